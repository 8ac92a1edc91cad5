"""Long curves with few points: `thin(series, most)`, which keeps every spike.

A plot of a thousand pixels shows no more than some thousand points; the lowest and the highest value of each slice of
steps are the ones that it would show. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from atropos_tui.monitor.series import Series, mean


def thin(series: Series, most: int) -> Series:
    """At most about `most` points of `series`: first, last, and the extremes of each slice in their order.

    A slice that holds a value which is not finite keeps one such value, too, so that the gap is seen.
    """
    if len(series) <= most:
        return series
    kept = {0, len(series) - 1}
    for start, end in _slices(len(series), max(1, most // 2)):
        finite = [at for at in range(start, end) if math.isfinite(series.values[at])]
        if finite:
            kept.add(min(finite, key=series.values.__getitem__))
            kept.add(max(finite, key=series.values.__getitem__))
        if len(finite) < end - start:
            kept.add(next(at for at in range(start, end) if not math.isfinite(series.values[at])))
    order = sorted(kept)
    return Series(
        [series.steps[at] for at in order], [series.values[at] for at in order], [series.times[at] for at in order]
    )


def averaged(series: Series, most: int) -> Series:
    """Means over at most `most` slices of `series`; each stands at the first step of its slice."""
    if len(series) <= most:
        return series
    found = Series()
    for start, end in _slices(len(series), most):
        average = mean(series.values[start:end])
        found.put(series.steps[start], math.nan if average is None else average, series.times[start])
    return found


def _slices(length: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` or fewer ranges of like length that cover `length`."""
    edges = [length * at // count for at in range(count + 1)]
    yield from ((start, end) for start, end in pairwise(edges) if end > start)
