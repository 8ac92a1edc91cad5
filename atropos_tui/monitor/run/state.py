"""State of a run from its records: `RunState.apply(record)`. Lists of texts are bounded.

After a crash, a later attempt replaces the later steps of earlier ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from atropos_common.protocol.control import State
from atropos_common.protocol.record_base import (
    SCHEMA_VERSION,
    Number,
    Record,
    Whole,
)
from atropos_common.protocol.records import (
    CommandRecord,
    ComponentRecord,
    DiagnosisRecord,
    EnvCountsRecord,
    EnvMetricsRecord,
    EvalRecord,
    GaugesRecord,
    StageRecord,
    StateRecord,
)
from atropos_common.protocol.trainer_records import (
    OF_EACH_STEP,
    AlignmentRecord,
    BenchmarkRecord,
    CheckpointRecord,
    MemoryRecord,
    RanksRecord,
    RolloutRecord,
    StepRecord,
    SyncRecord,
    TimingRecord,
    TrainerRecord,
)
from atropos_tui.monitor.format import (
    TONES,
    Tone,
    bytes_text,
    clock,
    glyph_and_word,
    one_line,
    plain_lines,
    real,
    reason_of,
    seconds_text,
)
from atropos_tui.monitor.run.gauges import GaugeHistory
from atropos_tui.monitor.run.series import MOST_STEPS, Series


def _numbers(kind: type[Record], *without: str) -> tuple[str, ...]:
    ends = (float, Number | None, int, int | None, Whole | None)
    own = {name: kind.model_fields[name].annotation for name in kind.__annotations__}
    return tuple(name for name, type_ in own.items() if type_ in ends and name not in without)


# Fields that become curves; `tokens` is that of the step record.
METRICS: dict[type[Record], tuple[str, ...]] = {
    StepRecord: _numbers(StepRecord),
    AlignmentRecord: _numbers(AlignmentRecord, "tokens"),
    TimingRecord: _numbers(TimingRecord),
    MemoryRecord: _numbers(MemoryRecord),
}
# Fields with named numbers -> prefix of their curve names, before a slash.
TABLES: dict[type[Record], dict[str, str]] = {
    StepRecord: {
        "left_out": "left_out",
        "left_out_tokens": "left_out_tokens",
        "logprobs_from": "logprobs_from",
    },
    SyncRecord: {"phases": "sync"},
}
# Share of a step's groups with an advantage; flat groups teach nothing.
USEFUL_GROUPS = "useful_groups"
# Sums over steps of fields that are rates or shares: tokens, idle seconds of engines, seconds of
# the steps that report idle time; accepted tokens, used seconds of capacity, seconds of the steps
# that report it; tokens that the engines generated.
TOKENS, IDLE_S, COUNTED_S = "tokens", "idle_s", "counted_s"
ACCEPTED, CAPACITY_S, RATED_S = "accepted", "capacity_s", "rated_s"
GENERATED = "generated"
SUMS = (TOKENS, IDLE_S, COUNTED_S, ACCEPTED, CAPACITY_S, RATED_S, GENERATED)
MOST_CURVES = 400  # a stream could contain endlessly many names


ROLLOUTS_KEPT = 1000
STEPS_KEPT = 10
DIAGNOSES_KEPT = 200
CHECKPOINTS_KEPT = 200
TRANSITIONS_KEPT = 2000
COMMANDS_KEPT = 200
MOMENTS_KEPT = 500


class ThrownAway:
    """Generated tokens that environments did not send to run-api, by reason."""

    def __init__(self) -> None:
        # Totals of each environment at Unix seconds, ascending.
        self._moments: dict[str, deque[tuple[float, Counter[str]]]] = {}
        self._newest: dict[str, EnvCountsRecord] = {}
        # Totals of earlier attempts: each attempt of an environment counts from 0.
        self._earlier: dict[str, Counter[str]] = {}

    def add(self, record: EnvCountsRecord) -> None:
        before = self._newest.get(record.env)
        if before is not None and record.time < before.time:
            return
        earlier = self._earlier.setdefault(record.env, Counter())
        if before is not None and _all_tokens(record) < _all_tokens(before):
            earlier.update(before.left_out_tokens)
        self._newest[record.env] = record
        moments = self._moments.setdefault(record.env, deque(maxlen=MOMENTS_KEPT))
        moments.append((record.time, earlier + Counter(record.left_out_tokens)))

    @property
    def total(self) -> dict[str, float]:
        counts = sum((kept[-1][1] for kept in self._moments.values()), Counter[str]())
        return {reason: real(tokens) for reason, tokens in counts.items()}

    def between(self, start: float, end: float) -> dict[str, float]:
        """Return the tokens of the seconds from `start` to `end`, at the rate of the records."""
        found: dict[str, float] = {}
        for kept in self._moments.values():
            moments = [(start, Counter[str]()), *kept]
            times = [time for time, _ in kept]
            last = bisect_right(times, end)
            if last == 0:
                continue
            # Records are further apart than short steps: at least one interval counts.
            first = min(bisect_right(times, start), last - 1)
            (began, before), (ended, after) = moments[first], moments[last]
            if ended > began:
                scale = (end - start) / (ended - began)
                for reason, tokens in (after - before).items():
                    found[reason] = found.get(reason, 0.0) + real(tokens) * scale
        return found


def _all_tokens(record: EnvCountsRecord) -> int:
    return record.sent_tokens + sum(record.left_out_tokens.values())


@dataclass
class RunState:
    """History of one run. Records may come in any order across streams."""

    series: dict[str, Series] = field(default_factory=dict)
    evals: dict[str, Series] = field(default_factory=dict)
    """Accuracy by `ENV/SPLIT`, over weight versions, else run-api's steps."""
    _versioned: set[str] = field(default_factory=set)
    """Keys of `evals` over weight versions."""
    _discarded: list[tuple[float, int]] = field(default_factory=list)
    """Start of each attempt of the trainer in Unix seconds, and the version that it began with."""
    env_metrics: dict[str, Series] = field(default_factory=dict)
    """Metrics by `ENV:NAME`, over run-api's steps."""
    attempt: int = 0
    attempt_steps: dict[int, int] = field(default_factory=dict)
    """First step of each attempt of the trainer."""
    step: int = 0
    """Newest optimizer step; 0 before the first."""
    trainer_time: float | None = None
    """Unix seconds of the newest trainer record."""
    newest_steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    alignment: AlignmentRecord | None = None
    benchmark: BenchmarkRecord | None = None
    ranks: RanksRecord | None = None
    """Newest step; None with one rank."""
    rollouts: deque[RolloutRecord] = field(default_factory=lambda: deque(maxlen=ROLLOUTS_KEPT))
    checkpoints: deque[CheckpointRecord] = field(
        default_factory=lambda: deque(maxlen=CHECKPOINTS_KEPT)
    )
    sums: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in SUMS})
    """Per-step values that add up to figures of the whole run."""
    thrown_away: ThrownAway = field(default_factory=ThrownAway)
    """Tokens that the environments did not send."""
    syncs: Series = field(default_factory=Series)
    """Seconds of every publish, over weight versions."""
    transitions: deque[StateRecord] = field(default_factory=lambda: deque(maxlen=TRANSITIONS_KEPT))
    diagnoses: deque[DiagnosisRecord] = field(default_factory=lambda: deque(maxlen=DIAGNOSES_KEPT))
    """Every diagnosis as opened, oldest first."""
    standing: dict[tuple[str | None, str, str], DiagnosisRecord] = field(default_factory=dict)
    """Open diagnoses by component, rule and title."""
    _over_at: dict[int, float] = field(default_factory=dict)
    """End in Unix seconds, by the `seq` of the opening."""
    stages: dict[str, list[StageRecord]] = field(default_factory=dict)
    """Each component's newest attempt, oldest first."""
    commands: dict[str, CommandRecord] = field(default_factory=dict)
    """Latest record by command id, oldest first."""
    gauges: GaugeHistory = field(default_factory=GaugeHistory)
    supervisor_seq: int = -1
    """Last applied record of supervisor.jsonl."""
    unknown: int = 0
    """Records of unknown kinds."""
    newest_version: int = SCHEMA_VERSION
    """Highest schema version in the records."""

    def apply(self, record: Record) -> None:
        """Apply one record; never raises for a parsed one."""
        if record.v > self.newest_version:
            self.newest_version = record.v
        if isinstance(record, TrainerRecord):
            self._apply_trainer(record)
        elif isinstance(record, EvalRecord):
            self._apply_eval(record)
        elif isinstance(record, EnvCountsRecord):
            self.thrown_away.add(record)
        elif isinstance(record, EnvMetricsRecord):
            self._apply_env_metrics(record)
        elif isinstance(record, ComponentRecord):
            self._apply_supervisor(record)
        elif isinstance(record, GaugesRecord):
            self.gauges.add(record)
        elif type(record) is Record:  # exactly the base class: an unknown kind
            self.unknown += 1

    def metric(self, name: str) -> Series:
        """Return a curve by its name; empty without data."""
        tables = (self.series, self.env_metrics, self.evals)
        return next((found for table in tables if (found := table.get(name))), Series())

    def names(self) -> list[str]:
        """Return the names of all curves."""
        return [*sorted(self.series), *sorted(self.evals), *sorted(self.env_metrics)]

    def open_commands(self) -> list[CommandRecord]:
        return [one for one in self.commands.values() if one.status in ("accepted", "running")]

    def over_at(self, found: DiagnosisRecord) -> float | None:
        """Return the end of a diagnosis in Unix seconds; None while it is open."""
        return self._over_at.get(found.seq)

    def _apply_diagnosis(self, record: DiagnosisRecord) -> None:
        key = record.component, record.rule, record.title
        if (before := self.standing.pop(key, None)) is not None:
            self._over_at[before.seq] = record.time
        if record.over:
            return
        self.diagnoses.append(record)
        self.standing[key] = record
        if len(self.standing) > DIAGNOSES_KEPT:  # dicts keep insertion order: drop the oldest
            del self.standing[next(iter(self.standing))]

    def _apply_trainer(self, record: TrainerRecord) -> None:
        if record.rank != 0 or record.step > MOST_STEPS:
            return  # rank 0 writes for all ranks; larger steps come from damaged or foreign records
        if record.attempt not in self.attempt_steps and isinstance(record, OF_EACH_STEP):
            self._begin_attempt(record)
        if len(self.attempt_steps) > 1 and self._superseded(record):
            return
        if record.attempt > self.attempt:
            self.attempt = record.attempt
        if self.trainer_time is None or record.time > self.trainer_time:
            self.trainer_time = record.time
        if isinstance(record, RolloutRecord):
            self.rollouts.append(record)
            return  # first, because most records of a long run are rollouts
        self._put_numbers(record)
        if isinstance(record, StepRecord):
            self.step = max(self.step, record.step)
            self.newest_steps.append(record)
            if record.groups:
                useful = 1 - real(record.flat_groups or 0) / real(record.groups)
                self._put(self.series, USEFUL_GROUPS, record.step, useful, record.time)
        elif isinstance(record, TimingRecord):
            self._put_sums(record)
        elif isinstance(record, AlignmentRecord):
            self.alignment = record
        elif isinstance(record, CheckpointRecord):
            self.checkpoints.append(record)
        elif isinstance(record, SyncRecord) and record.moved:
            self.syncs.put(record.weight_version, record.seconds, record.time)
        elif isinstance(record, RanksRecord):
            self.ranks = record
        elif isinstance(record, BenchmarkRecord):
            self.benchmark = record

    def _put_numbers(self, record: TrainerRecord) -> None:
        # Includes fields that this version does not know.
        names = METRICS.get(type(record))
        if names is not None:
            values, step, time = record.__dict__, record.step, record.time
            for name in names:
                if (value := values[name]) is not None:
                    # A call of `_put` for each number is slow, so only for the first of a name.
                    if (series := self.series.get(name)) is None:
                        self._put(self.series, name, step, value, time)
                    else:
                        series.put(step, value, time)
            if record.model_extra:
                self._put_unnamed(record, record.model_extra)
        for field_, prefix in TABLES.get(type(record), {}).items():
            for key, value in getattr(record, field_).items():
                self._put(self.series, f"{prefix}/{key}", record.step, value, record.time)

    def _put_sums(self, record: TimingRecord) -> None:
        step, seconds, time = record.step, real(record.step_s), record.time
        # Rates times seconds, so that sums over any steps give correct averages.
        self.sums[TOKENS].put(step, real(record.tokens_per_s) * seconds, time)
        if record.engine_idle_fraction is not None:
            self.sums[IDLE_S].put(step, real(record.engine_idle_fraction) * seconds, time)
            self.sums[COUNTED_S].put(step, seconds, time)
        if record.generated_tokens is not None:
            self.sums[GENERATED].put(step, real(record.generated_tokens), time)
        if record.accepted_tokens_per_s is not None:
            self.sums[ACCEPTED].put(step, real(record.accepted_tokens_per_s) * seconds, time)
        if record.engine_capacity_used is not None:
            self.sums[CAPACITY_S].put(step, real(record.engine_capacity_used) * seconds, time)
            self.sums[RATED_S].put(step, seconds, time)

    def _put_unnamed(self, record: TrainerRecord, more: dict[str, Any]) -> None:
        found = {name: value for name, value in more.items() if type(value) in (int, float)}
        for name, value in found.items():
            self._put(self.series, name, record.step, value, record.time)

    def _put(
        self, where: dict[str, Series], name: str, step: int, value: float, time: float
    ) -> None:
        series = where.get(name)
        if series is None:
            if len(where) >= MOST_CURVES:
                return
            series = where[name] = Series()
        series.put(step, value, time)

    def _begin_attempt(self, record: TrainerRecord) -> None:
        # The later steps of earlier attempts no longer count.
        first = record.step
        self.attempt_steps[record.attempt] = first
        if any(later > record.attempt for later in self.attempt_steps):
            return  # a late record of an older attempt: a later one has cut the series already
        versions = self.series.get("weight_version")
        oldest = versions.values[0] if versions else None
        for series in (*self.series.values(), *self.sums.values(), self.syncs):
            series.cut(first)
        if versions is not None and oldest is not None:
            # The first step makes the version after the one that it began with.
            kept = oldest - 1 if versions.last is None else versions.last
            self._discard_evals(record.time, int(kept))
        self.step = min(self.step, first - 1)
        self.newest_steps.clear()

        def stands(old: TrainerRecord) -> bool:
            return old.attempt >= record.attempt or old.step < first

        self.rollouts = deque(filter(stands, self.rollouts), ROLLOUTS_KEPT)
        self.checkpoints = deque(filter(stands, self.checkpoints), CHECKPOINTS_KEPT)
        if self.alignment and not stands(self.alignment):
            self.alignment = None
        if self.benchmark and self.benchmark.attempt < record.attempt:
            self.benchmark = None

    def _discard_evals(self, time: float, version: int) -> None:
        """Drop evaluations before `time` of weights after `version`, which no longer count."""
        self._discarded.append((time, version))
        for name in self._versioned:
            self.evals[name].cut(version + 1)

    def _superseded(self, record: TrainerRecord) -> bool:
        return any(
            later > record.attempt and record.step >= first
            for later, first in self.attempt_steps.items()
        )

    def _apply_eval(self, record: EvalRecord) -> None:
        # Stock environments know run-api's step only.
        version, name = record.weight_version, f"{record.env}/{record.split}"
        at = version if version is not None else record.policy_step
        if at is None or abs(at) > MOST_STEPS:
            return
        if version is not None:
            # Streams are read one after another, so this record may be older than a resume.
            if any(record.time < time and version > kept for time, kept in self._discarded):
                return
            self._versioned.add(name)
        self._put(self.evals, name, at, record.accuracy, record.time)

    def _apply_env_metrics(self, record: EnvMetricsRecord) -> None:
        step = record.policy_step or 0
        if abs(step) <= MOST_STEPS:
            for name, value in record.metrics.items():
                self._put(self.env_metrics, f"{record.env}:{name}", step, value, record.time)

    def _apply_supervisor(self, record: ComponentRecord) -> None:
        # Once: a record comes from the file and from the live stream, with the same `seq`.
        if record.seq <= self.supervisor_seq:
            return
        self.supervisor_seq = record.seq
        if isinstance(record, StateRecord):
            self.transitions.append(record)
        elif isinstance(record, DiagnosisRecord):
            self._apply_diagnosis(record)
        elif isinstance(record, StageRecord) and record.component:
            earlier = self.stages.get(record.component, [])
            # A new attempt drops the stages of the one before.
            same = [old for old in earlier if old.attempt == record.attempt]
            others = [old for old in same if old.stage != record.stage]
            self.stages[record.component] = [*others, record]
        elif isinstance(record, CommandRecord):
            self.commands[record.command_id] = record
            while len(self.commands) > COMMANDS_KEPT:
                del self.commands[next(iter(self.commands))]


# Events of a run as one list: transitions, diagnoses, commands, checkpoints.


@dataclass(frozen=True)
class Event:
    """One line of the timeline. All texts are plain."""

    time: float
    component: str
    mark: str
    """Glyph and word."""
    text: str
    tone: Tone
    detail: str = ""


def timeline(state: RunState) -> list[Event]:
    """Return every event, oldest first."""
    sources = (
        (_moved(record) for record in state.transitions),
        (diagnosed(record, state.over_at(record)) for record in state.diagnoses),
        (_commanded(record) for record in state.commands.values()),
        (_saved(record) for record in state.checkpoints),
    )
    return list(heapq.merge(*map(_ascending, sources), key=lambda event: event.time))


def _ascending(events: Iterator[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time)


def _moved(record: StateRecord) -> Event:
    known = next((state for state in State if state.value == record.new), None)
    mark = glyph_and_word(known) if known else f"· {one_line(record.new)}"
    is_again = record.attempt > 1 and record.new == State.STARTING
    words = [reason_of(record), f"attempt {record.attempt}" if is_again else ""]
    text, tone = " · ".join(filter(None, words)), TONES.get(record.new, "dim")
    code = "" if record.exit_code is None else f", exit code {record.exit_code}"
    detail = f"from {one_line(record.old)}{code}"
    return Event(record.time, one_line(record.component or ""), mark, text, tone, detail)


def diagnosed(record: DiagnosisRecord, over_at: float | None = None) -> Event:
    """Return a diagnosis as an event."""
    parts = {"evidence": record.evidence, "fix": record.fix, "rule": record.rule}
    parts["over"] = "" if over_at is None else f"at {clock(over_at)}"
    detail = "\n".join(f"{name}: {plain_lines(text)}" for name, text in parts.items() if text)
    component, title = one_line(record.component or ""), one_line(record.title)
    return Event(record.time, component, "▲ diagnosis", title, "warn", detail)


def _commanded(record: CommandRecord) -> Event:
    whose = one_line(record.component or "the stack")
    by = "" if record.initiator == "user" else f" by the {one_line(record.initiator)}"
    tone: Tone = "bad" if record.status in ("failed", "refused") else "busy"
    text = f"{one_line(record.action)} {whose}{by}: {record.status}"
    detail = one_line(record.detail)
    return Event(record.time, one_line(record.component or ""), "→ command", text, tone, detail)


def _saved(record: CheckpointRecord) -> Event:
    name = PurePath(one_line(record.path)).name or f"step {record.step}"
    text = f"{name}: {bytes_text(record.bytes)} in {seconds_text(record.seconds)}"
    return Event(record.time, "trainer", "▪ checkpoint", text, "dim", one_line(record.path))
