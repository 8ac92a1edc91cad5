"""What is wrong with a run now: diagnoses that still hold, and a step that is overdue. Pure functions of records."""

from __future__ import annotations

from atropos_common.control import RunStatus, State
from atropos_common.records import DiagnosisRecord
from atropos_tui.monitor.pace import pace
from atropos_tui.monitor.plain import duration
from atropos_tui.monitor.state import RunState

SILENT_S, SILENT_STEPS = 10.0, 10
"""A trainer that is silent for both this many seconds and this many usual steps is waiting for something. The
supervisor waits longer before it says so in a diagnosis: that is written down, and names a cause."""

_ENDED_BY_A_STEP = ("no_batches",)
"""Rules that say only that no step comes."""
_WELL = (State.HEALTHY, State.COMPLETED)


def silent_s(state: RunState, now: float) -> float | None:
    """Seconds since the trainer's last record, if they are more than it ever takes; None while all is well."""
    if state.benchmark or state.trainer_time is None:
        return None
    silent = now - state.trainer_time
    return silent if silent > max(SILENT_S, SILENT_STEPS * (pace(state, None).step_s or 0.0)) else None


def overdue(state: RunState, status: RunStatus, now: float) -> str:
    """Which step should have come long ago, and who is away; empty while steps come, and before the first."""
    silent = silent_s(state, now) if state.step else None
    if silent is None:
        return ""
    away = [row.name for row in status.components if row.state in (State.STOPPED, State.FAILED, State.UNHEALTHY)]
    cause = f", {', '.join(away)} not running" if away else ""
    return f"step {state.step + 1} is overdue: silent for {duration(silent)}{cause}"


def open_diagnoses(state: RunState, status: RunStatus) -> list[DiagnosisRecord]:
    """The newest diagnosis of each component, newest first, unless it is over.

    It is over when the component has become healthy or completed since: being stopped is no cure. One about missing
    steps is over with the next step, one about alignment with the next verdict that is well.
    """
    newest = {found.component: found for found in state.diagnoses if found.component}
    moves = [(move.component, move.time) for move in state.transitions if move.new in _WELL]
    well = dict([*moves, *((row.name, row.since or 0.0) for row in status.components if row.state in _WELL)])
    still = [found for name, found in newest.items() if found.time >= well.get(name, 0.0)]
    return sorted((found for found in still if not _is_past(found, state)), key=lambda found: found.time, reverse=True)


def _is_past(found: DiagnosisRecord, state: RunState) -> bool:
    """Whether what the trainer wrote since contradicts it."""
    if found.rule in _ENDED_BY_A_STEP:
        times = state.metric("loss").times
        return bool(times) and times[-1] > found.time
    if found.rule.startswith("alignment") and state.alignment:
        return state.alignment.verdict == "ok" and state.alignment.time > found.time
    return False
