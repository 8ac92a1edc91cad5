"""The key file: other keys, own commands, wrong entries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.ui import user_files
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.home.app import HomeApp
from atropos_tui.ui.keymap import KeyFile, kinds_with_keys, read_key_file
from atropos_tui.ui.own_commands import OwnCommand, filled, run_in_background
from atropos_tui.ui.widgets.components import Components
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run

NOW = T0 + 31 + 0.33 * 37 + 0.4
SHOW = f"""
[ui.command.show]
key = "ctrl+g"
description = "Show the selection"
argv = ["{sys.executable}", "-c", "import sys; print(*sys.argv[1:])",
    "{{component}}", "{{pid}}", "at {{step}}"]
background = true
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def write(text: str) -> Path:
    path = user_files.key_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(text: str) -> KeyFile:
    return read_key_file(write(text), kinds_with_keys())


async def ready(screen: Screen) -> None:
    """Wait until the records are read and the table of components has its cursor."""
    table = screen.app.query_one(Components)
    await screen.until(lambda: screen.app.loaded and table.selected is not None)


def test_keys_of_a_panel_and_of_the_app() -> None:
    found = read('[keys]\nrestart = "ctrl+r"\ncharts.smooth = ["S", "f5"]\n"log.level" = "L"\n')
    assert not found.problems
    assert found.keys == {"restart": "ctrl+r", "charts.smooth": "S,f5", "log.level": "L"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[keys]\nrestrat = "x"', "keys.restrat: not an action; did you mean restart"),
        ('[keys]\nrestart = "ctrl+"', "keys.restart: 'ctrl+' is not a key"),
        ("[keys]\nrestart = 3", "keys.restart: 3 is not a key"),
        ("[keys]\nrestart = []", "is not a key"),
        ('[keys]\nrestart = "K"', "keys.restart: K is the key of kill; fix:"),
        ('[keys]\nrestart = "ctrl+c"', "is the key of Quit"),
        ('[keys]\ncharts.smooth = "l"', "keys.charts.smooth: l is the key of charts.log-axis"),
        ('keys = "x"', "keys: not a section"),
        ("[key]", "key: not a section of this file"),
        ("[keys\n", "nothing of it is used"),
        ("[ui.commands.x]", "only [ui.command.NAME]"),
        ('[ui.command.x]\nkey = "f5"\ndescription = "d"', "ui.command.x.argv: Field required"),
        (SHOW + "shell = true", "ui.command.show.shell: unknown key; known: argv"),
        (SHOW.replace("ctrl+g", "r"), "ui.command.show.key: r is the key of restart"),
        (SHOW.replace("ctrl+g", "m"), "key: m is the key of"),
        (SHOW.replace("{pid}", "{pdi}"), "{pdi} is not a placeholder; did you mean pid"),
        (SHOW.replace("{pid}", "{pid!r}"), "is not a placeholder"),
        (SHOW.replace("{pid}", "{"), "write {{ and }} for a brace"),
        ('[ui.command.x]\nkey = "f5"\ndescription = "d"\nargv = "ls"', "argv: not a list; fix:"),
        ("[ui.command]\nx = 1", "ui.command.x.not a section"),
    ],
)
def test_a_wrong_entry_is_named_with_a_fix(text: str, words: str) -> None:
    found = read(text)
    assert len(found.problems) == 1 and words in found.problems[0], found.problems
    assert found.problems[0].startswith("keys.toml: ")
    assert not found.keys and not found.commands


def test_a_freed_key_may_be_taken() -> None:
    found = read('[keys]\nkill = "ctrl+k"\nrestart = "K"')
    assert not found.problems and found.keys == {"kill": "ctrl+k", "restart": "K"}


def test_right_entries_beside_a_wrong_one_are_used() -> None:
    found = read(SHOW + '[keys]\nrestrat = "x"\nkill = "ctrl+k"')
    assert len(found.problems) == 1
    assert found.keys == {"kill": "ctrl+k"} and [one.name for one in found.commands] == ["show"]


def test_a_shared_action_s_key_is_free_in_the_list_of_runs_too() -> None:
    assert kinds_with_keys()[0] is CockpitApp and HomeApp in kinds_with_keys()
    assert "c is the key of compare;" in read(SHOW.replace("ctrl+g", "c")).problems[0]
    assert "n is the key of runs.note;" in read('[keys]\ncompare = "n"').problems[0]


def test_a_replay_without_the_list_of_runs_accepts_its_names() -> None:
    kinds = [kind for kind in kinds_with_keys() if ".home." not in kind.__module__]
    assert read_key_file(write('[keys]\nruns.note = "N"'), kinds) == KeyFile()


def test_no_file_changes_nothing() -> None:
    assert read_key_file(user_files.key_file(), kinds_with_keys()) == KeyFile()


def test_arguments_are_single_words_and_never_options() -> None:
    command = OwnCommand(key="f5", description="d", argv=["x", "{component}", "a={component}{{}}"])
    assert filled(command, {"component": "a b; rm"}) == ["x", "a b; rm", "a=a b; rm{}"]
    with pytest.raises(ValueError, match="would be an option"):
        filled(command, {"component": "--delete"})
    with pytest.raises(ValueError, match="the selection has no component"):
        filled(command, {"component": None})


async def test_only_the_end_of_long_output_is_kept() -> None:
    script = "print('x' * 300_000); print(*range(20), sep='\\n'); raise SystemExit(3)"
    status, output = await run_in_background([sys.executable, "-c", script])
    assert status == 3 and output.splitlines() == [str(number) for number in range(12, 20)]


async def test_the_user_s_keys_work_and_stand_in_help_and_footer(run: RunDir) -> None:
    write('[keys]\nrestart = "ctrl+r"\ncharts.smooth = "S"\n')
    async with cockpit(run, (100, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await ready(screen)
        await screen.shows("^r Restart")
        await screen.press("r")
        await screen.pilot.pause(0.3)
        assert len(screen.app.screen_stack) == 1
        await screen.press("ctrl+r")
        await screen.shows("Restart trainer?")
        await screen.press("escape", "2")
        await screen.shows("S Smooth")
        before = screen.app.shared.lens.smoothing
        await screen.press("S")
        assert screen.app.shared.lens.smoothing != before
        titles = {one.title: one.help for one in screen.app.get_system_commands(screen.app.screen)}
        assert titles["Restart"].endswith("key ^r")


async def test_wrong_entries_are_shown_and_the_screen_works(run: RunDir) -> None:
    write('[keys]\nrestrat = "x"\n')
    async with cockpit(run, (100, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await ready(screen)
        assert any("keys.restrat: not an action" in toast for toast in screen.toasts())
        await screen.press("question_mark")
        await screen.until(lambda: len(screen.app.screen_stack) == 2)
        await screen.press("y")
        assert "keys.restrat: not an action" in screen.app.clipboard.replace("\n", " ")


async def test_an_own_command_runs_on_the_selection(run: RunDir) -> None:
    write(SHOW)
    async with cockpit(run, (100, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await ready(screen)
        await screen.select("vllm")
        pid = screen.row("vllm").pid
        await screen.press("ctrl+g")
        await screen.until(lambda: f"show: done vllm {pid} at 37" in screen.toasts())
        await screen.select("prepare")
        await screen.press("ctrl+g")
        await screen.until(lambda: any("has no pid" in toast for toast in screen.toasts()))
        await screen.press("question_mark")
        await screen.shows("Show the selection")


async def test_an_own_command_may_ask_first(run: RunDir) -> None:
    write(SHOW + "confirm = true\n")
    async with cockpit(run, (100, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await ready(screen)
        await screen.press("ctrl+g")
        await screen.shows("y run · esc cancel")
        await screen.press("escape")
        await screen.pilot.pause(0.3)
        assert not screen.toasts()
        await screen.press("ctrl+g")
        await screen.shows("y run · esc cancel")
        await screen.press("y")
        await screen.until(lambda: any("show: done" in toast for toast in screen.toasts()))


async def test_a_read_only_screen_runs_no_own_command(run: RunDir) -> None:
    write(SHOW)
    async with cockpit(run, (100, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        screen.app.read_only = True
        await ready(screen)
        await screen.press("ctrl+g")
        await screen.until(lambda: any("read-only" in toast for toast in screen.toasts()))


async def test_a_failing_or_missing_program_is_a_message(run: RunDir) -> None:
    fails = SHOW.replace("print(*sys.argv[1:])", "print('no'); sys.exit(4)")
    missing = SHOW.replace(sys.executable, "no-such-program").replace(
        "ui.command.show", "ui.command.gone"
    )
    write(fails + missing.replace("ctrl+g", "ctrl+b"))
    async with cockpit(run, (100, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await ready(screen)
        await screen.press("ctrl+g", "ctrl+b")
        await screen.until(lambda: "show: exit status 4 no" in screen.toasts())
        await screen.until(lambda: any("cannot be started" in toast for toast in screen.toasts()))
