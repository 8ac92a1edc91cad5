"""Records of `telemetry.jsonl`, `supervisor.jsonl` and `eval.NAME.jsonl`: one JSON object a line.

Writers stamp every line with an `Envelope`; readers call `parse_line`, which accepts unknown fields and unknown kinds
(a newer writer) and raises `RecordError` for anything that is not a record at all. A value that does not exist is
`null`; a non-finite float travels as the string "NaN", "Infinity" or "-Infinity", so every line is strict JSON.
"""

import json
import math
import re
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, ValidationError

from atropos_common.control import GpuStatus
from atropos_common.run_dir import LATEST_TIME

SCHEMA_VERSION = 1


class RecordError(ValueError):
    """A line that is not a record: not JSON, not an object, or without the fields its kind needs."""


def _encode_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


Number = Annotated[
    float,
    PlainSerializer(_encode_float, return_type=float | str, when_used="json"),
]
"""A float that survives JSON whatever its value."""


def _as_name(text: str) -> str:
    """A file may come from anywhere, and its names go to terminals as they are."""
    is_name = len(text) <= MAX_NAME and text.isascii() and text.isprintable()
    return text if is_name else _NO_NAME.sub("?", text[:MAX_NAME])


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A whole number of a machine word."""
MAX_NAME = 64
_NO_NAME = re.compile("[^ -~]")
Name = Annotated[str, AfterValidator(_as_name)]
"""A word of ours, such as a component or a state: printable ASCII of at most 64 characters, whatever was written."""


Severity = Literal["alarm", "warning", "advice"]
"""Of a diagnosis: training is wrong or stands still; something is broken; nothing is broken, and it can be better."""


class Record(BaseModel):
    """Fields of every line. Subclasses add the fields of their kind."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    KIND: ClassVar[str] = ""
    """What `kind` always says in a record of this class; empty in a base of several."""

    v: int = SCHEMA_VERSION
    run_id: str = ""
    time: Annotated[float, Field(ge=0, le=LATEST_TIME)] = 0.0
    """Unix seconds."""
    seq: Whole = 0
    """Position in its file, from 0, without gaps."""
    kind: str = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.KIND = cls.model_fields["kind"].default

    def to_line(self) -> str:
        """The record as one line of strict JSON, newline included."""
        return self.model_dump_json() + "\n"


class ComponentRecord(Record):
    """A record of the supervisor about one component."""

    component: Name | None = None
    role: Name | None = None
    node: Name | None = None


class StateRecord(ComponentRecord):
    """One transition of a component."""

    kind: Literal["state"] = "state"
    old: Name
    new: Name
    attempt: int = 0
    reason: str = ""
    command_id: str | None = None
    pid: int | None = None
    exit_code: int | None = None
    """Exit status; negative is the signal that ended the process. Null while it runs."""
    retry_at: Number | None = None
    """In backoff: when the component is started again, in Unix seconds."""


class ProbeRecord(ComponentRecord):
    """A probe whose verdict changed (not every probe that ran)."""

    kind: Literal["probe"] = "probe"
    probe: Literal["startup", "readiness", "liveness"]
    ok: bool
    latency_s: Number | None = None
    detail: str = ""


class StageRecord(ComponentRecord):
    """A milestone that a component reached in this attempt."""

    kind: Literal["stage"] = "stage"
    stage: str
    attempt: int = 0


class CommandRecord(ComponentRecord):
    """A command that was accepted, refused, done or failed."""

    kind: Literal["command"] = "command"
    command_id: str
    action: Name
    status: Literal["accepted", "refused", "running", "done", "failed"]
    initiator: str = "user"
    detail: str = ""


class DiagnosisRecord(ComponentRecord):
    """A detected problem with its evidence and fix, or (`over`) its end."""

    kind: Literal["diagnosis"] = "diagnosis"
    rule: str = ""
    """Stable name of the rule that spoke, such as `alignment_mismatch`; empty when none did."""
    severity: Severity | Literal[""] = ""
    """Empty in recordings of versions that did not write it."""
    over: bool = False
    """The diagnosis with the same component, rule and title is over; `evidence` says why."""
    title: str
    evidence: str = ""
    fix: str = ""


class TrainerRecord(Record):
    """A record of the trainer."""

    attempt: int = 1
    rank: int = 0
    step: Whole = 0
    """Optimizer step this record belongs to, from 1."""


class StepRecord(TrainerRecord):
    """One optimizer step."""

    kind: Literal["step"] = "step"
    loss: Number
    reward_mean: Number
    reward_std: Number
    lr: Number
    grad_norm: Number
    ratio_mean: Number
    clip_fraction: Number
    tokens: int
    sequences: int
    policy_lag_mean: Number | None = None
    """Weight versions between generation and training, by the oldest token; null when no version is known."""
    policy_lag_max: Number | None = None
    weight_version: Whole
    objective: str = ""
    kl_k3: Number | None = None
    """Estimate of KL(rollout policy || trainer) over the trained tokens, policy lag included."""
    clip_fraction_low: Number | None = None
    clip_fraction_high: Number | None = None
    """Shares of tokens with a ratio below and above the clip range; together `clip_fraction`."""
    dual_clip_fraction: Number | None = None
    ratio_max: Number | None = None
    """The largest ratio of a trained token, however it was clipped."""
    entropy_mean: Number | None = None
    """Of the policy at the sampling temperature, over trained tokens, in nats."""
    completion_tokens_mean: Number | None = None
    """Generated tokens of a sequence, all of its turns together."""
    truncated_fraction: Number | None = None
    """Share of completions that were cut off; null where nothing tells it."""
    optimizer_steps: int = 1
    """On this batch (`minibatches` x `epochs`); the figures beside it are their means."""
    tis_mean: Number | None = None
    """Mean importance weight trainer/rollout; null with `ratio_base = rollout`, as the next two."""
    tis_truncated_fraction: Number | None = None
    tis_masked_fraction: Number | None = None
    left_out: dict[str, int] = Field(default_factory=dict)
    """Sequences left out by reason, those of batches in which nothing was left included."""
    faults_by_env: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Of them the malformed ones, by environment and reason, and an example of each environment."""
    fault_examples: dict[str, str] = Field(default_factory=dict)
    too_old: int = 0
    """Sequences of `left_out` with more policy lag than their bound allows."""
    policy_lag_bound: int | None = None
    """The bound that left out the newest of them; null where none was left out."""
    groups_by_env: dict[str, int] = Field(default_factory=dict)
    flat_groups_by_env: dict[str, int] = Field(default_factory=dict)
    """Well-formed groups of the batch by environment, and those of them that have no advantage: equal scores."""
    unused_fields: dict[str, int] = Field(default_factory=dict)
    """Groups that hold something which the trainer does not use, by its name: a field, or TABLE.KEY."""
    logprobs_from: dict[str, int] = Field(default_factory=dict)
    """Sequences by who gave the rollout logprobs: environment, engine (asked for those that came without), trainer."""
    ref_kl: Number | None = None
    """Estimate (k3) of KL(policy || frozen reference) over the trained tokens; null without `ref_kl_coef`."""
    distill_kl: Number | None = None
    """KL(policy || teacher) on the teacher's tokens and one remaining outcome, by tokens that have one; null where none
    has."""
    skipped: dict[str, int] = Field(default_factory=dict)
    """The same, under its older name."""


STALE_WEIGHTS = "stale weights"
STALE_PREFIX = "stale prefix cache"
TEMPERATURE = "temperature"
SHIFTED = "shifted logprobs"
MISSING = "missing logprobs"
HEAD_DTYPE = "head dtype"
BROKEN_WEIGHTS = "broken weights"
OTHER_WEIGHTS = "other weights"
SAMPLING = "sampling"
POLICY_LAG = "policy lag"
OUTLIER = "outlier"
ROUNDING = "rounding"
ALIGNMENT_CAUSES = (
    STALE_WEIGHTS, STALE_PREFIX, TEMPERATURE, SHIFTED, MISSING, HEAD_DTYPE, BROKEN_WEIGHTS, OTHER_WEIGHTS, SAMPLING,
    POLICY_LAG, OUTLIER, ROUNDING,
)  # fmt: skip
"""What `AlignmentRecord.cause` begins with, before a colon and what was seen."""

HEALTHY_RATIO = (0.8, 1.2)
HEALTHY_CLIP_FRACTION = 0.3
HEALTHY_LOGPROB_DIFF = 0.1
"""The guides' health numbers, which charts shade and diagnoses judge by: a step's `ratio_mean` lies in this range, its
`clip_fraction` and the alignment's `logprob_diff_abs_mean` (in nats) below these."""


class AlignmentRecord(TrainerRecord):
    """Trainer logprobs against the engine's. `logprob_diff_*` over rollout tokens, policy lag included;
    `probe_*` at the same weights on both sides."""

    kind: Literal["alignment"] = "alignment"
    logprob_diff_mean: Number | None = None
    logprob_diff_abs_mean: Number | None = None
    logprob_diff_abs_max: Number | None = None
    kl_k3: Number | None = None
    train_mean: Number | None = None
    inference_mean: Number | None = None
    tokens: int = 0
    probe_diff_abs_mean: Number | None = None
    probe_diff_abs_max: Number | None = None
    probe_tokens: int = 0
    probe_cached_tokens: int | None = None
    """Prompt tokens that the engine took from its prefix cache; 0: the cache was not tested."""
    routing_replayed: Number | None = None
    """Share of the batch's tokens that took the engine's experts; null without `routing_replay`."""
    verdict: Literal["ok", "drift", "mismatch"] = "ok"
    cause: str = ""


class TimingRecord(TrainerRecord):
    """Where the seconds of a step went."""

    kind: Literal["timing"] = "timing"
    step_s: Number
    data_wait_s: Number
    train_s: Number
    sync_s: Number
    checkpoint_s: Number
    tokens_per_s: Number
    mfu: Number | None = None
    engine_idle_fraction: Number | None = None
    """Share of the time in which no request for completions was under way at the engines, by their own count."""
    engine_capacity_used: Number | None = None
    """Generated tokens a second by the most that the engines can make, 0 to 1; null while that is not known."""
    accepted_tokens_per_s: Number | None = None
    """Generated tokens that were trained on, by the seconds of the step."""


class MemoryRecord(TrainerRecord):
    """Memory of the trainer process, in bytes; GPU fields are null on a CPU machine."""

    kind: Literal["memory"] = "memory"
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    rss_bytes: int | None = None


class RankUse(BaseModel):
    """One rank's part in a step."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    rank: int
    gpu: str | None = None
    """Of the machine, by index or UUID; null on a CPU."""
    tokens: int = 0
    """Of its rows: all ranks pass through the model together, and wait for the one with the longest."""
    alone_s: Number
    """Seconds of what it did without the others: packing, the optimizer's update. The slowest rank needs most."""
    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    rss_bytes: int | None = None


class RanksRecord(TrainerRecord):
    """The ranks of a trainer in one step, by rank; not written where there is one."""

    kind: Literal["ranks"] = "ranks"
    ranks: list[RankUse]


class SyncRecord(TrainerRecord):
    """One publish of weights to the engine."""

    kind: Literal["sync"] = "sync"
    mode: str
    weight_version: Whole
    seconds: Number
    phases: dict[str, Number] = Field(default_factory=dict)
    moved: bool = True
    """Whether the engine got the version; between two loads of `none` and `lora_restart` only the trainer has it."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Of several engines those that the run goes on without, by address, and why."""


class RolloutRecord(TrainerRecord):
    """One completion of a batch, a few per step. Text is data from a model: escape before showing it."""

    kind: Literal["rollout"] = "rollout"
    env: str = ""
    prompt: str
    completion: str
    reward: Number
    advantage: Number
    policy_lag: Number | None = None
    group_size: int | None = None
    """Completions of this prompt in the step's batch, of which perhaps not all are written."""
    tokens: int | None = None
    """Generated ones, with what an environment put in between its turns."""


class CheckpointRecord(TrainerRecord):
    """A checkpoint that was written."""

    kind: Literal["checkpoint"] = "checkpoint"
    path: str
    seconds: Number
    bytes: int


class BenchmarkRecord(TrainerRecord):
    """The guides' BENCHMARK SUMMARY as data; seconds and bytes."""

    kind: Literal["benchmark"] = "benchmark"
    mode: str
    total_s: Number
    steps: int
    avg_step_s: Number
    total_step_s: Number
    avg_sync_s: Number
    syncs: int
    total_sync_s: Number
    avg_data_wait_s: Number
    total_data_wait_s: Number
    engine_idle_fraction: Number | None = None
    """Mean over the seconds of all steps."""
    engine_capacity_used: Number | None = None
    """The same."""
    accepted_tokens_per_s: Number | None = None
    peak_bytes: int | None = None
    avg_bytes: int | None = None
    tokens_per_s: Number


OF_EACH_STEP = (StepRecord, AlignmentRecord, TimingRecord, MemoryRecord, RolloutRecord)
"""Kinds that tell where an attempt begins. A sync or checkpoint may carry the step that was resumed from."""


class EvalRecord(Record):
    """Held-out accuracy, written by an environment to its own `eval.NAME.jsonl`."""

    kind: Literal["eval"] = "eval"
    env: str
    split: str = "held_out"
    accuracy: Number
    correct: int | None = None
    questions: int | None = None
    """How many; null where the environment tells only the share."""
    weight_version: Whole | None = None
    policy_step: Whole | None = None
    """run-api's step (batches drained) when the evaluation began."""


class EnvCountsRecord(Record):
    """What became of an environment's groups since it started; in its own `eval.NAME.jsonl`."""

    kind: Literal["env_counts"] = "env_counts"
    env: str
    policy_step: Whole | None = None
    requests: int | None = None
    """Requests to engines by atroposlib's servers; the environment's own clients are not counted."""
    sent: int
    """Groups that run-api accepted."""
    left_out: dict[str, int] = {}
    """Groups that run-api does not have, by reason (`group_reasons.py`)."""
    examples: dict[str, str] = {}
    """Newest words about a reason: which field run-api refused, which type JSON cannot hold."""
    failures: dict[str, int] = {}
    """Groups that were not made, by reason."""
    evaluation_failures: dict[str, int] = {}
    """Evaluations that failed since the last one that did not, by reason."""
    adjusted: dict[str, int] = {}
    """Requests of which the engine left a sampling option out, by the option."""
    workers: Number | None = None
    """Groups under way, a mean over the time since the record before; null where nobody counts, as the next five."""
    max_workers: int | None = None
    """Most groups under way at a time: `max_num_workers`."""
    waiting_for_slot: Number | None = None
    """Groups under way that are made and wait for a queue slot; a mean as before."""
    in_engine: Number | None = None
    """Completions that the environment waits for from its engines, a mean as before."""
    queue_slots: int | None = None
    """Groups that may wait in run-api and be under way together: `max_batches_offpolicy` batches."""
    free_slots: Number | None = None
    """Queue slots that no group under way takes; a mean as before."""
    group_size: int | None = None
    """Completions of a group."""
    awaited: float | None = None
    """Share of the time in which a batch waited for this environment's share; None where it has the queue alone."""


class EnvMetricsRecord(Record):
    """Every number that an environment logs, wandb or not; in its own `eval.NAME.jsonl`."""

    kind: Literal["env_metrics"] = "env_metrics"
    env: str
    policy_step: Whole | None = None
    metrics: dict[str, Number]


Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**60)]


class Figures(BaseModel):
    """A part of a `GaugesRecord`. None where nobody tells."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class EngineGauges(Figures):
    """One look at an engine's counters."""

    running: Amount | None = None
    """Requests in the present batch."""
    waiting: Amount | None = None
    kv_use: Amount | None = None
    """Share of the KV cache in use, 0 to 1; the mean of several engines behind one port."""
    prefix_queries: Amount | None = None
    prefix_hits: Amount | None = None
    prompt_tokens: Amount | None = None
    generated_tokens: Amount | None = None
    weight_version: Amount | None = None
    """Of the weights that answer."""


class HostUse(Figures):
    """The whole machine, or the container where that has limits of its own; memory in bytes, CPU in percent of all."""

    cpu_percent: Amount | None = None
    cores: Amount | None = None
    memory_used: Count | None = None
    memory_total: Count | None = None


class ComponentUse(Figures):
    """What one component uses; CPU in percent of one core, memory in bytes, as in `control.ComponentStatus`."""

    cpu_percent: Amount | None = None
    memory_bytes: Count | None = None
    gpu_bytes: Count | None = None


class EnvFlow(Figures):
    """What one environment makes, and who waits for it, over the newest seconds (`diagnoses.flow.FlowWatch`)."""

    engine: str
    """Which it asks."""
    workers: str | None = None
    """`max_num_workers` of its command."""
    made: Count = 0
    """Groups in `counted_s` seconds, and those of them with equal scores."""
    flat: Count = 0
    counted_s: Amount = 0.0
    waiting: Amount | None = None
    """Share of the time in which the trainer had no batch; None while too little was measured, as the next three."""
    idle: Amount | None = None
    """Share of the time in which its engine had no request."""
    running: Amount | None = None
    """Sequences in the engine, and how many it computes at a time, at most."""
    slots: Amount | None = None
    queued: Amount | None = None
    """Sequences that wait in the engine for one of its slots."""
    tokens_per_s: Amount | None = None
    """Generated by its engines."""
    capacity_used: Amount | None = None
    """Share of the tokens a second that its engines can make at most; None while that is not known."""
    busy_workers: Amount | None = None
    """As in `EnvCountsRecord`, as the rest."""
    max_workers: Count | None = None
    waiting_for_slot: Amount | None = None
    in_engine: Amount | None = None
    queue_slots: Count | None = None
    free_slots: Amount | None = None
    group_size: Count | None = None
    awaited: Amount | None = None


class GaugesRecord(Record):
    """How busy machine, components, engines and run-api are; in `gauges.jsonl`, which is thinned as it grows."""

    kind: Literal["gauges"] = "gauges"
    components: dict[Name, ComponentUse] = {}
    engines: dict[Name, EngineGauges] = {}
    gpus: list[GpuStatus] = []
    host: HostUse = Field(default_factory=HostUse)
    queue: Count | None = None
    """Groups that wait in run-api for the trainer; None where nobody answers."""
    disk_free_bytes: Count | None = None
    """Of the disk that holds the run directory."""
    disk_bytes: int | None = None
    """Its size."""
    flows: dict[Name, EnvFlow] = {}
    """By environment."""


def _concrete(root: type[Record]) -> list[type[Record]]:
    found = [root] if root.KIND else []
    for child in root.__subclasses__():
        found += _concrete(child)
    return found


RECORD_TYPES: dict[str, type[Record]] = {cls.KIND: cls for cls in _concrete(Record)}
"""Every kind that this version knows, by its `kind`."""


def _is_number(annotation: Any) -> bool:
    if get_origin(annotation) is dict:
        return False
    parts = get_args(annotation) or (annotation,)
    return bool({int, float} & {*parts, *(inner for part in parts for inner in get_args(part))})


METRIC_KINDS: dict[str, type[TrainerRecord]] = {
    name: kind
    for kind in (MemoryRecord, TimingRecord, AlignmentRecord, StepRecord)
    for name, field in kind.model_fields.items()
    if name not in TrainerRecord.model_fields and not name.startswith("optimizer") and _is_number(field.annotation)
}
"""Every number of a step by its name, and the record that holds it; of two with one name the step's own."""
HELD_OUT_METRIC = "eval/"
"""Begins the name of a held-out accuracy: `eval/SPLIT`, or `eval/ENV/SPLIT` of one environment alone."""


_KIND = re.compile(rb'"kind": ?"(\w+)"')


def _parsed_at_once(line: bytes) -> Record | None:
    """The record of an ordinary line, in half the time; None where a second, careful look is needed."""
    named = _KIND.search(line)
    if named is None:
        return None
    kind = named[1].decode()
    try:
        record = RECORD_TYPES.get(kind, Record).model_validate_json(line)
    except ValidationError:
        return None
    return record if record.kind == kind else None


def parse_line(line: str | bytes) -> Record:
    """One line as its typed record; a kind this version does not know comes back as a plain `Record`.

    Raises:
        RecordError: the line is no JSON object, or lacks a field that its kind needs.
    """
    if isinstance(line, bytes) and (record := _parsed_at_once(line)) is not None:
        return record
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise RecordError("not a record: a JSON object with a 'kind' is expected")
    try:
        return RECORD_TYPES.get(data["kind"], Record).model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise RecordError(f"{data['kind']}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
