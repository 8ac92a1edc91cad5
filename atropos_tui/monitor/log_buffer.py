"""Log lines for a screen: followed (`LogFeed`), and kept in a bounded buffer, filtered, wrapped and searched.

Entries have numbers that never change. What a screen shows are *rows*: an entry each, or several where long lines are
wrapped; with a filter, only those that match it.
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

from atropos_common.run_dir import RunDir
from atropos_tui.monitor.format import plain_text
from atropos_tui.monitor.log_reader import LogLine, LogReader, MergedLogs
from atropos_tui.monitor.patterns import Pattern

Kind = Literal["plain", "poll", "warning", "error", "note"]
Level = Literal["all", "warning", "error", "most"]
LEVELS: tuple[Level, ...] = get_args(Level)

AROUND_S, AROUND_LINES = 30.0, 400
"""How much of a log is read about a moment that lies further back than what is kept."""
ROWS_AT_ONCE = 1000
"""Searched as one text on the way to the next match."""
_SHOWN: dict[Level, tuple[Kind, ...]] = {
    "all": ("plain", "poll", "warning", "error", "note"),
    "warning": ("warning", "error", "note"),
    "error": ("error", "note"),
    "most": ("plain", "warning", "error", "note"),
}
"""What is shown of each level; notes always are."""
_LEVEL = re.compile(r"\b(?:(WARN|WARNING)|ERROR|CRITICAL|FATAL|Traceback|[A-Z]\w*(?:Error|Exception))\b")
_MAYBE = ("ERROR", "CRITICAL", "FATAL", "Traceback", "Error", "Exception", "WARN")
_ANSWER = re.compile(r'"([A-Z]+) \S+ HTTP/[\d.]+" ([1-5])\d\d\b')
"""What a web server says of a request that it has answered."""
_CHANGING = re.compile(
    r"\b(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?|\b\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"|(?<=\d\.\d\.\d\.\d:)\d+|(?<=127\.0\.0\.1:)\d+(?= - )"
)
"""Of a line: when it was said, and a client's port."""
_SAME_END = 12
"""Characters that two lines must have in common before they are looked at closely."""


class LogEntry(NamedTuple):
    """One line. A `note` is ours: a new attempt, or lines that were skipped."""

    kind: Kind
    text: str
    component: str = ""
    time: float = 0.0
    """Unix seconds; 0 where nobody asked."""
    times: int = 1
    """It came so often in a row, the first time at `time`."""

    @property
    def shown(self) -> str:
        return self.text if self.times == 1 else f"{self.text}  × {self.times:,}"

    def repeats(self, other: LogEntry) -> bool:
        """Whether it says what `other` said, but for the time of day and a client's port."""
        if (self.kind, self.component) != (other.kind, other.component) or self.kind == "note":
            return False
        if self.text == other.text:
            return bool(self.text.strip())
        if self.text[-_SAME_END:] != other.text[-_SAME_END:]:
            return False
        return _CHANGING.sub("", self.text) == _CHANGING.sub("", other.text)


class Classifier:
    """Tells the level of a component's lines by their first word of one: a warning that names an error is a warning.

    A traceback's indented lines belong to it. A request that was refused is a warning, one that was only a look is a
    poll.
    """

    def __init__(self) -> None:
        self._in_traceback = False

    def kind(self, line: str) -> Kind:
        if self._in_traceback and line[:1] in (" ", "\t", ""):
            return "error"
        self._in_traceback = False
        if "HTTP/" in line and (asked := _ANSWER.search(line)):
            return "warning" if asked[2] in "45" else "poll" if asked[1] == "GET" else "plain"
        if not any(word in line for word in _MAYBE):
            return "plain"
        found = _LEVEL.search(line)
        self._in_traceback = found is not None and "Traceback" in line
        if found is None or self._in_traceback:
            return "error" if found else "plain"
        return "warning" if found[1] else "error"


class LogBuffer:
    """At most `capacity` entries; the oldest go first, so that a full one keeps its height: no layout at every line."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.dropped = 0
        """Entries that had to go."""
        self.width = 0
        """Of the longest line kept since the last clear, in cells."""
        self.level: Level = "all"
        self.pattern: Pattern | None = None
        self._wrap: int | None = None
        self._entries: list[LogEntry] = []
        self._base = 0
        self._rows: list[tuple[int, int]] | None = None
        """Number and part of each row; None while every entry is one row."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[LogEntry]:
        """What is kept, oldest first."""
        return self._entries

    def times(self) -> Iterator[tuple[int, float]]:
        """Number and time of each entry that is kept."""
        return ((self._base + at, entry.time) for at, entry in enumerate(self._entries))

    @property
    def height(self) -> int:
        """How many rows there are."""
        return len(self._entries) if self._rows is None else len(self._rows)

    def extend(self, entries: Iterable[LogEntry]) -> int:
        """Append, or count what only repeats the newest entry; how many rows left at the top."""
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
        """Which entries are shown, and the width at which they are wrapped (None: not at all)."""
        if (level, pattern, wrap) == (self.level, self.pattern, self._wrap):
            return
        self.level, self.pattern, self._wrap = level, pattern, wrap
        if level == "all" and pattern is None and wrap is None:
            self._rows = None
        else:
            self._rows = self._rows_from(self._base)

    def _rows_from(self, first: int) -> list[tuple[int, int]]:
        """The rows of what is shown, from an entry on."""
        return [row for number in self._shown(first) for row in self._rows_of(number)]

    def _shown(self, first: int) -> list[int]:
        """The numbers of the entries that are shown, from `first` on."""
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
        """Number, part, entry and text of a row; None where there is none."""
        if not 0 <= y < self.height:
            return None
        number, part = (self._base + y, 0) if self._rows is None else self._rows[y]
        entry = self._entries[number - self._base]
        return number, part, entry, entry.shown if self._wrap is None else self._parts(entry.shown)[part]

    def row_of(self, number: int) -> int | None:
        """The first row of an entry, or None when it is gone or not shown."""
        if not 0 <= number - self._base < len(self._entries):
            return None
        if self._rows is None:
            return number - self._base
        at = bisect_left(self._rows, (number, 0))
        return at if at < len(self._rows) and self._rows[at][0] == number else None

    def next_row(self, number: int, step: int) -> int | None:
        """The row behind the last one of an entry, or before its first; None when it is gone or not shown."""
        first = self.row_of(number)
        if first is None:
            return None
        if step < 0:
            return first - 1
        return first + 1 if self._rows is None else bisect_left(self._rows, (number + 1, 0))

    def find(self, wanted: Pattern | Kind, start: int, step: int) -> int | None:
        """The number of the next shown entry that matches, from row `start` on, in direction `step`, around the end."""
        for begin in range(0, self.height, ROWS_AT_ONCE):
            steps = range(begin, min(begin + ROWS_AT_ONCE, self.height))
            rows = [(start + step * count) % self.height for count in steps]
            numbers = [self._base + row if self._rows is None else self._rows[row][0] for row in rows]
            entries = [self._entries[number - self._base] for number in numbers]
            if isinstance(wanted, str):
                hits = (at for at, entry in enumerate(entries) if entry.kind == wanted)
            else:
                hits = (at for at in wanted.matching([entry.text for entry in entries]))
            if (hit := next(hits, None)) is not None:
                return numbers[hit]
        return None

    def count(self, pattern: Pattern) -> int:
        """How many shown lines match."""
        entries = [self._entries[number - self._base] for number in self._shown(self._base)]
        return sum(entries[at].times for at in pattern.matching([entry.text for entry in entries]))


class EntryMaker:
    """Makes the lines of several components into entries of a screen, with a note where another attempt begins."""

    def __init__(self) -> None:
        self.attempts: dict[str, int] = {}
        """The attempt of each component's last line."""
        self._classifiers: dict[str, Classifier] = {}

    def entries(self, lines: Iterable[LogLine]) -> list[LogEntry]:
        """The entries of `lines`, and the notes between them."""
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
    """Logs of a run as a screen follows them; what it follows may change at every call."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._readers: dict[str, LogReader] = {}
        self._merged = MergedLogs([])
        self._maker = EntryMaker()

    def path(self, name: str) -> Path | None:
        """The log of `name` that is being read."""
        return self._readers[name].path if name in self._readers else None

    def around(self, name: str, time: float) -> list[LogEntry]:
        """Lines of one component from shortly before `time` (Unix seconds) on, whatever is followed."""
        reader = LogReader(self._run.logs / name, "all")
        reader.skip(since=time - AROUND_S)
        lines = takewhile(lambda line: line.time <= time + AROUND_S, chain(reader.drain(), reader.rest()))
        found = deque((line for line in lines if line.time >= time - AROUND_S), AROUND_LINES)
        reader.close()
        return EntryMaker().entries(found)

    def read(self, names: tuple[str, ...]) -> list[LogEntry]:
        """What was printed since the last call; from their latest lines on, where `names` are others than before."""
        if names != tuple(self._readers):
            self._merged.close()
            self._readers = {name: LogReader(self._run.logs / name, lossy=True) for name in names}
            self._merged, self._maker = MergedLogs(list(self._readers.values())), EntryMaker()
        return self._maker.entries(self._merged.ready())
