"""The screen in rare states: a supervisor that is silent, gone or new; more cards than lines; a
stall."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from atropos_common.protocol.control import GpuStatus, RunStatus
from atropos_common.protocol.records import CommandRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.run.run_files import LONG_BYTES, RecordBatch, RunFeed
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.widgets.bars import CommandBar
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.footer import Footer
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, gauges, live_status, make_run, write_records


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


class Silent(FakeControl):
    """It is there and does not answer."""

    async def status(self) -> RunStatus:
        raise TimeoutError


def _command(seq: int, when: float, status: str) -> CommandRecord:
    return CommandRecord(
        seq=seq,
        time=when,
        command_id=f"c{seq}",
        action="restart",
        component="vllm",
        status=status,
        initiator="user",
    )  # type: ignore[arg-type]


async def test_a_silent_supervisor_leaves_the_word_to_the_files(run: RunDir) -> None:
    async with cockpit(run, control=Silent()) as screen:
        await screen.until(lambda: screen.row("trainer"))


async def test_gone_with_the_supervisor_are_the_figures_not_the_cards(run: RunDir) -> None:
    control = FakeControl(
        live_status(run, T0).model_copy(
            update={"gpus": [GpuStatus(index=0, name="H200", used_bytes=1, total_bytes=2)]}
        )
    )
    async with cockpit(run, (160, 45), control) as screen:
        await screen.shows("1 × H200")
        control.answer = None
        await screen.shows("supervisor gone")
        await screen.until(lambda: "H200" not in screen.text())
        assert "no GPU" not in screen.text()


async def test_cards_without_a_line_are_counted(run: RunDir) -> None:
    cards = [GpuStatus(index=at, name="H200", used_bytes=1, total_bytes=2) for at in range(16)]
    control = FakeControl(live_status(run, T0).model_copy(update={"gpus": cards}))
    async with cockpit(run, (160, 45), control) as screen:
        await screen.shows("more: 6 shows them")
        await screen.press("6")
        await screen.shows("GPU 15")


async def test_a_queue_that_grows_while_the_trainer_stalls_is_drawn(run: RunDir) -> None:
    write_records(run.gauges_jsonl, [gauges(T0 + 45, queue=13)])
    async with cockpit(run, (220, 70), FakeControl(live_status(run, T0))) as screen:
        await screen.press("2")
        await screen.shows("groups 13")
        write_records(run.gauges_jsonl, [gauges(T0 + 50, queue=83)])
        await screen.shows("groups 83")


async def test_what_another_supervisor_left_undone_is_not_under_way(run: RunDir) -> None:
    write_records(
        run.supervisor_jsonl,
        [_command(100, T0 - 50, "running"), _command(101, T0 + 5, "running")],
        100,
    )
    async with cockpit(
        run, (160, 45), FakeControl(live_status(run, T0 + 40)), lambda: T0 + 40
    ) as screen:
        await screen.shows("◔ restart vllm  35 s")
        assert screen.text().count("◔ restart vllm") == 1


async def test_a_repaint_that_is_the_first_to_see_a_command_draws_it(run: RunDir) -> None:
    """Between two draws the state grows on, and a dialog that closes paints what is beneath it."""
    write_records(run.supervisor_jsonl, [_command(100, T0 + 5, "running")], 100)
    async with cockpit(
        run, (160, 45), FakeControl(live_status(run, T0 + 40)), lambda: T0 + 40
    ) as screen:
        await screen.shows("◔ restart vllm  35 s")
        bar = screen.app.query_one(CommandBar)
        screen.app.state.apply(_command(101, T0 + 10, "running"))
        assert "◔ restart vllm  30 s" in str(bar.render())


async def test_a_replaced_file_tells_no_old_news(run: RunDir) -> None:
    write_records(run.supervisor_jsonl, [_command(100, T0, "done")], 100)
    async with cockpit(run, control=FakeControl(live_status(run, T0))) as screen:
        await screen.until(lambda: screen.app.loaded)
        text = run.supervisor_jsonl.read_text()
        run.supervisor_jsonl.unlink()
        run.supervisor_jsonl.write_text(text)
        write_records(run.supervisor_jsonl, [_command(101, T0, "failed")], 101)
        await screen.until(screen.toasts)
        assert [toast for toast in screen.toasts() if "vllm" in toast] == [" restart vllm: failed"]


async def test_a_long_run_shows_how_it_stands_before_its_history_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "long", steps=450, training_steps=1000)
    assert run.telemetry_jsonl.stat().st_size > LONG_BYTES
    may_read, read = threading.Event(), RunFeed.read

    def held_back(feed: RunFeed) -> RecordBatch:
        assert may_read.wait(30)
        return read(feed)

    monkeypatch.setattr(RunFeed, "read", held_back)
    now = T0 + 31 + 0.33 * 450 + 60
    try:
        async with cockpit(
            run, (160, 45), FakeControl(live_status(run, now)), lambda: now
        ) as screen:
            await screen.shows("step 450/1000")
            await screen.shows("no step 451 for")
            await screen.shows("reading the run's history: step 0")
            assert "peak, mean" not in screen.text() and not screen.app.loaded, (
                "of what is not read nothing is said"
            )
            may_read.set()
            await screen.until(
                lambda: screen.app.loaded and "reading the run's history" not in screen.text()
            )
            assert len(screen.app.state.metric("loss")) == 450
            await screen.shows("peak, mean")
    finally:
        may_read.set()


def footer(screen: Screen) -> list[str]:
    return [offer.words for offer in screen.app.query_one(Footer).offers]


async def test_keys_that_can_do_nothing_are_not_offered(run: RunDir) -> None:
    control = FakeControl(live_status(run, T0))
    async with cockpit(run, (120, 35), control, lambda: T0) as screen:
        await screen.until(
            lambda: {"Restart", "Stop/start", "Kill", "Quit", "Help"} <= set(footer(screen))
        )
        control.answer = None
        await screen.until(lambda: screen.app.is_over)
        await screen.until(lambda: not {"Restart", "Stop/start", "Kill"} & set(footer(screen)))
        assert {"Open", "Last words", "Quit", "Help"} <= set(footer(screen))
        assert not any(
            "Restart " in command.title
            for command in screen.app.get_system_commands(screen.app.screen)
            if "trainer" in command.title
        )
        # Without a selected component the key has another reason to refuse.
        await screen.until(lambda: screen.app.query_one(Components).selected)
        await screen.press("r")
        await screen.shows("this run has ended")


async def test_a_screen_that_only_shows_offers_to_quit_and_not_to_act(run: RunDir) -> None:
    app = CockpitApp(run.root, control=FakeControl(live_status(run, T0)), clock=lambda: T0)
    app.read_only = True
    async with app.run_test(size=(120, 35)) as pilot:
        screen = Screen(app, pilot)
        await screen.until(lambda: "Quit" in footer(screen) and "Restart" not in footer(screen))


async def test_a_log_without_lines_says_so(run: RunDir) -> None:
    shutil.rmtree(run.logs)
    async with cockpit(run, (120, 40), FakeControl(live_status(run, T0)), lambda: T0) as screen:
        await screen.shows("no output yet")
