"""Restarts after the first step: components, time, cause, and the time of the last start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atropos_common.protocol.control import ComponentStatus, Phase, Role, State
from atropos_common.protocol.records import CommandRecord, DiagnosisRecord, StateRecord
from atropos_tui.monitor.explain.limits import Run
from atropos_tui.monitor.explain.why import doing, next_stage
from atropos_tui.monitor.format import duration, one_line
from atropos_tui.monitor.run.run_files import start_seconds

ON_THE_WAY = (State.PENDING, State.STARTING, State.STOPPING)
WAS_UP = (State.HEALTHY, State.UNHEALTHY)
# Steps that the trainer can make from batches that an environment sent before its end.
LEFT_BEHIND = 2
# Factor on the usual start time above which a restart is slow.
LONG = 2.0
LEAST_LONG_S = 30.0
_DONE = {"kill": "killed", "restart": "restarted", "start": "started"}
_BY: Mapping[str, str] = defaultdict(lambda: "by hand", trainer="by the trainer")
# Longest time from a diagnosis to the end that it explains.
EXPLAINS_S = 10.0


@dataclass(frozen=True)
class Outage:
    """A component that went down and is not back."""

    row: ComponentStatus
    down: StateRecord
    """Transition out of its last healthy or unhealthy state."""
    command: CommandRecord | None
    """Command that took it down or starts it; None after a crash."""

    @property
    def since(self) -> float:
        return (
            self.command.time if self.command and self.command.action == "start" else self.down.time
        )


@dataclass(frozen=True)
class Restart:
    """Components of one restart, in the order in which they went down."""

    outages: Sequence[Outage]
    usual_s: float | None
    """Longest of their last starts."""
    cause: DiagnosisRecord | None = None
    """Diagnosis of a crash; None after a command."""

    @property
    def since(self) -> float:
        return self.outages[0].since

    def words(self, now: float) -> str:
        """Return `vllm and trainer are restarting (killed by hand 10 s ago; last time 15 s)`."""
        names = [each.row.name for each in self.outages]
        who = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        command, why = self.outages[0].command, one_line(self.cause.title) if self.cause else ""
        how = (
            f"{_DONE[command.action]} {_BY[command.initiator]}"
            if command
            else f"{names[0]} crashed"
        )
        last = "" if self.usual_s is None else f"; last time {duration(self.usual_s)}"
        verb = "is" if len(names) == 1 else "are"
        ago = f"{duration(max(0.0, now - self.since))} ago" + (f": {why}" if why else "")
        return f"{who} {verb} restarting ({how} {ago}{last})"

    def is_slow(self, now: float) -> bool:
        """Return True if it takes clearly longer than the last time."""
        return now - self.since > max(LEAST_LONG_S, LONG * (self.usual_s or 0.0))


def restart(run: Run) -> Restart | None:
    """Return the restart in progress after the first step, if any."""
    # Before the first step, a start is no restart.
    if not run.state.step or run.status.phase is not Phase.RUNNING:
        return None
    rows = (row for row in run.status.components if row.state in (*ON_THE_WAY, State.BACKOFF))
    found = sorted(filter(None, (_outage(run, row) for row in rows)), key=lambda each: each.since)
    if not found:
        return None
    usual = run.info.last_start_s | start_seconds(run.state.transitions)
    known = [usual[each.row.name] for each in found if each.row.name in usual]
    return Restart(
        found, max(known, default=None), None if found[0].command else _cause(run, found[0])
    )


def _outage(run: Run, row: ComponentStatus) -> Outage | None:
    # None if it was never up, is stopped for good, or backs off after a crash.
    own = [move for move in run.state.transitions if move.component == row.name]
    # The newest time it went down; changes between healthy and unhealthy do not count.
    down = next(
        (move for move in reversed(own) if move.old in WAS_UP and move.new not in WAS_UP), None
    )
    if down is None:
        return None
    later = [move for move in own if move.seq >= down.seq and move.command_id]
    command = run.state.commands.get(later[-1].command_id or "") if later else None
    if command and command.action not in _DONE:
        return None
    if row.state is State.BACKOFF and not (command and command.action == "kill"):
        return None  # a crash: the verdict reports it as a failure
    return Outage(row, down, command)


def stopped_by_hand(run: Run) -> list[str]:
    """Return the components that a `stop` command stopped."""
    found = []
    for row in run.status.components:
        moves = [
            move
            for move in run.state.transitions
            if move.component == row.name and move.new == State.STOPPED
        ]
        command = run.state.commands.get(moves[-1].command_id or "") if moves else None
        if row.state is State.STOPPED and command and command.action == "stop":
            found.append(row.name)
    return found


def _cause(run: Run, outage: Outage) -> DiagnosisRecord | None:
    # An older diagnosis does not explain this outage.
    own = (each for each in reversed(run.state.diagnoses) if each.component == outage.row.name)
    newest = next(own, None)
    return newest if newest and newest.time >= outage.down.time - EXPLAINS_S else None


def resuming(run: Run) -> str:
    """Describe a restarted trainer or environment without a step so far; empty if none."""
    for role, steps in ((Role.TRAINER, 0), (Role.ENV, LEFT_BEHIND)):
        rows = [row for row in run.status.components if row.role is role]
        if not rows or not run.state.step or any(not _comes_up(row) for row in rows):
            continue
        row = max(rows, key=lambda row: row.started_at or 0.0)  # the last one to start
        since = row.started_at or 0.0
        fresh = run.now - max(row.since or 0.0, since) <= max(
            LEAST_LONG_S, LONG * run.info.last_start_s.get(row.name, 0.0)
        )
        if fresh and sum(step.time > since for step in run.state.newest_steps) <= steps:
            return f"{row.name} has started again: it {doing(row)} · {duration(run.now - since)}"
    return ""


def _comes_up(row: ComponentStatus) -> bool:
    return row.started_at is not None and next_stage(row) is not None
