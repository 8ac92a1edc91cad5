"""A growing run is drawn along every axis, size and view; an error stays in its panel."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.charts import Along
from atropos_tui.ui import user_files
from atropos_tui.ui.user_files import Charts
from atropos_tui.ui.widgets.benchmark import AlignmentPanel
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.details import Details
from atropos_tui.ui.widgets.header import Header, Notices
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.panel import Guarded
from tests.atropos_tui.ui.conftest import cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, step_records

NOW = T0 + 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "mine", steps=12)


@pytest.mark.parametrize("along", list(Along))
@pytest.mark.parametrize("attempt", [1, 2])
async def test_a_growing_run_is_drawn_along_every_axis(
    run: RunDir, along: Along, attempt: int
) -> None:
    """Records arrive between two draws, then the terminal is resized or another view is chosen:
    both draw the view of before over the newer series. With tokens that ended the screen."""
    user_files.keep(charts=Charts(along=along))
    rng, step = random.Random(0), 12
    async with cockpit(run, (120, 40), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 12/60")
        for at, key in enumerate("217z2571"):
            for _ in range(2):
                step += 1
                new = step if attempt == 1 else step - 6  # a restart forgets the newest steps
                for record in step_records(new, rng, attempt=attempt):
                    screen.app.state.apply(record)
            await screen.pilot.resize_terminal(*((90, 30), (120, 40), (200, 50))[at % 3])
            await screen.press("z" if key == "z" else key)
        assert not user_files._recorded
        assert all(not panel.failure for panel in screen.app.query(Guarded))


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
@pytest.mark.parametrize(
    ("kind", "method", "key"),
    [
        (Chart, "_draw", "2"),
        (Chart, "_prepare", "2"),
        (AlignmentPanel, "lines", "7"),
        (Components, "_cells", "1"),
        (Components, "render_line", "1"),
        (Details, "_lines", "9"),
        (Header, "lines", "1"),
        (Notices, "_sentences", "1"),
        (LogView, "render_line", "3"),
        (LogView, "_arrange", "3"),
    ],
)
async def test_a_panel_that_cannot_be_drawn_says_so_and_recovers(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    kind: type[Guarded],
    method: str,
    key: str,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("no [such] figure")

    async with cockpit(run, size, FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 12/60")
        with monkeypatch.context() as patch:
            patch.setattr(kind, method, broken)
            await screen.press(key)
            screen.app.painter.current.clear()
            screen.app.painter.draw_now()
            await screen.pilot.resize_terminal(size[0] - 1, size[1])
            for log in screen.app.query(LogView):
                log._stale = True
                log.refresh()
            await screen.shows("cannot be drawn: ValueError: ")
            await screen.shows("Quit")
            assert "no [such] figure" in user_files.error_file().read_text()
        screen.app.painter.current.clear()
        screen.app.painter.draw_now()
        for log in screen.app.query(LogView):
            log._stale = True
        await screen.until(lambda: "cannot be" not in screen.text())
    user_files._recorded.clear()
