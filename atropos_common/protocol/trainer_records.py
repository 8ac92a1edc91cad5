"""Records of the trainer, and the table of its metrics."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from atropos_common.protocol.record_base import Number, Record, Whole


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
    ratio_base: Annotated[
        str,
        Metric(
            "Base of the ratio in this step: `rollout`, or `proximal` with an importance weight "
            "trainer/rollout. [The default](modes.md#how-old-rollouts-are) depends on the lag"
        ),
    ] = ""
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
    left_out_tokens: Annotated[
        dict[str, int],
        Metric(
            "Generated tokens of the batch that were thrown away, by reason: `flat` (no advantage, "
            "so no gradient), `too_old`, `malformed`, `too_long`, `cut_off` (`overlong_mask`), "
            "`skipped` (the update was). Includes earlier batches as `left_out` does"
        ),
    ] = Field(default_factory=dict)
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
        Metric("Bound of the newest sequence of `too_old`, else the batch's largest; `null`: none"),
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
LARGE_UPDATE = "large update"
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
    """Token rate over the engines' largest, an estimate; above 1 in single steps."""
    accepted_tokens_per_s: Number | None = None
    """Generated tokens that entered an update with a gradient, per second of the step."""
    generated_tokens: int | None = None
    """Tokens that the engines generated since the report before, evaluations included."""


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


class RolloutTurn(NamedTuple):
    """One turn of a completion. A list of its values in JSON."""

    number: int
    """From 0. Even: the model's; odd: the environment's."""
    chars: int
    """Characters of the completion's text."""
    tokens: int
    oldest: int | None = None
    newest: int | None = None
    """Weight versions that made it; None: unknown."""
    newest_tokens: int | None = None
    """Tokens of the newest version, which are the last ones; None: unknown."""


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
    # Earlier releases wrote none of these.
    turns: list[RolloutTurn] = Field(default_factory=list)
    """Turns of the completion, without those left out in its middle."""
    turn_count: int | None = None
    token_chars: str = ""
    token_diffs: str = ""
    """Length and logprob difference of each token of the completion, as in `token_columns`."""


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
