"""All runs as rows and sentences; an ended run is read again only when its files change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atropos_common.protocol.control import Phase, RunStatus
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.run.run_files import (
    RunFeed,
    RunInfo,
    changed_at,
    read_info,
    size_of,
    status_from_files,
)
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.run_list import LIVE, RunRow
from atropos_tui.monitor.verdict import Verdict, verdict

FIRST, PART = 30, 20  # rows of the first and of every later part of a slow first scan
# A longer stream takes over a second to read: only the run under the cursor gets its sentence.
LARGEST_BYTES = 4_000_000


@dataclass(frozen=True)
class Source:
    """Access to the runs of this user."""

    roots: Callable[[], Sequence[Path]]
    """Directories of all runs, newest first."""
    row: Callable[[Path], RunRow | None]
    """Description of the run in a directory; None if it was removed."""


@dataclass
class Catalogue:
    """Rows of all runs. Use it from one thread at a time."""

    source: Source
    count: int = 0
    """Number of runs, read or not."""
    _known: dict[Path, tuple[object, RunRow]] = field(default_factory=dict)

    def scan(self) -> Iterator[list[RunRow]]:
        """Yield the rows known so far, then all; an unchanged ended run is not read again."""
        roots = list(self.source.roots())
        self.count = len(roots)
        self._known = {root: self._known[root] for root in roots if root in self._known}
        read = 0
        for root in roots:
            if self._refresh(root):
                read += 1
                if read >= FIRST and (read - FIRST) % PART == 0:
                    yield self._rows(roots)
        yield self._rows(roots)

    def _rows(self, roots: Sequence[Path]) -> list[RunRow]:
        return [self._known[root][1] for root in roots if root in self._known]

    def _refresh(self, root: Path) -> bool:
        # True if the files were read.
        stamp, before = stamp_of(root), self._known.get(root)
        if before and before[0] == stamp and is_ended(before[1]):
            return False
        if row := self.source.row(root):
            self._known[root] = stamp, row
        return True


def is_ended(row: RunRow) -> bool:
    """Return True if nothing will change the row by itself."""
    return row.state != LIVE and row.state != "waits"


def stamp_of(root: Path) -> object:
    """Return a value that changes with the files of a run."""
    run = RunDir(root)
    files = (run.run_json, run.result_json, run.notes_json, run.telemetry_jsonl)
    return tuple(map(changed_at, files))


class Story:
    """Follows one run to tell its sentence."""

    def __init__(self, root: Path) -> None:
        self._feed, self._state = RunFeed(RunDir(root)), RunState()
        self._info = RunInfo()

    def tell(self, status: RunStatus | None = None) -> Verdict:
        """Return the sentence; `status`: the supervisor's, of a live run."""
        run = self._feed.run
        self._state, self._info = self._feed.catch_up(self._state), read_info(run)
        status = status or status_from_files(run, self._info, self._state)
        return verdict(status, self._info, self._state, time.time())


@dataclass
class Sentences:
    """Sentences of runs, by directory. Use it from one thread at a time."""

    _ended: dict[Path, tuple[object, Verdict]] = field(default_factory=dict)
    _live: dict[Path, Story] = field(default_factory=dict)

    def known(self, row: RunRow) -> Verdict | None:
        """Return the sentence of an ended run, if its files have not changed since."""
        found = self._ended.get(row.dir)
        return found[1] if found and found[0] == stamp_of(row.dir) else None

    def tell(self, row: RunRow, status: RunStatus | None = None) -> Verdict:
        """Read the run and return its sentence."""
        if is_ended(row) or status is None or status.phase is Phase.ENDED:
            self._live.pop(row.dir, None)
            stamp = stamp_of(row.dir)
            said = Story(row.dir).tell()
            self._ended[row.dir] = stamp, said
            return said
        return self._live.setdefault(row.dir, Story(row.dir)).tell(status)


def is_quick(row: RunRow) -> bool:
    """Return True if the run's records are read within a fraction of a second."""
    with suppress(OSError):
        return size_of(RunDir(row.dir).telemetry_jsonl) <= LARGEST_BYTES
    return False
