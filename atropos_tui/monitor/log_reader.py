"""Read growing logs: `LogReader` for one component, `MergedLogs` for several by time of arrival.

A lossy reader keeps a screen up to date: it reads one bounded chunk a call, and skips the rest.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from atropos_common.protocol.record_tail import CHUNK_BYTES, MAX_LINE_BYTES
from atropos_common.system.files import IN_LOGS, next_data, open_regular
from atropos_tui.monitor.format import bytes_text
from atropos_tui.supervisor.processes.logs import LogTimes, attempts, latest_attempt

# A lossy reader with more unread bytes skips ahead.
MAX_BEHIND_BYTES = 4 * CHUNK_BYTES
# Bytes that a lossy reader reads per call in a flood: each line costs the screen time.
FLOOD_BYTES = 32 * 1024
# Reads without a skip that end a flood.
CALM_READS = 20
ROTATED = "[atropos] the log was rotated here; its earlier part is in the file ending in .1"
# Each line of a merged log is held back this long.
HOLD_S = 0.15


class LogLine(NamedTuple):
    """One line of a component's log, without its newline."""

    time: float
    """Unix seconds of its arrival; never decreasing in a reader."""
    component: str
    attempt: int
    text: str
    read_at: float
    """Monotonic clock."""
    is_note: bool = False
    """Inserted by the reader."""


ARRIVAL = itemgetter(0)


class LogReader:
    """Reads one component, from its latest attempt on.

    Args:
        attempt: `"all"`: from the first on; a number: that one alone.
        lossy: prefer the newest lines.
    """

    def __init__(
        self, folder: Path, attempt: int | Literal["all"] | None = None, *, lossy: bool = False
    ) -> None:
        self._folder = folder
        self._alone = isinstance(attempt, int)
        self.lossy = lossy
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._times: LogTimes | None = None
        self._partial = b""
        self._clock = 0.0
        self._begun = False  # after something of this attempt was read
        self._is_torn = False  # after a skip into the middle of a line
        self._calm = CALM_READS  # reads since the last skip
        if isinstance(attempt, int):
            self._path = next(
                (path for path in attempts(folder) if int(path.stem) == attempt), None
            )
        else:
            self._path = self._next_attempt() if attempt == "all" else latest_attempt(folder)

    @property
    def path(self) -> Path | None:
        """Path of the current log; None until an attempt exists."""
        return self._path

    def skip(self, count: float = math.inf, since: float = -math.inf) -> None:
        """Start late, but early enough for the last `count` lines since `since` (Unix seconds)."""
        for segment, path in self._backwards():
            file = _open(segment)
            if file is None or (self._file is not None and _same(file, self._file)):
                continue
            self._path = path
            times = self._take(segment, file)
            start, lines_behind = _start(file, times, count, since)
            file.seek(start)
            count -= lines_behind
            if start:
                return

    def drain(self) -> Iterator[LogLine]:
        """Yield complete lines up to the current end (lossy: at most a chunk)."""
        while True:
            later = (
                self._next_attempt()
            )  # before reading: once it exists, this attempt's log is complete
            yield from self._attempt(is_over=later is not None)
            if later is None:
                return
            yield from self.rest()
            self.close()
            self._path, self._begun, self._is_torn, self._calm = later, False, False, CALM_READS

    def rest(self) -> Iterator[LogLine]:
        """Yield the last line if it has no newline; nothing more may come."""
        if self._partial and self._file is not None:
            yield from self._timed(
                [self._partial], self._file.tell() - 1 - len(self._partial), time.monotonic()
            )
        self._partial = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._times is not None:
            self._times.close()
            self._times = None

    @property
    def _number(self) -> int:
        return int(self._path.stem) if self._path else -1

    def _next_attempt(self) -> Path | None:
        if self._alone:
            return None
        now = self._number
        later = (path for path in attempts(self._folder) if int(path.stem) > now)
        return (max if self.lossy else min)(later, key=lambda path: int(path.stem), default=None)

    def _backwards(self) -> Iterator[tuple[Path, Path]]:
        # Every segment to read, newest first, with the log that it belongs to.
        first = self._number
        for path in sorted(attempts(self._folder), key=lambda path: -int(path.stem)):
            if int(path.stem) == first or (int(path.stem) > first and not self._alone):
                yield path, path
                yield _older(path), path

    def _attempt(self, is_over: bool) -> Iterator[LogLine]:
        if self._path is None:
            return
        if self._file is None:
            self._open_first(self._path)
        # At most the open file and two more by name. Without the limit, a flood that rotates faster
        # than it is read would keep this loop going for ever; the next call continues.
        for _ in range(3):
            if self._file is None:
                return
            newer = self._rotated(
                self._path, self._file
            )  # before reading: a renamed file is complete
            yield from self._lines(self._file, grows=newer is None and not is_over)
            if newer is None:
                return
            if self.lossy:
                yield self._own(ROTATED)
            self._take(self._path, newer)

    def _open_first(self, path: Path) -> None:
        for segment in (path,) if self.lossy else (_older(path), path):
            if (file := _open(segment)) is not None:
                self._take(segment, file)
                return

    def _take(self, segment: Path, file: BinaryIO) -> LogTimes:
        self.close()
        self._file, self._times = file, LogTimes(segment, file)
        return self._times

    def _rotated(self, path: Path, file: BinaryIO) -> BinaryIO | None:
        # The next segment, opened, if `file` is no longer written.
        try:
            with contextlib.ExitStack() as stack:
                newest = stack.enter_context(open_regular(path, IN_LOGS))
                if _same(newest, file):
                    return None
                # The new file is opened before the old one: a rotation between the two can only
                # make the older one newer. The other order could lose a segment.
                older = _open(_older(path))
                if older is not None and not _same(older, file) and not _same(older, newest):
                    return older
                if older is not None:
                    again = _same(older, newest)
                    older.close()
                    if again:
                        return None  # a rotation happened just now: decide at the next call
                stack.pop_all()
                return newest
        except OSError:
            return None  # between the two steps of a rotation

    def _lines(self, file: BinaryIO, grows: bool) -> Iterator[LogLine]:
        assert self._times is not None
        size = os.fstat(file.fileno()).st_size
        if size < file.tell():  # the file was truncated: read it from its start
            file.seek(0)
            self._partial = b""
            yield self._own(ROTATED)
        if self.lossy:
            at_once = CHUNK_BYTES if self._calm >= CALM_READS else FLOOD_BYTES
            may_wait = grows or at_once == CHUNK_BYTES  # in a flood, skip the surplus at once
            yield from self._jump(
                file, size - file.tell(), at_once, MAX_BEHIND_BYTES if may_wait else at_once
            )
            size = min(size, file.tell() + at_once) if grows else size
        left = size - file.tell()
        while left > 0:
            begin = file.tell()
            left -= (
                file.seek(next_data(file.fileno(), begin)) - begin
            )  # skip a hole of a sparse file
            data = file.read(min(CHUNK_BYTES, left)) if left > 0 else b""
            if not data:
                return
            left -= len(data)
            end = file.tell() - len(data) - len(self._partial)
            self._times.refresh()
            read_at = time.monotonic()
            *lines, self._partial = (self._partial + data).split(b"\n")
            if len(self._partial) > MAX_LINE_BYTES:
                lines, self._partial = [*lines, self._partial], b""
            if self._is_torn and lines:
                end += len(lines.pop(0)) + 1
                self._is_torn = False
            yield from self._timed(lines, end, read_at)

    def _jump(self, file: BinaryIO, left: int, at_once: int, allowed: int) -> Iterator[LogLine]:
        # Skips a lossy reader that is late to the last `at_once` bytes.
        assert self._times is not None
        is_late = left > (allowed if self._begun else at_once)
        self._calm = 0 if is_late and self._begun else self._calm + 1
        if is_late:
            where = "skipped here" if self._begun else "earlier"
            self._partial, self._is_torn = b"", True
            self._times.refresh()
            self._clock = max(self._clock, self._times.at(file.seek(left - at_once, os.SEEK_CUR)))
            name = f"{self._folder.name}/{self._number}.log"
            yield self._own(
                f"··· {bytes_text(left - at_once)} {where}, in {name} ···", is_note=True
            )
        self._begun = True

    def _timed(self, lines: list[bytes], begin: int, read_at: float) -> list[LogLine]:
        # The innermost loop of all log reading. The first line begins at offset `begin`.
        assert self._times is not None
        arrival, number, ends, end = self._times.at, self._number, [], begin - 1
        for line in lines:
            end += len(line) + 1
            ends.append(end)
        # Usually a chunk arrived at one time: then one lookup serves all lines.
        if ends and arrival(ends[0]) == arrival(ends[-1]):
            self._clock = max(self._clock, arrival(end))
            clocks: Iterable[float] = itertools.repeat(self._clock, len(lines))
        else:
            clocks = list(itertools.accumulate(map(arrival, ends), max, initial=self._clock))[1:]
            self._clock = max([self._clock, *clocks])
        make, name = tuple.__new__, self._folder.name  # `LogLine(...)` takes twice as long
        return [
            make(LogLine, (clock, name, number, line.decode("utf-8", "replace"), read_at, False))
            for clock, line in zip(clocks, lines, strict=True)
        ]

    def _own(self, text: str, is_note: bool = False) -> LogLine:
        return LogLine(
            self._clock, self._folder.name, self._number, text, time.monotonic(), is_note
        )


class MergedLogs:
    """Merges several readers by time of arrival; no line is lost or repeated."""

    def __init__(self, readers: Sequence[LogReader]) -> None:
        self._readers = readers
        self._holds = len(readers) > 1
        self._bounded = self._holds and all(reader.lossy for reader in readers)
        self._waiting: list[LogLine] = []

    def ready(self) -> Iterator[LogLine]:
        """Yield the lines that are due. Exhaust it before the next call."""
        if not self._holds:
            yield from self._in_order(*(reader.drain() for reader in self._readers))
            return
        limit = self._due()
        waiting, self._waiting = self._waiting, []
        for line in self._in_order(waiting, *(reader.drain() for reader in self._readers)):
            if line.time <= limit:
                yield line
            else:
                self._waiting.append(line)

    def rest(self) -> Iterator[LogLine]:
        """Yield everything that is left; call when nothing more can come."""
        waiting, self._waiting = self._waiting, []
        both = (itertools.chain(reader.drain(), reader.rest()) for reader in self._readers)
        yield from self._in_order(waiting, *both)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _due(self) -> float:
        # If the clock of the lines is another machine's or was set back, the time of reading
        # decides.
        oldest = time.monotonic() - HOLD_S
        return max(
            time.time() - HOLD_S,
            *(line.time for line in self._waiting if line.read_at <= oldest),
            0.0,
        )

    def _in_order(self, *sources: Iterable[LogLine]) -> Iterable[LogLine]:
        if self._bounded:  # lossy readers return little: sorting costs half of merging
            return sorted(itertools.chain(*sources), key=ARRIVAL)
        return heapq.merge(*sources, key=ARRIVAL)


def _start(file: BinaryIO, times: LogTimes, count: float, since: float) -> tuple[int, int]:
    # The offset from which the last `count` lines since `since` are read, and the lines after it.
    if count == math.inf and since == -math.inf:
        return 0, 0
    times.refresh()
    position, newlines = file.seek(0, os.SEEK_END), 0
    while position > 0:
        step = min(CHUNK_BYTES, position)
        position -= step
        is_hole = next_data(file.fileno(), position) >= position + step
        data = b"" if is_hole else os.pread(file.fileno(), step, position)
        newlines += data.count(b"\n")
        first = position + data.find(b"\n")
        if first >= position and (newlines > count or times.at(first) < since):
            return first + 1, newlines - 1
    return 0, newlines


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _open(path: Path) -> BinaryIO | None:
    try:
        return open_regular(path, IN_LOGS)
    except OSError:
        return None


def _same(one: BinaryIO, other: BinaryIO) -> bool:
    return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
