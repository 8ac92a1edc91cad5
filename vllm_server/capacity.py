"""Highest token rate of an engine, estimated from its own steps.

A step of n sequences that use the share u of the KV cache takes about `a + b * n + c * u` seconds.
The curve is fitted to the fastest steps, which had the GPU and its CPU cores for themselves, and
evaluated at the number of sequences that fit, at their present length. Beside a trainer on the same
GPU steps are slower. The ceiling is what the engine can make there: `ceiling` has the rules.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from atropos_common.protocol.bridge import EngineLoad

# Minimum steps and seconds in one sample.
STEPS, SAMPLE_S = 8, 0.5
# Samples kept for each number of sequences, and the minimum for a point of the curve.
SAMPLES_KEPT = 64
SAMPLES_NEEDED = 3
# Minimum seconds of the samples of a present rate. While another engine of the GPU is paused, a few
# steps are fast.
PRESENT_S = 4.0
# Quantile of the samples that counts: slower ones shared the machine or were paused.
FASTEST = 0.1
# If steps reached this share of `most` sequences, the best rate seen is the ceiling.
NEARLY_ALL = 0.8
# Age in seconds of steps up to which samples tell the present speed of the engine.
RECENT_S = 120.0
# Sequences count as equally long if their shares of the KV cache differ by less than this fraction.
SAME_LENGTH = 0.25
# Minimum relative error of a point: steps do not lie exactly on the curve.
NOISE = 0.03
# Part of a step's time that reading the KV cache may take, until the steps show it.
KV_PART = 0.5
# The curve is extrapolated to at most this multiple of the most sequences seen.
MOST_EXTRAPOLATED = 32.0
# The fit counts only up to this relative standard error of the step time.
MOST_ERROR = 0.15
# Weight of the newest step in the moving average of a sequence's share of the KV cache.
NEWEST = 0.005
# The knee is known once the most sequences seen are `CONTRAST` times the fewest, and cost at least
# the share `LEAST_GROWTH` of a step's time.
CONTRAST, LEAST_GROWTH = 4.0, 0.25
# At the knee 1 % more sequences raise the token rate by this many per cent. The same number is the
# share of the highest rate that is left to gain.
KNEE_GAIN = 0.07
# The knee is no higher than the fewest sequences that reach this share of the best rate, if `TIMES`
# as many were seen: an engine may be slower at sizes without a CUDA graph, which the fit ignores.
NO_FASTER, TIMES = 0.97, 1.4


@dataclass(frozen=True)
class Point:
    """Means over steps."""

    sequences: float
    kv_use: float
    """Share of the KV cache in use, 0 to 1; 0 if unknown."""
    seconds: float

    @property
    def rate(self) -> float:
        return self.sequences / self.seconds


@dataclass
class _Bin:
    """Samples with about the same number of sequences."""

    samples: deque[tuple[float, Point]] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    """Each with the time of its last step."""
    steps: int = 0
    sequences: int = 0
    kv_use: float = 0.0
    seconds: float = 0.0

    def add(self, sequences: int, seconds: float, kv_use: float, now: float) -> None:
        self.steps += 1
        self.sequences += sequences
        self.kv_use += kv_use
        self.seconds += seconds
        if self.steps >= STEPS and self.seconds >= SAMPLE_S:
            sums = self.sequences, self.kv_use, self.seconds
            self.samples.append((now, Point(*(each / self.steps for each in sums))))
            self.steps, self.sequences, self.kv_use, self.seconds = 0, 0, 0.0, 0.0

    def point(self) -> Point | None:
        """One of the fastest samples; None: too few."""
        if len(self.samples) < SAMPLES_NEEDED:
            return None
        by_rate = sorted((sample for _, sample in self.samples), key=lambda sample: -sample.rate)
        return by_rate[int(FASTEST * len(by_rate))]

    def present(self, since: float) -> Point | None:
        """Mean of the samples after `since`; None: too few."""
        new = [sample for at, sample in self.samples if at >= since]
        lasted = sum(max(SAMPLE_S, STEPS * sample.seconds) for sample in new)
        if len(new) < SAMPLES_NEEDED or lasted < PRESENT_S:
            return None
        sequences, rate = fmean(each.sequences for each in new), fmean(each.rate for each in new)
        return Point(sequences, fmean(each.kv_use for each in new), sequences / rate)


class StepCurve:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        # Bins are never dropped: an engine that now always runs many sequences showed the cost of
        # fewer only during its start.
        self._bins: dict[int, _Bin] = {}
        self.steps_s = 0.0
        """Seconds of all steps, the clock of the samples."""
        # Moving average of one sequence's share of the KV cache; 0 while unknown.
        self._kv_share = 0.0

    def add(self, sequences: int, seconds: float, kv_use: float = 0.0) -> None:
        if sequences > 0 and seconds > 0:
            self.steps_s += seconds
            at = round(2 * math.log2(sequences))
            self._bins.setdefault(at, _Bin()).add(sequences, seconds, kv_use, self.steps_s)

    def hold(self, sequences: int, kv_use: float) -> None:
        """Record the KV cache use of the running sequences, 0 to 1."""
        if sequences > 0 and kv_use > 0:
            share = kv_use / sequences
            self._kv_share += (NEWEST if self._kv_share else 1.0) * (share - self._kv_share)

    @property
    def most(self) -> float:
        """Sequences that can run at a time."""
        return min(self._slots, max(1.0, 1.0 / self._kv_share)) if self._kv_share else self._slots

    def ceiling(self) -> float | None:
        """Most tokens a second, beside the trainer if both share a GPU; None: unknown yet."""
        since = self.steps_s - RECENT_S
        # Rates of sequences of another length do not apply to the present ones.
        present = {
            at: new
            for at, each in self._bins.items()
            if (new := each.present(since)) and self._is_present(new)
        }
        if not present:
            return None
        best, largest = max(new.rate for new in present.values()), max(present)
        if present[largest].sequences >= NEARLY_ALL * self.most:
            return best
        alone, fastest = self._fitted_ceiling(), self._bins[largest].point()
        if alone is None or fastest is None:
            return None
        return max(best, alone * min(1.0, present[largest].rate / fastest.rate))

    def _fitted_ceiling(self) -> float | None:
        """Tokens a second at `most` sequences by the fastest steps."""
        points, most = self._points(), self.most
        if most > MOST_EXTRAPOLATED * max(point.sequences for point in points):
            return None
        parts = _fitted(points, most, min(1.0, most * self._kv_share))
        return None if parts is None else most / sum(parts)

    def _points(self) -> list[Point]:
        return [point for each in self._bins.values() if (point := each.point())]

    def _is_present(self, point: Point) -> bool:
        share = point.kv_use / point.sequences
        if not share or not self._kv_share:
            return True
        return abs(math.log(share / self._kv_share)) < math.log1p(SAME_LENGTH)

    def knee(self) -> float | None:
        """Sequences beyond which the token rate hardly rises, at most `most`; None: unknown yet."""
        points = self._points()
        known = [knee for knee in (_seen_knee(points), self._fitted_knee(points)) if knee]
        return min(self.most, *known) if known else None

    def _fitted_knee(self, points: list[Point]) -> float | None:
        seen = [point.sequences for point in points]
        if not seen or max(seen) < CONTRAST * min(seen):
            return None
        highest = max(seen)
        parts = _fitted(points, highest, min(1.0, highest * self._kv_share))
        if parts is None or parts[1] < LEAST_GROWTH * sum(parts):
            return None
        # The rate n / (a + b n) grows by a / (a + b n) per cent for each per cent of n.
        fixed, each = parts[0], parts[1] / highest
        return fixed / each * (1.0 / KNEE_GAIN - 1.0)


def _seen_knee(points: list[Point]) -> float | None:
    """Fewest sequences at nearly the best rate; None unless many more were seen."""
    best = max((point.rate for point in points), default=0.0)
    fast = min(
        (point.sequences for point in points if point.rate >= NO_FASTER * best), default=math.inf
    )
    return fast if any(point.sequences >= TIMES * fast for point in points) else None


def _fitted(points: list[Point], sequences: float, kv_use: float) -> tuple[float, float] | None:
    """Fit the seconds of a step: a fixed part, and one that grows with the sequences; None if
    uncertain."""
    seconds = np.array([point.seconds for point in points])
    wanted = np.array([1.0, sequences, kv_use])
    seen = np.array([[1.0, point.sequences, point.kv_use] for point in points])
    # The fit minimizes relative errors. Its unknowns are the three parts of the wanted step, in
    # seconds.
    parts = seen / np.where(wanted > 0, wanted, 1.0)
    longest, fullest = float(seconds.max()), float(parts[:, 2].max())
    # Prior knowledge as additional rows: the parts are finite, and reading the KV cache takes at
    # most `KV_PART` of a step.
    prior = np.diag(np.full(3, NOISE / (MOST_EXTRAPOLATED * longest)))
    # If the use of the cache is unknown, its cost is part of each sequence's.
    prior[2, 2] = NOISE * fullest / (KV_PART * longest) if fullest else 1e3 / longest
    rows = np.vstack([parts / seconds[:, None], prior])
    target = np.concatenate([np.ones(len(points)), np.zeros(3)])
    costs = _not_negative(rows, target)
    scatter = math.sqrt(float(((rows @ costs - target) ** 2).sum()) / max(1, len(points) - 2))
    variance = float(np.linalg.inv(rows.T @ rows).sum())
    error = max(NOISE, scatter) * math.sqrt(max(0.0, variance))
    if error > MOST_ERROR * costs.sum():
        return None
    return float(costs[0]), float(costs[1] + costs[2])


def _not_negative(rows: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with solutions from 0 on: try every subset of columns."""
    width = rows.shape[1]
    best, best_error = np.zeros(width), math.inf
    for chosen in (each for n in range(1, width + 1) for each in combinations(range(width), n)):
        found = np.zeros(width)
        found[list(chosen)] = np.linalg.lstsq(rows[:, chosen], target, rcond=None)[0]
        error = float(((rows @ found - target) ** 2).sum())
        if found.min() >= 0 and error < best_error:
            best, best_error = found, error
    return best


@dataclass(frozen=True)
class Step:
    """One engine step, once the server has its tokens."""

    engine: int
    ended_at: float | None
    """Seconds of a monotonic clock in the engine's process; None: unknown."""
    tokens: int
    """New ones at the server, which gets those of several steps together (`held_outputs.py`)."""
    running: int | None
    """Unfinished sequences after it; None: tokens alone, and no step."""
    waiting: int | None
    kv_use: float | None
    recomputed: int = 0
    """Tokens of preempted sequences whose keys and values are computed again."""


class EngineCapacity:
    """Tokens and step times of a server's engines."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._curve = StepCurve(slots)
        # Time of each engine's last step; None while it has no work. With data parallelism the
        # engines share one curve, whose ceiling counts once for each.
        self._ended: dict[int, float | None] = {}
        self._resumed_at = -math.inf
        self.generated = 0
        """Tokens since the server started."""
        # Tokens, and steps of a sequence, since then.
        self._made = self._ran = 0
        self.recomputed = 0
        """Tokens of preempted sequences whose keys and values were computed again."""
        self._last: dict[int, Step] = {}

    def step(self, step: Step) -> None:
        now, before = step.ended_at, self._ended.get(step.engine)
        self.generated += step.tokens
        self.recomputed += step.recomputed
        self._made += step.tokens
        if step.running is None:
            return  # held tokens that are released before a pause: no step of the engine
        last, self._last[step.engine] = self._last.get(step.engine), step
        if step.running and step.kv_use:
            self._curve.hold(step.running, step.kv_use)
        # In a step after which nothing runs, the sequences that ran before it have ended.
        ran = step.running or (last.running if last else 0) or 0
        self._ran += ran
        # The start of the first step after a time without work, or after a pause, is unknown.
        if before is not None and before >= self._resumed_at and now is not None and self._ran:
            # About one token of each running sequence, more with speculation.
            tokens = round(ran * max(1.0, self._made / self._ran))
            self._curve.add(tokens, now - before, step.kv_use or 0.0)
        self._ended[step.engine] = None if step.running == 0 and not step.waiting else now

    def resumes(self, now: float) -> None:
        """Exclude the time of a pause, which ends now, from the next step.

        Args:
            now: seconds of the engine's clock. The server may read a step of before the pause
                later.
        """
        self._resumed_at = now

    def ceiling(self) -> float | None:
        """Tokens a second of all engines; None: unknown yet."""
        one = self._curve.ceiling()
        return None if one is None else one * max(1, len(self._ended))

    def knee(self) -> float | None:
        """`StepCurve.knee`, summed over the engines."""
        one = self._curve.knee()
        return None if one is None else one * max(1, len(self._ended))

    def load(self) -> EngineLoad:
        """Return the load after the newest steps."""
        last = list(self._last.values())
        return EngineLoad(
            running=sum(step.running or 0 for step in last),
            waiting=sum(step.waiting or 0 for step in last),
            kv_use=max((step.kv_use or 0.0 for step in last), default=0.0),
            generated_tokens=self.generated,
            steps_s=self._curve.steps_s,
            slots=self._slots * max(1, len(self._ended)),
            knee=self.knee(),
        )
