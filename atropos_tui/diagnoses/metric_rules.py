"""Rules for the trainer's records, and the alerts of a profile.

Each judge gets the last records, oldest first, and returns evidence, or None if all is well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low, pstdev
from typing import Any

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import EvalRecord
from atropos_common.protocol.trainer_records import (
    BROKEN_WEIGHTS,
    HEAD_DTYPE,
    HEALTHY_CLIP_FRACTION,
    HEALTHY_LOGPROB_DIFF,
    HEALTHY_RATIO,
    HELD_OUT_METRIC,
    LARGE_UPDATE,
    METRIC_KINDS,
    MISSING,
    OTHER_WEIGHTS,
    OUTLIER,
    ROUNDING,
    SAMPLING,
    SHIFTED,
    STALE_PREFIX,
    STALE_WEIGHTS,
    TEMPERATURE,
    AlignmentRecord,
    RolloutRecord,
    StepRecord,
    SyncRecord,
    TimingRecord,
)
from atropos_tui.diagnoses.log_rules import ALIGNMENT_FIX, GRADIENT_FIX, NO_LOGPROBS_FIX
from atropos_tui.diagnoses.model import Ends, Layer, Rule
from atropos_tui.profile.spec import AlertSpec

LOSS = -10.0
IN_A_ROW = 3
"""Bad records in a row that count; one bad step is noise."""
BLOCK = 10
"""Steps that are averaged."""
REMEMBERED = 200
SMALL_DROP = 0.05
LAG = 3.0
"""Mean policy lag from which growth is reported."""
SLOWER = 3.0
"""Factor on the usual step time above which steps are slow."""
WAIT_SHARE = 0.8
WORTH_SAYING_S = 5.0
LONG_WAIT_S = 30.0
LOOKED_AT = 12
SHARE = 0.5
"""Smallest share of bad rollouts."""
LONG = 120
LONGEST_PIECE = 40
SHOWN = 60
NEARLY_ALL = 0.9
GROUPS_ALL_FLAT = "groups_all_flat"
LOOK_AT_ROLLOUTS = (
    "read the rollouts. All wrong: check if answers are cut off (env.max_token_length) and "
    "if the prompt has the "
    "model's format; use easier questions, or a reward with values between. All right: use "
    "harder questions. Mixed "
    'groups are rare: raise env.group_size under [env.args], or set curriculum = "pass_rate" '
    "under [env]"
)
"""Fix for groups of equal scores."""

ALERT = Rule(
    "alert",
    "a metric meets the condition of an [[alert]] in the profile",
    ends=Ends.RECORDS,
    event="alert",
)
SLOPE_STEPS = 5
BASE_STEPS = 50
"""Steps that give mean and deviation of a z-score."""
LEAST_BASE = 10
SHOWN_VALUES = 5
COLLAPSE_FIX = (
    "go back to the last good checkpoint (atropos-tui up PROFILE --resume RUN), lower "
    "[trainer] lr, keep clip_eps at "
    "0.2; look at alignment and ratio just before the fall"
)

Judge = Callable[[Sequence[Any]], str | None]


@dataclass(frozen=True)
class MetricRule(Rule):
    """A rule for the newest `window` records; its diagnosis ends after `good` records without
    evidence."""

    fix: str
    kinds: tuple[type[Record], ...]
    judge: Judge
    window: int = IN_A_ROW
    good: int = 5
    ends: Ends = field(default=Ends.RECORDS, kw_only=True)


def reward_collapsed(steps: Sequence[StepRecord]) -> str | None:
    """Apply if the mean reward of the last `BLOCK` steps is one standard deviation below the best
    `BLOCK` before them.

    The deviation is that of single rewards, so 0/1 and -1/+1 rewards behave alike.
    """
    now = steps[-BLOCK:]
    # Any steps in a row, so that the best ones stay the same while the window moves.
    earlier = [steps[at : at + BLOCK] for at in range(len(steps) - 2 * BLOCK + 1)]
    if not earlier:
        return None
    best = max(earlier, key=lambda block: fmean(step.reward_mean for step in block))
    high, low = (fmean(step.reward_mean for step in block) for block in (best, now))
    scale = max(median_low(step.reward_std for step in block) for block in (best, now))
    if not math.isfinite(high - low) or high - low <= max(scale, SMALL_DROP):
        return None
    return (
        f"mean reward {high:.3g} over steps {best[0].step}-{best[-1].step}, "
        f"{low:.3g} over steps {now[0].step}-{now[-1].step}"
    )


def held_out_collapsed(evals: Sequence[EvalRecord]) -> str | None:
    """Apply if the last two accuracies of a split are below half of its best, by more than
    chance."""
    if len(evals) < 3:
        return None
    best, last = max(evals[:-2], key=lambda record: record.accuracy), evals[-2:]
    # Two standard deviations of a mean of 0/1 answers are at most 2 * sqrt(0.25 / n).
    chance = 2 * math.sqrt(0.25 / max(best.questions or 1, 1)) + SMALL_DROP
    if any(
        record.accuracy > best.accuracy / 2 or best.accuracy - record.accuracy < chance
        for record in last
    ):
        return None
    recent = " then ".join(f"{record.accuracy:.1%}{_at(record)}" for record in last)
    return f"{best.env}, {best.split}: {best.accuracy:.1%}{_at(best)}, {recent}"


def _at(record: EvalRecord) -> str:
    return "" if record.weight_version is None else f" at weight version {record.weight_version}"


def lag_grows(steps: Sequence[StepRecord]) -> str | None:
    """Apply if the lag has no bound, and its mean in the last block is high and well above the
    block before."""
    # With a bound the lag rises from 0 at the start, while completions in flight become more.
    if len(steps) < 2 * BLOCK or steps[-1].policy_lag_bound is not None:
        return None
    before, now = (
        [step.policy_lag_mean for step in part if step.policy_lag_mean is not None]
        for part in (steps[-2 * BLOCK : -BLOCK], steps[-BLOCK:])
    )
    if not before or not now or fmean(now) < LAG or fmean(now) < 1.5 * fmean(before):
        return None
    return (
        f"mean policy lag {fmean(before):.1f} over steps "
        f"{steps[-2 * BLOCK].step}-{steps[-BLOCK - 1].step}, "
        f"{fmean(now):.1f} over steps {steps[-BLOCK].step}-{steps[-1].step}"
    )


def slow(timings: Sequence[TimingRecord]) -> str | None:
    """Apply if steps take much longer than before, or mostly wait for data."""
    if len(timings) < BLOCK:
        return None
    now, before = timings[-BLOCK:], timings[:-BLOCK]
    step_s = median_low(timing.step_s for timing in now)
    parts = _parts(now)
    steps = f"steps {now[0].step}-{now[-1].step}"
    if parts["waiting for data"] > max(WAIT_SHARE * step_s, LONG_WAIT_S):
        return (
            f"{steps}: {step_s:.1f} s each, {parts['waiting for data']:.1f} s of it waiting for "
            f"data"
        )
    if len(before) < BLOCK:
        return None
    usual, earlier = median_low(timing.step_s for timing in before), _parts(before)
    if step_s < SLOWER * usual or step_s - usual < WORTH_SAYING_S:
        return None
    part = max(parts, key=lambda name: parts[name] - earlier[name])
    return (
        f"{steps}: {step_s:.1f} s each, {usual:.1f} s before; most of it is {part}: "
        f"{parts[part]:.1f} s, {earlier[part]:.1f} s before"
    )


def _parts(timings: Sequence[TimingRecord]) -> dict[str, float]:
    return {
        "waiting for data": median_low(timing.data_wait_s for timing in timings),
        "training": median_low(timing.train_s for timing in timings),
        "publishing weights": median_low(timing.sync_s for timing in timings),
        "checkpoints": median_low(timing.checkpoint_s for timing in timings),
    }


def repeated_piece(text: str) -> str | None:
    """Return the piece that fills the last `LONG` characters, at least three times."""
    end = text.rstrip("\n")[-LONG:]
    if len(end) < LONG:
        return None
    for size in range(1, LONGEST_PIECE + 1):
        if end[size:] == end[:-size]:  # the text has the period `size`
            return end[-size:]
    return None


def repeating(rollouts: Sequence[RolloutRecord]) -> str | None:
    found = [
        (rollout, piece)
        for rollout in rollouts
        if (piece := repeated_piece(rollout.completion)) is not None
    ]
    if len(rollouts) < LOOKED_AT or len(found) < SHARE * len(rollouts):
        return None
    rollout, piece = found[-1]
    shown = " ".join(piece.split())[:SHOWN] or repr(piece[:SHOWN])
    many = f"{len(found)} of the last {len(rollouts)} rollouts end in a repetition"
    return f"{many}; step {rollout.step}: {shown!r} again and again"


def in_a_row(bad: Callable[[Any], str | None], count: int = IN_A_ROW) -> Judge:
    """Judge that each of the last `count` records is bad."""

    def judge(records: Sequence[Any]) -> str | None:
        found = [bad(record) for record in records[-count:]]
        return "; ".join(map(str, found)) if len(found) == count and all(found) else None

    return judge


def ratio_out_of_range(record: StepRecord) -> str | None:
    low, high = HEALTHY_RATIO  # NaN and infinity are the rule non_finite
    # With `ratio_base = proximal` the importance weight has the distance to the rollouts.
    name = "ratio_mean" if record.tis_mean is None else "tis_mean"
    ratio = getattr(record, name)
    bad = not low <= ratio <= high and math.isfinite(ratio)
    return f"step {record.step}: {name} {ratio:.3g}" if bad else None


def clipped_too_often(record: StepRecord) -> str | None:
    return (
        f"step {record.step}: clip_fraction {record.clip_fraction:.1%}"
        if record.clip_fraction >= HEALTHY_CLIP_FRACTION
        else None
    )


def loss_too_low(record: StepRecord) -> str | None:
    low = record.loss < LOSS and math.isfinite(record.loss)
    return f"step {record.step}: loss {record.loss:.3g}" if low else None


def mismatch(record: AlignmentRecord) -> str | None:
    return _alignment(record) if record.verdict == "mismatch" else None


def drift(record: AlignmentRecord) -> str | None:
    mean = record.logprob_diff_abs_mean
    far = mean is not None and mean >= HEALTHY_LOGPROB_DIFF
    # An outlier or rounding explains a drift and needs no action.
    other = record.cause_kind not in (OUTLIER, ROUNDING, LARGE_UPDATE)
    drifts = record.verdict == "drift" and other
    return _alignment(record) if drifts or (far and record.verdict == "ok") else None


def large_update(record: AlignmentRecord) -> str | None:
    return _alignment(record) if record.cause_kind == LARGE_UPDATE else None


def _alignment(record: AlignmentRecord) -> str:
    parts = [f"step {record.step}: verdict {record.verdict}"]
    means = {
        "rollouts": record.logprob_diff_abs_mean,
        "probe at the same weights": record.probe_diff_abs_mean,
    }
    for label, value in means.items():
        if value is not None:
            parts.append(f"mean |trainer - engine| {value:.3g} ({label})")
    if record.cause:
        parts.append(f"cause: {record.cause}")
    return ", ".join(parts)


def not_finite(record: Record) -> str | None:
    step = getattr(record, "step", 0)
    bad = [
        f"{name} is {value}"
        for name, value in record
        if isinstance(value, float) and not math.isfinite(value)
    ]
    return f"step {step} ({record.kind}): {', '.join(bad)}" if bad else None


def gradients_lost(record: StepRecord) -> str | None:
    """Apply if the gradient is exactly 0 although rewards within groups differ."""
    teaches = record.reward_std > 0 and not _all_flat(record)
    gone = record.grad_norm == 0 and teaches
    return (
        f"step {record.step}: grad_norm 0 with reward_std {record.reward_std:.3g}" if gone else None
    )


def reward_constant(record: StepRecord) -> str | None:
    if record.reward_std != 0:
        return None
    return (
        f"step {record.step}: reward_mean {record.reward_mean:.3g}, reward_std "
        f"{record.reward_std:.3g}"
    )


def groups_flat(record: StepRecord) -> str | None:
    groups, flat = _groups(record)
    # A deviation of 0 is the rule reward_constant.
    if not groups or flat < NEARLY_ALL * groups or record.reward_std == 0:
        return None
    return (
        f"step {record.step}: {flat} of {groups} groups have equal scores, reward_mean "
        f"{record.reward_mean:.3g}"
    )


def _groups(record: StepRecord) -> tuple[int, int]:
    return record.groups or 0, record.flat_groups or 0


def _all_flat(record: StepRecord) -> bool:
    groups, flat = _groups(record)
    return groups > 0 and groups == flat


def _mismatch_by(cause: str) -> Judge:
    """Judge of mismatches with this cause; an empty cause means those without a known one."""

    def bad(record: AlignmentRecord) -> str | None:
        known = record.cause_kind if record.cause_kind in CAUSE_FIXES else ""
        return mismatch(record) if known == cause else None

    return in_a_row(bad, 1)


def engines_left_out(record: SyncRecord) -> str | None:
    """Name the engines that this publish did not reach."""
    return "; ".join(f"{url}: {why}" for url, why in record.left_out.items()) or None


STEPS, ALIGNMENTS, TIMINGS = (StepRecord,), (AlignmentRecord,), (TimingRecord,)
CAUSE_FIXES = {
    STALE_WEIGHTS: (
        "the engine generates with old weights: atropos-tui restart {engine} gives both "
        "sides the same ones. If it "
        "happens again, a layer uses a copy of its weights: set enforce-eager = true under "
        "[vllm.args], or use another "
        "mode (broadcast, lora_only)"
    ),
    STALE_PREFIX: (
        "the engine reuses keys and values of older weights: atropos-tui restart {engine}. "
        "If it happens again, set "
        "enable-prefix-caching = false under [vllm.args] until the cause is found (on a GPU "
        "trainer.routing_replay needs that cache: leave it out as well)"
    ),
    TEMPERATURE: (
        "let the environment send its sampling temperature (generation_params or "
        "group_overrides), or set [trainer] "
        "temperature to it; and keep logprobs-mode = processed_logprobs under [vllm.args], "
        "the default here"
    ),
    SHIFTED: (
        "correct the environment, which assigns logprobs to the wrong tokens: "
        "inference_logprobs[i] belongs to "
        "tokens[i], and prompt tokens have 1.0. atroposlib's ManagedServer does it right"
    ),
    MISSING: NO_LOGPROBS_FIX,
    HEAD_DTYPE: (
        "set the same types on both sides: dtype under [trainer] and [vllm], and head_dtype "
        "under both [trainer] and "
        "[vllm.args] hf-overrides, or under neither"
    ),
    BROKEN_WEIGHTS: (
        "NaN or infinity in the weights: atropos-tui up PROFILE --resume RUN goes back to "
        "the last checkpoint; lower "
        "[trainer] lr and keep clip_eps at 0.2"
    ),
    OTHER_WEIGHTS: (
        "set the same `model` and dtype for trainer and engine, which began with different "
        "weights or types; then "
        "atropos-tui restart {engine} gives it the trainer's weights"
    ),
    SAMPLING: (
        "sample by plain temperature: remove top_p, top_k, min_p and penalties from the "
        "environment's requests, and "
        "generation-config from [vllm.args]; send the temperature in generation_params. If the "
        "requests are plain already, lower [trainer] lr: one large update shows the same"
    ),
}
"""Cause of an alignment mismatch -> fix."""

METRIC_RULES: tuple[MetricRule, ...] = (
    MetricRule(
        "non_finite",
        "a number of the training is NaN or infinite",
        "wait if it happens once (the update was skipped). If it goes on: lower [trainer] "
        "lr, keep clip_eps at "
        "0.2, raise warmup_steps, and go back: atropos-tui up PROFILE --resume RUN starts "
        "from the last checkpoint",
        (StepRecord, AlignmentRecord, TimingRecord),
        in_a_row(not_finite, 1),
        good=15,
        severity="alarm",
    ),
    *(
        MetricRule(
            "alignment_mismatch",
            f"alignment MISMATCH: {cause}",
            fix,
            ALIGNMENTS,
            _mismatch_by(cause),
            severity="alarm",
            event="mismatch",
        )
        for cause, fix in CAUSE_FIXES.items()
    ),
    MetricRule(
        "alignment_mismatch",
        "trainer and engine disagree about the same tokens: alignment MISMATCH",
        ALIGNMENT_FIX,
        ALIGNMENTS,
        _mismatch_by(""),
        severity="alarm",
        event="mismatch",
    ),
    MetricRule(
        "alignment_drift",
        "each update moves the policy far from its rollouts",
        "lower [trainer] lr, or raise warmup_steps (20). The rollouts are as fresh as they can "
        "be (lag 1), and trainer and engine agree at the same weights. If the reward rises "
        "steadily, leave it",
        ALIGNMENTS,
        in_a_row(large_update),
    ),
    MetricRule(
        "alignment_drift",
        "trainer and engine drift apart",
        "set env.max_batches_offpolicy = 1 under [env.args] if it is higher: policy lag is the "
        "usual cause. At a lag of 1 or less, remove sampling that changes the "
        "distribution (top-p, top-k, "
        "min-p, penalties), and send the temperature in generation_params",
        ALIGNMENTS,
        in_a_row(drift),
    ),
    MetricRule(
        "ratio_out_of_range",
        "the importance ratio has left 0.8-1.2",
        "lower [trainer] lr, raise warmup_steps (20), keep clip_eps at 0.2, and limit the lag: "
        "env.max_batches_offpolicy = 1 under [env.args]; the policy moves away from the "
        "rollouts too fast. A wrong "
        "ratio from step 1 on is an alignment problem",
        STEPS,
        in_a_row(ratio_out_of_range),
    ),
    MetricRule(
        "clip_fraction_high",
        "30 % of the tokens or more are clipped",
        "lower [trainer] lr, raise warmup_steps (20), and limit the lag: "
        "env.max_batches_offpolicy = 1 under "
        "[env.args]; the steps are too large for rollouts this old",
        STEPS,
        in_a_row(clipped_too_often),
    ),
    MetricRule(
        "loss_too_low",
        "the loss is below -10: the policy is running away",
        "keep [trainer] clip_eps at 0.2, lower lr, and go back to the last good checkpoint: "
        "atropos-tui up PROFILE "
        "--resume RUN",
        STEPS,
        in_a_row(loss_too_low, 1),
    ),
    MetricRule(
        "lost_gradients",
        "gradients are lost on the way to the trained layers",
        GRADIENT_FIX,
        STEPS,
        in_a_row(gradients_lost),
    ),
    MetricRule(
        GROUPS_ALL_FLAT,
        "the groups of the batches are flat: nothing is learnt from them",
        LOOK_AT_ROLLOUTS
        + ". Set env.ensure_scores_are_not_same = true to keep flat groups from the trainer",
        STEPS,
        in_a_row(groups_flat),
        severity="alarm",
        layer=Layer.ROLLOUTS,
    ),
    MetricRule(
        "reward_constant",
        "all rewards are the same: the trainer learns nothing",
        "read the rollouts (on the screen, or rollout records of RUN/telemetry.jsonl). All "
        "right: the task is solved, "
        "use harder questions. All wrong: check if answers are cut off "
        "(env.max_token_length), if the scoring finds "
        "them, and if the model is too weak",
        STEPS,
        in_a_row(reward_constant),
    ),
    MetricRule(
        "accuracy_collapse",
        "the accuracy has collapsed",
        COLLAPSE_FIX,
        STEPS,
        reward_collapsed,
        window=REMEMBERED,
    ),
    MetricRule(
        "accuracy_collapse",
        "the held-out accuracy has collapsed",
        COLLAPSE_FIX,
        (EvalRecord,),
        held_out_collapsed,
        window=REMEMBERED,
        good=2,
    ),
    MetricRule(
        "repetition",
        "the model repeats itself",
        "lower [trainer] lr, keep clip_eps at 0.2, and go back to the last good checkpoint: "
        "the policy degenerates. In "
        "the first steps of a base model, wait: the model itself may repeat",
        (RolloutRecord,),
        repeating,
        window=LOOKED_AT,
        good=LOOKED_AT,
    ),
    MetricRule(
        "policy_lag_growing",
        "the policy lag grows: rollouts get older and older",
        "set env.max_batches_offpolicy = 1 under [env.args] to limit the queue in run-api; lower "
        "env.max_num_workers_per_node, so that rollouts end sooner; set [trainer] "
        "max_policy_lag to leave out older "
        "ones",
        STEPS,
        lag_grows,
        window=2 * BLOCK,
    ),
    MetricRule(
        "engine_left_out",
        "the run goes on without one of its engines",
        "wait: it gets the current weights and rollouts again as soon as it answers, and a "
        "crashed one restarts by "
        "itself. If it does not come back, restart it: atropos-tui restart ENGINE",
        (SyncRecord,),
        in_a_row(engines_left_out, 1),
        good=1,
        layer=Layer.LINK,
    ),
    MetricRule(
        "slow_progress",
        "optimizer steps have become slow",
        "atropos-tui bench shows the split. Waiting for data: raise "
        "env.max_num_workers_per_node under [env.args], use "
        "CUDA graphs (leave out enforce-eager under [vllm.args]), lower "
        "env.max_token_length. Training: lower seq_len, "
        "or use fewer sequences. Publishing or checkpoints: raise their interval",
        TIMINGS,
        slow,
        window=REMEMBERED,
        severity="advice",
    ),
)


def alert_rules(alerts: Sequence[AlertSpec]) -> tuple[MetricRule, ...]:
    """Return a rule for each condition of the profile's `[[alert]]` tables."""
    return tuple(
        _rule(alert, words, judge) for alert in alerts for words, judge in _conditions(alert)
    )


def _rule(alert: AlertSpec, words: str, judge: Judge) -> MetricRule:
    fix = (
        f"look at {alert.metric} in view 2 of the screen or in the report, at the events of "
        f"that time, and at the "
        "sentence on top; or change the bounds of the [[alert]] in the profile"
    )
    window = max(alert.for_steps, SLOPE_STEPS) + BASE_STEPS
    kinds = (METRIC_KINDS.get(alert.metric, EvalRecord),)
    # The title is the identity of a diagnosis.
    title = f"alert: {alert.metric} {words}"
    title += f" for {alert.for_steps} steps" if alert.for_steps > 1 else ""
    return MetricRule(ALERT.name, title, fix, kinds, judge, window, event=ALERT.event)


def _conditions(alert: AlertSpec) -> list[tuple[str, Judge]]:
    below, above, slope, z = alert.below, alert.above, alert.slope, alert.z
    count = alert.for_steps
    found: list[tuple[str, Judge]] = []
    if below is not None:
        found.append(
            (
                f"is below {below:g}",
                lambda records: _all(records, alert.metric, count, lambda x: x < below),
            )
        )
    if above is not None:
        found.append(
            (
                f"is above {above:g}",
                lambda records: _all(records, alert.metric, count, lambda x: x > above),
            )
        )
    if slope is not None:
        verb = "rises" if slope > 0 else "falls"
        found.append(
            (
                f"{verb} by {abs(slope):g} a step",
                lambda records: _steep(records, alert.metric, slope, count),
            )
        )
    if z is not None:
        found.append(
            (f"is {z:g} deviations off", lambda records: _odd(records, alert.metric, z, count))
        )
    return found


def _values(records: Sequence[Any], metric: str) -> list[tuple[int, float]]:
    known = (_value(record, metric) for record in records)
    return [
        (step, float(value)) for step, value in known if value is not None and math.isfinite(value)
    ]


def _value(record: Any, metric: str) -> tuple[int, float | None]:
    if not isinstance(record, EvalRecord):
        return record.step, getattr(record, metric)
    asked = metric in (
        f"{HELD_OUT_METRIC}{record.split}",
        f"{HELD_OUT_METRIC}{record.env}/{record.split}",
    )
    return record.weight_version or 0, record.accuracy if asked else None


def _all(records: Sequence[Any], metric: str, count: int, holds: Any) -> str | None:
    newest = _values(records, metric)[-count:]
    return (
        _value_list(newest)
        if len(newest) == count and all(holds(value) for _, value in newest)
        else None
    )


def _steep(records: Sequence[Any], metric: str, slope: float, count: int) -> str | None:
    """Apply if the least-squares slope of the newest values is as steep, in the same direction."""
    newest = _values(records, metric)[-max(count, SLOPE_STEPS) :]
    if len(newest) < max(count, SLOPE_STEPS):
        return None
    middle, mean = fmean(step for step, _ in newest), fmean(value for _, value in newest)
    spread = sum((step - middle) ** 2 for step, _ in newest)
    found = (
        sum((step - middle) * (value - mean) for step, value in newest) / spread if spread else 0.0
    )
    steep = found >= slope if slope > 0 else found <= slope
    return f"{found:+.3g} a step; {_value_list(newest)}" if steep else None


def _odd(records: Sequence[Any], metric: str, z: float, count: int) -> str | None:
    """Apply if each of the newest values is `z` deviations from the mean of those before."""
    values = _values(records, metric)
    base, newest = [value for _, value in values[:-count]][-BASE_STEPS:], values[-count:]
    if len(base) < LEAST_BASE or len(newest) < count:
        return None
    mean, deviation = fmean(base), pstdev(base)
    # A constant base has no scale.
    if not deviation or any(abs(value - mean) < z * deviation for _, value in newest):
        return None
    return f"{_value_list(newest)}; the {len(base)} steps before: {mean:.3g} ± {deviation:.2g}"


def _value_list(values: Sequence[tuple[int, float]]) -> str:
    shown = values[-SHOWN_VALUES:]
    return (
        f"{', '.join(f'{value:.4g}' for _, value in shown)} at steps {values[0][0]}-{values[-1][0]}"
    )
