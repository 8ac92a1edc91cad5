"""One metric over optimizer steps, aware of attempts: the memory behind a curve."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass
class Series:
    """Values by step, ascending. NaN and infinities are kept; a value that does not exist has no point."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Unix seconds of each point."""

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
        return self.values[-count:] if count > 0 else []


def mean(values: list[float]) -> float | None:
    """Arithmetic mean; NaN if one value is NaN, None for no values."""
    return sum(values) / len(values) if values else None
