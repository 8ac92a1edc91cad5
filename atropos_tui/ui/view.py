"""What every panel is given to draw: one consistent picture of the run at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from atropos_tui.monitor.run_info import RunInfo
from atropos_tui.monitor.state import RunState
from trainer_core.contracts.control import RunStatus


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


class Panel(Protocol):
    """A widget that draws a `View`."""

    def show(self, view: View) -> None: ...
