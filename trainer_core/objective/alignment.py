"""Alignment of trainer and engine: sums, comparison and verdict on their logprobs. Without torch.

Rollout tokens include policy lag; the probe compares at the same weights, and counts first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from atropos_common.protocol.trainer_records import (
    BROKEN_WEIGHTS,
    LARGE_UPDATE,
    OTHER_WEIGHTS,
    OUTLIER,
    POLICY_LAG,
    ROUNDING,
    SAMPLING,
    STALE_PREFIX,
    STALE_WEIGHTS,
)

Verdict = Literal["ok", "drift", "mismatch"]
Cause = tuple[str, str]
"""A cause of `protocol.trainer_records` or `protocol.audit`, and the evidence."""


@dataclass(frozen=True)
class Thresholds:
    """Bounds on mean |trainer - inference| in nats; drift lies between them."""

    ok: float
    mismatch: float
    half: bool = False
    follows: bool = False
    """`ok` is a default, which the first probe may raise."""

    def after(self, first: float) -> Thresholds:
        """Bounds after a first probe that differs by `first` nats on average."""
        # That difference is rounding: deep models have more of it, and it changes from step to
        # step.
        if not self.follows:
            return self
        return replace(
            self, ok=min(max(self.ok, FIRST_PROBE * first), self.mismatch), follows=False
        )


@dataclass(frozen=True)
class DiffSums:
    """Sums over tokens of logprobs, and of trainer minus inference, in nats."""

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
        return total / self.tokens if self.tokens else None

    @property
    def abs_mean(self) -> float | None:
        return self.mean(self.abs_diff)


@dataclass(frozen=True)
class ProbeDiffs:
    """Comparison at the same weights, decoded on a fresh and on a cached prefix."""

    fresh: DiffSums
    cached: DiffSums
    cached_tokens: int | None = None
    """Prompt tokens from the prefix cache; None if unknown."""
    anchor: DiffSums | None = None
    """The likeliest answer to one fixed prompt."""

    @property
    def both(self) -> DiffSums:
        return self.fresh + self.cached


@dataclass(frozen=True)
class Alignment:
    verdict: Verdict
    kind: str = ""
    """A cause of `protocol.trainer_records`."""
    evidence: str = ""

    @property
    def cause(self) -> str:
        """Kind, a colon, and the evidence."""
        return f"{self.kind}: {self.evidence}" if self.kind else self.evidence

    def explained(self, cause: Cause | None) -> Alignment:
        """A mismatch with the given cause; None keeps this result."""
        return self if cause is None else Alignment("mismatch", *cause)


def diff_sums(train: Sequence[float], inference: Sequence[float]) -> DiffSums:
    diffs = [a - b for a, b in zip(train, inference, strict=True)]
    largest = reduce(_max, map(abs, diffs), 0.0)
    return DiffSums(
        len(diffs), sum(diffs), sum(map(abs, diffs)), largest, sum(train), sum(inference)
    )


def thresholds(dtype: str, ok: float | None = None, mismatch: float | None = None) -> Thresholds:
    """Bounds for weights of `dtype` (torch's name)."""
    half = dtype != "float32"
    bounds = Thresholds(0.1, 0.5) if half else Thresholds(1e-3, 0.05)
    least = bounds.ok if ok is None else ok
    return Thresholds(
        least,
        max(least, bounds.mismatch if mismatch is None else mismatch),
        half,
        follows=half and ok is None,
    )


class AlignmentGate:
    """The verdict on every step; keeps the sums of the last agreement."""

    def __init__(self, bounds: Thresholds) -> None:
        self.bounds = bounds
        # Anchor of the last probe that was ok.
        self._agreed: DiffSums | None = None
        # Rollouts of the last step that was ok, and their oldest version; used without a probe.
        self._rollouts: tuple[DiffSums, float | None] | None = None

    def judge(
        self,
        rollouts: DiffSums,
        probe: ProbeDiffs | None,
        *,
        lag_max: float | None = None,
        version: int = 0,
    ) -> Alignment:
        """Return the verdict on one step.

        Args:
            rollouts: over the tokens of the batch, policy lag included.
            probe: without one the rollouts decide.
            lag_max: policy lag of the oldest rollout; None: unknown.
            version: weight version of the policy.
        """
        oldest = None if lag_max is None else version - lag_max
        alignment = Alignment("ok")
        if probe is not None and probe.both.tokens:
            alignment = self._judge_probe(probe)
            if alignment.verdict == "ok":
                # A later disagreement is compared with this state: which side has moved since?
                self._agreed = probe.anchor or probe.both
                self.bounds = self.bounds.after(
                    max(probe.fresh.abs_mean or 0.0, probe.cached.abs_mean or 0.0)
                )
        outlier = alignment.kind == OUTLIER
        if alignment.verdict == "ok" or outlier:
            more = self._judge_rollouts(rollouts, probe, lag_max, oldest)
            alignment = alignment if outlier and more.verdict == "ok" else more
        if alignment.verdict == "ok":
            self._rollouts = rollouts, oldest
        return alignment

    def _judge_probe(self, probe: ProbeDiffs) -> Alignment:
        fresh, cached = (_grade(sums, self.bounds) for sums in (probe.fresh, probe.cached))
        worst: Verdict = max(fresh, cached, key=_ORDER.index)
        if worst == "ok":
            return Alignment("ok")
        if not math.isfinite(probe.both.abs_diff):
            return Alignment(
                "mismatch", BROKEN_WEIGHTS, "a logprob is not a finite number on one side"
            )
        if worst == "drift" and (lone := _outlier(probe, self.bounds)):
            return Alignment(worst, OUTLIER, lone)
        # Only the cached side differs, so the prefix cache has keys and values of old weights.
        if fresh == "ok":
            return Alignment(worst, STALE_PREFIX, "only answers on a cached prefix differ")
        if self._agreed is not None:
            now = probe.anchor or probe.both
            if worst == "drift" and (noise := _alike(self._agreed, now)):
                return Alignment(worst, ROUNDING, noise)
            return Alignment(worst, STALE_WEIGHTS, _how_stale(self._agreed, now))
        return Alignment(worst, OTHER_WEIGHTS, "trainer and server differ from the start")

    def _judge_rollouts(
        self,
        rollouts: DiffSums,
        probe: ProbeDiffs | None,
        lag_max: float | None,
        oldest: float | None,
    ) -> Alignment:
        mean = rollouts.abs_mean
        if mean is None:
            return Alignment("ok", evidence="no rollout token has a logprob")
        if not math.isfinite(mean):
            return Alignment(
                "mismatch", BROKEN_WEIGHTS, "a logprob of the batch is not a finite number"
            )
        if lag_max == 0:  # the same weights on both sides, as in the probe
            verdict = _grade(rollouts, self.bounds)
            if verdict != "ok" and mean >= ROLLOUT_MISMATCH:
                verdict = "mismatch"
            return Alignment(verdict, *(() if verdict == "ok" else _fresh_cause(mean, probe)))
        # Rounding in half precision may exceed the guides' bound.
        if mean < max(ROLLOUT_DRIFT, self.bounds.ok if self.bounds.half else 0.0):
            return Alignment("ok")
        if probe is None and (how := self._stale(rollouts, oldest)):
            return Alignment("mismatch", STALE_WEIGHTS, how)
        if (
            lag_max is not None and lag_max <= 1 and mean >= ROLLOUT_MISMATCH
        ):  # more than one update can explain
            return Alignment("mismatch", SAMPLING, f"{_FRESH[1]}, or an update too large (lr)")
        if lag_max is not None and lag_max <= 1:
            moved = f"one update moved the policy by {mean:.2g} nats a token (lag 1)"
            return Alignment("drift", LARGE_UPDATE, moved)
        lag = "unknown" if lag_max is None else f"up to {lag_max:g}"
        far: Verdict = "mismatch" if probe is None and mean >= ROLLOUT_MISMATCH else "drift"
        return Alignment(far, POLICY_LAG, f"rollouts are far from the policy (lag {lag})")

    def _stale(self, rollouts: DiffSums, oldest: float | None) -> str | None:
        """Evidence that the server's weights did not change although its version did."""
        if self._rollouts is None:
            return None
        then, version = self._rollouts
        if oldest is not None and version is not None and oldest <= version:
            return None  # no newer version has arrived, so equal answers are only lag
        train, inference = _moved(then, rollouts)
        return (
            _how_stale(then, rollouts)
            if train >= ROLLOUT_DRIFT and inference <= STILL * train
            else None
        )


def _outlier(probe: ProbeDiffs, bounds: Thresholds) -> str | None:
    """Evidence that a single token lifts the mean above the bound."""
    lone = None
    for sums in (probe.fresh, probe.cached):
        if _grade(sums, bounds) == "ok":
            continue
        # Mean of the tokens without the largest difference.
        others = (sums.abs_diff - sums.abs_max) / max(sums.tokens - 1, 1)
        if not bounds.half or sums.tokens < 2 or others > OUTLIER_OTHERS * bounds.ok:
            return None
        lone = (
            f"one of {sums.tokens} tokens differs by {sums.abs_max:.2g} nats, the others by "
            f"{others:.2g} on average"
        )
    return lone


def _fresh_cause(mean: float, probe: ProbeDiffs | None) -> Cause:
    # The probe uses no sampling options: a difference that it shows too comes from the weights.
    seen = probe.fresh.abs_mean if probe is not None else None
    if seen is None or seen <= ALIKE * mean:
        return _FRESH
    return (
        OTHER_WEIGHTS,
        f"fresh rollouts differ by {mean:.2g}, and so does the probe, by {seen:.2g}",
    )


def _moved(then: DiffSums, now: DiffSums) -> tuple[float, float]:
    """Change of the trainer's and the server's mean logprob, in nats."""
    train = (now.mean(now.train) or 0.0) - (then.mean(then.train) or 0.0)
    inference = (now.mean(now.inference) or 0.0) - (then.mean(then.inference) or 0.0)
    return abs(train), abs(inference)


def _alike(then: DiffSums, now: DiffSums) -> str | None:
    """Evidence that both sides moved together."""
    noise = then.abs_mean or 0.0
    apart = abs((now.mean(now.diff) or 0.0) - (then.mean(then.diff) or 0.0))
    if apart > noise:
        return None
    train, inference = _moved(then, now)
    return (
        f"both sides moved alike (means by {train:.2g} here, {inference:.2g} there), tokens differ "
        f"on average by {now.abs_mean or 0.0:.2g} nats, {noise:.2g} before"
    )


def _how_stale(then: DiffSums, now: DiffSums) -> str:
    train, inference = _moved(then, now)
    if inference <= STILL * train:
        return f"the server's mean has not moved, and the trainer's has moved by {train:.2g}"
    return (
        f"the server follows only in part (means moved by {inference:.2g} there, {train:.2g} "
        f"here): a tensor is not shared, or a compiled graph uses a copy"
    )


# Largest ratio of two means' changes at which the smaller one counts as unchanged.
STILL = 0.1
# Share of the rollouts' difference above which the probe shows the same fault.
ALIKE = 0.3
# Share of the bound below which the other tokens' mean shows a single rounded token.
OUTLIER_OTHERS = 0.4
_FRESH = (
    SAMPLING,
    "fresh rollouts differ: top-p, top-k, min-p or penalties, a temperature missing in "
    "generation_params, or raw logprobs",
)
# Factor on the first probe's difference in half precision that later probes may reach.
FIRST_PROBE = 2.0
ROLLOUT_DRIFT = 0.1  # the upstream guides' bound, in nats
ROLLOUT_MISMATCH = 1.0
_ORDER: list[Verdict] = ["ok", "drift", "mismatch"]


def _grade(sums: DiffSums, bounds: Thresholds) -> Verdict:
    mean = sums.abs_mean
    if mean is None or mean <= bounds.ok:
        return "ok"
    return "drift" if mean < bounds.mismatch else "mismatch"


def _max(a: float, b: float) -> float:
    # `max` would drop a NaN, depending on the order of its arguments.
    return b if math.isnan(b) or b > a else a
