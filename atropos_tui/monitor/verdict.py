"""The verdict: one sentence about a run, its limit, and the change to make."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atropos_common.protocol.control import ComponentStatus, Phase, Role, RunStatus, State
from atropos_common.protocol.records import (
    CommandRecord,
    DiagnosisRecord,
    StateRecord,
)
from atropos_tui.diagnoses import rule_of
from atropos_tui.monitor.bench import pace
from atropos_tui.monitor.format import Tone, counted, duration, number, one_line
from atropos_tui.monitor.limits import FRESH_S, HARDLY_WAITS, STEPS, WAITS, Limit, Run, limit, rates
from atropos_tui.monitor.run.run_files import RunInfo, start_seconds
from atropos_tui.monitor.run.series import mean
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.why import doing, has_all_steps, next_stage, overdue

Severity = Literal["alarm", "warning", "advice", "healthy", "coming", "over"]

# Share of sequences beyond the lag limit above which it is reported.
LEFT_OUT = 0.05
MOST_WORDS = 160  # characters of a fix in the sentence; the diagnosis has all of it


_LOOKS: dict[Severity, tuple[str, Tone]] = {
    "alarm": ("✖", "bad"),
    "warning": ("▲", "warn"),
    "advice": ("◆", "busy"),
    "healthy": ("●", "good"),
    "coming": ("◔", "busy"),
    "over": ("■", "dim"),
}
GLYPHS = {severity: glyph for severity, (glyph, _) in _LOOKS.items()}
TONES = {severity: tone for severity, (_, tone) in _LOOKS.items()}


@dataclass(frozen=True)
class Verdict:
    severity: Severity
    what: str
    do: str = ""
    """Change to make, if any."""
    diagnosis: DiagnosisRecord | None = None
    """Diagnosis behind it, with evidence and the whole fix."""

    @property
    def text(self) -> str:
        return f"{self.what}; {self.do}" if self.do else self.what

    @property
    def line(self) -> str:
        """The text with its glyph."""
        return f"{GLYPHS[self.severity]} {self.text}"

    @property
    def is_trouble(self) -> bool:
        """True if something is wrong or stopped."""
        return self.severity in ("alarm", "warning")

    @property
    def tone(self) -> Tone:
        return TONES[self.severity]


def verdict(status: RunStatus, info: RunInfo, state: RunState, now: float) -> Verdict:
    """Return the sentence about a run at `now` (Unix seconds)."""
    run = Run(status, info, state, now)
    return next(found for check in CHECKS if (found := check(run)) is not None)


# The end.


def _over(run: Run) -> Verdict | None:
    status = run.status
    if status.phase is Phase.STOPPING:
        left = ", ".join(row.name for row in status.components if not row.state.is_resting)
        reason = one_line(status.reason)
        return Verdict("coming", f"stopping ({reason}): {left or 'nothing'} still to end")
    if status.phase is not Phase.ENDED:
        return None
    slow = _slowness(run)
    if status.exit_code == 0:
        return Verdict("over", f"done: {_achieved(run)}{slow.what}", slow.do)
    failed = [row.name for row in status.components if row.state is State.FAILED]
    wrong = min(run.standing, key=lambda found: found.component not in failed, default=None)
    # The reason of the end already names the diagnosis of a failed component.
    also = f"; {one_line(wrong.title)}" if wrong and wrong.component not in failed else ""
    do = _first_words(wrong.fix) if wrong else ""
    if status.exit_code == 130:
        return Verdict(
            "over", f"stopped by hand: {_achieved(run)}{also or slow.what}", do or slow.do
        )
    end = "crashed" if status.exit_code is None else f"failed with code {status.exit_code}"
    return Verdict("alarm", f"{end}: {one_line(status.reason)}{also}", do, wrong)


def _achieved(run: Run) -> str:
    state = run.state
    words = [counted(state.step, "step")]
    if (rewards := state.metric("reward_mean").values) and state.step > 1:
        first, last = number(mean(rewards[:STEPS]), 2), number(mean(rewards[-STEPS:]), 2)
        words.append(f"reward {first} → {last} (means of {STEPS} steps)")
    held_out = next((series.values for series in state.evals.values() if len(series) > 1), None)
    if held_out:
        words.append(f"held-out {held_out[0]:.0%} → {held_out[-1]:.0%}")
    return ", ".join(words)


def _slowness(run: Run) -> Limit:
    # What a run that is over was limited by, if its trainer mostly waited.
    speed = pace(run.state, None, window=max(1, run.state.step))
    times, gauges = run.state.metric("step_s").times, run.state.gauges.last
    if times and gauges and abs(times[-1] - gauges.time) <= FRESH_S:
        run = replace(run, now=gauges.time)  # the newest rates of the supervisor, as at their time
    last = rates(run.state, run.now)
    # A queue in the engine already slows a trainer that waits for a smaller share.
    least = HARDLY_WAITS if last and last.has_engine_queue else WAITS
    if speed.waiting is None or speed.waiting < least:
        return Limit("")
    if found := limit(run):
        return Limit(f"; in its last steps {found.what}", found.do)
    return Limit(f", the trainer waited for rollouts {speed.waiting:.0%} of the time")


# What is broken, and what stands still.


def _ill(run: Run) -> Verdict | None:
    again = restart(run)
    back = {each.row.name for each in again.outages} if again else set()
    rows = [
        row
        for row in run.status.components
        if row.state in (State.FAILED, State.BACKOFF, State.UNHEALTHY)
        and row.name not in back
        # A component that became unhealthy after the restart began only waits for the others.
        and not (again and row.state is State.UNHEALTHY and (row.since or 0.0) >= again.since)
    ]
    if not rows:
        return None
    # Gravest first: a failed component never comes back by itself.
    row = min(rows, key=lambda row: (State.FAILED, State.BACKOFF, State.UNHEALTHY).index(row.state))
    found = next((each for each in run.standing if each.component == row.name), None)
    what = f"{row.name} {_down(row, run.now)}"
    alike = run.of(row.role)
    if len(alike) > 1:
        up = sum(each.state is State.HEALTHY for each in alike)
        what += f", {up} of {len(alike)} {_NAMES.get(row.role, 'component')}s are left"
    why = one_line(found.title if found else row.probe_detail or row.reason)
    do = _first_words(found.fix) if found else f"atropos-tui why {row.name}"
    return Verdict("alarm", f"{what}: {why}" if why else what, do, found)


_NAMES = {Role.ENGINE: "engine", Role.ENV: "environment"}


def _down(row: ComponentStatus, now: float) -> str:
    if row.state is State.BACKOFF:
        left = (row.retry_at or now) - now
        return "crashed and starts again" + (f" in {duration(left)}" if left > 0 else "")
    return "has failed for good" if row.state is State.FAILED else "does not answer"


def _diagnosed(run: Run) -> Verdict | None:
    found = next(iter(run.standing), None)
    if found is None:
        return None
    title = one_line(found.title)
    evidence = one_line(found.evidence) if rule_of(found).shows_evidence else ""
    what = f"{title}: {evidence}" if evidence else title
    return Verdict(found.severity, what, _first_words(found.fix), found)


def _first_words(fix: str) -> str:
    # A sentence ends at a full stop between a small letter, bracket or digit, and a capital letter.
    first = re.split(r"(?<=[a-z)\]\d])\. (?=[A-Z])", one_line(fix), maxsplit=1)[0]
    return first if len(first) <= MOST_WORDS else f"{first[: MOST_WORDS - 1].rsplit(' ', 1)[0]} …"


def _stopped(run: Run) -> Verdict | None:
    names = stopped_by_hand(run)
    if not names or run.status.phase is Phase.STARTING:
        return None
    late = overdue(run.state, run.status, run.info.training_steps, run.now)
    what = f"{', '.join(names)} stopped by hand" + (f": {late}" if late else "")
    return Verdict("warning", what, f"atropos-tui start {names[0]}")


def _restarts(run: Run) -> Verdict | None:
    found = restart(run)
    if found is None:
        return None
    do = _first_words(found.cause.fix) if found.cause else ""
    if not do and found.is_slow(run.now):
        do = f"atropos-tui why {found.outages[0].row.name}"
    is_crash = found.outages[0].command is None
    return Verdict("warning" if is_crash else "coming", found.words(run.now), do, found.cause)


def _restarts_in_time(run: Run) -> Verdict | None:
    found = restart(run)
    return None if found is None or found.is_slow(run.now) else _restarts(run)


def _resumes(run: Run) -> Verdict | None:
    words = resuming(run)
    return Verdict("coming", words) if words else None


def _late(run: Run) -> Verdict | None:
    late = overdue(run.state, run.status, run.info.training_steps, run.now)
    return Verdict("warning", late, "atropos-tui why") if late else None


def _saves(run: Run) -> Verdict | None:
    if not has_all_steps(run.state, run.info.training_steps):
        return None
    since = duration(run.now - (run.state.trainer_time or run.now))
    return Verdict("coming", f"all {run.state.step:,} steps are done; saving the model · {since}")


# What is coming up.


def _coming(run: Run) -> Verdict | None:
    status, state = run.status, run.state
    waiting = [row for row in status.components if row.state is State.STARTING]
    if waiting and (not state.step or status.phase is Phase.STARTING):
        row = min(waiting, key=lambda row: row.since or run.now)
        return Verdict("coming", starting_words(row, run.info, state, run.now))
    if state.step:
        return None
    pending = next((row for row in status.components if row.state is State.PENDING), None)
    if pending:
        awaited = one_line(pending.waiting_for) or "its turn"
        return Verdict("coming", f"{pending.name} waits for {awaited}")
    if run.info.other_trainer:  # it writes no records, so its first step is never seen
        made = run.state.gauges.last
        groups = sum(flow.made or 0 for flow in made.flows.values()) if made else 0
        what = (
            f"the trainer is {run.info.other_trainer}, which tells no figures: steps, reward, "
            f"loss and alignment are missing; {counted(groups, 'group')} of rollouts"
        )
        return Verdict("healthy", what, "docs/trainers.md says how")
    trainer = next(iter(run.of(Role.TRAINER)), None)
    since = max((row.since or 0.0 for row in status.components), default=0.0)
    stage = next_stage(trainer) if trainer else None
    waits = stage is not None and stage.name == "first batch"
    what = "waiting for the first batch" if waits else "the first optimizer step"
    return Verdict("coming", f"{what} · {duration(run.now - since)}" if since else what)


def starting_words(row: ComponentStatus, info: RunInfo, state: RunState, now: float) -> str:
    """Describe a starting component: its stage, its time, and that of its last start."""
    # This run's own newest start replaces that of an earlier run.
    usual = (info.last_start_s | start_seconds(state.transitions)).get(row.name)
    last = f" (last time {duration(usual)})" if usual is not None else ""
    return f"{row.name} {doing(row)} · {duration(now - (row.since or now))}{last}"


# A run that trains.


def _too_old(run: Run) -> Verdict | None:
    steps = run.state.newest_steps
    out = sum(step.too_old for step in steps)
    taken = sum(step.sequences for step in steps)
    if not out or out < LEFT_OUT * (out + taken):
        return None
    most = next(step.policy_lag_bound for step in reversed(steps) if step.too_old)
    what = (
        f"policy lag at its bound: {out} of the newest {out + taken} sequences are older "
        f"than max_policy_lag = {most} and left out"
    )
    do = (
        "env.max_batches_offpolicy = 1 and fewer env.max_num_workers make rollouts younger, "
        "or raise [trainer] max_policy_lag"
    )
    return Verdict("warning", what, do)


def _limited(run: Run) -> Verdict | None:
    found = limit(run)
    return Verdict("advice", found.what, found.do) if found else None


def _healthy(run: Run) -> Verdict:
    state, steps = run.state, run.info.training_steps
    speed, found = pace(state, steps), rates(state, run.now)
    words = [f"healthy: step {state.step}" + (f" of {steps}" if steps else "")]
    if speed.eta_s is not None and state.step:
        words.append(f"ETA {duration(speed.eta_s)}")
    if found:
        words.append(f"the trainer waits {found.waiting:.0%}, {found.engine_words}")
    return Verdict("healthy", ", ".join(words))


# Failures, then stalls, then starts, then advice. A restart within its usual time comes before the
# diagnoses, because they are about the outage that it ends.
CHECKS: tuple[Callable[[Run], Verdict | None], ...] = (
    *(_over, _ill, _restarts_in_time, _diagnosed, _restarts, _stopped, _resumes, _late),
    *(_saves, _coming, _too_old, _limited, _healthy),
)


# Restarts after the first step: components, time, cause, and the time of the last start.

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
        by_start = self.command if self.command and self.command.action == "start" else None
        return by_start.time if by_start else self.down.time


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
        """Return `vllm is restarting (killed by hand 10 s ago; last time 15 s)`."""
        names = [each.row.name for each in self.outages]
        who = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        command, verb = self.outages[0].command, "is" if len(names) == 1 else "are"
        how = f"{names[0]} crashed"
        if command:
            how = f"{_DONE[command.action]} {_BY[command.initiator]}"
        last = "" if self.usual_s is None else f"; last time {duration(self.usual_s)}"
        why = f": {one_line(self.cause.title)}" if self.cause else ""
        ago = f"{duration(max(0.0, now - self.since))} ago{why}"
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
    cause = None if found[0].command else _cause(run, found[0])
    return Restart(found, max(known, default=None), cause)


def _outage(run: Run, row: ComponentStatus) -> Outage | None:
    # None if it was never up, is stopped for good, or backs off after a crash.
    own = [move for move in run.state.transitions if move.component == row.name]
    # The newest time it went down; changes between healthy and unhealthy do not count.
    falls = (move for move in reversed(own) if move.old in WAS_UP and move.new not in WAS_UP)
    if (down := next(falls, None)) is None:
        return None
    command = _command(run, [move for move in own if move.seq >= down.seq and move.command_id])
    if command and command.action not in _DONE:
        return None
    if row.state is State.BACKOFF and not (command and command.action == "kill"):
        return None  # a crash: the verdict reports it as a failure
    return Outage(row, down, command)


def stopped_by_hand(run: Run) -> list[str]:
    """Return the components that a `stop` command stopped."""
    found = []
    stops = [move for move in run.state.transitions if move.new == State.STOPPED]
    for row in run.status.components:
        command = _command(run, [move for move in stops if move.component == row.name])
        if row.state is State.STOPPED and command and command.action == "stop":
            found.append(row.name)
    return found


def _command(run: Run, moves: Sequence[StateRecord]) -> CommandRecord | None:
    # Of the newest of these transitions.
    return run.state.commands.get(moves[-1].command_id or "") if moves else None


def _cause(run: Run, outage: Outage) -> DiagnosisRecord | None:
    # An older diagnosis does not explain this outage.
    own = (each for each in reversed(run.state.diagnoses) if each.component == outage.row.name)
    newest = next(own, None)
    return newest if newest and newest.time >= outage.down.time - EXPLAINS_S else None


def resuming(run: Run) -> str:
    """Describe a restarted trainer or environment without a step so far."""
    for role, steps in ((Role.TRAINER, 0), (Role.ENV, LEFT_BEHIND)):
        rows = [row for row in run.status.components if row.role is role]
        # Every one is up and has a stage left to reach.
        coming = all(row.started_at is not None and next_stage(row) is not None for row in rows)
        if not rows or not run.state.step or not coming:
            continue
        row = max(rows, key=lambda row: row.started_at or 0.0)  # the last one to start
        since = row.started_at or 0.0
        usual = run.info.last_start_s.get(row.name, 0.0)
        fresh = run.now - max(row.since or 0.0, since) <= max(LEAST_LONG_S, LONG * usual)
        if fresh and sum(step.time > since for step in run.state.newest_steps) <= steps:
            return f"{row.name} has started again: it {doing(row)} · {duration(run.now - since)}"
    return ""
