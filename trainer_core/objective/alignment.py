"""Do trainer and inference server compute the same logprobs? Sums, comparison and verdict; pure, no torch.

Two comparisons that mean different things: over rollout tokens policy lag is included, the probe compares at the same
weights on both sides. The verdict rests on the probe first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "drift", "mismatch"]


@dataclass(frozen=True)
class Thresholds:
    """Bounds on mean |trainer - inference| in nats: ok up to the first, mismatch from the second on."""

    ok: float
    mismatch: float


@dataclass(frozen=True)
class DiffSums:
    """Sums over tokens of trainer logprobs against the server's; differences are trainer minus inference."""

    tokens: int = 0
    diff: float = 0.0
    abs_diff: float = 0.0
    abs_max: float = 0.0
    train: float = 0.0
    inference: float = 0.0

    def __add__(self, other: DiffSums) -> DiffSums:
        return DiffSums(
            self.tokens + other.tokens,
            self.diff + other.diff,
            self.abs_diff + other.abs_diff,
            _max(self.abs_max, other.abs_max),
            self.train + other.train,
            self.inference + other.inference,
        )

    def mean(self, total: float) -> float | None:
        """`total` by token; None when there is none."""
        return total / self.tokens if self.tokens else None

    @property
    def abs_mean(self) -> float | None:
        return self.mean(self.abs_diff)


@dataclass(frozen=True)
class Probe:
    """The same weights on both sides: decoded on a fresh and on a cached prefix."""

    fresh: DiffSums
    cached: DiffSums
    cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache; null when the server does not say."""

    @property
    def both(self) -> DiffSums:
        return self.fresh + self.cached


@dataclass(frozen=True)
class Alignment:
    """The answer, with the cause when it is not ok."""

    verdict: Verdict
    cause: str = ""


def diff_sums(train: Sequence[float], inference: Sequence[float]) -> DiffSums:
    """Sums over T tokens of two lists of logprobs."""
    if len(train) != len(inference):
        raise ValueError(f"{len(train)} trainer logprobs but {len(inference)} of the server")
    diffs = [a - b for a, b in zip(train, inference, strict=True)]
    largest = 0.0
    for value in diffs:
        largest = _max(largest, abs(value))
    return DiffSums(len(diffs), sum(diffs), sum(map(abs, diffs)), largest, sum(train), sum(inference))


def thresholds(dtype: str, ok: float | None = None, mismatch: float | None = None) -> Thresholds:
    """Bounds for weights of `dtype` (torch's name), where the configuration names none."""
    default = Thresholds(1e-3, 0.05) if dtype == "float32" else Thresholds(0.1, 0.5)
    ok = default.ok if ok is None else ok
    return Thresholds(ok, max(ok, default.mismatch if mismatch is None else mismatch))


def judge(
    rollouts: DiffSums,
    probe: Probe | None,
    bounds: Thresholds,
    *,
    lag_max: float | None = None,
    probe_was_ok: bool = False,
) -> Alignment:
    """The verdict on one step.

    Args:
        rollouts: over the tokens of the batch, policy lag included.
        probe: null when none was taken; then only the rollouts speak, with the guides' bound of 0.1.
        lag_max: oldest rollout in weight versions; null when unknown.
        probe_was_ok: an earlier probe of this attempt agreed, so both sides started from the same weights.
    """
    if probe is not None and probe.both.tokens:
        judged = _judge_probe(probe, bounds, probe_was_ok)
        if judged.verdict != "ok":
            return judged
    return _judge_rollouts(rollouts, probe, lag_max)


def _judge_probe(probe: Probe, bounds: Thresholds, was_ok: bool) -> Alignment:
    fresh, cached = (_grade(sums, bounds) for sums in (probe.fresh, probe.cached))
    worst: Verdict = max(fresh, cached, key=_ORDER.index)
    if worst == "ok":
        return Alignment("ok")
    if not math.isfinite(probe.both.abs_diff):
        return Alignment("mismatch", "a logprob is not a finite number: the weights are broken on one side")
    if fresh == "ok":
        return Alignment(worst, "stale prefix cache: only answers on a cached prefix differ")
    if was_ok:
        return Alignment(worst, "stale weights: the server does not see the trainer's updates")
    return Alignment(
        worst,
        "trainer and server differ from the start: other weights, another head dtype, or raw logprobs",
    )


def _judge_rollouts(rollouts: DiffSums, probe: Probe | None, lag_max: float | None) -> Alignment:
    mean = rollouts.abs_mean
    if mean is None:
        return Alignment("ok", "no rollout tokens")
    if not math.isfinite(mean):
        return Alignment("mismatch", "a logprob of the batch is not a finite number")
    if mean < ROLLOUT_DRIFT:
        return Alignment("ok")
    if lag_max is None or lag_max > 1:
        lag = "unknown policy lag" if lag_max is None else f"policy lag of up to {lag_max:g}"
        verdict: Verdict = "mismatch" if probe is None and mean >= ROLLOUT_MISMATCH else "drift"
        return Alignment(verdict, f"rollouts are far from the policy ({lag})")
    verdict = "mismatch" if mean >= ROLLOUT_MISMATCH else "drift"
    return Alignment(
        verdict,
        "fresh rollouts differ: another temperature, top-p, top-k or min-p, shifted or raw logprobs",
    )


ROLLOUT_DRIFT = 0.1
"""The guides' bound on mean |difference| over rollouts."""
ROLLOUT_MISMATCH = 1.0
_ORDER: list[Verdict] = ["ok", "drift", "mismatch"]


def _grade(sums: DiffSums, bounds: Thresholds) -> Verdict:
    mean = sums.abs_mean
    if mean is None or mean <= bounds.ok:
        return "ok"
    return "drift" if mean < bounds.mismatch else "mismatch"


def _max(a: float, b: float) -> float:
    return b if math.isnan(b) or b > a else a
