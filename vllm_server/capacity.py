"""Most tokens a second that an engine can make, learned from its own steps while it works.

A step of n sequences takes about `a + b * n` seconds: a part that every step costs, and a part for
each sequence. The curve is fitted to the steps that the engine makes, by their number of sequences,
and read at as many sequences as fit: `--max-num-seqs`, or fewer where the KV cache holds fewer.
docs/telemetry.md says when that is not known.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

STEPS, SAMPLE_S = 8, 0.5
"""Least number and seconds of the steps in one sample: a busy server gets many steps at once, then
none for a while."""
SAMPLES_KEPT = 32
"""Newest samples of each number of sequences."""
SAMPLES_NEEDED = 3
"""Samples below which a number of sequences says nothing."""
FASTEST = 0.25
"""Quantile of the samples that counts: what is slower shared the machine or was paused."""
NEARLY_ALL = 0.8
"""Share of the most sequences from which on the best rate seen is the answer."""
LEAST_SEQUENCES = 8
MOST_EXTRAPOLATED = 32.0
"""Most sequences by those seen, above which the curve is not read."""
CONTRAST = 4.0
"""Most by fewest sequences seen, below which no curve is fitted."""
LEAST_GROWTH = 0.25
"""Share of a step's time that its sequences cost, below which their cost is not known well
enough."""


@dataclass
class _Bin:
    """Samples of about the same number of sequences, as (sequences, seconds) of a mean step."""

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
        """A fast sample; None while there are few."""
        if len(self.samples) < SAMPLES_NEEDED:
            return None
        return sorted(self.samples, key=lambda sample: sample[1] / sample[0])[
            int(FASTEST * len(self.samples))
        ]


class StepCurve:
    """Time of an engine's steps by their number of sequences."""

    def __init__(self, slots: int) -> None:
        """`slots`: sequences that the engine computes at a time, at most."""
        self._slots = slots
        self._bins: dict[int, _Bin] = {}
        self._kv_share = 0.0
        """Share of the KV cache that one sequence takes, a moving average; 0 while it is not
        known."""

    def add(self, sequences: int, seconds: float) -> None:
        """Count one step."""
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
        points = sorted(
            point for each in self._bins.values() if (point := each.point()) is not None
        )
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
    """Seconds of a step, and of each sequence in it: the least squares of relative errors, neither
    below 0."""
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (n - mean_n) * (s - mean_s) for w, (n, s) in zip(weights, points, strict=True))
        / spread
    )
    slope = min(max(slope, 0.0), mean_s / mean_n)
    return mean_s - slope * mean_n, slope


@dataclass(frozen=True)
class Step:
    """One step of an engine, when the server has its tokens."""

    engine: int
    """Its number, with data parallelism."""
    tokens: int
    running: int | None
    """Sequences that go on after it; None where vLLM does not tell, as the next two."""
    waiting: int | None
    kv_use: float | None
    """Share of the KV cache in use, 0 to 1."""


class EngineCapacity:
    """Counts the tokens of a server's engines and times their steps.

    With data parallelism the engines share one curve, and each adds its ceiling.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._curve = StepCurve(slots)
        self._ended: dict[int, float | None] = {}
        """Time of each engine's last step; None where that step left it without work."""
        self.generated = 0
        """Tokens since the server began."""

    def step(self, step: Step) -> None:
        """Count one step. The first after a time without work is not timed: nobody knows when it
        began."""
        now, before = self._clock(), self._ended.get(step.engine)
        self.generated += step.tokens
        if step.running and step.kv_use:
            self._curve.hold(step.running, step.kv_use)
        if before is not None:
            self._curve.add(step.tokens, now - before)
        self._ended[step.engine] = None if step.running == 0 and not step.waiting else now

    def ceiling(self) -> float | None:
        """Tokens a second that the engines of this server can make; None while that is not
        known."""
        one = self._curve.ceiling()
        return None if one is None else one * max(1, len(self._ended))
