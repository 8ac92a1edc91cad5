"""A refusal appears once, Ctrl-C twice leaves without ending the run, and figures have labels."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from rich.style import Style

from atropos_common.protocol.trainer_records import CheckpointRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.run.state import timeline
from atropos_tui.ui.dialogs import QuitDialog
from atropos_tui.ui.plot import Axes, Curve, PlotStyles, plot
from tests.atropos_tui.monitor.run.test_state import fed
from tests.atropos_tui.ui.conftest import cockpit
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run

NOW = T0 + 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


async def test_a_refusal_is_said_once(run: RunDir) -> None:
    """Four keys on a run that is over piled four equal messages over half of the screen."""
    run.result_json.write_text(json.dumps({"exit_code": 0, "reason": "it ended"}))
    async with cockpit(run, (120, 40), FakeControl(None), lambda: NOW) as screen:
        await screen.shows("✔ done")
        await screen.press("r", "s", "K", "R")
        await screen.until(lambda: any("this run has ended" in toast for toast in screen.toasts()))
        assert len(screen.toasts()) == 1
        screen.app.refuse("another reason", "")
        await screen.until(lambda: len(screen.toasts()) == 2)


async def test_ctrl_c_twice_detaches(run: RunDir) -> None:
    control = FakeControl(live_status(run, NOW))
    async with cockpit(run, (120, 40), control, lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("ctrl+c")
        await screen.until(lambda: isinstance(screen.app.screen, QuitDialog))
        await screen.press("ctrl+c")
        await screen.until(lambda: not screen.app.is_running)
        assert screen.app.return_value == "detach" and not control.commands


def test_checkpoints_are_told_apart_by_their_names() -> None:
    """`checkpoint step 60: 10 MB` and `checkpoint step 60: 3 MB`: one was the final model."""
    state = fed(
        CheckpointRecord(step=60, path="/run/checkpoints/step_60", seconds=0.1, bytes=10_000_000),
        CheckpointRecord(
            step=60, path="/run/checkpoints/final_model", seconds=0.1, bytes=3_000_000
        ),
    )
    assert [event.text.partition(":")[0] for event in timeline(state)] == ["step_60", "final_model"]


@pytest.mark.parametrize(
    ("high", "height"), [(3.0, 8), (3.0, 10), (1.0, 9), (1.0, 14), (0.7, 10), (12.0, 12), (4.4, 14)]
)
def test_labels_of_the_vertical_axis_stand_at_equal_distances(high: float, height: int) -> None:
    """3, 2, 1, 0 stood on rows 1, 3, 4, 6. Where no round values fit the rows, the distances differ
    by one."""
    style = Style()
    lines = plot(
        [Curve([0, 10], [0, high], style)],
        Axes(low=0.0),
        PlotStyles(style, style, style, style),
        40,
        height,
    )
    rows = [at for at, line in enumerate(lines) if any("┤" in part.text for part in line)]
    assert len(rows) >= 2 and len({after - before for before, after in pairwise(rows)}) == 1, rows
