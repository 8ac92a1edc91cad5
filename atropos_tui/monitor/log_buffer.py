"""Log lines for a screen: followed by `LogFeed`, stored in `LogBuffer`.

A screen shows rows: one for each entry, or several for a wrapped one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from rich.cells import cell_len, chop_cells

from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.format import plain_text
from atropos_tui.monitor.log_reader import LogLine, LogReader, MergedLogs
from atropos_tui.monitor.patterns import Pattern

Kind = Literal["plain", "poll", "warning", "error", "note"]
Level = Literal["all", "warning", "error", "most"]
LEVELS: tuple[Level, ...] = get_args(Level)

# Seconds and lines read around a moment that the buffer no longer has.
AROUND_S, AROUND_LINES = 30.0, 400
# Rows that are searched as one text.
ROWS_AT_ONCE = 1000
# Notes are shown at each level.
_SHOWN: dict[Level, tuple[Kind, ...]] = {
    "all": ("plain", "poll", "warning", "error", "note"),
    "warning": ("warning", "error", "note"),
    "error": ("error", "note"),
    "most": ("plain", "warning", "error", "note"),
}
_LEVEL = re.compile(
    r"\b(?:(WARN|WARNING)|ERROR|CRITICAL|FATAL|Traceback|[A-Z]\w*(?:Error|Exception))\b"
)
_MAYBE = ("ERROR", "CRITICAL", "FATAL", "Traceback", "Error", "Exception", "WARN")
# Access log line of a web server: method and status class.
_ANSWER = re.compile(r'"([A-Z]+) \S+ HTTP/[\d.]+" ([1-5])\d\d\b')
# Parts that differ between equal lines: the time, and a client's port.
_CHANGING = re.compile(
    r"\b(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?|\b\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|(?<=\d\.\d\.\d\.\d:)\d+|(?<=127\.0\.0\.1:)\d+(?= - )"
)
# Characters at the end of two lines that must be equal before they are compared in full.
_SAME_END = 12


class LogEntry(NamedTuple):
    """One line. A `note` is ours: a new attempt, or skipped lines."""

    kind: Kind
    text: str
    component: str = ""
    time: float = 0.0
    """Unix seconds; 0 if unknown."""
    times: int = 1
    """Repetitions in a row; `time` is that of the first."""

    @property
    def shown(self) -> str:
        return self.text if self.times == 1 else f"{self.text}  × {self.times:,}"

    def repeats(self, other: LogEntry) -> bool:
        """Return True if only time and a client's port differ."""
        if (self.kind, self.component) != (other.kind, other.component) or self.kind == "note":
            return False
        if self.text == other.text:
            return bool(self.text.strip())
        # Cheap check first: the regular expression is slow, and most lines differ at their end.
        if self.text[-_SAME_END:] != other.text[-_SAME_END:]:
            return False
        return _CHANGING.sub("", self.text) == _CHANGING.sub("", other.text)


class Classifier:
    """Detects the level of a component's lines by their first level word; a traceback is one
    error."""

    def __init__(self) -> None:
        self._in_traceback = False

    def kind(self, line: str) -> Kind:
        if self._in_traceback and line[:1] in (" ", "\t", ""):
            return "error"
        self._in_traceback = False
        if "HTTP/" in line and (asked := _ANSWER.search(line)):
            return "warning" if asked[2] in "45" else "poll" if asked[1] == "GET" else "plain"
        # Substring search is much cheaper than the regular expression.
        if not any(word in line for word in _MAYBE):
            return "plain"
        found = _LEVEL.search(line)
        self._in_traceback = found is not None and "Traceback" in line
        if found is None or self._in_traceback:
            return "error" if found else "plain"
        return "warning" if found[1] else "error"


class LogBuffer:
    """At most `capacity` entries; the oldest are dropped."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.dropped = 0  # entries
        self.width = 0  # cells of the longest line since the last clear
        self.level: Level = "all"
        self.pattern: Pattern | None = None
        self._wrap: int | None = None
        self._entries: list[LogEntry] = []
        self._base = 0
        # Entry number and part of each row; None while each entry is one row.
        self._rows: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[LogEntry]:
        return self._entries

    def times(self) -> Iterator[tuple[int, float]]:
        """Return number and time of each stored entry."""
        return ((self._base + at, entry.time) for at, entry in enumerate(self._entries))

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self._entries) if self._rows is None else len(self._rows)

    def extend(self, entries: Iterable[LogEntry]) -> int:
        """Append entries, or count repetitions; return the number of rows dropped at the top."""
        kept = self._entries
        first = len(kept)
        for entry in entries:
            if kept and entry.repeats(kept[-1]):
                kept[-1] = kept[-1]._replace(times=kept[-1].times + 1)
                first = min(first, len(kept) - 1)
            else:
                kept.append(entry)
        for entry in kept[first:]:
            text = entry.shown
            self.width = max(self.width, len(text) if text.isascii() else cell_len(text))
        if self._rows is not None:
            # Rebuild the rows of changed entries: a repetition count may wrap to another row.
            del self._rows[bisect_left(self._rows, (self._base + first, 0)) :]
            self._rows.extend(self._rows_from(self._base + first))
        return self._trim() if len(self._entries) > self.capacity else 0

    def _trim(self) -> int:
        surplus = len(self._entries) - self.capacity
        del self._entries[:surplus]
        self._base += surplus
        self.dropped += surplus
        if self._rows is None:
            return surplus
        gone = bisect_left(self._rows, (self._base, 0))
        del self._rows[:gone]
        return gone

    def clear(self) -> None:
        self._base += len(self._entries)
        self._entries.clear()
        self.dropped = self.width = 0
        self._rows = None if self._rows is None else []

    def show(self, *, level: Level, pattern: Pattern | None, wrap: int | None) -> None:
        """Set the filter, and the width for wrapping (None: no wrapping)."""
        if (level, pattern, wrap) == (self.level, self.pattern, self._wrap):
            return
        self.level, self.pattern, self._wrap = level, pattern, wrap
        if level == "all" and pattern is None and wrap is None:
            self._rows = None
        else:
            self._rows = self._rows_from(self._base)

    def _rows_from(self, first: int) -> list[tuple[int, int]]:
        return [row for number in self._shown(first) for row in self._rows_of(number)]

    def _shown(self, first: int) -> list[int]:
        # Returns numbers of entries.
        entries = self._entries[first - self._base :]
        if self.pattern is None:
            return [first + at for at, entry in enumerate(entries) if self._has_level(entry)]
        matching = set(self.pattern.matching([entry.text for entry in entries]))
        return [
            first + at
            for at, entry in enumerate(entries)
            if entry.kind == "note" or (at in matching and self._has_level(entry))
        ]

    def _rows_of(self, number: int) -> list[tuple[int, int]]:
        entry = self._entries[number - self._base]
        if self._wrap is None:
            return [(number, 0)]
        return [(number, part) for part in range(len(self._parts(entry.shown)))]

    def _has_level(self, entry: LogEntry) -> bool:
        return entry.kind in _SHOWN[self.level]

    def _parts(self, text: str) -> list[str]:
        assert self._wrap is not None
        width = max(self._wrap, 1)
        if text.isascii():
            return [text[at : at + width] for at in range(0, len(text), width)] or [""]
        return chop_cells(text, width) or [""]

    def row(self, y: int) -> tuple[int, int, LogEntry, str] | None:
        """Return number, part, entry and text of a row, if it exists."""
        if not 0 <= y < self.height:
            return None
        number, part = (self._base + y, 0) if self._rows is None else self._rows[y]
        entry = self._entries[number - self._base]
        text = entry.shown if self._wrap is None else self._parts(entry.shown)[part]
        return number, part, entry, text

    def row_of(self, number: int) -> int | None:
        """Return the first row of an entry; None if it is dropped or hidden."""
        if not 0 <= number - self._base < len(self._entries):
            return None
        if self._rows is None:
            return number - self._base
        at = bisect_left(self._rows, (number, 0))
        return at if at < len(self._rows) and self._rows[at][0] == number else None

    def next_row(self, number: int, step: int) -> int | None:
        """Return the row after the last one of an entry, or before its first."""
        first = self.row_of(number)
        if first is None:
            return None
        if step < 0:
            return first - 1
        return first + 1 if self._rows is None else bisect_left(self._rows, (number + 1, 0))

    def find(self, wanted: Pattern | Kind, start: int, step: int) -> int | None:
        """Return the number of the next matching entry from row `start`, wrapping around."""
        for begin in range(0, self.height, ROWS_AT_ONCE):
            steps = range(begin, min(begin + ROWS_AT_ONCE, self.height))
            rows = [(start + step * count) % self.height for count in steps]  # wraps around the end
            numbers = [
                self._base + row if self._rows is None else self._rows[row][0] for row in rows
            ]
            entries = [self._entries[number - self._base] for number in numbers]
            if isinstance(wanted, str):
                hits = (at for at, entry in enumerate(entries) if entry.kind == wanted)
            else:
                hits = (at for at in wanted.matching([entry.text for entry in entries]))
            if (hit := next(hits, None)) is not None:
                return numbers[hit]
        return None

    def count(self, pattern: Pattern) -> int:
        """Count the shown lines that match."""
        entries = [self._entries[number - self._base] for number in self._shown(self._base)]
        return sum(entries[at].times for at in pattern.matching([entry.text for entry in entries]))


class EntryMaker:
    """Converts lines of several components into entries."""

    def __init__(self) -> None:
        self.attempts: dict[str, int] = {}  # of each component's last line
        self._classifiers: dict[str, Classifier] = {}

    def entries(self, lines: Iterable[LogLine]) -> list[LogEntry]:
        """Return the entries of `lines`, with a note at each new attempt."""
        entries: list[LogEntry] = []
        for at, name, attempt, text, _, is_note in lines:
            if self.attempts.get(name) != attempt:
                if name in self.attempts:
                    entries.append(LogEntry("note", f"── attempt {attempt} of {name} ──", name, at))
                else:
                    self._classifiers[name] = Classifier()
                self.attempts[name] = attempt
            if is_note:
                entries.append(LogEntry("note", text, name, at))
            else:
                text = plain_text(text)
                entries.append(LogEntry(self._classifiers[name].kind(text), text, name, at))
        return entries


class LogFeed:
    """Logs as a screen follows them."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._readers: dict[str, LogReader] = {}
        self._merged = MergedLogs([])
        self._maker = EntryMaker()

    def path(self, name: str) -> Path | None:
        """Return the path of the log of `name` that is read."""
        return self._readers[name].path if name in self._readers else None

    def around(self, name: str, time: float) -> list[LogEntry]:
        """Return lines of one component around `time` (Unix seconds), followed or not."""
        reader = LogReader(self._run.logs / name, "all")
        reader.skip(since=time - AROUND_S)
        lines = takewhile(
            lambda line: line.time <= time + AROUND_S, chain(reader.drain(), reader.rest())
        )
        found = deque((line for line in lines if line.time >= time - AROUND_S), AROUND_LINES)
        reader.close()
        return EntryMaker().entries(found)

    def read(self, names: tuple[str, ...]) -> list[LogEntry]:
        """Return the lines since the last call; the latest after a change of `names`."""
        if names != tuple(self._readers):
            self._merged.close()
            self._readers = {name: LogReader(self._run.logs / name, lossy=True) for name in names}
            self._merged, self._maker = MergedLogs(list(self._readers.values())), EntryMaker()
        return self._maker.entries(self._merged.ready())
