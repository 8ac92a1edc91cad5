"""A metric over optimizer steps in bounded memory (`Series`), and thinned for drawing.

Old points are merged: one stands for 2, 4, 8 ... steps, with their mean, lowest and highest value.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import mul

from atropos_tui.monitor.format import real

MOST_STEPS = 2**53
BEYOND = 2**62  # beyond every step, with room for the widest point
# An axis cannot scale magnitudes beyond these, which come from foreign records.
LARGEST, SMALLEST = 1e300, 1e-300
# Beyond it old points are merged; a shorter run is kept whole.
MOST_POINTS = 8192
# Never merged: the newest points, and the first, where a run compiles and warms up.
NEWEST, FIRST = 2048, 32
# Limit of the merged points. A series is at this limit from its first merge on.
MOST_MERGED = 4096
# New points between two merges. An array allocates a sixteenth more than it holds, which is more
# than this, so that it keeps its size in memory for the rest of a run.
ROOM = 256


class Series:
    """Values by step, ascending; non-finite ones are stored.

    Each of the oldest `len(counts)` points stands for steps: `values` has their mean, `steps` and
    `times` the first.
    """

    def __init__(
        self, steps: Iterable[int] = (), values: Iterable[float] = (), times: Iterable[float] = ()
    ) -> None:
        self.steps = array("q", steps)
        self.values = array("d", values)
        self.times = array("d", times)  # Unix seconds
        self.counts = array("q")  # steps of each of the oldest points
        # Lowest and highest value of those points; NaN if one was not finite (the mean leaves it
        # out).
        self.lows, self.highs = array("d"), array("d")
        # A merged point has the steps with the same `step // _width`: curves of one run stay
        # comparable. Below `_doubled_to` it has those with the same `step // (2 * _width)`.
        self._width = 1
        self._doubled_to = -BEYOND

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return NotImplemented
        mine = self.steps, self.values, self.times, self.counts
        return mine == (other.steps, other.values, other.times, other.counts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Series({list(self.steps)}, {list(self.values)}, {list(self.times)})"

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    @property
    def is_merged(self) -> bool:
        return bool(self.counts)

    @property
    def count(self) -> int:
        """Steps with a value."""
        return sum(self.counts) + len(self) - len(self.counts)

    @property
    def total(self) -> float:
        return sum(map(mul, self.values, self.counts)) + sum(self.values[len(self.counts) :])

    @property
    def mean(self) -> float | None:
        """Mean over all steps; NaN if one value is NaN."""
        return self.total / self.count if self.steps else None

    @property
    def highest(self) -> float | None:
        """Maximum over all steps."""
        return max([*self.highs, *self.values[len(self.counts) :]], default=None)

    def put(self, step: int, value: float, time: float = 0.0) -> None:
        """Add or replace the point of `step`, unless it is merged."""
        steps = self.steps
        if type(value) is not float:
            value = real(value)
        if not steps or step > steps[-1]:  # nearly always: steps arrive in order
            steps.append(step)
            self.values.append(value)
            self.times.append(time)
        elif (at := bisect_left(steps, step)) < len(self.counts):
            return  # within merged points
        elif steps[at] == step:
            self.values[at], self.times[at] = value, time
        else:
            steps.insert(at, step)
            self.values.insert(at, value)
            self.times.insert(at, time)
        if len(steps) > (MOST_MERGED + NEWEST + ROOM if self.counts else MOST_POINTS):
            self._merge_old()

    def cut(self, step: int) -> None:
        """Drop the points from `step` on, and one with steps before and after it."""
        at = bisect_left(self.steps, step)
        before = at - 1
        if 0 <= before < len(self.counts) and self.counts[before] > 1:
            # Its value mixes steps before and after the cut, so it cannot be corrected.
            at = before if step < self._end_of(self.steps[before]) else at
        for points in (self.steps, self.values, self.times, self.counts, self.lows, self.highs):
            del points[at:]
        if self._doubled_to > step:  # every merged point that is left has the double width
            self._width, self._doubled_to = 2 * self._width, -BEYOND

    def at(self, step: int) -> float | None:
        """Return the value of exactly this step, if it has one."""
        at = bisect_left(self.steps, step)
        return self.values[at] if at < len(self) and self.steps[at] == step else None

    def reach(self, step: int) -> tuple[int, int]:
        """Return first and last of the steps that share a point with `step`."""
        at = bisect_right(self.steps, step) - 1
        if not 0 <= at < len(self.counts) or self.counts[at] == 1:
            return step, step
        end = self._end_of(self.steps[at])
        return self.steps[at], min(end, self.steps[at + 1] if at + 1 < len(self) else end) - 1

    def newest(self, count: int) -> Series:
        """Return the points of at least the newest `count` steps."""
        at = max(len(self.counts), len(self) - count)
        inside = len(self) - at
        while at and inside < count:
            at -= 1
            inside += self.counts[at]
        return self.part(at, len(self))

    def part(self, start: int, end: int) -> Series:
        """Return the points from index `start` to before `end`."""
        found = Series(self.steps[start:end], self.values[start:end], self.times[start:end])
        found.counts = self.counts[start:end]
        found._width, found._doubled_to = self._width, self._doubled_to
        found.lows, found.highs = self.lows[start:end], self.highs[start:end]
        return found

    def like(self, values: Iterable[float]) -> Series:
        """Return other values for the same points and step counts."""
        found = Series(self.steps, values, self.times)
        found.counts = self.counts[:]
        found._width, found._doubled_to = self._width, self._doubled_to
        found.lows, found.highs = found.values[: len(self.counts)], found.values[: len(self.counts)]
        return found

    def tail(self, count: int) -> list[float]:
        """Return the newest `count` values, oldest first."""
        return list(self.values[-count:]) if count > 0 else []

    def extremes(self) -> Series:
        """Return the series for drawing: a merged point becomes its lowest and highest value."""
        merged = len(self.counts)
        if not merged:
            return self
        found = Series()
        for step, value, time, count, low, high in zip(
            self.steps, self.values, self.times, self.counts, self.lows, self.highs, strict=False
        ):
            both = (value,) if count == 1 else (low, high) if math.isfinite(low) else (value, low)
            found.steps.extend([step] * len(both))
            found.values.extend(both)
            found.times.extend([time] * len(both))
        found.steps += self.steps[merged:]
        found.values += self.values[merged:]
        found.times += self.times[merged:]
        return found

    def _end_of(self, step: int) -> int:
        # First step after the merged point that has `step`.
        width = 2 * self._width if step < self._doubled_to else self._width
        return (step // width + 1) * width

    def _merge_old(self) -> None:
        merged, end = len(self.counts), len(self) - NEWEST
        values = self.values[merged:end]
        self.counts.extend([1] * len(values))
        self.lows += values
        self.highs += values
        # The last merged point may still be growing.
        if self._width > 1:
            self._merge(max(FIRST, merged - 1), end, self._width)
        # Double the width of as many points as are too many, oldest first: doubling all at once
        # would halve the memory, which then would grow again.
        while (surplus := len(self.counts) - MOST_MERGED) > 0:
            start = bisect_left(self.steps, self._doubled_to, FIRST, len(self.counts))
            self._double(start, min(start + 2 * surplus, len(self.counts)))

    def _double(self, start: int, end: int) -> None:
        # The points from `start` to `end`, and those that share the last wide point with them.
        width = 2 * self._width
        to = (self.steps[end - 1] // width + 1) * width
        end = bisect_left(self.steps, to, end, len(self.counts))
        if end == len(self.counts):
            self._width, self._doubled_to = width, -BEYOND
        else:
            self._doubled_to = to
        self._merge(start, end, width)

    def _merge(self, start: int, end: int, width: int) -> None:
        # Points that share a slot of `width` steps.
        found = Series()
        steps, at = self.steps, start
        while at < end:
            # End of the slot: the first point with another `step // width`.
            to = bisect_left(steps, (steps[at] // width + 1) * width, at + 1, min(at + width, end))
            found.steps.append(steps[at])
            found.times.append(self.times[at])
            value, low, high, count = self._summed(at, to)
            found.values.append(value)
            found.lows.append(low)
            found.highs.append(high)
            found.counts.append(count)
            at = to
        for name in ("steps", "values", "times", "counts", "lows", "highs"):
            getattr(self, name)[start:end] = getattr(found, name)

    def _summed(self, start: int, end: int) -> tuple[float, float, float, int]:
        # Mean, lowest, highest and step count.
        if end == start + 1:
            return self.values[start], self.lows[start], self.highs[start], self.counts[start]
        values, counts, lows = self.values[start:end], self.counts[start:end], self.lows[start:end]
        total, count = sum(map(mul, values, counts)), sum(counts)
        # Nearly always all values are finite; then builtins do the work, without a Python loop.
        if math.isfinite(total) and math.isfinite(sum(lows)):
            return total / count, min(lows), max(self.highs[start:end]), count
        pairs = zip(values, counts, strict=True)
        finite = [(value, number) for value, number in pairs if math.isfinite(value)]
        known = sum(number for _, number in finite)
        mean = sum(value * number / known for value, number in finite) if known else math.nan
        return mean, math.nan, math.nan, count


def on_scale(value: float) -> float:
    """Return NaN beyond `LARGEST`, 0 below `SMALLEST`, and other values unchanged."""
    if SMALLEST <= abs(value) < LARGEST or math.isinf(value):
        return value
    return 0.0 if abs(value) < SMALLEST else math.nan


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, NaN if one value is NaN, None without values."""
    return sum(values) / len(values) if values else None


def thin(series: Series, most: int) -> Series:
    """Return about `most` points: first, last, and the extremes of each slice."""
    is_merged, series = series.is_merged, series.extremes()
    if len(series) <= most:
        return series
    kept = {0, len(series) - 1}
    for start, end in _slices(series, max(1, most // 2), by_steps=is_merged):
        part = series.values[start:end]
        if math.isfinite(sum(part)):  # nearly always; then builtins do the work
            kept |= {start + part.index(min(part)), start + part.index(max(part))}
            continue
        finite = [at for at in range(start, end) if math.isfinite(series.values[at])]
        if finite:
            kept.add(min(finite, key=series.values.__getitem__))
            kept.add(max(finite, key=series.values.__getitem__))
        if len(finite) < end - start:
            kept.add(next(at for at in range(start, end) if not math.isfinite(series.values[at])))
    order = sorted(kept)
    steps, times = [series.steps[at] for at in order], [series.times[at] for at in order]
    return Series(steps, [series.values[at] for at in order], times)


def averaged(series: Series, most: int) -> Series:
    """Return means over at most `most` slices, at the first step of each."""
    if len(series) <= most:
        return series
    slices = list(_slices(series, most, by_steps=series.is_merged))
    if series.is_merged:
        means = [series.part(start, end).mean for start, end in slices]
    else:  # fast path: runs for every chart at each redraw
        means = [sum(series.values[start:end]) / (end - start) for start, end in slices]
    starts = [start for start, _ in slices]
    steps, times = [series.steps[at] for at in starts], [series.times[at] for at in starts]
    return Series(steps, [math.nan if mean is None else mean for mean in means], times)


def _slices(series: Series, count: int, *, by_steps: bool) -> Iterator[tuple[int, int]]:
    # Ranges of equal numbers of points; with `by_steps` of steps, because merged points have more.
    edges = [len(series) * at // count for at in range(count + 1)]
    if by_steps:
        first, width = series.steps[0], series.steps[-1] + 1 - series.steps[0]
        edges = [bisect_left(series.steps, first + width * at // count) for at in range(count + 1)]
    yield from ((start, end) for start, end in pairwise(edges) if end > start)
