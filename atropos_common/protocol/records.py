"""Records of supervisor and environments, and `parse_line` for a line of any JSONL file.

`parse_line` accepts unknown fields and kinds of a newer writer.
"""

import json
import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# The trainer's records are imported for `RECORD_TYPES`.
from atropos_common.protocol import trainer_records  # noqa: F401
from atropos_common.protocol.control import GpuStatus
from atropos_common.protocol.record_base import Name, Number, Record, RecordError, Whole

Severity = Literal["alarm", "warning", "advice"]
"""alarm: training is wrong or stands still; warning: something is broken; advice: it works, and
could be better."""


class ComponentRecord(Record):
    """Record of the supervisor about one component."""

    component: Name | None = None
    role: Name | None = None
    node: Name | None = None


class StateRecord(ComponentRecord):
    """State transition of a component."""

    kind: Literal["state"] = "state"
    old: Name
    new: Name
    attempt: int = 0
    reason: str = ""
    # The command that caused the transition; None without one.
    command_id: str | None = None
    pid: int | None = None
    exit_code: int | None = None
    """Exit status; negative: the signal that ended the process. None while it runs."""
    retry_at: Number | None = None
    """Time of the next start in backoff, Unix seconds."""


class ProbeRecord(ComponentRecord):
    """Changed result of a health check; unchanged results are not recorded."""

    kind: Literal["probe"] = "probe"
    # A health check; the trainer's logprob probe is in `AlignmentRecord`.
    probe: Literal["startup", "readiness", "liveness"]
    ok: bool
    latency_s: Number | None = None
    detail: str = ""


class StageRecord(ComponentRecord):
    """Stage that a component reached in this attempt."""

    kind: Literal["stage"] = "stage"
    stage: str
    attempt: int = 0


class CommandRecord(ComponentRecord):
    """Command that was accepted, refused, done or failed."""

    kind: Literal["command"] = "command"
    command_id: str
    action: Name
    status: Literal["accepted", "refused", "running", "done", "failed"]
    initiator: str = "user"
    detail: str = ""


class DiagnosisRecord(ComponentRecord):
    """Detected problem with its evidence and fix, or (`over`) its end."""

    kind: Literal["diagnosis"] = "diagnosis"
    rule: str = ""
    """Name of the rule, such as `alignment_mismatch`; empty without a rule."""
    severity: Severity = "warning"
    over: bool = False
    """The open diagnosis with the same component, rule and title has ended; `evidence` has the
    reason."""
    title: str
    evidence: str = ""
    fix: str = ""


class EvalRecord(Record):
    """Held-out accuracy of an environment."""

    kind: Literal["eval"] = "eval"
    env: str
    split: str = "held_out"
    accuracy: Number
    correct: int | None = None
    questions: int | None = None
    """None if the environment reports only the share."""
    weight_version: Whole | None = None
    policy_step: Whole | None = None
    """run-api's step at the start of the evaluation."""


# Keys of `left_out` of an environment: recordings contain them, so they never change.
REFUSED = "refused"
UNSENDABLE = "unsendable"
UNANSWERED = "unanswered"
RETURNED_NONE = "none"
FLAT = "flat"
GROUP_SIZE = "group_size"
TOO_LONG = "too_long"
NOT_FINITE = "not_finite"
SURPLUS = "surplus"
# Keys of `left_out_tokens` only: their groups count in `failures`, or are tried again.
FAILED = "failed"
CANCELLED = "cancelled"
# Of the trainer's `left_out_tokens`, beside FLAT and TOO_LONG.
TOO_OLD = "too_old"
MALFORMED = "malformed"
CUT_OFF = "cut_off"
SKIPPED = "skipped"

_REASONS = {
    REFUSED: "run-api refused it",
    UNSENDABLE: "JSON cannot hold it",
    UNANSWERED: "run-api did not answer",
    # An atroposlib environment returns None to give up a group.
    RETURNED_NONE: "the environment returned None in its place",
    FLAT: "all scores equal",
    GROUP_SIZE: "another number of completions than group_size",
    TOO_LONG: "a sequence longer than the trainer takes",
    NOT_FINITE: "a score that is not a finite number",
    SURPLUS: "surplus: a spare group that was not needed",
    FAILED: "the rollout failed",
    CANCELLED: "the rollout was cancelled",
}
"""Reason -> one line."""


def reason_text(reason: str) -> str:
    """The line for `reason`; an unknown reason is its own line."""
    return _REASONS.get(reason, reason)


class CurriculumCounts(BaseModel):
    """Items of an environment with `curriculum = "pass_rate"` since its start."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)

    offered: int
    """Items that the environment offered."""
    skipped: int
    """Offered items that did not go."""
    known: int
    """Offered items with an earlier result."""
    without_key: int
    """Offered items without a stable content; they always go."""
    flat_share: float | None = None
    """Share of flat groups among about the newest 200."""
    flat_share_without: float | None = None
    """Estimate of that share if every item had gone."""


class EnvCountsRecord(Record):
    """Counts of an environment's groups since its start."""

    kind: Literal["env_counts"] = "env_counts"
    env: str
    policy_step: Whole | None = None
    requests: int | None = None
    """Requests through atroposlib's servers."""
    sent: int
    """Groups that run-api accepted."""
    sent_flat: int = 0
    """Groups among `sent` whose scores are all equal."""
    sent_tokens: int = 0
    """Generated tokens of the groups in `sent`."""
    sent_flat_tokens: int = 0
    """Generated tokens of the groups in `sent_flat`."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """Groups that did not reach run-api, by reason."""
    left_out_tokens: dict[str, int] = Field(default_factory=dict)
    """Generated tokens that did not reach run-api, by reason; failed rollouts included."""
    examples: dict[str, str] = Field(default_factory=dict)
    """Newest detail of each reason."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Failed rollouts, by reason."""
    episodes: dict[str, int] = Field(default_factory=dict)
    """Episodes of programs, by outcome (`played`, `timed out`) and by what they did wrong."""
    evaluation_failures: dict[str, int] = Field(default_factory=dict)
    """Evaluations that failed since the last success, by reason."""
    adjusted: dict[str, int] = Field(default_factory=dict)
    """Sampling option that the engine removed -> requests."""
    workers: Number | None = None
    """Groups in flight. Each `Number` from here on is a mean since the previous record."""
    max_workers: int | None = None
    """Limit of groups in flight, `max_num_workers`."""
    waiting_for_slot: Number | None = None
    """Finished groups without a queue slot."""
    in_engine: Number | None = None
    """Completions in flight at its engines."""
    queue_slots: int | None = None
    """Limit of groups queued and in flight together."""
    free_slots: Number | None = None
    """Queue slots without a group in flight."""
    group_size: int | None = None
    awaited: float | None = None
    """Share of the time in which a batch waited for this environment; None if alone."""
    curriculum: CurriculumCounts | None = None
    target_sequences: Number | None = None
    """Completions in flight that the environment aims at; None: its workers decide."""
    knee_sequences: Number | None = None
    """Completions from which on more of them hardly raise tokens a second; None: unknown."""
    concurrency: str | None = None
    """Bound on the completions in flight, a `Phase` of `atropos_envs.hosting.concurrency`."""
    batches_ahead: int | None = None
    """Limit of batches that groups in flight and in the queue may fill."""


class EnvMetricsRecord(Record):
    """Numbers that an environment logs, with or without wandb."""

    kind: Literal["env_metrics"] = "env_metrics"
    env: str
    policy_step: Whole | None = None
    metrics: dict[str, Number]


# Engines answer with any number they like: negative or non-finite values are refused here.
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**60)]


class Figures(BaseModel):
    """Part of `GaugesRecord`; None: unknown."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class EngineGauges(Figures):
    running: Amount | None = None
    waiting: Amount | None = None
    kv_use: Amount | None = None
    """Share of the KV cache, 0 to 1."""
    # Counters since the engine started; readers take differences of two samples.
    prefix_queries: Amount | None = None
    prefix_hits: Amount | None = None
    prompt_tokens: Amount | None = None
    generated_tokens: Amount | None = None
    recomputed_tokens: Amount | None = None
    weight_version: Amount | None = None


class HostUse(Figures):
    """Use of the machine, or of a container with limits; CPU in percent of all cores."""

    cpu_percent: Amount | None = None
    cores: Amount | None = None
    memory_used: Count | None = None
    memory_total: Count | None = None


class ComponentUse(Figures):
    """CPU in percent of one core."""

    cpu_percent: Amount | None = None
    memory_bytes: Count | None = None
    gpu_bytes: Count | None = None


class EnvFlow(Figures):
    """Throughput and waits of one environment, over the last seconds."""

    engine: str
    """Engine component."""
    workers: str | None = None
    made: Count = 0
    """Groups finished in the last `counted_s` seconds; `flat`: those with equal scores."""
    flat: Count = 0
    counted_s: Amount = 0.0
    waiting: Amount | None = None
    """Share of the time in which the trainer had no batch."""
    idle: Amount | None = None
    """Share of the time in which its engine had no request."""
    running: Amount | None = None
    """Sequences computed now; `slots`: the largest number of them."""
    slots: Amount | None = None
    queued: Amount | None = None
    """Sequences that wait for a slot."""
    tokens_per_s: Amount | None = None
    capacity_used: Amount | None = None
    """Share of the engines' largest token rate."""
    # From here on as in `EnvCountsRecord`.
    busy_workers: Amount | None = None
    max_workers: Count | None = None
    waiting_for_slot: Amount | None = None
    in_engine: Amount | None = None
    queue_slots: Count | None = None
    free_slots: Amount | None = None
    group_size: Count | None = None
    awaited: Amount | None = None
    target_sequences: Amount | None = None
    knee_sequences: Amount | None = None
    concurrency: str | None = None
    batches_ahead: Count | None = None


class GaugesRecord(Record):
    """Load of machine, components and engines; thinned as the file grows."""

    kind: Literal["gauges"] = "gauges"
    components: dict[Name, ComponentUse] = Field(default_factory=dict)
    engines: dict[Name, EngineGauges] = Field(default_factory=dict)
    gpus: list[GpuStatus] = Field(default_factory=list)
    host: HostUse = Field(default_factory=HostUse)
    queue: Count | None = None
    """Groups queued in run-api."""
    disk_free_bytes: Count | None = None
    """Free on the run directory's disk."""
    disk_bytes: int | None = None
    flows: dict[Name, EnvFlow] = Field(default_factory=dict)
    """Figures by environment."""


def _concrete(root: type[Record]) -> list[type[Record]]:
    # Bases of several kinds, such as `TrainerRecord`, have an empty `KIND`.
    found = [root] if root.KIND else []
    for child in root.__subclasses__():
        found += _concrete(child)
    return found


RECORD_TYPES: dict[str, type[Record]] = {cls.KIND: cls for cls in _concrete(Record)}


# Our writers put `kind` in every line; a regular expression finds it without decoding the JSON.
_KIND = re.compile(rb'"kind": ?"(\w+)"')


def _parsed_at_once(line: bytes) -> Record | None:
    # Decode in one pass, which takes half the time. None: the caller takes the slow path.
    named = _KIND.search(line)
    if named is None:
        return None
    kind = named[1].decode()
    try:
        record = RECORD_TYPES.get(kind, Record).model_validate_json(line)
    except ValidationError:
        return None
    # The match may lie inside of a text field, such as a completion that quotes a record.
    return record if record.kind == kind else None


def parse_line(line: str | bytes) -> Record:
    """Return one line as its typed record, an unknown kind as a plain `Record`.

    Raises:
        RecordError: not a JSON object, or a field is missing.

    """
    # The slow path also gives the exact error, and handles `kind` inside of other text.
    if isinstance(line, bytes) and (record := _parsed_at_once(line)) is not None:
        return record
    try:
        data = json.loads(line)
        # JSON's escapes allow half of a surrogate pair, which cannot be encoded as UTF-8.
        json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise RecordError("not a record: a JSON object with a 'kind' is expected")
    try:
        return RECORD_TYPES.get(data["kind"], Record).model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise RecordError(
            f"{data['kind']}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
