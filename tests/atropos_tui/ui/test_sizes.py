"""The screen when its size changes or is small: nothing stays empty, nothing important is cut."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from atropos_common.protocol.control import ComponentStatus, Role, RunStatus, State
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import DiagnosisRecord, StateRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.replay import Recording, Replay
from atropos_tui.ui.dialogs import TextDialog
from atropos_tui.ui.replay import ReplayApp
from atropos_tui.ui.views import VIEWS
from atropos_tui.ui.widgets.bars import ViewsLine
from atropos_tui.ui.widgets.components import Components
from tests.atropos_tui.ui.conftest import Screen, cockpit, has_news
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, write_records

NOW = T0 + 31 + 0.33 * 37 + 0.4
REFUSED = DiagnosisRecord(
    time=NOW - 5,
    component="trainer",
    rule="rollouts_refused",
    severity="alarm",
    title="no batches: the engine refuses every request of env",
    evidence="331 of 332 requests were answered 400",
    fix="send top_p=1",
)


def now() -> float:
    return NOW


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def ended(run: RunDir, code: int = 0) -> FakeControl:
    """No supervisor, and the result it has written."""
    run.result_json.write_text(json.dumps({"exit_code": code, "reason": "it ended"}))
    return FakeControl(None)


def shows_all_records(screen: Screen) -> bool:
    text = screen.text()
    return all(
        words in text
        for words in ("Events  10", "Loss  ━ loss", "Policy lag  ━ mean", "Rollouts  newest of 148")
    )


async def test_what_appears_after_the_end_is_drawn(run: RunDir) -> None:
    async with cockpit(run, (120, 35), ended(run), now) as screen:
        await screen.shows("✔ done")
        await screen.until(lambda: not has_news(screen.app))
        assert "Events  10" not in screen.text()
        await screen.pilot.resize_terminal(185, 60)
        await screen.until(lambda: shows_all_records(screen), timeout_s=5)
        await screen.pilot.resize_terminal(80, 24)
        await screen.press("8")
        await screen.shows("Events  10", timeout_s=5)


async def test_a_view_that_was_looked_at_in_vain_is_drawn_too(run: RunDir) -> None:
    """Key 8 shows a panel that was on the screen already: it does not appear, and must not be
    passed over."""
    async with cockpit(run, (120, 35), ended(run), now) as screen:
        await screen.shows("✔ done")
        await screen.until(lambda: not has_news(screen.app))
        await screen.pilot.resize_terminal(185, 60)
        await screen.press("8")
        await screen.until(
            lambda: "Events  10" in screen.text() and "✔ completed  probe passed" in screen.text(),
            5,
        )
        await screen.press("1")
        await screen.until(lambda: shows_all_records(screen), timeout_s=5)


async def test_what_appears_in_a_paused_replay_is_drawn(run: RunDir) -> None:
    ended(run)
    app = ReplayApp(Replay(Recording.load(run), 1.0, lambda: 0.0))
    async with app.run_test(size=(120, 35), notifications=True) as pilot:
        screen = Screen(app, pilot)  # type: ignore[arg-type]
        for _ in range(49):
            app.action_seek(1)
        await screen.press("space")
        await screen.shows("paused")
        await screen.until(lambda: app.state.step > 30 and not has_news(app))
        await screen.pilot.resize_terminal(185, 60)
        await screen.until(
            lambda: "Events  10" in screen.text() and "Loss  ━ loss" in screen.text(), timeout_s=5
        )


async def test_the_table_fits_after_every_change_of_size(run: RunDir) -> None:
    async with cockpit(run, (120, 60), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows("step 37/60")
        table = screen.app.query_one(Components)
        for width, height in ((220, 60), (185, 60), (120, 60), (60, 20), (80, 24), (120, 60)):
            await screen.pilot.resize_terminal(width, height)
            frame = 2 if width >= 110 else 1
            await screen.until(lambda frame=frame: table.outer_size.height == 1 + 5 + frame, 5)  # type: ignore[misc]
            # The height may have been right before; columns follow a new width a moment later.
            await screen.until(
                lambda: table.max_scroll_x == 0 and not table.show_horizontal_scrollbar, 5
            )
            assert not screen.app.screen.show_vertical_scrollbar


async def test_at_eighty_columns_the_diagnosis_is_whole_and_its_fix_two_keys_away(
    run: RunDir,
) -> None:
    write_records(run.supervisor_jsonl, [REFUSED.model_copy(update={"time": NOW - 0.3})], start=100)
    later = StateRecord(
        time=NOW - 1, component="env", role=Role.ENV, old="healthy", new="unhealthy", attempt=1
    )
    write_records(run.supervisor_jsonl, [later], start=101)
    async with cockpit(run, (80, 24), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.shows(
            "✖ no batches: the engine refuses every request of env: 331 of 332 requests"
        )
        await screen.shows("were answered 400; send top_p=1  (8 ⏎ fix)")
        assert "▲ running" in screen.text().splitlines()[0]
        assert "8 Events ▲1" in screen.text()
        await screen.press("8")
        await screen.shows("Events  12")
        await screen.press("enter")
        await screen.until(lambda: isinstance(screen.app.screen, TextDialog))
        await screen.shows("send top_p=1")
        await screen.press("escape")
        await screen.pilot.resize_terminal(60, 20)
        await screen.until(lambda: "…  (8 ⏎ fix)" in screen.text().splitlines()[3])


async def test_an_ended_run_keeps_its_diagnosis_in_view_unless_all_went_well(run: RunDir) -> None:
    stopped = StateRecord(
        time=NOW, component="trainer", role=Role.TRAINER, old="healthy", new="stopped", attempt=1
    )
    write_records(run.supervisor_jsonl, [REFUSED, stopped], start=100)
    async with cockpit(run, (80, 24), ended(run, 130), now) as screen:
        await screen.shows("■ stopped by hand: 37 steps, reward 0.59 → 0.91")
        await screen.shows("batches: the engine refuses every request of env")
    async with cockpit(run, (80, 24), ended(run, 0), now) as screen:
        await screen.shows("✔ done")
        assert "no batches" not in screen.text()


async def test_columns_make_room_for_words(run: RunDir) -> None:
    calm = live_status(run, NOW)
    words = "exit code 1; again in 4.0 s"
    rows = [
        row.model_copy(update={"state": State.BACKOFF, "reason": words})
        if row.name == "env"
        else row
        for row in calm.components
    ]
    control = FakeControl(calm)
    async with cockpit(run, (80, 24), control, now) as screen:
        await screen.until(
            lambda: all(name in screen.text() for name in (" health ", " pid ", " rst ", "40014"))
        )
        control.answer = calm.model_copy(update={"components": rows})
        await screen.shows(words)
        head = next(
            line for line in screen.text().splitlines() if line.split()[:1] == ["component"]
        )
        assert head.split() == ["component", "state", "up", "rst", "cpu", "memory"]


def with_more(status: RunStatus, count: int) -> RunStatus:
    more = [
        ComponentStatus(name=f"env-{at}", role=Role.ENV, state=State.HEALTHY) for at in range(count)
    ]
    return status.model_copy(update={"components": [*status.components, *more]})


@pytest.mark.parametrize("key", [str(at) for at in range(1, len(VIEWS) + 1)])
async def test_every_component_is_in_every_view_or_is_counted(run: RunDir, key: str) -> None:
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (80, 24), control, now) as screen:
        await screen.shows("step 37/60")
        await screen.press(key)
        table = screen.app.query_one(Components)
        await screen.until(lambda: table.size.height == 6)
        lines = screen.text().splitlines()
        first = next(at for at, line in enumerate(lines) if line.split()[:1] == ["component"])
        names = [line.split()[0] for line in lines[first + 1 : first + 6]]
        assert names == ["prepare", "run-api", "vllm", "env", "trainer"]
        assert "more" not in lines[first - 1]
        control.answer = with_more(live_status(run, NOW), 9)
        await screen.until(lambda: len(table.statuses) == 14)
        await screen.until(
            lambda: f"Components  {14 + 1 - table.size.height} more: ↑ ↓" in screen.text()
        )


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
async def test_no_view_is_cut_off_the_line_of_views(run: RunDir, columns: int) -> None:
    found: list[Record] = [
        DiagnosisRecord(time=T0, component="vllm", title=f"problem {at}") for at in range(12)
    ]
    write_records(run.supervisor_jsonl, found, start=1000)
    status = live_status(run, NOW)
    async with cockpit(run, (columns, 24), FakeControl(status), now) as screen:
        await screen.shows("▲12")
        line = str(screen.app.query_one(ViewsLine).render())
        assert re.findall(r"\b(\d)\b", line) == list("0123456789")
        assert len(line) <= columns and "…" not in line
        assert ("0 Runs 1 Run 2 Train" in line) == (columns == 80)


@pytest.mark.parametrize("away", [("6", "1"), ("F", "F"), ("2", "enter", "escape", "1")])
async def test_the_top_row_is_as_high_as_its_table_after_other_views(
    run: RunDir, away: tuple[str, ...]
) -> None:
    async with cockpit(run, (200, 50), FakeControl(live_status(run, NOW)), now) as screen:
        await screen.until(lambda: screen.app.loaded and screen.app.query_one(Components).statuses)
        top = screen.app.query_one("#top")
        await screen.until(lambda: top.size.height == 8)
        await screen.press(*away)
        await screen.until(lambda: screen.app.views.name == "overview")
        assert top.size.height == 8
