"""Pages of charts, the filter by name, hidden charts, and compared runs shown one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.overlay import Comparison
from atropos_tui.ui import user_files
from atropos_tui.ui.views import TRAINING
from atropos_tui.ui.widgets.chart_grid import ChartGrid
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.legend import RunsLegend
from tests.atropos_tui.ui.conftest import Screen, cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.atropos_tui.ui.widgets.test_legends import NOW, made
from tests.support.run_maker import live_status


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return made(tmp_path / "runs" / "mine", "2e-4")


def names(screen: Screen) -> list[str]:
    grid = screen.app.query_one("#view-training").query_one(ChartGrid)
    return [one.spec.name for one in grid.query(Chart) if one.display]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_pages_show_every_chart_once_and_none_too_low(
    run: RunDir, size: tuple[int, int]
) -> None:
    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/60")
        await screen.press("2")
        await screen.until(lambda: 0 < len(names(screen)) < len(TRAINING) or size[1] == 50)
        seen: list[str] = []
        while names(screen) and names(screen)[0] not in seen:
            seen += names(screen)
            charts = [one for one in screen.app.query(Chart) if one.is_on_screen]
            assert all(one.size.height >= 5 for one in charts)
            await screen.until(lambda: all(one._traces for one in charts))  # noqa: B023
            await screen.press("pagedown")
        assert len(seen) == len(set(seen)) == len(TRAINING)
        assert isinstance(screen.app.focused, Chart) and screen.app.focused.display


async def test_charts_are_filtered_by_name_and_esc_drops_the_filter(run: RunDir) -> None:
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/60")
        await screen.press("2", "slash", *"lag|loss")
        await screen.shows("2 charts")
        assert names(screen) == ["Loss", "Policy lag"]
        await screen.press("enter")
        assert isinstance(screen.app.focused, Chart)
        await screen.shows("/lag|loss: esc drops it")
        await screen.press("escape")
        await screen.until(lambda: "Reward" in names(screen))
        assert screen.app.views.name == "training"


async def test_a_hidden_chart_stays_hidden_in_later_screens(run: RunDir) -> None:
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (120, 40), control, lambda: NOW) as screen:
        await screen.shows("step 60/60")
        await screen.press("2", "delete")
        await screen.until(lambda: "Reward" not in names(screen))
        await screen.shows("1 chart hidden: U shows")
        assert isinstance(screen.app.focused, Chart) and screen.app.focused.spec.name != "Reward"
    assert user_files.charts().hidden == ("Reward",)
    async with cockpit(run, (120, 40), control, lambda: NOW) as screen:
        await screen.shows("step 60/60")
        await screen.press("2")
        await screen.shows("1 chart hidden: U shows")
        await screen.press("U")
        await screen.until(lambda: "Reward" in names(screen))
    assert user_files.charts().hidden == ()


@pytest.mark.parametrize("colours", [True, False])
async def test_compared_runs_are_shown_one_by_one(
    run: RunDir, colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    other = made(run.root.parent / "other", "1e-3").root
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/60")
        screen.app.comparison = Comparison().with_runs([other], run)
        await screen.press("2")
        chart = next(one for one in screen.app.query(Chart) if one.is_on_screen)
        await screen.until(lambda: [trace.mark for trace in chart._traces] == ["1", "2"])
        spans = [trace.span for trace in chart._traces]
        text = "\n".join(strip.text for strip in chart._strips)
        assert "1" in text and "2" in text, "the marks stand on the curves"
        await screen.press("f2")
        await screen.shows("2 (")
        assert [trace.mark for trace in chart._traces] == ["1"]
        assert [trace.span for trace in chart._traces] == spans[:1]
        await screen.press("f1")
        assert len(chart._traces) == 2, "hiding the last one shows all"
        await screen.press("f9")
        await screen.pilot.click(RunsLegend, offset=(2, 0))
        await screen.until(lambda: [trace.mark for trace in chart._traces] == ["2"])


async def test_seeds_are_drawn_apart_on_request(run: RunDir) -> None:
    others = [made(run.root.parent / name, "2e-4").root for name in ("twin", "third")]
    async with cockpit(run, (200, 50), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 60/60")
        screen.app.comparison = Comparison().with_runs(others, run)
        await screen.press("2")
        await screen.shows("3 runs")
        await screen.press("e")
        await screen.shows("2 twin")
        await screen.shows("3 third")
