"""Every key of the screen against a real supervisor with small children; the palette, the dialogs,
the themes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.widgets import Input, SelectionList

from atropos_common.protocol.control import Action, Recipe, Role, State
from atropos_common.protocol.records import DiagnosisRecord
from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_tui.monitor.log_buffer import LogEntry
from atropos_tui.monitor.patterns import compiled
from atropos_tui.profile.spec import StopPolicy
from atropos_tui.ui.dialogs import ChooseRunsDialog, ConfirmDialog, QuitDialog, TextDialog
from atropos_tui.ui.views import VIEWS
from atropos_tui.ui.widgets.bars import ViewsLine
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.rollouts import Rollouts
from tests.atropos_tui.ui.conftest import Screen, Supervise, child, cockpit, lines_of, small_stack
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, write_records

NOW = T0 + 31 + 0.33 * 37 + 0.4
TALKS = """
print("ready", flush=True)
for n in range(40):
    print(f"INFO plain line {n}")
print("WARNING careful")
print("ERROR: the one that matters", flush=True)
for n in range(40, 80):
    print(f"INFO plain line {n}, " + "long " * 60)
import sys, time
sys.stdout.flush()
time.sleep(600)
"""

SLOW = """
import os, signal, time
def end(*_):
    while not os.path.exists({may_end!r}):
        time.sleep(0.05)
    exit()
signal.signal(15, end)
print("ready", flush=True)
time.sleep(60)
"""


async def type_in(screen: object, words: str) -> None:
    for char in words:
        await screen.press({" ": "space"}.get(char, char))  # type: ignore[attr-defined]


async def test_the_whole_stack_is_restarted_in_order(tmp_path: Path, supervise: Supervise) -> None:
    may_end = tmp_path / "may-end"
    slow = child("slow", Role.OTHER, SLOW.format(may_end=str(may_end)), stop=StopPolicy(grace_s=30))
    run = supervise(small_stack(tmp_path / "run", slow))
    names = ("run-api", "vllm", "slow", "trainer")
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        before = {name: screen.row(name).pid for name in names}
        await screen.press("R")
        await screen.shows("Restart the whole stack?")
        await screen.shows("trainer → slow → vllm → run-api")
        await screen.shows("run-api → vllm → slow → trainer")
        await screen.press("y")
        await screen.shows("◔ restart the stack")
        may_end.touch()
        await screen.until(
            lambda: any("restart the stack: done" in toast for toast in screen.toasts())
        )
        await screen.until(lambda: all(screen.row(name).state is State.HEALTHY for name in names))
        assert all(screen.row(name).pid not in (None, before[name]) for name in names)
        assert all(screen.row(name).restarts == 0 for name in names)
    records = [json.loads(line) for line in run.supervisor_jsonl.read_text().splitlines()]
    stopped = [
        row["component"] for row in records if row["kind"] == "state" and row["new"] == "stopped"
    ]
    assert stopped == ["trainer", "slow", "vllm", "run-api"]


async def test_the_log_s_keys(tmp_path: Path, supervise: Supervise) -> None:
    run = supervise(small_stack(tmp_path / "run", child("talker", Role.OTHER, TALKS)))
    async with cockpit(run, (100, 30)) as screen:
        await screen.until(lambda: screen.row("talker").state is State.HEALTHY)
        await screen.select("talker")
        await screen.press("3")
        log = screen.app.query_one(LogView)
        await screen.until(lambda: log.component == "talker" and len(log.buffer) >= 83)
        assert screen.app.focused is log
        await screen.press("e")
        await screen.shows("ERROR: the one that matters")
        assert not log.following
        await screen.press("slash")
        await type_in(screen, "line 1")
        await screen.shows("11 lines")
        await screen.press("enter")
        assert screen.app.focused is log
        await screen.press("n")
        await screen.shows("INFO plain line 1")
        first = log._marked
        await screen.press("N")
        assert log._marked != first
        await screen.press("y")
        await screen.until(lambda: any("copied 1 line" in toast for toast in screen.toasts()))
        assert "plain line 1" in screen.app.clipboard
        await screen.press("l")
        await screen.until(
            lambda: log.buffer.height == 2 and "warnings and errors" in screen.text()
        )
        await screen.press("l")
        await screen.until(lambda: log.buffer.height == 1 and "errors only" in screen.text())
        await screen.press("l")
        await screen.until(lambda: log.buffer.height >= 83)
        rows = log.buffer.height
        await screen.press("w")
        await screen.until(lambda: log.buffer.height > rows)
        await screen.press("w", "ampersand")
        await type_in(screen, "careful")
        await screen.press("enter")
        await screen.until(lambda: log.buffer.height == 1 and "& careful" in screen.text())
        await screen.press("ampersand", "escape")
        await screen.until(lambda: log.buffer.height == rows)
        await screen.press("x")
        await screen.until(lambda: len(log.buffer) == 0)
        await screen.press("f")
        assert not log.following
        await screen.press("o")
        await screen.until(
            lambda: any("cannot be suspended for an editor" in toast for toast in screen.toasts())
        )


async def test_all_logs_in_one_and_the_brackets_choose(
    tmp_path: Path, supervise: Supervise
) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        log = screen.app.query_one(LogView)
        await screen.press("a")
        await screen.shows("all components")
        await screen.until(
            lambda: (
                {entry.component for entry in log.buffer.entries} == {"run-api", "vllm", "trainer"}
            )
        )
        times = [entry.time for entry in log.buffer.entries]
        assert times == sorted(times)
        await screen.press("a")
        await screen.until(lambda: log.component == "trainer")
        await screen.press("left_square_bracket")
        await screen.until(
            lambda: log.component == "vllm" and any("vllm line" in line for line in lines_of(log))
        )
        await screen.press("right_square_bracket", "right_square_bracket")
        await screen.until(lambda: log.component == "trainer")


async def test_events_and_the_component_s_page(tmp_path: Path, supervise: Supervise) -> None:
    dies = child(
        "dies", Role.OTHER, "print('ready', flush=True); import time; time.sleep(0.5); 1/0"
    )
    run = supervise(small_stack(tmp_path / "run", dies))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("dies").restarts > 0)
        await screen.select("dies")
        await screen.press("9")
        await screen.shows("restarts after a crash")
        await screen.shows("command")
        await screen.press("8")
        await screen.shows("↻ backoff")
        await screen.press("slash")
        await type_in(screen, "backoff")
        await screen.press("enter")
        await screen.until(lambda: "● healthy" not in screen.text().partition("Events")[2])
        await screen.press("down", "up", "enter")
        await screen.until(lambda: isinstance(screen.app.screen, TextDialog))
        await screen.shows("exit code 1")
        await screen.press("escape")
        await screen.until(lambda: not isinstance(screen.app.screen, TextDialog))


async def test_the_palette_has_every_action_and_acts(tmp_path: Path, supervise: Supervise) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        offered = {command.title for command in screen.app.get_system_commands(screen.app.screen)}
        wanted = {view.title for view in VIEWS.values()} | {
            "Restart vllm",
            "Stop trainer",
            "Kill run-api",
        }
        wanted |= {"Restart all", "Search", "Follow", "Compare", "Picture", "Theme", "Detach"}
        wanted |= {"Wrap", "Next error", "Mark"}
        assert wanted <= offered
        about = [command.help for command in screen.app.get_system_commands(screen.app.screen)]
        assert sum("key enter" in words or "key ⏎" in words for words in about) == 2, (
            "rollouts and events"
        )
        await screen.press("ctrl+p")
        await screen.until(lambda: isinstance(screen.app.screen, CommandPalette))
        await type_in(screen, "Prev")
        await screen.shows("left bracket")
        await screen.press("ctrl+u")
        await type_in(screen, "Kill run")
        await screen.shows("run-api is healthy")
        await screen.press("enter")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmDialog))
        await screen.shows("Kill run-api?")
        await screen.press("escape")


async def test_the_mouse_selects_and_presses(tmp_path: Path, supervise: Supervise) -> None:
    run = supervise(small_stack(tmp_path / "run"))
    async with cockpit(run) as screen:
        await screen.until(lambda: screen.row("trainer").state is State.HEALTHY)
        await screen.pilot.click("#components", offset=(5, 2))
        await screen.until(lambda: screen.app.query_one(LogView).component == "run-api")
        await screen.press("K")
        await screen.shows("Kill run-api?")
        await screen.pilot.click("#no")
        await screen.until(lambda: "Kill run-api?" not in screen.text())


async def test_j_and_k_move_and_end_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (120, 40), control, lambda: NOW) as screen:
        table = screen.app.query_one(Components)
        await screen.until(lambda: table.selected is not None and table.selected.name == "trainer")
        await screen.press("k", "k", "enter")
        assert table.selected and table.selected.name == "vllm"
        await screen.press("j")
        assert table.selected and table.selected.name == "env"
        assert screen.app.user_selects, "the cursor stays where it was put"
        for view, kind in (("4", Rollouts), ("8", Events)):
            await screen.press(view)
            listing = screen.app.query_one(kind)
            await screen.until(lambda listing=listing: len(listing.items) > 3)  # type: ignore[misc]
            await screen.press("j", "j", "k")
            assert listing.cursor == 1
        await screen.press("3")
        log = screen.app.query_one(LogView)
        await screen.until(lambda: log.max_scroll_y > 2)
        await screen.press("k")
        await screen.until(lambda: not log.following)
        assert len(screen.app.screen_stack) == 1 and control.commands == []


@pytest.mark.parametrize(
    ("key", "enter_sends"), [("r", True), ("s", False), ("K", False), ("R", False)]
)
async def test_enter_alone_ends_nothing_that_does_not_come_back(
    tmp_path: Path, key: str, enter_sends: bool
) -> None:
    run = make_run(tmp_path / "run")
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (100, 30), control, lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press(key)
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmDialog))
        await screen.press("enter")
        await screen.until(lambda: len(screen.app.screen_stack) == 1)
        await screen.pilot.pause(0.2)
        assert bool(control.commands) is enter_sends
        await screen.press(key)
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmDialog))
        await screen.press("y")
        await screen.until(lambda: len(control.commands) == 1 + enter_sends)


async def test_rollouts_are_searched_and_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    rows = [
        RolloutRecord(
            step=1,
            env="arithmetic",
            prompt="9+8=",
            completion="the answer is 16",
            reward=0,
            advantage=-1,
        ),
        RolloutRecord(
            step=2,
            env="arithmetic",
            prompt="9+8=",
            completion="the answer is 17",
            reward=1,
            advantage=1,
        ),
        RolloutRecord(
            step=2, env="arithmetic", prompt="9+8=", completion="no idea", reward=0, advantage=-1
        ),
    ]
    write_records(run.telemetry_jsonl, list(rows), start=1000)
    async with cockpit(run, (140, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.press("4")
        await screen.shows("9+8=")
        await screen.press("slash")
        await type_in(screen, "^9.8=")
        await screen.press("enter")
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: len(listing.items) == 3)
        await screen.shows("no idea")
        await screen.press("home")
        await screen.shows("the answer is 17")
        await screen.press("D")
        await screen.shows("against step 1")
        await screen.shows("the answer is [-16-]{+17+}")
        await screen.press("end", "m", "home")
        await screen.shows("marked: step 1")
        await screen.press("m")
        await screen.shows("marked: step 2")
        await screen.press("equals_sign", "slash", "escape")
        await screen.until(lambda: len(listing.items) == 11)


async def test_another_run_stands_beside_with_ratios(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "mine")
    make_run(tmp_path / "runs" / "other", steps=20, seed=1)
    async with cockpit(run, (180, 45), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("5", "c")
        await screen.until(lambda: isinstance(screen.app.screen, ChooseRunsDialog))
        await screen.shows("STARTED")
        await screen.shows("20/60   0.7")
        await screen.press("enter")
        await screen.shows("vs other")
        await screen.shows("(x0.54)")
        await screen.press("c")
        await screen.until(lambda: isinstance(screen.app.screen, ChooseRunsDialog))
        await screen.press("space", "enter")
        await screen.shows("BENCHMARK SUMMARY")
        assert screen.app.comparison.first is None


async def test_themes_are_offered(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, (100, 30), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        for theme in ("textual-light", "gruvbox", "atropos"):
            screen.app.theme = theme
            await screen.shows("step 37/60")
        await screen.press("t")
        await screen.until(lambda: isinstance(screen.app.screen, CommandPalette))
        await screen.press("escape")


async def test_without_colours_every_state_and_share_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run = make_run(tmp_path / "run")
    control = FakeControl(live_status(run, NOW, vllm=State.FAILED))
    async with cockpit(run, (180, 45), control, lambda: NOW) as screen:
        await screen.shows("✖ failed")
        await screen.shows("Host  no GPU")
        legend = screen.text()
        assert {mark for mark in "█▓▒▚" if mark + " " in legend} >= {"█", "▒", "▚"}


@pytest.mark.parametrize("size", [(20, 5), (39, 24), (80, 11)])
async def test_a_terminal_too_small_gets_a_message(tmp_path: Path, size: tuple[int, int]) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("the terminal is too")
        for key in ("2", "3", "slash", "a", "escape", "4", "1"):
            await screen.press(key)
        await screen.pilot.resize_terminal(80, 24)
        await screen.shows("step 37/60")


async def test_a_newer_writer_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with run.telemetry_jsonl.open("a") as file:
        file.write('{"v": 9, "kind": "hologram", "step": 38}\n')
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("a newer version wrote this run (schema 9")


async def test_a_search_line_is_closed_by_escape(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, (100, 30), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("slash")
        assert isinstance(screen.app.focused, Input)
        await type_in(screen, "q?r")
        await screen.press("escape")
        assert isinstance(screen.app.focused, LogView)
        assert len(screen.app.screen_stack) == 1
        assert not screen.app.query(SelectionList)


LINES = [
    LogEntry("error" if at in (5, 30, 55) else "plain", f"line {at} " + "word " * 60)
    for at in range(60)
]


@asynccontextmanager
async def the_log(
    tmp_path: Path, size: tuple[int, int] = (100, 30)
) -> AsyncIterator[tuple[Screen, LogView]]:
    """View 3 with `LINES` and nothing that writes."""
    run = make_run(tmp_path / "run")
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("3")
        log = screen.app.query_one(LogView)
        screen.app.feed.follow_log_of(())
        await screen.until(lambda: log.component == "trainer" and len(log.buffer) > 0)
        log.buffer.clear()
        log.extend(LINES, None)
        await screen.until(lambda: log.max_scroll_y > 0 and "line 59" in screen.text())
        yield screen, log


async def test_the_log_s_keys_that_jump(tmp_path: Path) -> None:
    async with the_log(tmp_path) as (screen, log):
        await screen.press("g")
        await screen.shows("line 0 ")
        assert not log.following
        page = log.scrollable_content_region.height
        await screen.press("pagedown")
        await screen.until(lambda: log.scroll_y == page)
        await screen.press("G")
        await screen.shows("line 59 ")
        assert log.following
        found = []
        for _ in range(3):
            await screen.press("E")
            found.append(log._marked)
        assert found[0] is not None and log.buffer.row_of(found[0]) == 55
        assert [number - found[0] for number in found if number is not None] == [0, -25, -50]


@pytest.mark.parametrize(
    ("key", "steps"), [("e", [5, 30, 55, 5]), ("E", [55, 30, 5, 55]), ("n", [5, 30, 55, 5])]
)
async def test_wrapped_lines_hold_no_search(tmp_path: Path, key: str, steps: list[int]) -> None:
    async with the_log(tmp_path) as (screen, log):
        await screen.press("w", "g" if key != "E" else "G")
        log.pattern = compiled("line (5|30|55) ")
        found = []
        for _ in steps:
            await screen.press(key)
            row = log.buffer.row_of(log._marked) if log._marked is not None else None
            seen = log.buffer.row(row) if row is not None else None
            found.append(LINES.index(seen[2]) if seen else None)
        assert found == steps


EVIL = "a" * 2000 + "b"


@pytest.mark.parametrize("key", ["slash", "ampersand"])
async def test_a_pattern_that_backtracks_for_ever_holds_up_no_key(tmp_path: Path, key: str) -> None:
    async with the_log(tmp_path) as (screen, log):
        log.extend([LogEntry("plain", EVIL)] * 50, None)
        await screen.press(key)
        await type_in(screen, "aab")
        await screen.shows("50 lines")
        began = time.process_time()
        screen.app.query_one(Input).value = "(a+)+$"
        await screen.shows("0 lines")
        log.extend([LogEntry("plain", EVIL + "a")], None)
        screen.app.query_one(Input).value = "(a+)+$|never"
        await screen.shows("1 line")
        assert time.process_time() - began < 4.0, "a few searches and some drawing"


async def test_a_pattern_that_asks_for_too_much_is_refused_in_one_line(tmp_path: Path) -> None:
    async with the_log(tmp_path) as (screen, log):
        await screen.press("ampersand")
        await type_in(screen, "30")
        await screen.until(lambda: log.buffer.height < len(log.buffer))
        screen.app.query_one(Input).value = "(?=3)"
        await screen.shows("invalid perl operator: (?=")
        assert log._filter is None and log.buffer.height == len(log.buffer)


@pytest.mark.parametrize(("view", "kind"), [("4", Rollouts), ("8", Events)])
async def test_lists_take_such_a_pattern_too(
    tmp_path: Path, view: str, kind: type[Rollouts | Events]
) -> None:
    run = make_run(tmp_path / "run", steps=2)
    rollout = RolloutRecord(step=2, env="e", prompt=EVIL, completion="c", reward=0, advantage=0)
    write_records(run.telemetry_jsonl, [rollout], start=1000)
    write_records(
        run.supervisor_jsonl, [DiagnosisRecord(time=T0, component="vllm", title=EVIL)], start=1000
    )
    async with cockpit(run, (140, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 2/60")
        await screen.press(view)
        listing = screen.app.query_one(kind)
        await screen.until(lambda: len(listing.items) > 1)
        began = time.process_time()
        await screen.press("slash")
        screen.app.query_one(Input).value = "(a+)+b"
        await screen.until(lambda: len(listing.items) == 1)
        screen.app.query_one(Input).value = "(a+)+§"
        await screen.until(lambda: not listing.items)
        assert time.process_time() - began < 4.0


async def test_the_last_rollout_can_be_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("4", "end")
        listing = screen.app.query_one(Rollouts)
        await screen.until(lambda: listing.cursor == len(listing.items) - 1 > 100)
        rows = listing.scrollable_content_region.height - listing.head
        await screen.until(lambda: listing.scroll_offset.y + rows == len(listing.items))
        await screen.press("g", "pagedown")
        assert listing.cursor == rows - 1
        await screen.press("G")
        assert listing.cursor == len(listing.items) - 1


async def test_ctrl_c_asks_as_q_does(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, (100, 30), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("ctrl+c")
        await screen.until(lambda: isinstance(screen.app.screen, QuitDialog))


async def test_an_editor_that_cannot_be_read_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "vim -c 'set")
    async with the_log(tmp_path) as (screen, _):
        await screen.press("o")
        await screen.until(
            lambda: any(
                'cannot parse the editor command "vim' in toast for toast in screen.toasts()
            )
        )
        assert any("No closing quotation" in toast for toast in screen.toasts())


class SlowControl(FakeControl):
    """Takes its time to tell what a command would touch."""

    async def recipe(self, action: Action, component: str | None = None) -> Recipe:
        await asyncio.sleep(0.3)
        return await super().recipe(action, component)


async def test_impatient_keys_ask_once_and_send_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    control = SlowControl(live_status(run, NOW))
    async with cockpit(run, (100, 30), control, lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("r", "r", "K")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmDialog))
        await asyncio.sleep(0.5)
        assert len(screen.app.screen_stack) == 2
        await screen.press("enter", "enter", "enter")
        await screen.until(lambda: any("accepted" in toast for toast in screen.toasts()))
        assert [request.action for request in control.commands] == ["restart"]
        await screen.press("K")
        await screen.until(lambda: isinstance(screen.app.screen, ConfirmDialog))
        await screen.press("escape")
        await screen.until(lambda: len(screen.app.screen_stack) == 1)
        screen.app.action_ask_quit()
        screen.app.action_ask_quit()
        screen.app.act("kill", "vllm")
        await screen.until(lambda: isinstance(screen.app.screen, QuitDialog))
        await asyncio.sleep(0.5)
        assert len(screen.app.screen_stack) == 2
        await screen.press("escape", "q")
        await screen.until(lambda: isinstance(screen.app.screen, QuitDialog))


async def test_the_line_of_views_is_lit_and_can_be_clicked_and_esc_leads_back(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, (80, 24), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows(
            "0 Runs 1 Run 2 Train 3 Logs 4 Rollouts 5 Time 6 Host 7 Align 8 Events 9 Comp"
        )
        line = screen.app.query_one(ViewsLine)
        for view in VIEWS:
            await screen.pilot.click(ViewsLine, offset=(line._ends[view] - 2, 0))
            await screen.until(lambda view=view: screen.app.views.name == view)  # type: ignore[misc]
        await screen.press("1", "2")
        screen.app.query_one(Components).focus()
        await screen.press("enter")
        await screen.shows("--training-steps 60")
        await screen.press("escape")
        await screen.until(lambda: screen.app.views.name == "training")
        await screen.press("escape")
        await screen.until(lambda: screen.app.views.name == "overview")
        await screen.press("escape")
        await screen.shows("Reward")


async def test_a_screen_that_only_shows_sends_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (100, 30), control, lambda: NOW) as screen:
        screen.app.read_only = True
        await screen.shows("step 37/60")
        for key in ("r", "s", "K", "R"):
            await screen.press(key)
            await screen.until(lambda: any("read-only" in words for words in screen.toasts()))
            assert len(screen.app.screen_stack) == 1, "and asks nothing"
            screen.app.clear_notifications()
        await screen.press("q")
        await screen.until(lambda: not screen.app.is_running)
        assert screen.app.return_value == "detach"


async def test_errors_are_counted_where_there_are_some(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    calm = live_status(run, NOW)
    control = FakeControl(calm)
    async with cockpit(run, (120, 40), control, lambda: NOW) as screen:
        await screen.shows("step 37/60")
        assert " err " not in screen.text()
        rows = [
            row.model_copy(update={"errors": 110}) if row.name == "env" else row
            for row in calm.components
        ]
        control.answer = calm.model_copy(update={"components": rows})
        await screen.until(lambda: " err " in screen.text() and " 110 " in screen.text())
