"""Do trainer and inference server compute the same logprobs? Sums, comparison and verdict; pure, no torch.

Two comparisons that mean different things: over rollout tokens policy lag is included, the probe compares at the same
weights on both sides. The verdict rests on the probe first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from atropos_common.records import (
    BROKEN_WEIGHTS,
    OTHER_WEIGHTS,
    OUTLIER,
    POLICY_LAG,
    ROUNDING,
    SAMPLING,
    STALE_PREFIX,
    STALE_WEIGHTS,
)

Verdict = Literal["ok", "drift", "mismatch"]


@dataclass(frozen=True)
class Thresholds:
    """Bounds on mean |trainer - inference| in nats: ok up to the first, mismatch from the second on."""

    ok: float
    mismatch: float
    half: bool = False
    """Half precision: it rounds a rare token far."""
    follows: bool = False
    """`ok` was chosen by nobody: it grows with what the first probe reads, when nothing has been trained yet."""

    def after(self, first: float) -> Thresholds:
        """These bounds where the first probe differs by `first` nats on average, and is ok: that is rounding, which a
        deep model has much of, and training changes from one step to the next."""
        if not self.follows:
            return self
        return replace(self, ok=min(max(self.ok, FIRST_PROBE * first), self.mismatch), follows=False)


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
class ProbeDiffs:
    """The same weights on both sides: decoded on a fresh and on a cached prefix."""

    fresh: DiffSums
    cached: DiffSums
    cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache; null when the server does not say."""
    anchor: DiffSums | None = None
    """The likeliest answer to the same prompt in every probe, fresh: stale weights answer the same for ever."""

    @property
    def both(self) -> DiffSums:
        return self.fresh + self.cached


@dataclass(frozen=True)
class Alignment:
    """The answer, with the cause when it is not ok."""

    verdict: Verdict
    cause: str = ""
    """One of `ALIGNMENT_CAUSES`, a colon, and what was seen."""

    def explained(self, cause: str | None) -> Alignment:
        """A mismatch with a cause that accounts for the difference; None leaves it as it is."""
        return self if cause is None else Alignment("mismatch", cause)


def diff_sums(train: Sequence[float], inference: Sequence[float]) -> DiffSums:
    """Sums over T tokens of two lists of logprobs."""
    diffs = [a - b for a, b in zip(train, inference, strict=True)]
    largest = reduce(_max, map(abs, diffs), 0.0)
    return DiffSums(len(diffs), sum(diffs), sum(map(abs, diffs)), largest, sum(train), sum(inference))


def thresholds(dtype: str, ok: float | None = None, mismatch: float | None = None) -> Thresholds:
    """Bounds for weights of `dtype` (torch's name), where the configuration names none."""
    half = dtype != "float32"
    bounds = Thresholds(0.1, 0.5) if half else Thresholds(1e-3, 0.05)
    least = bounds.ok if ok is None else ok
    return Thresholds(
        least, max(least, bounds.mismatch if mismatch is None else mismatch), half, follows=half and ok is None
    )


class AlignmentGate:
    """The verdict on every step; remembers what trainer and server said when they last agreed."""

    def __init__(self, bounds: Thresholds) -> None:
        self.bounds = bounds
        self._agreed: DiffSums | None = None
        """The anchor of the last probe that was ok."""
        self._rollouts: tuple[DiffSums, float | None] | None = None
        """The rollouts of the last step that was ok, and the version of the oldest; they speak where there is no
        probe."""

    def judge(
        self, rollouts: DiffSums, probe: ProbeDiffs | None, *, lag_max: float | None = None, version: int = 0
    ) -> Alignment:
        """The verdict on one step; whoever gave it may know better (`explained`).

        Args:
            rollouts: over the tokens of the batch, policy lag included.
            probe: null when none was taken; then only the rollouts speak, with the guides' bound of 0.1.
            lag_max: oldest rollout in weight versions; null when unknown.
            version: of the policy's present weights.
        """
        oldest = None if lag_max is None else version - lag_max
        alignment = Alignment("ok")
        if probe is not None and probe.both.tokens:
            alignment = self._judge_probe(probe)
            if alignment.verdict == "ok":
                self._agreed = probe.anchor or probe.both
                self.bounds = self.bounds.after(max(probe.fresh.abs_mean or 0.0, probe.cached.abs_mean or 0.0))
        lone = alignment.cause.startswith(OUTLIER)
        if alignment.verdict == "ok" or lone:
            more = self._judge_rollouts(rollouts, probe, lag_max, oldest)
            alignment = alignment if lone and more.verdict == "ok" else more
        if alignment.verdict == "ok":
            self._rollouts = rollouts, oldest
        return alignment

    def _judge_probe(self, probe: ProbeDiffs) -> Alignment:
        fresh, cached = (_grade(sums, self.bounds) for sums in (probe.fresh, probe.cached))
        worst: Verdict = max(fresh, cached, key=_ORDER.index)
        if worst == "ok":
            return Alignment("ok")
        if not math.isfinite(probe.both.abs_diff):
            return Alignment("mismatch", f"{BROKEN_WEIGHTS}: a logprob is not a finite number on one side")
        if worst == "drift" and (lone := _outlier(probe, self.bounds)):
            return Alignment(worst, f"{OUTLIER}: {lone}")
        if fresh == "ok":
            return Alignment(worst, f"{STALE_PREFIX}: only answers on a cached prefix differ")
        if self._agreed is not None:
            now = probe.anchor or probe.both
            if worst == "drift" and (noise := _alike(self._agreed, now)):
                return Alignment(worst, f"{ROUNDING}: {noise}")
            return Alignment(worst, f"{STALE_WEIGHTS}: {_how_stale(self._agreed, now)}")
        return Alignment(worst, f"{OTHER_WEIGHTS}: trainer and server differ from the start")

    def _judge_rollouts(
        self, rollouts: DiffSums, probe: ProbeDiffs | None, lag_max: float | None, oldest: float | None
    ) -> Alignment:
        mean = rollouts.abs_mean
        if mean is None:
            return Alignment("ok", "no rollout token came with a logprob")
        if not math.isfinite(mean):
            return Alignment("mismatch", f"{BROKEN_WEIGHTS}: a logprob of the batch is not a finite number")
        if lag_max == 0:  # the same weights on both sides, as in a probe
            verdict = _grade(rollouts, self.bounds)
            if verdict != "ok" and mean >= ROLLOUT_MISMATCH:
                verdict = "mismatch"
            return Alignment(verdict, "" if verdict == "ok" else _fresh_cause(mean, probe))
        if mean < max(ROLLOUT_DRIFT, self.bounds.ok if self.bounds.half else 0.0):
            return Alignment("ok")
        if probe is None and (how := self._stale(rollouts, oldest)):
            return Alignment("mismatch", f"{STALE_WEIGHTS}: {how}")
        if lag_max is not None and lag_max <= 1 and mean >= ROLLOUT_MISMATCH:  # more than one update does
            return Alignment("mismatch", _FRESH)
        lag = "unknown" if lag_max is None else f"up to {lag_max:g}"
        far: Verdict = "mismatch" if probe is None and mean >= ROLLOUT_MISMATCH else "drift"
        return Alignment(far, f"{POLICY_LAG}: rollouts are far from the policy (lag {lag})")

    def _stale(self, rollouts: DiffSums, oldest: float | None) -> str | None:
        """How the server stood still since the rollouts last agreed, although its version has moved on."""
        if self._rollouts is None:
            return None
        then, version = self._rollouts
        if oldest is not None and version is not None and oldest <= version:
            return None  # older versions answer the same: that is lag
        train, inference = _moved(then, rollouts)
        return _how_stale(then, rollouts) if train >= ROLLOUT_DRIFT and inference <= STILL * train else None


def _outlier(probe: ProbeDiffs, bounds: Thresholds) -> str | None:
    """What to say where one token alone lifts the mean above the bound, and the others are far below it."""
    lone = None
    for sums in (probe.fresh, probe.cached):
        if _grade(sums, bounds) == "ok":
            continue
        others = (sums.abs_diff - sums.abs_max) / max(sums.tokens - 1, 1)
        if not bounds.half or sums.tokens < 2 or others > OUTLIER_OTHERS * bounds.ok:
            return None
        lone = f"one of {sums.tokens} tokens differs by {sums.abs_max:.2g} nats, the others by {others:.2g} on average"
    return lone


def _fresh_cause(mean: float, probe: ProbeDiffs | None) -> str:
    """Sampling or weights? The probe is asked without sampling options: what it sees too, they did not do."""
    seen = probe.fresh.abs_mean if probe is not None else None
    if seen is None or seen <= ALIKE * mean:
        return _FRESH
    return f"{OTHER_WEIGHTS}: fresh rollouts differ by {mean:.2g}, and so does the probe, by {seen:.2g}"


def _moved(then: DiffSums, now: DiffSums) -> tuple[float, float]:
    """How far the means of trainer and server have moved, in nats."""
    train = (now.mean(now.train) or 0.0) - (then.mean(then.train) or 0.0)
    inference = (now.mean(now.inference) or 0.0) - (then.mean(then.inference) or 0.0)
    return abs(train), abs(inference)


def _alike(then: DiffSums, now: DiffSums) -> str | None:
    """What to say where both sides moved together, to within the difference that they had when they agreed."""
    noise = then.abs_mean or 0.0
    apart = abs((now.mean(now.diff) or 0.0) - (then.mean(then.diff) or 0.0))
    if apart > noise:
        return None
    train, inference = _moved(then, now)
    return (
        f"both sides moved alike (means by {train:.2g} here, {inference:.2g} there), single tokens differ by "
        f"{now.abs_mean or 0.0:.2g} nats, {noise:.2g} before"
    )


def _how_stale(then: DiffSums, now: DiffSums) -> str:
    train, inference = _moved(then, now)
    if inference <= STILL * train:
        return f"the server's mean stands still while the trainer's has moved by {train:.2g}"
    return (
        f"the server follows only in part (means moved by {inference:.2g} there, {train:.2g} here): a tensor that is "
        "not shared, or a graph that computes with a copy"
    )


STILL = 0.1
"""A mean that moved by less than this share of the other one stands still."""
ALIKE = 0.3
"""A probe that differs by more than this share of what the rollouts differ by sees the same fault."""
OUTLIER_OTHERS = 0.4
"""Share of the bound below which the others' mean speaks for one rounded token; above it the whole drifts."""
_FRESH = (
    f"{SAMPLING}: fresh rollouts differ: top-p, top-k, min-p or penalties, a temperature that generation_params does "
    "not tell, or raw logprobs"
)
FIRST_PROBE = 2.0
"""A probe in half precision may differ by so many times what the first one did, of weights that nobody had changed."""
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
