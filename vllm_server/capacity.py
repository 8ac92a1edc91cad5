"""Most tokens a second that an engine can make, learned from its own steps.

A step of n sequences takes about `a + b * n` seconds. The curve is fitted to the steps, and read at
as many sequences as fit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

# Least number and seconds of the steps in one sample: a busy server gets many steps at once, then
# none for a while.
STEPS, SAMPLE_S = 8, 0.5
# The newest samples of each number of sequences, and how many it takes to use them.
SAMPLES_KEPT = 32
SAMPLES_NEEDED = 3
# Quantile of the samples that counts: a slower step shared the machine or was paused.
FASTEST = 0.25
# Share of the most sequences from which on the best rate seen is the answer.
NEARLY_ALL = 0.8
LEAST_SEQUENCES = 8
# The curve is read at no more than this times the most sequences seen.
MOST_EXTRAPOLATED = 32.0
# It is fitted once the most sequences seen are this times the fewest.
CONTRAST = 4.0
# Share of a step's time that its sequences must cost, for their cost to be known well enough.
LEAST_GROWTH = 0.25


@dataclass
class _Bin:
    """Samples of about the same number of sequences: (sequences, seconds) of a mean step."""

    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    steps: int = 0
    sequences: int = 0
    seconds: float = 0.0

    def add(self, sequences: int, seconds: float) -> None:
        self.steps += 1
        self.sequences += sequences
        self.seconds += seconds
        if self.steps >= STEPS and self.seconds >= SAMPLE_S:
            self.samples.append((self.sequences / self.steps, self.seconds / self.steps))
            self.steps, self.sequences, self.seconds = 0, 0, 0.0

    def point(self) -> tuple[float, float] | None:
        if len(self.samples) < SAMPLES_NEEDED:
            return None
        by_rate = sorted(self.samples, key=lambda sample: sample[1] / sample[0])
        return by_rate[int(FASTEST * len(by_rate))]


class StepCurve:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._bins: dict[int, _Bin] = {}
        # Share of the KV cache that one sequence takes, a moving average; 0 while unknown.
        self._kv_share = 0.0

    def add(self, sequences: int, seconds: float) -> None:
        if sequences > 0 and seconds > 0:
            self._bins.setdefault(round(2 * math.log2(sequences)), _Bin()).add(sequences, seconds)

    def hold(self, sequences: int, kv_use: float) -> None:
        """Note the share of the KV cache, 0 to 1, that running sequences take."""
        if sequences > 0 and kv_use > 0:
            share = kv_use / sequences
            self._kv_share = share if not self._kv_share else 0.99 * self._kv_share + 0.01 * share

    @property
    def most(self) -> float:
        """Sequences that can run at a time."""
        return min(self._slots, max(1.0, 1.0 / self._kv_share)) if self._kv_share else self._slots

    def ceiling(self) -> float | None:
        """Tokens a second at `most` sequences; None while too little was seen."""
        points = sorted(point for each in self._bins.values() if (point := each.point()))
        if not points:
            return None
        fewest, highest, most = points[0][0], points[-1][0], self.most
        best = max(sequences / seconds for sequences, seconds in points)
        if highest >= NEARLY_ALL * most:
            return best
        if highest < max(LEAST_SEQUENCES, most / MOST_EXTRAPOLATED) or highest < CONTRAST * fewest:
            return None
        fixed, each = _line(points)
        if each * highest < LEAST_GROWTH * (fixed + each * highest):
            return None
        return max(best, most / (fixed + each * most))


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    # The least squares of relative errors, neither part below 0.
    weighed = [(1.0 / seconds**2, sequences, seconds) for sequences, seconds in points]
    total = sum(w for w, _, _ in weighed)
    mean_n = sum(w * n for w, n, _ in weighed) / total
    mean_s = sum(w * s for w, _, s in weighed) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n, _ in weighed)
    slope = sum(w * (n - mean_n) * (s - mean_s) for w, n, s in weighed) / spread
    slope = min(max(slope, 0.0), mean_s / mean_n)
    return mean_s - slope * mean_n, slope


@dataclass(frozen=True)
class Step:
    """One step of an engine, when the server has its tokens."""

    engine: int
    tokens: int
    running: int | None
    """Sequences that go on after it; None if unknown."""
    waiting: int | None
    kv_use: float | None
    """Share of the KV cache in use, 0 to 1."""


class EngineCapacity:
    """Tokens and step times of a server's engines."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._curve = StepCurve(slots)
        # Time of each engine's last step; None if it has no work since. With data parallelism the
        # engines share one curve, and each adds its ceiling.
        self._ended: dict[int, float | None] = {}
        self.generated = 0
        """Tokens since the server began."""

    def step(self, step: Step) -> None:
        now, before = self._clock(), self._ended.get(step.engine)
        self.generated += step.tokens
        if step.running and step.kv_use:
            self._curve.hold(step.running, step.kv_use)
        # The beginning of the first step after a time without work is not known.
        if before is not None:
            self._curve.add(step.tokens, now - before)
        self._ended[step.engine] = None if step.running == 0 and not step.waiting else now

    def ceiling(self) -> float | None:
        """Tokens a second of all engines; None while unknown."""
        one = self._curve.ceiling()
        return None if one is None else one * max(1, len(self._ended))
