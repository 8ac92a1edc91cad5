"""How a curve is read: what it is drawn along, smoothed, within which range, and what happened beside it. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, repeat
from statistics import quantiles

from atropos_tui.monitor.series import Series, averaged
from atropos_tui.monitor.state import RunState

FENCE = 6.0
"""Values further from the middle half than so many times its width are outliers."""
MOST_OUTLIERS = 0.05
"""Of the points; where there are more, they are no outliers."""
FEWEST = 12
"""Points that a range is judged by."""
SPANS = 5
"""Shortest curve that is smoothed, in spans of the moving average: of a shorter one nothing would be left."""
SHORTEST_AXIS, GROWTH, MARGIN = 10.0, 1.3, 1.05
"""The axis of a young run: its first length in steps, the factor by which it grows, and the room kept free."""


class Along(StrEnum):
    """What the horizontal axis counts."""

    STEPS = "steps"
    TOKENS = "tokens"
    MINUTES = "minutes"


@dataclass(frozen=True)
class Lens:
    """How all charts of a screen are looked at: together, so that they show the same moment."""

    along: Along = Along.STEPS
    first: float | None = None
    """Of the axis; None: from its beginning."""
    last: float | None = None
    """None: to its end, also while that moves."""
    newest: float | None = None
    """So much of the axis' end instead, moving along with it."""
    whole_plan: bool = False
    """Draw to the planned end of the run, although it is far from there."""
    cursor: float | None = None
    """Where the values are read; None: at the end."""
    smoothing: int = 10
    """Span of the moving average, in points; 0: none."""
    cuts_outliers: bool = True
    other_axis: frozenset[str] = field(default_factory=frozenset)
    """Charts, by name, whose vertical axis is logarithmic where it is linear by default, and the other way round."""

    def window(self, first: float, last: float) -> tuple[float, float]:
        """The part of the axis from `first` to `last` that is drawn."""
        if self.newest is not None:
            return max(first, last - self.newest), last
        return first if self.first is None else self.first, last if self.last is None else self.last


def axis_end(newest: float, planned: float) -> float:
    """Last step of the axis of a run: the plan once half of it is done, before that at most `GROWTH` times `newest`.

    It grows in jumps, so that curves do not shift with every step.
    """
    if newest >= planned / 2:
        return max(newest, planned)
    end = SHORTEST_AXIS
    while end < MARGIN * newest:
        end *= GROWTH
    return min(float(math.ceil(end)), planned)


@dataclass
class Looking:
    """The lens that all charts of a screen share; a chart changes it at once, for the next key may be under way."""

    lens: Lens


class Ruler:
    """Where a step of a run lies on an axis, as of the moment at which the ruler was made.

    It copies what it reads from `state`: series that are placed by it may have grown since, or lost their end to a
    restart. Later steps lie at its end.
    """

    def __init__(self, state: RunState, along: Along) -> None:
        self._along = along
        tokens = state.metric("tokens") if along is Along.TOKENS else Series()
        self._steps, self._sums = tokens.steps[:], list(_sums(tokens))
        times = state.metric("step_s")
        took = times.values[0] if len(times) and math.isfinite(times.values[0]) else 0.0
        self._start = times.times[0] - took if len(times) else math.inf  # before the first step all lies at 0

    def place(self, series: Series) -> Sequence[float]:
        """The places of the points of `series`."""
        if self._along is Along.STEPS:
            return series.steps
        if self._along is Along.MINUTES:
            return [max(0.0, (time - self._start) / 60) for time in series.times]
        return [self._tokens(step) for step in series.steps]

    def part(self, series: Series, first: float, last: float) -> Series:
        """The points of `series` from `first` to `last` on the axis."""
        if self._along is Along.STEPS:
            return series.part(bisect_left(series.steps, first), bisect_right(series.steps, last))
        if self._along is Along.MINUTES:
            begin, end = self._start + 60 * first, self._start + 60 * last
            return series.part(bisect_left(series.times, begin), bisect_right(series.times, end + 1e-3))
        within = self._steps[bisect_left(self._sums, first) : bisect_right(self._sums, last)]
        return series.part(
            bisect_left(series.steps, min(within, default=0)), bisect_right(series.steps, max(within, default=0))
        )

    def step_at(self, place: float, steps: Series) -> int:
        """The newest step of `steps` at or before `place`; 0 before the first."""
        at = bisect_right(self.place(steps), place)
        return steps.steps[at - 1] if at else 0

    def _tokens(self, step: int) -> float:
        at = bisect_right(self._steps, step)
        return self._sums[at - 1] if at else 0.0


def _sums(series: Series) -> Iterator[float]:
    total = 0.0
    for value, count in zip(series.values, chain(series.counts, repeat(1)), strict=False):
        total += value * count if math.isfinite(value) else 0.0
        yield total


def smoothed(values: Sequence[float], span: float) -> list[float]:
    """Exponential moving average with the weight 2 / (span + 1), without a bias towards the first value (as Adam's
    moments are corrected). What is not finite is left out, and stays where it is."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight if math.isfinite(value) else value)
    return found


def smooth(series: Series, span: int, most: int) -> Series:
    """`series` smoothed over `span` steps; of more than `most` points, means over slices of them."""
    means = averaged(series, most)
    of_slices = span * len(means) / max(1, series.count)
    values = smoothed(means.values, of_slices) if of_slices > 1 else means.values
    return Series(means.steps, values, means.times)


def is_smoothed(points: int, span: int) -> bool:
    """Whether so many points bear an average over `span`."""
    return span > 1 and points >= SPANS * span


def sensible_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Lowest and highest value without outliers; None where there are none, or leaving them out shows hardly more.

    Outliers are few (`MOST_OUTLIERS`) and far (`FENCE`) from the middle half, as Tukey's far-out values are. A curve
    that mostly stands still has no outliers: each of its moves is what one looks for.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < FEWEST:
        return None
    quarter, _, three_quarters = quantiles(finite, n=4)
    reach = FENCE * (three_quarters - quarter)
    if not reach > 0:
        return None
    first = bisect_left(finite, quarter - reach)
    last = bisect_right(finite, three_quarters + reach) - 1
    left_out = first + len(finite) - 1 - last
    low, high = finite[first], finite[last]
    if not left_out or left_out > max(1, MOST_OUTLIERS * len(finite)) or finite[-1] - finite[0] < 2 * (high - low):
        return None
    return low, high


def value_at(places: Sequence[float], values: Sequence[float], place: float) -> float | None:
    """The value that held at `place`: of the point there, else of the one before; None before the first."""
    at = bisect_right(places, place)
    return values[at - 1] if at else None


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step, beside the curves."""

    step: int
    kind: str
    """restart, checkpoint, evaluation or diagnosis."""
    words: str
    time: float = 0.0


MARKS = {"restart": "↻", "diagnosis": "▲", "evaluation": "◇", "checkpoint": "▪"}
"""The glyph of each kind; where several share a place, the first of these is shown."""


def marks(state: RunState) -> list[Mark]:
    """Restarts, checkpoints, evaluations and diagnoses, by step."""
    first_attempt = min(state.attempt_steps, default=0)
    steps = state.metric("step_s")
    found = [
        Mark(step, "restart", f"attempt {attempt} begins")
        for attempt, step in state.attempt_steps.items()
        if attempt > first_attempt
    ]
    found += [Mark(record.step, "checkpoint", "checkpoint", record.time) for record in state.checkpoints]
    for name, series in state.evals.items():
        for step, value, time in zip(series.steps, series.values, series.times, strict=True):
            found.append(Mark(step, "evaluation", f"{name} {value:.3g}", time))
    for record in state.diagnoses:
        at = bisect_right(steps.times, record.time)
        found.append(Mark(steps.steps[at - 1] if at else 0, "diagnosis", record.title, record.time))
    return sorted(found, key=lambda mark: mark.step)
