"""What every panel is given to draw: one consistent picture of the run at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from atropos_common.control import ComponentStatus, RunStatus
from atropos_tui.monitor.bench import RunBenchmark
from atropos_tui.monitor.gauges import GaugeHistory
from atropos_tui.monitor.run_info import RunInfo
from atropos_tui.monitor.state import RunState


@dataclass(frozen=True, eq=False)
class View:
    """The run as the screen knows it now. Each is a new one to draw, though it holds the same growing state."""

    info: RunInfo
    state: RunState
    status: RunStatus | None
    """None until the supervisor or the files have told."""
    gone: str
    """Why no supervisor answers; empty while one does."""
    now: float
    """Unix seconds."""
    bad_lines: int = 0
    """Lines in the run's streams that were no records."""
    gauges: GaugeHistory = field(default_factory=GaugeHistory)
    other: RunBenchmark | None = None
    """The run that this one is compared with."""
    selected: str = ""
    """The component under the cursor."""
    loaded: bool = True
    """Whether the files were read to their end once."""

    @property
    def rows(self) -> list[ComponentStatus]:
        """Components in start order; empty until something has told."""
        return self.status.components if self.status else []


class Panel(Protocol):
    """A widget that draws a `View`."""

    def show(self, view: View) -> None: ...
