"""One metric over optimizer steps, aware of attempts: the memory behind a curve."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

MOST_STEPS = 2**53
LARGEST, SMALLEST = 1e300, 1e-300
"""Beyond these a plot has no scale any more: figures of foreign records, which must not end what draws them."""


class Series:
    """Values by step, ascending. NaN and infinities are kept; a value that does not exist has no point.

    Values and times are packed, for a long run has a hundred thousand of them.
    """

    def __init__(self, steps: Iterable[int] = (), values: Iterable[float] = (), times: Iterable[float] = ()) -> None:
        self.steps = list(steps)
        self.values = array("d", values)
        self.times = array("d", times)
        """Unix seconds of each point."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return NotImplemented
        return (self.steps, self.values, self.times) == (other.steps, other.values, other.times)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Series({self.steps}, {list(self.values)}, {list(self.times)})"

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """Newest value, or None where there is no data."""
        return self.values[-1] if self.values else None

    def put(self, step: int, value: float, time: float = 0.0) -> None:
        """Add the point of `step`, replacing one that is there."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            self.times.append(time)
            return
        at = bisect_left(self.steps, step)
        if self.steps[at] == step:
            self.values[at], self.times[at] = value, time
        else:
            self.steps.insert(at, step)
            self.values.insert(at, value)
            self.times.insert(at, time)

    def cut(self, step: int) -> None:
        """Forget every point from `step` on."""
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:], self.times[at:]

    def tail(self, count: int) -> list[float]:
        """The newest `count` values, oldest first."""
        return list(self.values[-count:]) if count > 0 else []


def on_scale(value: float) -> float:
    """`value` as a plot can place it: NaN where it is beyond `LARGEST`, 0 where it is nearer to 0 than `SMALLEST`."""
    if SMALLEST <= abs(value) < LARGEST or math.isinf(value):
        return value
    return 0.0 if abs(value) < SMALLEST else math.nan


def real(value: float) -> float:
    """`value` as a float; a whole number beyond any float, in a foreign record, is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; NaN if one value is NaN, None for no values."""
    return sum(values) / len(values) if values else None
