"""`Explanation`: the text of `why`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from atropos_common.protocol.control import (
    HEALTH_CHECK,
    ComponentStatus,
    Phase,
    Role,
    RunStatus,
    StageStatus,
    State,
)
from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.diagnoses import gravest_first
from atropos_tui.monitor.bench import pace
from atropos_tui.monitor.format import (
    clock,
    counted,
    duration,
    glyph_and_word,
    one_line,
    seconds_text,
)
from atropos_tui.monitor.run.run_files import PlannedComponent, RunInfo, is_crashed
from atropos_tui.monitor.run.state import RunState

# The trainer is overdue if it is silent for this many seconds and this many usual steps. A
# diagnosis waits longer, because it is recorded and names a cause.
TRAINER_SILENT_S, TRAINER_SILENT_STEPS = 10.0, 10

PIDS_SHOWN = 8
DIAGNOSES_SHOWN = 5


class Explanation:
    """One moment of a run, and its plan."""

    def __init__(self, status: RunStatus, info: RunInfo, state: RunState, now: float) -> None:
        self.status = status
        self.state = state
        self.rows = {row.name: row for row in status.components}
        self._plan = {item.name: item for item in info.components}
        self._last_step = info.training_steps
        self._now = now
        self._ended = status.phase is Phase.ENDED
        self._open = open_diagnoses(state, status)

    def lines(self, component: str | None = None, columns: int | None = None) -> list[str]:
        """Return the text, or one component's paragraph, wrapped to `columns`."""
        if component is not None:
            return self._paragraph(self.rows[component], 0, columns)
        width = max((len(name) for name in self.rows), default=0) + 2
        parts = [
            line for row in self.rows.values() for line in self._paragraph(row, width, columns)
        ]
        return [*_wrapped(self._headline(), columns, 2), "", *parts]

    # The run.

    def _headline(self) -> str:
        status = self.status
        if self._ended:
            end = "crashed" if is_crashed(status) else f"ended with code {status.exit_code}"
            reason = f": {one_line(status.reason)}" if status.reason else ""
            return f"{status.run_id} {end}{reason}"
        if status.phase is Phase.STOPPING:
            left = [row.name for row in self.rows.values() if not row.state.is_resting]
            waits = f"; it waits for {_listed(left)} to be gone" if left else ""
            return f"{status.run_id} is being stopped ({one_line(status.reason)}){waits}"
        return f"{status.run_id} is {status.phase}; {self._awaited()}"

    def _awaited(self) -> str:
        roots = self._roots()
        if not roots:
            if has_all_steps(self.state, self._last_step):
                return "all steps are done, and the trainer saves the model"
            late = overdue(self.state, self.status, self._last_step, self._now)
            return late or f"it waits for {self._next_of_the_run()}"
        first = self.rows[roots[0]]
        state = f"{_word(first.state)}{self._since(first)}{self._limit(first)}"
        others = f", and for {_listed(roots[1:])}" if len(roots) > 1 else ""
        return f"it waits for {first.name}, which is {state}{others}"

    def _roots(self) -> list[str]:
        # The start of each chain of waiting: components that wait for no other.
        found: dict[str, None] = {}
        for row in self.rows.values():
            if row.state not in (State.HEALTHY, State.COMPLETED, State.STOPPED):
                found |= dict.fromkeys(self._root_of(row.name, set()))
        if any(self.rows[name].role is Role.ENGINE for name in found):
            # A starting trainer waits for the engine inside its program, without a `depends_on`.
            found = {name: None for name in found if self.rows[name].role is not Role.TRAINER}
        return list(found)

    def _root_of(self, name: str, seen: set[str]) -> list[str]:
        if name in seen:
            return []
        # `seen` ends a cycle, which only a foreign plan can have.
        gates = [gate for gate, _ in self._closed_gates(self.rows[name])]
        return [root for gate in gates for root in self._root_of(gate, seen | {name})] or [name]

    def _closed_gates(self, row: ComponentStatus) -> list[tuple[str, str]]:
        # The components that a pending one waits for, each with the required condition.
        plan = self._plan.get(row.name)
        if row.state is not State.PENDING or plan is None:
            return []
        return [
            (name, condition)
            for name, condition in plan.depends_on.items()
            if name in self.rows and not self.rows[name].state.satisfies(condition)
        ]

    def _next_of_the_run(self) -> str:
        trainer_first = sorted(self.rows.values(), key=lambda row: row.role is not Role.TRAINER)
        for row in trainer_first:
            if (stage := next_stage(row)) is not None:
                return f"{stage.name} of {row.name}{self._for(_waiting_since(row))}"
        for row in trainer_first:
            if row.role is Role.TRAINER and row.state is State.HEALTHY and not self.state.step:
                return f"the first optimizer step{self._for(_waiting_since(row))}"
        stopped = _listed([row.name for row in self.rows.values() if row.state is State.STOPPED])
        but = f", but {stopped} is stopped" if stopped else ""
        return f"nothing: every component is healthy or done{but}"

    # A component.

    def _paragraph(self, row: ComponentStatus, width: int, columns: int | None) -> list[str]:
        # The name takes `width` cells; 0: it is not padded, and nothing is indented.
        name = f"  {row.name}" if width else row.name
        head = f"{name:<{width}}  {glyph_and_word(row.state):<11}"
        first, *rest = [*self._ideas(row), *self._diagnosis(row)] or [""]
        begin = len(head) + 2
        lines = [f"{head}  {first}".rstrip(), *(" " * begin + line for line in rest)]
        return [part for line in lines for part in _wrapped(line, columns, begin)]

    def _ideas(self, row: ComponentStatus) -> list[str]:
        if self._ended:
            pids = f"; pid {', '.join(map(str, row.pids))}" if row.pids else ""
            tells = row.reason and row.state is not State.COMPLETED
            return [one_line(row.reason) + pids] if tells else []
        say = {
            State.PENDING: self._pending,
            State.STARTING: self._starting,
            State.HEALTHY: self._stages,
            State.UNHEALTHY: self._unhealthy,
            State.STOPPING: self._stopping,
            State.BACKOFF: self._backoff,
            State.STOPPED: self._stopped,
            State.FAILED: lambda row: [one_line(row.reason)],
            State.COMPLETED: lambda row: [],
        }
        return say[row.state](row)

    def _pending(self, row: ComponentStatus) -> list[str]:
        lines = []
        for name, condition in self._closed_gates(row):
            state = f"{_word(self.rows[name].state)}{self._since(self.rows[name])}"
            lines.append(f"waits for {name} to be {condition}: it is {state}")
        if not lines and row.waiting_for:
            lines.append(f"waits for {one_line(row.waiting_for)}{self._since(row)}")
        return lines or ["is about to start"]

    def _starting(self, row: ComponentStatus) -> list[str]:
        lines = [f"{self._since(row).strip() or 'just now'}{self._limit(row)}"]
        if row.probe_detail:
            check = f"{row.probe or 'newest'} check"
            verdict = "passed" if row.healthy else "has not passed"
            lines.append(f"its {check} {verdict}: {one_line(row.probe_detail)}")
        elif row.waiting_for:
            lines.append(f"waits for {one_line(row.waiting_for)}")
        return lines + self._stages(row)

    def _stages(self, row: ComponentStatus) -> list[str]:
        stage = next_stage(row)
        if stage is None:
            return []
        reached = [(one.reached_at, one.name) for one in row.stages if one.reached_at is not None]
        before = ""
        if reached:
            at, name = max(reached)
            before = f"{name} {self._for(at).removeprefix(' for ')} ago; "
        lines = [f"{before}waiting for: {stage.name}{self._for(_waiting_since(row))}"]
        return lines + ([f"usually: {one_line(stage.usually)}"] if stage.usually else [])

    def _unhealthy(self, row: ComponentStatus) -> list[str]:
        return [f"{self._since(row).strip()}: {one_line(row.probe_detail or row.reason)}"]

    def _stopping(self, row: ComponentStatus) -> list[str]:
        lines = [f"{one_line(row.reason)}{self._since(row)}"]
        if row.pids:
            more = f" and {len(row.pids) - PIDS_SHOWN} more" if len(row.pids) > PIDS_SHOWN else ""
            pids = ", ".join(map(str, row.pids[:PIDS_SHOWN]))
            lines.append(f"{counted(len(row.pids), 'process')} left: pid {pids}{more}")
        if row.waiting_for:
            lines.append(f"waits for {one_line(row.waiting_for)}")
        return lines

    def _backoff(self, row: ComponentStatus) -> list[str]:
        plan = self._plan.get(row.name)
        lines = [f"crashed: {one_line(row.reason)}"]
        if row.retry_at is not None:
            left = row.retry_at - self._now
            lines.append(f"next start in {duration(left)}" if left > 0 else "starts again now")
        if row.crashes and plan and plan.max_restarts is not None and plan.window_s is not None:
            window, last = duration(plan.window_s), plan.max_restarts + 1
            lines.append(f"crash {row.crashes} within {window}; crash {last} is the last")
        return lines

    def _stopped(self, row: ComponentStatus) -> list[str]:
        lines = [one_line(row.reason)] if row.reason else []
        if self.status.phase in (Phase.STARTING, Phase.RUNNING):
            lines.append(f"atropos-tui start {row.name} brings it back")
        return lines

    def _diagnosis(self, row: ComponentStatus) -> list[str]:
        # Open ones, gravest first; after the end of the run all of them, each once.
        if not self._ended:
            found = [each for each in self._open if each.component == row.name][:DIAGNOSES_SHOWN]
            return [line for each in found for line in _diagnosis_lines(each, "")]
        # A dict keeps the newest of each rule and title.
        every = (found for found in self.state.diagnoses if found.component == row.name)
        own = {(found.rule, found.title): found for found in every}
        latest = sorted(own.values(), key=lambda found: found.time)[-DIAGNOSES_SHOWN:]
        lines = [line for found in latest for line in _diagnosis_lines(found, self._when(found))]
        if more := len(own) - len(latest):
            command = f"atropos-tui events --kind diagnosis --component {row.name}"
            lines.append(f"and {more} before: {command}")
        return lines

    def _when(self, found: DiagnosisRecord) -> str:
        over = self.state.over_at(found)
        return f" at {clock(found.time)}" + (f", over at {clock(over)}" if over is not None else "")

    def _limit(self, row: ComponentStatus) -> str:
        plan: PlannedComponent | None = self._plan.get(row.name)
        if row.state is not State.STARTING or plan is None or plan.start_timeout_s is None:
            return ""
        return f", at most {duration(plan.start_timeout_s)}"

    def _since(self, row: ComponentStatus) -> str:
        return self._for(row.since)

    def _for(self, since: float | None) -> str:
        if since is None or self._ended:
            return ""
        return f" for {duration(max(0.0, self._now - since))}"


def _diagnosis_lines(found: DiagnosisRecord, when: str) -> list[str]:
    lines = [f"diagnosis{when}: {one_line(found.title)}"]
    lines += [f"evidence: {one_line(found.evidence)}"] if found.evidence else []
    return lines + ([f"fix: {one_line(found.fix)}"] if found.fix else [])


def _word(state: State) -> str:
    return "in backoff" if state is State.BACKOFF else state.value


def next_stage(row: ComponentStatus) -> StageStatus | None:
    """Return the first stage after the last one reached; earlier ones no longer matter."""
    if row.state not in (State.STARTING, State.HEALTHY, State.UNHEALTHY):
        return None
    if row.role is Role.ENGINE and row.state is not State.STARTING:
        return None  # a healthy engine answers requests, even if a stage line was missed
    reached = [at for at, stage in enumerate(row.stages) if stage.reached_at is not None]
    return next(iter(row.stages[max(reached) + 1 if reached else 0 :]), None)


def doing(row: ComponentStatus) -> str:
    """Describe a starting component: its next stage, or what it waits for."""
    stage = next_stage(row)
    if stage is not None:
        return _DOES.get(stage.name, f"waits for {one_line(stage.name)}")
    words = one_line(row.waiting_for)
    is_check = words in ("", HEALTH_CHECK, one_line(row.probe_detail))
    return "is starting" if is_check else f"waits for {words}"


# Stages whose name does not say what the component does.
_DOES = {"registered": "registers with run-api", "attached": "attaches to the engine"}


def _waiting_since(row: ComponentStatus) -> float | None:
    # The wait began at the last stage, or at the start of the process.
    times = [stage.reached_at for stage in row.stages if stage.reached_at is not None]
    return max(times) if times else row.started_at or row.since


def _wrapped(line: str, columns: int | None, begin: int) -> list[str]:
    if columns is None or len(line) <= columns:
        return [line]
    return textwrap.wrap(line, max(columns, begin + 20), subsequent_indent=" " * begin)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def silent_s(state: RunState, now: float) -> float | None:
    """Return the seconds since the trainer's last record, if unusually long."""
    if state.benchmark or state.trainer_time is None:  # the summary is the trainer's last record
        return None
    silent, step_s = now - state.trainer_time, pace(state, None).step_s or 0.0
    return silent if silent > max(TRAINER_SILENT_S, TRAINER_SILENT_STEPS * step_s) else None


def has_all_steps(state: RunState, last_step: int | None) -> bool:
    """Return True once only the final model is to be saved."""
    return last_step is not None and state.step >= last_step and state.benchmark is None


def overdue(state: RunState, status: RunStatus, last_step: int | None, now: float) -> str:
    """Describe the step that does not come, and the components that are down, if any."""
    silent = silent_s(state, now) if state.step else None
    if silent is None or has_all_steps(state, last_step):
        return ""
    down = (State.STOPPED, State.FAILED, State.UNHEALTHY)
    away = [row.name for row in status.components if row.state in down]
    cause = f", {', '.join(away)} not running" if away else ""
    usual = pace(state, None).step_s
    measure = f" (usual: {seconds_text(usual)})" if usual else ""
    return f"no step {state.step + 1} for {duration(silent)}{measure}{cause}"


def open_diagnoses(state: RunState, status: RunStatus) -> list[DiagnosisRecord]:
    """Return the open diagnoses, gravest first; none for a run that ended well."""
    if status.phase is Phase.ENDED and status.exit_code == 0:
        return []
    return gravest_first(state.standing.values())
