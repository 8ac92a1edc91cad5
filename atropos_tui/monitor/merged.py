"""Logs of several components as one, in order of arrival: `MergedLogs([LogFollower(...), ...])`.

A line may reach its file a moment after a later one of another component reached its own. So, while a run is followed,
a line is held back for `HOLD_S` before it is shown (`due`): the order is right unless the supervisor was held up for
longer, and nothing is ever waited for. Nothing is lost or repeated either way, and memory holds a chunk of each log
plus what is held back.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from atropos_tui.monitor.follow import Line, LogFollower

HOLD_S = 0.15


def _arrival(line: Line) -> float:
    return line.time


def due(waiting: Iterable[tuple[float, float]]) -> float:
    """Lines that came up to this time are shown now; `waiting` has the time of each held line and when it was read.

    By the clock of the lines, and where that is another machine's or was set back, by when they were read.
    """
    oldest = time.monotonic() - HOLD_S
    return max(time.time() - HOLD_S, *(came for came, read_at in waiting if read_at <= oldest), 0.0)


class MergedLogs:
    """One stream from several followers; a single one is never held back."""

    def __init__(self, followers: Sequence[LogFollower]) -> None:
        self._followers = followers
        self._holds = len(followers) > 1
        self._waiting: list[Line] = []

    def ready(self) -> Iterator[Line]:
        """Lines whose turn has come, from all that is in the files now. Use it up before the next call."""
        limit = due((line.time, line.read_at) for line in self._waiting)
        waiting, self._waiting = self._waiting, []
        for line in self._all(waiting, *(follower.drain() for follower in self._followers)):
            if line.time <= limit or not self._holds:
                yield line
            else:
                self._waiting.append(line)

    def rest(self) -> Iterator[Line]:
        """Everything that is left, last lines without a newline included; for when nothing more can come."""
        waiting, self._waiting = self._waiting, []
        both = (itertools.chain(follower.drain(), follower.rest()) for follower in self._followers)
        yield from self._all(waiting, *both)

    @staticmethod
    def _all(*sources: Iterator[Line] | list[Line]) -> Iterator[Line]:
        return heapq.merge(*sources, key=_arrival)
