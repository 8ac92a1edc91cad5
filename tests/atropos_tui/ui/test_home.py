"""The list of runs: order, filter, marks, comparison, notes, the way into a run and back."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.catalogue import Catalogue, Source
from atropos_tui.monitor.run.notes import notes_of, read_notes, write_notes
from atropos_tui.monitor.run_list import RunRow, listed
from atropos_tui.ui import user_files
from atropos_tui.ui.home import session
from atropos_tui.ui.home.app import Choice, HomeApp
from atropos_tui.ui.home.comparison import CompareScreen
from atropos_tui.ui.home.notes import NotesDialog
from atropos_tui.ui.home.table import Memory
from tests.support.run_maker import make_run


def ended_run(
    root: Path, *, steps: int, code: int = 0, age_s: float = 60.0, lr: str = "1e-4"
) -> RunDir:
    run = make_run(root, steps=steps)
    began = time.time() - age_s
    run.run_json.write_text(json.dumps({"run_id": root.name, "started_at": began}))
    plan = json.loads(run.plan_json.read_text()) | {"run_id": root.name}
    run.plan_json.write_text(json.dumps(plan))
    run.profile_toml.write_text(f'name = "demo"\n[trainer]\nlr = {lr}\n')
    result = {"exit_code": code, "reason": "it ended", "ended_at": began + 30}
    run.result_json.write_text(json.dumps(result))
    return run


class Folder:
    """Runs below a folder; `live` names those that run."""

    def __init__(self, root: Path) -> None:
        self.root, self.live, self.reads = root, set[str](), list[str]()

    def source(self) -> Source:
        return Source(lambda: sorted(self.root.iterdir(), reverse=True), self.row)

    def row(self, root: Path) -> RunRow:
        self.reads.append(root.name)
        return listed(RunDir(root), is_live=root.name in self.live, now=time.time())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "runs").mkdir()
    found = Folder(tmp_path / "runs")
    ended_run(found.root / "alpha", steps=5, code=3, age_s=30)
    ended_run(found.root / "beta", steps=37, age_s=7200)
    ended_run(found.root / "gamma", steps=20, age_s=90_000, lr="2e-4")
    return found


class Home:
    def __init__(self, app: HomeApp, pilot: Pilot[Choice]) -> None:
        self.app, self.pilot = app, pilot

    def text(self) -> str:
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    def names(self) -> list[str]:
        return [row.run for row in self.app.table.items]

    def toasts(self) -> str:
        return "\n".join(note.message for note in self.app._notifications)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, true: Callable[[], object], timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"never came true; the screen:\n{self.text()}"
            await self.pilot.pause(0.03)

    async def shows(self, words: str) -> None:
        await self.until(lambda: words in self.text())


@asynccontextmanager
async def home(
    folder: Folder, size: tuple[int, int] = (120, 40), memory: Memory | None = None
) -> AsyncIterator[Home]:
    app = HomeApp(Catalogue(folder.source()), memory)
    async with app.run_test(size=size, notifications=True) as pilot:
        found = Home(app, pilot)
        await found.until(lambda: app.table.items or app._is_scanned)
        yield found


async def test_runs_stand_newest_first_with_their_figures_and_sentences(folder: Folder) -> None:
    async with home(folder) as screen:
        assert screen.names() == ["alpha", "beta", "gamma"]
        await screen.shows("✖ failed")
        await screen.shows("37/60")
        await screen.shows("done: 37 steps, reward")
        await screen.shows("failed with code 3: it ended")


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_the_best_reward_is_one_key_away(folder: Folder, size: tuple[int, int]) -> None:
    async with home(folder, size) as screen:
        await screen.shows("R By reward")
        await screen.press("R")
        assert screen.names() == ["beta", "gamma", "alpha"]
        await screen.shows("REWARD▼")
        await screen.press("R")
        assert screen.names() == ["alpha", "gamma", "beta"]
        await screen.press("S", "N")
        assert screen.names() == ["alpha", "beta", "gamma"]


async def test_the_slowest_run_is_found_by_its_column(folder: Folder) -> None:
    path = folder.root / "gamma" / "telemetry.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    slow = [line | {"step_s": 7.5} if line["kind"] == "timing" else line for line in lines]
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in slow))
    async with home(folder, (100, 24)) as screen:
        await screen.shows("S/STEP")
        await screen.press("S", "S")
        assert screen.names()[0] == "gamma"
        row = next(line for line in screen.text().splitlines() if "gamma" in line)
        assert "7.50" in row


async def test_a_filter_finds_names_states_and_tags_and_esc_drops_it(folder: Folder) -> None:
    write_notes(RunDir(folder.root / "gamma"), notes_of("twice the rate", ["best"]))
    async with home(folder) as screen:
        await screen.press("slash", *"done")
        assert screen.names() == ["beta", "gamma"]
        screen.app.query_one(Input).value = "best|twice"
        await screen.until(lambda: screen.names() == ["gamma"])
        await screen.press("enter")
        await screen.shows("1 of 3")
        await screen.shows("#best twice the rate")
        await screen.press("escape")
        assert screen.names() == ["alpha", "beta", "gamma"]


async def test_marked_runs_are_compared_in_words_then_in_charts(folder: Folder) -> None:
    async with home(folder) as screen:
        await screen.press("c")
        await screen.until(lambda: "mark two" in screen.toasts())
        await screen.press("down", "space", "space")
        await screen.shows("✓ 2 marked")
        await screen.press("c")
        await screen.until(lambda: isinstance(screen.app.screen, CompareScreen))
        await screen.shows("Settings that differ")
        row = next(line for line in screen.text().splitlines() if "trainer.lr" in line)
        assert "0.0001" in row and "0.0002" in row
        await screen.shows("best: 1")
        # Both tables have the same columns.
        heads = [line for line in screen.text().splitlines() if "  1   " in line and "2" in line]
        assert len(heads) == 2 and heads[0].index(" 2") == heads[1].index(" 2")
        await screen.press("enter")
    beta, gamma = folder.root / "beta", folder.root / "gamma"
    assert screen.app.return_value == Choice(beta, "training", (gamma,))


async def test_the_user_s_keys_and_commands_work_in_the_list(folder: Folder) -> None:
    path = user_files.key_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""
[keys]
compare = "C"
runs.by-reward = "f6"
runs.nose = "x"

[ui.command.where]
key = "ctrl+g"
description = "Where it is"
argv = ["{sys.executable}", "-c", "import sys; print(sys.argv[1])", "{{run_dir}}"]
background = true
""")
    async with home(folder, (80, 24)) as screen:
        await screen.shows("C Compare")
        await screen.shows("f6 By reward")
        assert "keys.runs.nose: not an action; did you mean runs.note" in screen.toasts()
        await screen.press("f6")
        assert screen.names() == ["beta", "gamma", "alpha"]
        await screen.press("R")
        assert screen.names() == ["beta", "gamma", "alpha"]
        await screen.press("ctrl+g")
        await screen.until(lambda: str(folder.root / "beta") in screen.toasts())
        await screen.press("c")
        assert "mark two" not in screen.toasts()
        await screen.press("C")
        await screen.until(lambda: "mark two" in screen.toasts())


async def test_a_read_only_list_runs_no_own_command(folder: Folder) -> None:
    path = user_files.key_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('[ui.command.x]\nkey = "ctrl+g"\ndescription = "x"\nargv = ["true"]\n')
    async with home(folder) as screen:
        screen.app.read_only = True
        await screen.press("ctrl+g")
        await screen.until(lambda: "read-only" in screen.toasts())


async def test_a_note_is_written_in_the_list(folder: Folder) -> None:
    async with home(folder) as screen:
        assert screen.app._details.outer_size.height == 9
        await screen.pilot.resize_terminal(100, 24)
        await screen.until(lambda: screen.app._details.outer_size.height == 6)
        await screen.press("n")
        await screen.until(lambda: isinstance(screen.app.screen, NotesDialog))
        await screen.press(*"ok", "tab", "a", "exclamation_mark", "enter")
        await screen.shows("is not a tag")
        await screen.press("backspace", "enter")
        await screen.shows("#a ok")
    notes = read_notes(RunDir(folder.root / "alpha"))
    assert (notes.text, notes.tags) == ("ok", ("a",))


async def test_a_report_goes_into_the_run_and_says_where(folder: Folder) -> None:
    alpha = RunDir(folder.root / "alpha")
    async with home(folder) as screen:
        await screen.press("o")
        await screen.until(lambda: "-report-" in screen.toasts())
    (page,) = alpha.exports.glob("atropos-alpha-report-*.html")
    assert str(page) in screen.toasts() and "<html" in page.read_text()


async def test_live_rows_update_and_ended_ones_are_read_once(folder: Folder) -> None:
    folder.live.add("alpha")
    (folder.root / "alpha" / "result.json").unlink()
    async with home(folder) as screen:
        await screen.shows("● live")
        await screen.shows("1 live")
        make_run(folder.root / "alpha", steps=9)
        await screen.shows("9/60")
        assert folder.reads.count("alpha") >= 2 and folder.reads.count("gamma") == 1
        ended_run(folder.root / "zeta", steps=2, age_s=1)
        await screen.until(lambda: screen.names()[0] == "zeta")
        folder.live.clear()
        (folder.root / "alpha" / "result.json").write_text('{"exit_code": 0, "reason": "done"}')
        await screen.until(lambda: "● live" not in screen.text())


async def test_an_empty_list_tells_the_way_to_the_first_run(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    async with home(Folder(tmp_path / "runs"), (80, 24)) as screen:
        await screen.shows("atropos-tui up demo")
        await screen.press("enter", "c", "n", "o", "i", "space", "S")
        ended_run(tmp_path / "runs" / "first", steps=2)
        await screen.until(lambda: screen.names() == ["first"])


async def test_without_colours_marks_and_states_can_be_read(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with home(folder, (80, 24)) as screen:
        await screen.press("space")
        for words in ("✓", "✖ failed", "✔ done"):
            await screen.shows(words)


async def test_two_hundred_runs_come_in_parts(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    folder = Folder(tmp_path / "runs")
    for at in range(200):
        run = RunDir(folder.root / f"run-{at:03d}")
        run.root.mkdir()
        run.result_json.write_text('{"exit_code": 0, "reason": ""}')
    parts = list(Catalogue(folder.source()).scan())
    assert len(parts[0]) == 30 and len(parts[-1]) == 200
    catalogue = Catalogue(folder.source())
    list(catalogue.scan())
    folder.reads.clear()
    assert [len(part) for part in catalogue.scan()] == [200] and not folder.reads


def test_a_session_leads_from_the_list_into_a_run_and_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha, beta = folder.root / "alpha", folder.root / "beta"
    choices = iter([Choice(alpha), Choice(beta, "settings"), Choice(None)])
    opened = []

    def cockpit(run: Path, **more: object) -> str:
        opened.append((run, more["view"], more["from_home"]))
        return "home"

    monkeypatch.setattr(session, "run_app", lambda app, left: next(choices))
    monkeypatch.setattr(session, "run_cockpit", cockpit)
    assert session.run_session(folder.source(), beta) == (None, "detach")
    assert opened == [(beta, "", False), (alpha, "", True), (beta, "settings", True)]


async def test_the_panel_names_what_a_run_sets_unlike_its_profile(
    folder: Folder, tmp_path: Path
) -> None:
    written = tmp_path / "mine.toml"
    written.write_text('name = "demo"\n[trainer]\nlr = 1e-4\n')
    for name in ("beta", "gamma"):
        meta = RunDir(folder.root / name).run_json
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"profile": str(written)}))
    async with home(folder) as screen:
        await screen.until(lambda: len(screen.names()) == 3)
        await screen.press("G")
        await screen.shows("settings    trainer.lr 0.0002 (mine.toml: 0.0001)")
        await screen.press("k")
        await screen.shows("settings    those of mine.toml")


@pytest.mark.parametrize(("key", "view"), [("d", "settings"), ("i", "settings"), ("l", "logs")])
async def test_a_key_opens_a_view_of_the_run(folder: Folder, key: str, view: str) -> None:
    async with home(folder) as screen:
        await screen.until(lambda: len(screen.names()) == 3)
        await screen.press(key)
    assert screen.app.return_value == Choice(folder.root / "alpha", view)


async def test_a_comparison_shows_long_names_of_settings(folder: Folder) -> None:
    key = "a_setting_whose_name_is_longer_than_32_cells"
    for name, value in {"alpha": 4, "beta": 8}.items():
        run = RunDir(folder.root / name)
        text = f'name = "demo"\n[[env]]\nname = "math"\n[env.args]\n{key} = {value}\n'
        run.profile_toml.write_text(text)
    async with home(folder) as screen:
        await screen.until(lambda: len(screen.names()) == 3)
        await screen.press("space", "space", "c")
        await screen.shows(f"args.{key} ")
