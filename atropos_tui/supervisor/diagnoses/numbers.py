"""Rules over the trainer's records: each is a pure function on the last records of its kinds, oldest first.

A judge gives the evidence (numbers with their steps) while something is wrong, None while all is well. Thresholds are
the guides' health numbers, or stand with the reason for their value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atropos_common.records import (
    HEALTHY_CLIP_FRACTION,
    HEALTHY_LOGPROB_DIFF,
    HEALTHY_RATIO,
    OUTLIER,
    AlignmentRecord,
    EvalRecord,
    Record,
    RolloutRecord,
    StepRecord,
    TimingRecord,
)
from atropos_tui.supervisor.diagnoses import texts, trends
from atropos_tui.supervisor.diagnoses.model import Rule
from atropos_tui.supervisor.diagnoses.training import (
    ALIGNMENT_FIX,
    ALIGNMENT_MISMATCH,
    CAUSE_FIXES,
    GRADIENT_FIX,
    LOST_GRADIENTS,
    NON_FINITE,
)

LOSS = -10.0
IN_A_ROW = 3
"""One odd step is noise; the guides' numbers speak of a state."""

Judge = Callable[[Sequence[Any]], str | None]


@dataclass(frozen=True)
class NumberRule(Rule):
    """A rule over the newest `window` records of `kinds`; over after `good` records in a row without evidence."""

    fix: str
    kinds: tuple[type[Record], ...]
    judge: Judge
    window: int = IN_A_ROW
    good: int = 5


def in_a_row(bad: Callable[[Any], str | None], count: int = IN_A_ROW) -> Judge:
    """A judge that speaks when each of the last `count` records is bad; `bad` gives the evidence of one."""

    def judge(records: Sequence[Any]) -> str | None:
        found = [bad(record) for record in records[-count:]]
        return "; ".join(map(str, found)) if len(found) == count and all(found) else None

    return judge


def ratio_out_of_range(record: StepRecord) -> str | None:
    low, high = HEALTHY_RATIO
    bad = not low <= record.ratio_mean <= high and math.isfinite(record.ratio_mean)
    return f"step {record.step}: ratio_mean {record.ratio_mean:.3g}" if bad else None


def clipped_too_often(record: StepRecord) -> str | None:
    high = record.clip_fraction >= HEALTHY_CLIP_FRACTION
    return f"step {record.step}: clip_fraction {record.clip_fraction:.1%}" if high else None


def loss_too_low(record: StepRecord) -> str | None:
    low = record.loss < LOSS and math.isfinite(record.loss)
    return f"step {record.step}: loss {record.loss:.3g}" if low else None


def mismatch(record: AlignmentRecord) -> str | None:
    return _alignment(record) if record.verdict == "mismatch" else None


def drift(record: AlignmentRecord) -> str | None:
    mean = record.logprob_diff_abs_mean
    far = mean is not None and mean >= HEALTHY_LOGPROB_DIFF
    drifts = record.verdict == "drift" and not record.cause.startswith(OUTLIER)
    return _alignment(record) if drifts or (far and record.verdict == "ok") else None


def _alignment(record: AlignmentRecord) -> str:
    parts = [f"step {record.step}: verdict {record.verdict}"]
    means = {"rollouts": record.logprob_diff_abs_mean, "probe at the same weights": record.probe_diff_abs_mean}
    for label, value in means.items():
        if value is not None:
            parts.append(f"mean |trainer - engine| {value:.3g} ({label})")
    if record.cause:
        parts.append(f"cause: {record.cause}")
    return ", ".join(parts)


def not_finite(record: Record) -> str | None:
    """Names of fields that are NaN or infinite."""
    step = getattr(record, "step", 0)
    bad = [f"{name} is {value}" for name, value in _numbers(record) if not math.isfinite(value)]
    return f"step {step} ({record.kind}): {', '.join(bad)}" if bad else None


def _numbers(record: Record) -> Iterable[tuple[str, float]]:
    return ((name, value) for name, value in record if isinstance(value, float))


def gradients_lost(record: StepRecord) -> str | None:
    """A gradient of exactly nothing although the groups differ in reward."""
    teaches = record.reward_std > 0 and not _all_flat(record)
    gone = record.grad_norm == 0 and teaches
    return f"step {record.step}: grad_norm 0 with reward_std {record.reward_std:.3g}" if gone else None


def reward_constant(record: StepRecord) -> str | None:
    if not (record.reward_std == 0 or _all_flat(record)):
        return None
    return f"step {record.step}: reward_mean {record.reward_mean:.3g}, reward_std {record.reward_std:.3g}"


def _all_flat(record: StepRecord) -> bool:
    """Every group of the batch has equal scores, by the trainer's own count where it gives one."""
    extra = record.model_extra or {}
    groups, flat = extra.get("groups"), extra.get("flat_groups")
    return bool(groups) and groups == flat


STEPS, ALIGNMENTS, TIMINGS = (StepRecord,), (AlignmentRecord,), (TimingRecord,)


def _mismatch_by(cause: str) -> Judge:
    """A judge of mismatches with this cause alone."""

    def bad(record: AlignmentRecord) -> str | None:
        return mismatch(record) if record.cause.startswith(f"{cause}:") else None

    return in_a_row(bad, 1)


def _other_mismatch(record: AlignmentRecord) -> str | None:
    known = any(record.cause.startswith(f"{cause}:") for cause in CAUSE_FIXES)
    return None if known else mismatch(record)


CAUSE_RULES = tuple(
    NumberRule(ALIGNMENT_MISMATCH.name, f"alignment MISMATCH: {cause}", fix, ALIGNMENTS, _mismatch_by(cause))
    for cause, fix in CAUSE_FIXES.items()
)
"""One rule for each cause that the trainer tells apart, all under one name."""

NUMBER_RULES: tuple[NumberRule, ...] = (
    NumberRule(
        NON_FINITE.name,
        "a number of the training is NaN or infinite",
        "the update was skipped or the weights are broken. If it goes on: lower [trainer] lr, keep clip_eps at "
        "0.2, raise warmup_steps, and go back: atropos-tui up PROFILE --resume RUN starts from the last checkpoint",
        (StepRecord, AlignmentRecord, TimingRecord),
        in_a_row(not_finite, 1),
        good=15,
    ),
    *CAUSE_RULES,
    NumberRule(
        ALIGNMENT_MISMATCH.name, ALIGNMENT_MISMATCH.title, ALIGNMENT_FIX, ALIGNMENTS, in_a_row(_other_mismatch, 1)
    ),
    NumberRule(
        "alignment_drift",
        "trainer and engine drift apart",
        "policy lag is the usual cause: env.max_batches_offpolicy = 1 under [env.args] (atroposlib's default of 3 "
        "gives a lag of up to 6). At a lag of 1 or less: sampling that changes the distribution (top-p, top-k, "
        "min-p, penalties), or a temperature that generation_params does not tell",
        ALIGNMENTS,
        in_a_row(drift),
    ),
    NumberRule(
        "ratio_out_of_range",
        "the importance ratio has left 0.8-1.2",
        "the policy moves away from the rollouts: lower [trainer] lr, raise warmup_steps (20), keep clip_eps at "
        "0.2, and bound the lag: env.max_batches_offpolicy = 1 under [env.args]. A ratio that is off from step 1 "
        "on is an alignment problem",
        STEPS,
        in_a_row(ratio_out_of_range),
    ),
    NumberRule(
        "clip_fraction_high",
        "30 % of the tokens or more are clipped",
        "steps are too large for such old rollouts: lower [trainer] lr, raise warmup_steps (20), and bound the lag: "
        "env.max_batches_offpolicy = 1 under [env.args]",
        STEPS,
        in_a_row(clipped_too_often),
    ),
    NumberRule(
        "loss_too_low",
        "the loss is below -10: the policy is running away",
        "keep [trainer] clip_eps at 0.2, lower lr, and go back to the last good checkpoint: atropos-tui up PROFILE "
        "--resume RUN",
        STEPS,
        in_a_row(loss_too_low, 1),
    ),
    NumberRule(LOST_GRADIENTS.name, LOST_GRADIENTS.title, GRADIENT_FIX, STEPS, in_a_row(gradients_lost)),
    NumberRule(
        "reward_constant",
        "all rewards of a group are the same: nothing is learnt",
        "all right: the task is solved, take harder questions. All wrong: read the rollouts (the screen, or "
        "rollout records of RUN/telemetry.jsonl); is the answer cut off (env.max_token_length), does the scoring "
        "find it, is the model too weak?",
        STEPS,
        in_a_row(reward_constant, 5),
        window=5,
    ),
    NumberRule(
        "accuracy_collapse",
        "the accuracy has collapsed",
        "go back to the last good checkpoint (atropos-tui up PROFILE --resume RUN), lower [trainer] lr, keep "
        "clip_eps at 0.2; see what alignment and ratio did just before",
        STEPS,
        trends.reward_collapsed,
        window=trends.REMEMBERED,
    ),
    NumberRule(
        "accuracy_collapse",
        "the held-out accuracy has collapsed",
        "go back to the last good checkpoint (atropos-tui up PROFILE --resume RUN), lower [trainer] lr, keep "
        "clip_eps at 0.2; see what alignment and ratio did just before",
        (EvalRecord,),
        trends.held_out_collapsed,
        window=trends.REMEMBERED,
        good=2,
    ),
    NumberRule(
        "repetition",
        "the model repeats itself",
        "the policy is degenerating: lower [trainer] lr, keep clip_eps at 0.2, go back to the last good "
        "checkpoint. In a base model's first steps it may be the model: see whether it goes away",
        (RolloutRecord,),
        texts.repeating,
        window=texts.LOOKED_AT,
        good=texts.LOOKED_AT,
    ),
    NumberRule(
        "policy_lag_growing",
        "the policy lag grows: rollouts get older and older",
        "run-api hands out all full batches at once, so the bound is the environment's: env.max_batches_offpolicy "
        "= 1 under [env.args]; and fewer rollouts at once: env.max_num_workers_per_node",
        STEPS,
        trends.lag_grows,
        window=2 * trends.BLOCK,
    ),
    NumberRule(
        "slow_progress",
        "optimizer steps have become slow",
        "waiting for data: more rollouts at once (env.max_num_workers_per_node under [env.args]), CUDA graphs "
        "(leave out enforce-eager under [vllm.args]), shorter env.max_token_length. Training: shorter seq_len, "
        "fewer sequences. Publishing or checkpoints: their interval. atropos-tui bench shows the split",
        TIMINGS,
        trends.slow,
        window=trends.REMEMBERED,
    ),
)
