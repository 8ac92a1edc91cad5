"""Records of the run's JSONL files: one strict JSON object a line.

`parse_line` accepts unknown fields and kinds of a newer writer. A missing value is JSON's null, a
non-finite float one of the strings "NaN", "Infinity" and "-Infinity".

"""

import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, ValidationError

from atropos_common.protocol.control import GpuStatus
from atropos_common.system.run_dir import LATEST_TIME

# Written into every line. The screen tells the user when a run has a newer version.
SCHEMA_VERSION = 1


class RecordError(ValueError):
    pass


# JSON has no literals for these values, and strict parsers refuse Python's `NaN`.
def _encode_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


Number = Annotated[float, PlainSerializer(_encode_float, return_type=float | str, when_used="json")]
"""Float, finite or not."""


# A recorded file may come from another machine, and its names go to the terminal as they are.
def _as_name(text: str) -> str:
    is_name = len(text) <= MAX_NAME and text.isascii() and text.isprintable()
    return text if is_name else _NO_NAME.sub("?", text[:MAX_NAME])


# Python's integers have no limit, but numpy and conversion to float have one.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
MAX_NAME = 64
# Everything outside of printable ASCII, control sequences of a terminal included.
_NO_NAME = re.compile("[^ -~]")
Name = Annotated[str, AfterValidator(_as_name)]
"""Printable ASCII, at most 64 characters; others are replaced or cut on reading."""


Severity = Literal["alarm", "warning", "advice"]
"""alarm: training is wrong or stands still; warning: something is broken; advice: it works, and
could be better."""


class Record(BaseModel):
    """Fields of every line."""

    # Unknown fields stay in the record. `defer_build` saves start-up time: a process uses few
    # kinds.
    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    KIND: ClassVar[str] = ""
    """`kind`; empty in a base class."""

    v: int = SCHEMA_VERSION
    run_id: str = ""
    # The upper limit keeps the time within the range of `datetime`, which charts and tables use.
    time: Annotated[float, Field(ge=0, le=LATEST_TIME)] = 0.0
    """Unix seconds."""
    seq: Whole = 0
    """Position in its file, from 0, without gaps."""
    kind: str = ""

    # Called after pydantic has collected the fields, when `model_fields` is complete.
    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.KIND = cls.model_fields["kind"].default

    def to_line(self) -> str:
        return self.model_dump_json() + "\n"


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


class TrainerRecord(Record):
    attempt: int = 1
    rank: int = 0
    step: Whole = 0
    """Optimizer step, from 1."""


@dataclass(frozen=True)
class Metric:
    """A number of a step, in the annotation of its field: how it is reduced, named and shown.

    `mean_of`, `over` and `max_of` name values of `trainer_core/optimization/step.py`, which
    combines them over rows and ranks. A metric without them is computed elsewhere.
    """

    doc: str
    """Meaning, for docs/telemetry.md; its first sentence describes the chart."""
    tracker: str = ""
    """Name in Weights & Biases and TensorBoard, beside KIND/FIELD."""
    mean_of: str = ""
    """Sum to divide by `over`."""
    over: str = "tokens"
    max_of: str = ""
    optional: bool = False
    """None where `over` is 0, instead of NaN."""
    smooth: bool = False
    """Charts may average it over steps: it is a noisy mean or a duration."""
    title: str = ""
    """Title of its own chart; without one, only charts that list the metric draw it."""


def metrics_of(kind: type[Record]) -> dict[str, Metric]:
    return {
        name: each
        for name, field in kind.model_fields.items()
        for each in field.metadata
        if isinstance(each, Metric)
    }


def table_of(kind: type[Record]) -> str:
    """Rows of docs/telemetry.md."""
    return "\n".join(f"| `{name}` | {each.doc} |" for name, each in metrics_of(kind).items())


class StepRecord(TrainerRecord):
    """One optimizer step. A new metric is one field here, and the line in
    `trainer_core/optimization/step.py` that computes its sum or maximum."""

    kind: Literal["step"] = "step"
    objective: Annotated[str, Metric("`grpo`, `dr_grpo`, `dapo`, `gspo` or `cispo`")] = ""
    loss: Annotated[
        Number,
        Metric("Loss by the objective's denominator", "train/loss", smooth=True, title="Loss"),
    ]
    grad_norm: Annotated[
        Number,
        Metric(
            "Gradient norm before clipping", "train/grad_norm", smooth=True, title="Gradient norm"
        ),
    ]
    lr: Annotated[Number, Metric("Learning rate of this step", "train/lr", title="Learning rate")]
    reward_mean: Annotated[
        Number,
        Metric(
            "Mean over every sequence with a usable score, including those that the objective "
            "leaves out",
            "train/reward_mean",
            smooth=True,
        ),
    ]
    reward_std: Annotated[
        Number, Metric("Standard deviation over the sequences of `reward_mean`", smooth=True)
    ]
    tokens: Annotated[int, Metric("Trained tokens")]
    sequences: Annotated[int, Metric("Trained sequences")]
    optimizer_steps: Annotated[
        int,
        Metric("Optimizer steps on this batch: `minibatches` x `epochs`; the figures are means"),
    ] = 1
    ratio_mean: Annotated[
        Number,
        Metric("Mean ratio of a token", "grpo/mean_ratio", "ratio", smooth=True, title="Ratio"),
    ]
    clip_fraction: Annotated[
        Number,
        Metric(
            "Share of tokens whose ratio lies outside the clip range",
            "grpo/clipped_fraction",
            "clipped",
            smooth=True,
            title="Clip fraction",
        ),
    ]
    clip_fraction_low: Annotated[
        Number | None,
        Metric("Share of tokens below the clip range", "grpo/clipped_fraction_low", "clipped_low"),
    ] = None
    clip_fraction_high: Annotated[
        Number | None,
        Metric(
            "Share of tokens above the clip range", "grpo/clipped_fraction_high", "clipped_high"
        ),
    ] = None
    dual_clip_fraction: Annotated[
        Number | None,
        Metric(
            "Share of tokens with a negative advantage and a ratio above `dual_clip`",
            "grpo/dual_clip_fraction",
            "dual_clipped",
        ),
    ] = None
    ratio_max: Annotated[
        Number | None,
        Metric(
            "Largest ratio of a token, before clipping",
            "grpo/max_ratio",
            max_of="ratio_max",
            title="Ratio max",
        ),
    ] = None
    entropy_mean: Annotated[
        Number | None,
        Metric(
            "Entropy of the policy at the trained tokens, in nats, at their sampling temperature; "
            "near 0 the policy no longer explores",
            "grpo/entropy",
            "entropy",
            over="labels",
            smooth=True,
            title="Entropy",
        ),
    ] = None
    completion_tokens_mean: Annotated[
        Number | None,
        Metric(
            "Generated tokens of a sequence, summed over its turns. Includes sequences that the "
            "objective leaves out",
            "train/completion_tokens_mean",
            smooth=True,
            title="Completion tokens",
        ),
    ] = None
    truncated_fraction: Annotated[
        Number | None,
        Metric(
            "Share of completions that were cut off. With `max_completion_tokens`: those with a "
            "turn of that length. Otherwise: those without the model's end token; `null` if the "
            "whole batch lacks it",
            "train/truncated_fraction",
            smooth=True,
            title="Cut off",
        ),
    ] = None
    kl_k3: Annotated[
        Number | None,
        Metric(
            "Estimate (k3) of KL(rollout policy, trainer), policy lag included",
            "grpo/kl_k3",
            "kl_k3",
            smooth=True,
            title="KL",
        ),
    ] = None
    tis_mean: Annotated[
        Number | None,
        Metric(
            "Mean importance weight trainer/rollout; `null` with `ratio_base = rollout`",
            "grpo/tis_mean",
            "tis_weight",
            over="weighted",
            optional=True,
        ),
    ] = None
    tis_truncated_fraction: Annotated[
        Number | None,
        Metric(
            "Share of tokens whose weight was capped; `null` as `tis_mean`",
            "grpo/tis_truncated_fraction",
            "tis_truncated",
            over="weighted",
            optional=True,
        ),
    ] = None
    tis_masked_fraction: Annotated[
        Number | None,
        Metric(
            "Share of tokens that were masked out; `null` as `tis_mean`",
            mean_of="tis_masked",
            over="weighted",
            optional=True,
        ),
    ] = None
    policy_lag_mean: Annotated[
        Number | None,
        Metric(
            "Weight versions between generation and training, by the oldest token; `null` if "
            "unknown. [The bound](modes.md#how-old-rollouts-are)"
        ),
    ] = None
    policy_lag_max: Annotated[Number | None, Metric("Largest policy lag of a sequence")] = None
    policy_lag_token_mean: Annotated[
        Number | None,
        Metric("Mean over tokens: each counts from the version that made it; `null` if unknown"),
    ] = None
    weight_version: Annotated[Whole, Metric("Version that the server has after the step")]
    ref_kl: Annotated[
        Number | None,
        Metric(
            "Estimate (k3) of KL(policy, frozen reference); `null` without `ref_kl_coef`",
            mean_of="ref_kl",
            over="referenced",
            optional=True,
        ),
    ] = None
    distill_kl: Annotated[
        Number | None,
        Metric(
            "KL(policy, teacher) over the teacher's tokens plus one outcome for the rest, mean "
            "over tokens with a teacher; `null` without one",
            mean_of="distill_kl",
            over="taught",
            optional=True,
        ),
    ] = None
    left_out: Annotated[
        dict[str, int],
        Metric(
            "Sequences left out, by reason; includes earlier batches in which every sequence was "
            "left out. A group of unknown size counts as one"
        ),
    ] = Field(default_factory=dict)
    skipped_sequences: Annotated[int, Metric("Sequences left out: the sum of `left_out`")] = 0
    faults_by_env: Annotated[
        dict[str, dict[str, int]],
        Metric("Malformed sequences of `left_out`, by environment and reason"),
    ] = Field(default_factory=dict)
    fault_examples: Annotated[
        dict[str, str], Metric("One example of `faults_by_env` for each environment")
    ] = Field(default_factory=dict)
    too_old: Annotated[
        int, Metric("Sequences of `left_out` whose policy lag exceeds their bound")
    ] = 0
    policy_lag_bound: Annotated[
        int | None,
        Metric("Bound that left out the newest sequence of `too_old`; `null` if none was left out"),
    ] = None
    skipped_update: Annotated[
        bool,
        Metric("`true`: loss or gradient was not finite, so the weights stayed as they were"),
    ] = False
    groups: Annotated[int | None, Metric("Well-formed groups of the batch")] = None
    flat_groups: Annotated[
        int | None,
        Metric("Groups of `groups` with equal scores; of a group of one: without an advantage"),
    ] = None
    groups_by_env: Annotated[
        dict[str, int], Metric("Well-formed groups of the batch by environment")
    ] = Field(default_factory=dict)
    flat_groups_by_env: Annotated[
        dict[str, int], Metric("Groups with equal scores, by environment")
    ] = Field(default_factory=dict)
    unused_fields: Annotated[
        dict[str, int],
        Metric(
            "Groups with data that the trainer does not use, by the name of the data: a field, or "
            "`TABLE.KEY`"
        ),
    ] = Field(default_factory=dict)
    logprobs_from: Annotated[
        dict[str, int],
        Metric(
            "Sequences by source of their rollout logprobs: `environment` if it sent them, else "
            "`engine` or `trainer`"
        ),
    ] = Field(default_factory=dict)


# Kinds of causes of an alignment verdict. Recordings contain them, so their text must stay.
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

# Health limits of the guides: range of `ratio_mean`, upper limits of `clip_fraction` and of
# `logprob_diff_abs_mean` in nats.
HEALTHY_RATIO = (0.8, 1.2)
HEALTHY_CLIP_FRACTION = 0.3
HEALTHY_LOGPROB_DIFF = 0.1


class AlignmentRecord(TrainerRecord):
    """Logprobs of the trainer compared with the engine's: over rollout tokens, policy lag included.
    Fields `probe_*` compare both at the same weights."""

    kind: Literal["alignment"] = "alignment"
    logprob_diff_mean: Annotated[
        Number | None, Metric("Mean of trainer minus engine, in nats", "alignment/diff_mean")
    ] = None
    logprob_diff_abs_mean: Annotated[
        Number | None,
        Metric("Mean |trainer - engine|, in nats", "alignment/diff_abs_mean", smooth=True),
    ] = None
    logprob_diff_abs_max: Annotated[
        Number | None, Metric("Largest |trainer - engine|, in nats", "alignment/diff_max")
    ] = None
    kl_k3: Number | None = None
    train_mean: Annotated[
        Number | None, Metric("Mean logprob by the trainer", "logprobs/training_mean", smooth=True)
    ] = None
    inference_mean: Annotated[
        Number | None, Metric("Mean logprob by the engine", "logprobs/inference_mean", smooth=True)
    ] = None
    tokens: int = 0
    probe_diff_abs_mean: Annotated[
        Number | None,
        Metric("Mean |trainer - engine|", "alignment/probe_diff_abs_mean", smooth=True),
    ] = None
    probe_diff_abs_max: Number | None = None
    probe_tokens: int = 0
    probe_cached_tokens: int | None = None
    """Prompt tokens from the engine's prefix cache; 0: the cache was not tested."""
    routing_replayed: Annotated[
        Number | None,
        Metric(
            "Share of the batch's tokens that used the engine's choice of experts; `null` without "
            "`routing_replay`",
            "alignment/routing_replayed",
        ),
    ] = None
    verdict: Literal["ok", "drift", "mismatch"] = "ok"
    cause: str = ""
    """For people: `cause_kind`, a colon, and the evidence."""
    cause_kind: str = ""
    """A constant above; empty if unknown. Rules compare this one."""


class TimingRecord(TrainerRecord):
    kind: Literal["timing"] = "timing"
    step_s: Annotated[Number, Metric("Seconds of the whole step", "train/step_time", smooth=True)]
    data_wait_s: Annotated[
        Number, Metric("Seconds of waiting for a batch", "train/data_fetch_time", smooth=True)
    ]
    train_s: Annotated[Number, Metric("Seconds of training", smooth=True)]
    sync_s: Annotated[Number, Metric("Seconds of the publish", "train/sync_time", smooth=True)]
    checkpoint_s: Number
    tokens_per_s: Annotated[
        Number, Metric("Trained tokens a second of the whole step, prompts included", smooth=True)
    ]
    # Model FLOP utilization of the training part (`train_s`); None on an unknown card.
    mfu: Number | None = None
    """Share of 790 TFLOP/s, which matrix products reach on an H100 or H200."""
    mfu_peak: Number | None = None
    """Share of the card's dense bfloat16 peak."""
    engine_idle_fraction: Number | None = None
    """Share of the time without a completion request."""
    engine_capacity_used: Number | None = None
    """Token rate over the engines' largest, 0 to 1."""
    accepted_tokens_per_s: Number | None = None
    """Trained tokens of completions, per second of the step."""


class MemoryRecord(TrainerRecord):
    """Memory of the trainer process; GPU fields are None on a CPU."""

    kind: Literal["memory"] = "memory"
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    rss_bytes: int | None = None


class RankUse(BaseModel):
    model_config = ConfigDict(extra="ignore", defer_build=True)

    rank: int
    gpu: str | None = None
    """Index or UUID; None on a CPU."""
    tokens: int = 0
    """Tokens of its rows; all ranks wait for the one with the most."""
    alone_s: Number
    """Seconds outside of the collective passes; most for the slowest rank."""
    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    rss_bytes: int | None = None


class RanksRecord(TrainerRecord):
    """Ranks of one step; written only for several."""

    kind: Literal["ranks"] = "ranks"
    ranks: list[RankUse]


class SyncRecord(TrainerRecord):
    """One publish of weights."""

    kind: Literal["sync"] = "sync"
    mode: str
    weight_version: Whole
    seconds: Number
    # Seconds by phase, adding up to `seconds`; the names depend on the mode.
    phases: dict[str, Number] = Field(default_factory=dict)
    moved: bool = True
    """The engine received this version; `none` and `lora_restart` load only some."""
    left_out: dict[str, str] = Field(default_factory=dict)
    """Engine address -> why the run continues without it."""


class RolloutRecord(TrainerRecord):
    """One completion; a few are written per step. Escape its text before showing it."""

    kind: Literal["rollout"] = "rollout"
    env: str = ""
    prompt: str
    completion: str
    reward: Number
    advantage: Number
    policy_lag: Number | None = None
    group_size: int | None = None
    """Completions of this prompt in the batch."""
    tokens: int | None = None
    """Generated tokens, and the environment's text between turns."""


class CheckpointRecord(TrainerRecord):
    kind: Literal["checkpoint"] = "checkpoint"
    path: str
    seconds: Number
    bytes: int


class BenchmarkRecord(TrainerRecord):
    """The guides' BENCHMARK SUMMARY as data."""

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
    """Mean over the steps, weighted by their seconds."""
    engine_capacity_used: Number | None = None
    """Mean over the steps, weighted by their seconds."""
    accepted_tokens_per_s: Number | None = None
    peak_bytes: int | None = None
    avg_bytes: int | None = None
    tokens_per_s: Number


# The first record of these kinds marks the first step of an attempt. A sync or checkpoint record
# may carry the step of the checkpoint that the attempt resumed from.
OF_EACH_STEP = (StepRecord, AlignmentRecord, TimingRecord, MemoryRecord, RolloutRecord)


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
    left_out: dict[str, int] = {}
    """Groups that did not reach run-api, by reason."""
    left_out_tokens: dict[str, int] = {}
    """Generated tokens that did not reach run-api, by reason; failed rollouts included."""
    examples: dict[str, str] = {}
    """Newest detail of each reason."""
    failures: dict[str, int] = {}
    """Failed rollouts, by reason."""
    evaluation_failures: dict[str, int] = {}
    """Evaluations that failed since the last success, by reason."""
    adjusted: dict[str, int] = {}
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


class GaugesRecord(Record):
    """Load of machine, components and engines; thinned as the file grows."""

    kind: Literal["gauges"] = "gauges"
    components: dict[Name, ComponentUse] = {}
    engines: dict[Name, EngineGauges] = {}
    gpus: list[GpuStatus] = []
    host: HostUse = Field(default_factory=HostUse)
    queue: Count | None = None
    """Groups queued in run-api."""
    disk_free_bytes: Count | None = None
    """Free on the run directory's disk."""
    disk_bytes: int | None = None
    flows: dict[Name, EnvFlow] = {}
    """Figures by environment."""


def _concrete(root: type[Record]) -> list[type[Record]]:
    # Bases of several kinds, such as `TrainerRecord`, have an empty `KIND`.
    found = [root] if root.KIND else []
    for child in root.__subclasses__():
        found += _concrete(child)
    return found


RECORD_TYPES: dict[str, type[Record]] = {cls.KIND: cls for cls in _concrete(Record)}


def _is_number(annotation: Any) -> bool:
    # A table of counts is not one number that a chart or alert can follow.
    if get_origin(annotation) is dict:
        return False
    # `Number | None` is a union of an `Annotated`: look two levels down.
    parts = get_args(annotation) or (annotation,)
    return bool({int, float} & {*parts, *(inner for part in parts for inner in get_args(part))})


METRIC_KINDS: dict[str, type[TrainerRecord]] = {
    name: kind
    # Later classes overwrite earlier ones, so `StepRecord` comes last.
    for kind in (MemoryRecord, TimingRecord, AlignmentRecord, StepRecord)
    for name, field in kind.model_fields.items()
    if name not in TrainerRecord.model_fields
    and not name.startswith("optimizer")
    and _is_number(field.annotation)
}
"""Metric name -> record class, for every number of a step."""
HELD_OUT_METRIC = "eval/"
"""`eval/SPLIT` over all environments, `eval/ENV/SPLIT` for one."""


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
