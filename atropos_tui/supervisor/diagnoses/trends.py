"""Judges over many steps: collapse, growing lag, slowness. Pure; records come oldest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median_low

from atropos_common.records import EvalRecord, StepRecord, TimingRecord

BLOCK = 10
"""Steps that are averaged: one batch alone says little."""
REMEMBERED = 200
SMALL_DROP = 0.05
LAG = 3.0
"""A mean lag below this is what an environment's bound of 1 to 3 batches gives."""
SLOWER = 3.0
"""Steps that take so many times the usual are slow."""
WAIT_SHARE = 0.8
WORTH_SAYING_S = 5.0
LONG_WAIT_S = 30.0


def reward_collapsed(steps: Sequence[StepRecord]) -> str | None:
    """The mean reward of the last block lies more than a standard deviation of single rewards below the best block.

    The deviation within batches is the scale, so it does not matter whether rewards are 0/1 or -1/+1; 59 % to 7 %, the
    guides' case, is such a fall, and 99 % to 85 % is not.
    """
    blocks = _blocks(steps)
    if len(blocks) < 2:
        return None
    now = blocks[-1]
    best = max(blocks[:-1], key=lambda block: fmean(step.reward_mean for step in block))
    high, low = (fmean(step.reward_mean for step in block) for block in (best, now))
    scale = max(median_low(step.reward_std for step in block) for block in (best, now))
    if not math.isfinite(high - low) or high - low <= max(scale, SMALL_DROP):
        return None
    return (
        f"mean reward {high:.3g} over steps {best[0].step}-{best[-1].step}, "
        f"{low:.3g} over steps {now[0].step}-{now[-1].step}"
    )


def held_out_collapsed(evals: Sequence[EvalRecord]) -> str | None:
    """The last two accuracies of a split are below half of its best, by more than chance on so few questions."""
    if len(evals) < 3:
        return None
    best, last = max(evals[:-2], key=lambda record: record.accuracy), evals[-2:]
    chance = 2 * math.sqrt(0.25 / max(best.questions or 1, 1)) + SMALL_DROP
    if any(record.accuracy > best.accuracy / 2 or best.accuracy - record.accuracy < chance for record in last):
        return None
    said = " then ".join(f"{record.accuracy:.1%}{_at(record)}" for record in last)
    return f"{best.env}, {best.split}: {best.accuracy:.1%}{_at(best)}, {said}"


def _at(record: EvalRecord) -> str:
    return "" if record.weight_version is None else f" at weight version {record.weight_version}"


def lag_grows(steps: Sequence[StepRecord]) -> str | None:
    """The mean policy lag of the last block is high, and well above that of the block before."""
    if len(steps) < 2 * BLOCK:
        return None
    before, now = (
        [step.policy_lag_mean for step in part if step.policy_lag_mean is not None]
        for part in (steps[-2 * BLOCK : -BLOCK], steps[-BLOCK:])
    )
    if not before or not now or fmean(now) < LAG or fmean(now) < 1.5 * fmean(before):
        return None
    return (
        f"mean policy lag {fmean(before):.1f} over steps {steps[-2 * BLOCK].step}-{steps[-BLOCK - 1].step}, "
        f"{fmean(now):.1f} over steps {steps[-BLOCK].step}-{steps[-1].step}"
    )


def slow(timings: Sequence[TimingRecord]) -> str | None:
    """Steps take much longer than before, or nearly all of a long step is waiting for data. Names the bottleneck."""
    if len(timings) < BLOCK:
        return None
    now, before = timings[-BLOCK:], timings[:-BLOCK]
    step_s = median_low(timing.step_s for timing in now)
    parts = _parts(now)
    steps = f"steps {now[0].step}-{now[-1].step}"
    if parts["waiting for data"] > max(WAIT_SHARE * step_s, LONG_WAIT_S):
        return f"{steps}: {step_s:.1f} s each, {parts['waiting for data']:.1f} s of it waiting for data"
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


def _blocks(steps: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    """Blocks of `BLOCK` steps, the last one ending with the newest step."""
    first = len(steps) % BLOCK
    return [steps[at : at + BLOCK] for at in range(first, len(steps), BLOCK)]
