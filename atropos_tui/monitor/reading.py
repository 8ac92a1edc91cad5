"""View of a curve: its axis, smoothing, value range, and marks of events. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, repeat
from statistics import quantiles

from atropos_tui.monitor.run.series import Series, averaged
from atropos_tui.monitor.run.state import RunState

# Outliers are this far from the middle half, in multiples of its width: Tukey's far-out values.
FENCE = 6.0
MOST_OUTLIERS = 0.05  # largest share of points that can be outliers
FEWEST = 12  # points needed for a range
SPANS = 5  # shortest curve that is smoothed, in spans of the moving average
# Axis of a young run: its first length in steps, its growth factor, and the factor of free space.
SHORTEST_AXIS, GROWTH, MARGIN = 10.0, 1.3, 1.05


class Along(StrEnum):
    """Unit of the horizontal axis."""

    STEPS = "steps"
    TOKENS = "tokens"
    MINUTES = "minutes"


@dataclass(frozen=True)
class Lens:
    """View settings that all charts of a screen share."""

    along: Along = Along.STEPS
    first: float | None = None
    """Start of the shown axis; None: its beginning."""
    last: float | None = None
    """End of the shown axis; None: its moving end."""
    newest: float | None = None
    """Length at the moving end to show, instead of `first` and `last`."""
    whole_plan: bool = False
    """Extend the axis to the planned end of the run."""
    cursor: float | None = None
    """Place at which values are read; None: the end."""
    smoothing: int = 10
    """Span of the moving average in points; 0: none."""
    cuts_outliers: bool = True
    other_axis: frozenset[str] = field(default_factory=frozenset)
    """Charts whose axis the user switched between linear and logarithmic."""

    def window(self, first: float, last: float) -> tuple[float, float]:
        """Return the shown part of the axis."""
        if self.newest is not None:
            return max(first, last - self.newest), last
        return first if self.first is None else self.first, last if self.last is None else self.last


def axis_end(newest: float, planned: float) -> float:
    """Return the last step of an axis: the plan from half of it on, before that at most `GROWTH`
    times `newest`."""
    if newest >= planned / 2:  # late enough that the rest of the plan is worth its width
        return max(newest, planned)
    end = SHORTEST_AXIS
    while end < MARGIN * newest:
        end *= GROWTH
    return min(float(math.ceil(end)), planned)


@dataclass
class Looking:
    """Holder of the shared lens."""

    lens: Lens


class Ruler:
    """Positions of a run's steps on an axis, at the moment of its creation."""

    def __init__(self, state: RunState, along: Along) -> None:
        self._along = along
        tokens = state.metric("tokens") if along is Along.TOKENS else Series()
        self._steps, self._sums = tokens.steps[:], list(_sums(tokens))
        times = state.metric("step_s")
        took = times.values[0] if len(times) and math.isfinite(times.values[0]) else 0.0
        self._start = (
            times.times[0] - took if len(times) else math.inf
        )  # without a step, all places are 0

    def place(self, series: Series) -> Sequence[float]:
        """Return the positions of the points of `series`."""
        if self._along is Along.STEPS:
            return series.steps
        if self._along is Along.MINUTES:
            return [max(0.0, (time - self._start) / 60) for time in series.times]
        return [self._tokens(step) for step in series.steps]

    def part(self, series: Series, first: float, last: float) -> Series:
        """Return the points of `series` from `first` to `last` on the axis."""
        if self._along is Along.STEPS:
            return series.part(bisect_left(series.steps, first), bisect_right(series.steps, last))
        if self._along is Along.MINUTES:
            begin, end = self._start + 60 * first, self._start + 60 * last
            # A millisecond more, because minutes as floats are rounded.
            return series.part(
                bisect_left(series.times, begin), bisect_right(series.times, end + 1e-3)
            )
        within = self._steps[bisect_left(self._sums, first) : bisect_right(self._sums, last)]
        return series.part(
            bisect_left(series.steps, min(within, default=0)),
            bisect_right(series.steps, max(within, default=0)),
        )

    def step_at(self, place: float, steps: Series) -> int:
        """Return the newest step of `steps` at or before `place`; 0 before the first."""
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
    """Exponential moving average with weight 2 / (span + 1), bias-corrected as Adam's moments
    are."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight if math.isfinite(value) else value)
    return found


def smooth(series: Series, span: int, most: int) -> Series:
    """Smooth `series` over `span` steps; with more than `most` points, average slices first."""
    means = averaged(series, most)
    of_slices = span * len(means) / max(1, series.count)
    values = smoothed(means.values, of_slices) if of_slices > 1 else means.values
    return Series(means.steps, values, means.times)


def is_smoothed(points: int, span: int) -> bool:
    return span > 1 and points >= SPANS * span


def sensible_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the value range without outliers; None if there are none, or the range would hardly
    shrink."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < FEWEST:
        return None
    quarter, _, three_quarters = quantiles(finite, n=4)
    reach = FENCE * (three_quarters - quarter)
    if not reach > 0:
        return None  # at least half of the values are equal
    first = bisect_left(finite, quarter - reach)
    last = bisect_right(finite, three_quarters + reach) - 1
    left_out = first + len(finite) - 1 - last
    low, high = finite[first], finite[last]
    if (
        not left_out
        or left_out > max(1, MOST_OUTLIERS * len(finite))
        or finite[-1] - finite[0] < 2 * (high - low)
    ):
        return None
    return low, high


def value_at(places: Sequence[float], values: Sequence[float], place: float) -> float | None:
    """Return the value at `place`, or of the last point before it."""
    at = bisect_right(places, place)
    return values[at - 1] if at else None


@dataclass(frozen=True)
class Mark:
    """An event at a step, drawn beside the curves."""

    step: int
    kind: str
    """restart, checkpoint, evaluation or diagnosis."""
    words: str
    time: float = 0.0


# At one place, the first kind in this order is shown.
MARKS = {"restart": "↻", "diagnosis": "▲", "evaluation": "◇", "checkpoint": "▪"}


def marks(state: RunState) -> list[Mark]:
    """Return restarts, checkpoints, evaluations and diagnoses, by step."""
    first_attempt = min(state.attempt_steps, default=0)
    steps = state.metric("step_s")
    found = [
        Mark(step, "restart", f"attempt {attempt} begins")
        for attempt, step in state.attempt_steps.items()
        if attempt > first_attempt
    ]
    found += [
        Mark(record.step, "checkpoint", "checkpoint", record.time) for record in state.checkpoints
    ]
    for name, series in state.evals.items():
        for step, value, time in zip(series.steps, series.values, series.times, strict=True):
            found.append(Mark(step, "evaluation", f"{name} {value:.3g}", time))
    for record in state.diagnoses:
        at = bisect_right(steps.times, record.time)
        found.append(Mark(steps.steps[at - 1] if at else 0, "diagnosis", record.title, record.time))
    return sorted(found, key=lambda mark: mark.step)
