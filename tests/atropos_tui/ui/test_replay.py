"""`replay` on the screen: it plays, pauses, seeks, refuses commands, and leaves without a
question."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.widgets import Input

from atropos_common.protocol.records import CommandRecord
from atropos_tui.cli import main
from atropos_tui.monitor.replay import Recording, Replay
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.supervisor.journal.store import ProcessTable
from atropos_tui.ui.replay import TICK_S, ReplayApp, ReplayBar
from atropos_tui.ui.views import VIEWS
from tests.atropos_tui.ui.conftest import Screen, Supervise, small_stack
from tests.support.run_maker import T0, make_run, start_records, write_records


class Ticks:
    """Seconds that pass when told."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def replay(tmp_path: Path) -> tuple[Replay, Ticks]:
    """A finished run of 30 steps, 41 seconds long, whose clock the test holds."""
    run = make_run(tmp_path / "run", steps=30, training_steps=30)
    run.supervisor_jsonl.unlink()
    records = sorted(start_records(), key=lambda record: record.time)
    done = CommandRecord(
        time=T0 + 35, command_id="c", component="vllm", action="restart", status="done"
    )
    write_records(run.supervisor_jsonl, [*records, done])
    run.result_json.write_text(json.dumps({"exit_code": 0, "reason": "trainer finished"}))
    ticks = Ticks()
    return Replay(Recording.load(run), 1.0, ticks), ticks


@asynccontextmanager
async def playing(replay: Replay, size: tuple[int, int] = (120, 40)) -> AsyncIterator[Screen]:
    app = ReplayApp(replay)
    async with app.run_test(size=size, notifications=True) as pilot:
        yield Screen(app, pilot)  # type: ignore[arg-type]


async def test_it_plays_from_the_start_to_the_end_as_recorded(replay: tuple[Replay, Ticks]) -> None:
    player, ticks = replay
    async with playing(player) as screen:
        ticks.at = 0.5
        await screen.until(lambda: screen.row("vllm").state == "starting")
        assert "REPLAY" in screen.text()
        assert "▶ 1×" in screen.text()
        ticks.at = 33.0
        await screen.shows("step 6/30")
        await screen.until(lambda: screen.row("vllm").state == "healthy")
        assert screen.app.state.step == 6
        ticks.at = 99.0
        await screen.shows("✔ done")
        await screen.shows("at its end")
        assert screen.app.state.step == 30
        assert any("restart vllm: done" in words for words in screen.toasts())
        await screen.press("space")
        await screen.until(lambda: screen.app.state.step == 0)
        await screen.until(lambda: screen.row("vllm").state == "pending")


async def test_space_pauses_signs_change_the_speed_arrows_seek(
    replay: tuple[Replay, Ticks],
) -> None:
    player, ticks = replay
    async with playing(player) as screen:
        ticks.at = 35.0
        await screen.until(lambda: screen.app.state.step == 12)
        await screen.press("space")
        await screen.shows("paused")
        ticks.at = 40.0
        await screen.press("plus", "plus")
        assert (player.clock.now(), player.clock.speed) == (T0 + 35.0, 4.0)
        await screen.press("minus")
        assert player.clock.speed == 2.0
        await screen.press("left", "left", "left", "left")
        await screen.until(lambda: screen.app.state.step == 2)
        await screen.press("right")
        await screen.until(lambda: screen.app.state.step == 4)
        await screen.press("space")
        assert not player.clock.paused


async def test_shift_and_arrows_go_from_event_to_event(replay: tuple[Replay, Ticks]) -> None:
    player, _ = replay
    events = player.recording.events()
    async with playing(player) as screen:
        await screen.press("space")  # it stands still
        player.clock.seek(T0 + 34)
        await screen.press("shift+right")
        assert player.clock.now() == T0 + 35, "the command"
        await screen.press("shift+right")
        assert player.clock.at_end, "nothing happened after it"
        await screen.press("shift+left", "shift+left")
        assert player.clock.now() == events[-2]
        for _ in events:
            await screen.press("shift+left")
        assert player.clock.now() == player.clock.first
        assert player.recording.time_of(6) == pytest.approx(T0 + 31 + 0.33 * 6)
        assert player.recording.time_of(31) is None


@pytest.mark.parametrize("key", ["r", "s", "K", "R"])
async def test_commands_are_refused_with_a_toast(replay: tuple[Replay, Ticks], key: str) -> None:
    player, ticks = replay
    ticks.at = 35.0
    async with playing(player) as screen:
        await screen.until(lambda: screen.row("vllm").state == "healthy")
        await screen.press(key)
        await screen.until(lambda: any("this is a replay" in words for words in screen.toasts()))
        assert len(screen.app.screen_stack) == 1


async def test_the_list_of_runs_is_not_offered(replay: tuple[Replay, Ticks]) -> None:
    player, ticks = replay
    ticks.at = 35.0
    async with playing(player) as screen:
        await screen.until(lambda: screen.row("vllm").state == "healthy")
        line = next(line for line in screen.text().splitlines() if "2 Train" in line)
        assert line.split()[0] == "1"
        await screen.press("0")
        assert screen.app.is_running
        assert not screen.toasts()
        offered = [command.title for command in screen.app.get_system_commands(screen.app.screen)]
        assert "Runs" not in offered
        await screen.press("question_mark")
        await screen.shows("Keys")
        assert "The list of runs" not in screen.text()
        await screen.press("escape")
        # A click on the first entry opens the overview: it is where the list of runs would be.
        await screen.press("3")
        rows = screen.text().splitlines()
        at = next(number for number, row in enumerate(rows) if "2 Train" in row)
        await screen.pilot.click(offset=(1, at))
        await screen.until(lambda: screen.app.views.name == "overview")


@pytest.mark.parametrize("key", ["q", "ctrl+d", "ctrl+q"])
async def test_leaving_asks_nothing(replay: tuple[Replay, Ticks], key: str) -> None:
    player, _ = replay
    async with playing(player) as screen:
        await screen.shows("REPLAY")
        await screen.press(key)
        await screen.until(lambda: not screen.app.is_running)
        assert screen.app.return_value == "detach"


async def test_a_typed_line_keeps_its_letters_and_the_help_names_the_keys(
    replay: tuple[Replay, Ticks],
) -> None:
    player, ticks = replay
    ticks.at = 35.0
    async with playing(player) as screen:
        await screen.until(lambda: screen.app.state.step == 12)
        await screen.press("slash")
        await screen.until(lambda: isinstance(screen.app.focused, Input))
        await screen.press("a", "space", "plus", "b")
        assert screen.app.focused and screen.app.focused.value == "a +b"  # type: ignore[attr-defined]
        assert (player.clock.paused, player.clock.speed) == (False, 1.0)
        await screen.press("escape", "escape")
        await screen.press("question_mark")
        await screen.shows("Keys")
        await screen.shows("pause, or go on")
        await screen.press("space")
        assert not player.clock.paused


async def test_the_palette_has_every_action(replay: tuple[Replay, Ticks]) -> None:
    player, ticks = replay
    ticks.at = 35.0
    async with playing(player) as screen:
        await screen.until(lambda: screen.row("vllm").state == "healthy")
        offered = [command.title for command in screen.app.get_system_commands(screen.app.screen)]
        wanted = {view.title for view in VIEWS.values()} | {
            "Search",
            "Help",
            "Theme",
            "Picture",
            "Follow",
        }
        assert wanted | {"Pause", "Faster", "Leave", "Wrap", "Mark", "Open"} <= set(offered)
        assert offered.count("Restart") == offered.count("Leave") == 1, (
            "the replay's own instead of the cockpit's"
        )


async def test_machine_and_engine_are_shown_as_they_were_and_nothing_is_rung(
    replay: tuple[Replay, Ticks],
) -> None:
    player, ticks = replay
    async with playing(player) as screen:
        await screen.press("6")
        await screen.shows("no figures yet")
        ticks.at = 99.0
        await screen.shows("✔ done")
        await screen.shows("9.3/64.0 GB")
        assert not screen.app.rings.at_status(screen.app.status)


@pytest.mark.parametrize("size", [(20, 5), (40, 12), (80, 24), (200, 50)])
async def test_any_size(replay: tuple[Replay, Ticks], size: tuple[int, int]) -> None:
    player, ticks = replay
    ticks.at = 35.0
    async with playing(player, size) as screen:
        await screen.shows("REPLAY")


def test_a_live_run_is_reported_as_live_and_one_that_hangs_from_its_files(
    supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a real supervisor: the page has the processes' states; a supervisor that is stopped
    holds up nothing."""
    monkeypatch.setattr("atropos_tui.supervisor.client.CONTROL_TIMEOUT_S", 0.5)
    run = supervise(small_stack(tmp_path / "run"))
    run.run_json.write_text(
        json.dumps({"run_id": f"ui-{os.getpid()}", "name": "small", "started_at": time.time()})
    )
    asyncio.run(ControlClient(run.root).wait("ready", 20))
    page = tmp_path / "live.html"
    assert main.run(["report", str(run.root), "-o", str(page)]) == 0
    assert "● running" in page.read_text()
    assert "has written no telemetry" in page.read_text()
    supervisor = ProcessTable.load(run.journal_json)
    assert supervisor and supervisor.supervisor
    os.kill(supervisor.supervisor.pid, signal.SIGSTOP)
    try:
        assert main.run(["report", str(run.root), "-o", str(page)]) == 0
    finally:
        os.kill(supervisor.supervisor.pid, signal.SIGCONT)
    assert "● running" in page.read_text()


async def test_at_its_end_it_draws_nothing_any_more(
    replay: tuple[Replay, Ticks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sent 10 kB a second to the terminal for ever."""
    player, ticks = replay
    async with playing(player) as screen:
        ticks.at = 99.0
        await screen.shows("at its end")
        await screen.shows("✔ done")
        drawn: list[str] = []
        render = ReplayBar.render
        monkeypatch.setattr(
            ReplayBar, "render", lambda self: (drawn.append("bar"), render(self))[1]
        )
        monkeypatch.setattr(screen.app.feed, "refresh", lambda: drawn.append("feed"))
        await asyncio.sleep(4 * TICK_S)
        assert drawn == []
        await screen.press("left")
        await screen.until(lambda: "bar" in drawn and "feed" in drawn)
