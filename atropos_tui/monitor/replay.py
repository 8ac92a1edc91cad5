"""Replay a recorded run on the screen: `Replay(Recording.load(run))` stands in for a live run."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atropos_common.protocol.control import (
    Accepted,
    Action,
    CommandRequest,
    Phase,
    Recipe,
    RunStatus,
    Snapshot,
    State,
)
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import (
    CommandRecord,
    ComponentRecord,
    DiagnosisRecord,
    GaugesRecord,
    StateRecord,
)
from atropos_common.protocol.trainer_records import CheckpointRecord, StepRecord
from atropos_common.system.run_dir import LATEST_TIME, RunDir
from atropos_tui.monitor.log_buffer import EntryMaker, LogEntry
from atropos_tui.monitor.log_reader import LogLine, LogReader, MergedLogs
from atropos_tui.monitor.run.run_files import (
    RecordBatch,
    RunInfo,
    component_rows,
    read_info,
    status_from_files,
    streams,
)
from atropos_tui.monitor.run.state import RunState
from atropos_tui.supervisor.client import Refused

# Records of one read, so that a jump does not block the screen.
RECORDS_AT_ONCE = 1_000
LINES_AT_ONCE = 500
# Logs from before the target of a jump are shown too.
LOOKBACK_S = 60.0
SLOWEST, FASTEST = 1 / 16, 4096.0
STATUS = (ComponentRecord, GaugesRecord)
# Records that the screen lists as events.
EVENTS = (StateRecord, DiagnosisRecord, CommandRecord, CheckpointRecord)
# Parts of the recording; an arrow key moves by one of them.
SEEKS = 50


@dataclass(frozen=True)
class Recording:
    """All records of a run, in a possible order of arrival."""

    run: RunDir
    info: RunInfo
    times: list[float]
    """Due time of each record, ascending, in Unix seconds."""
    records: list[Record]
    bad_lines: int
    final: RunStatus
    """Status at the end of the files."""

    def events(self) -> list[float]:
        """Return the times of events, ascending and without duplicates."""
        pairs = zip(self.times, self.records, strict=True)
        return sorted({at for at, record in pairs if isinstance(record, EVENTS)})

    def time_of(self, step: int) -> float | None:
        """Return the time of that step, or of the first later one."""
        for at, record in zip(self.times, self.records, strict=True):
            if isinstance(record, StepRecord) and record.step >= step:
                return at
        return None

    @classmethod
    def load(cls, run: RunDir) -> Recording:
        """Read every stream of `run`; count and skip invalid lines."""
        timed, bad_lines = [], 0
        for path in streams(run):
            records, bad = _read(path)
            timed.append(list(zip(_ascending(records), records, strict=True)))
            bad_lines += bad
        ordered = list(heapq.merge(*timed, key=lambda pair: pair[0]))
        info, state = read_info(run), RunState()
        for _, record in ordered:
            if isinstance(record, STATUS):
                state.apply(record)
        final = status_from_files(run, info, state)
        times, records = [at for at, _ in ordered], [record for _, record in ordered]
        return cls(run, info, times, records, bad_lines, final)


def _read(path: Path) -> tuple[list[Record], int]:
    tail, records = RecordTail(path), []
    while True:
        records += tail.read()
        if not tail.behind:
            return records, tail.bad_lines


def _ascending(records: list[Record]) -> list[float]:
    # Backwards: a record is due no later than any record after it in the same file.
    times, latest = [], math.inf
    for record in reversed(records):
        if 0 < record.time < LATEST_TIME:
            latest = min(latest, record.time)
        times.append(latest)
    times.reverse()
    known = max((at for at in times if math.isfinite(at)), default=0.0)
    return [at if math.isfinite(at) else known for at in times]


class ReplayClock:
    """Time of the recording, `speed` times as fast as the wall clock."""

    def __init__(
        self,
        first: float,
        last: float,
        speed: float = 1.0,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: `first`, `last`: Unix seconds; `ticks`: seconds of a monotonic clock."""
        self.first, self.last = first, last
        self.paused = False
        self.jumps = 0  # seeks so far
        self._speed = speed
        self._ticks = ticks
        self._at, self._since = first, ticks()

    @property
    def speed(self) -> float:
        return self._speed

    @property
    def at_end(self) -> bool:
        return self.now() >= self.last

    def now(self) -> float:
        """Return the recording's time in Unix seconds."""
        passed = 0.0 if self.paused else (self._ticks() - self._since) * self._speed
        return min(self.last, self._at + passed)

    def toggle(self) -> None:
        """Pause or continue; at the end, restart from the beginning."""
        if self.at_end and not self.paused:
            self.seek(self.first)
            return
        self._settle()  # fix the time passed so far before the mode changes
        self.paused = not self.paused

    def faster(self, factor: float) -> None:
        self._settle()
        self._speed = min(max(self._speed * factor, SLOWEST), FASTEST)

    def seek(self, at: float) -> None:
        self._at, self._since = min(max(at, self.first), self.last), self._ticks()
        self.jumps += 1

    def seek_event(self, events: Sequence[float], direction: int) -> None:
        """Seek to the next or previous of `events` (ascending)."""
        now = self.now()
        at = bisect_right(events, now) if direction > 0 else bisect_left(events, now) - 1
        end = self.last if direction > 0 else self.first
        self.seek(events[at] if 0 <= at < len(events) else end)

    def skip(self, parts: int) -> None:
        """Seek by parts of the whole (`SEEKS`)."""
        self.seek(self.now() + parts * (self.last - self.first) / SEEKS)

    def _settle(self) -> None:
        self._at, self._since = self.now(), self._ticks()


class ReplayFeed:
    """Due records, as from `RunFeed`. Read it from one thread at a time."""

    def __init__(self, recording: Recording, clock: ReplayClock) -> None:
        self._recording, self._clock = recording, clock
        self._next = 0
        self._seen = RunState()  # state of the supervisor's records so far
        self._steps = False
        self.status = self._status()

    @property
    def bad_lines(self) -> int:
        return self._recording.bad_lines

    def newest(self) -> list[Record]:
        """Return nothing: a recording is in memory and needs no preview."""
        return []

    def read(self) -> RecordBatch:
        """Return the records that became due; all due records after a seek back."""
        due = bisect_right(self._recording.times, self._clock.now())
        from_start = due < self._next
        if from_start:  # states cannot be rolled back: build a new one
            self._next, self._seen, self._steps = 0, RunState(), False
        until = min(due, self._next + RECORDS_AT_ONCE)
        records = self._recording.records[self._next : until]
        self._next = until
        for record in records:
            self._steps = self._steps or isinstance(record, StepRecord)
            if isinstance(record, STATUS):
                self._seen.apply(record)
        self.status = self._status()
        return RecordBatch(records, until < due, from_start)

    def _status(self) -> RunStatus:
        final = self._recording.final
        if self._next == len(self._recording.records):
            return final  # all records are due: the end of the run, with its exit code
        gauges = self._seen.gauges
        rows = component_rows(self._recording.info, self._seen)
        rows = [gauges.used([row])[0] if row.state.has_process else row for row in rows]
        coming = any(row.state in (State.PENDING, State.STARTING) for row in rows)
        return final.model_copy(
            update={
                "phase": Phase.STARTING if coming and not self._steps else Phase.RUNNING,
                "components": rows,
                "gpus": gauges.last.gpus if gauges.last else [],
                "exit_code": None,
                "reason": "",
                "seq": self._seen.supervisor_seq,
            }
        )


class ReplayControl:
    """Read-only supervisor of a recording: returns its status and refuses commands."""

    def __init__(self, feed: ReplayFeed) -> None:
        self._feed = feed

    async def status(self) -> RunStatus:
        return self._feed.status

    async def events(self, after: int = -1) -> AsyncIterator[Snapshot | Record]:
        yield Snapshot(status=self._feed.status)
        await asyncio.Event().wait()  # no further events; callers cancel this

    async def recipe(self, action: Action, component: str | None = None) -> Recipe:
        raise Refused(
            "this is a replay: what it shows is over",
            "atropos-tui attach opens the screen of a live run",
        )

    async def command(self, request: CommandRequest) -> Accepted:
        await self.recipe(request.action, request.component)
        raise AssertionError("a replay refuses every recipe")


class ReplayLogs:
    """Due log lines, with the interface of `LogFeed`."""

    def __init__(self, run: RunDir, clock: ReplayClock) -> None:
        self._run, self._clock = run, clock
        self._following: tuple[str, ...] = ()
        self._jumps = -1
        self._lines: Iterator[LogLine] = iter(())
        self._waiting: LogLine | None = None
        self._merged = MergedLogs([])
        self._maker = EntryMaker()

    def path(self, name: str) -> Path | None:
        """Return the path of the log of `name` that is shown."""
        attempts = self._maker.attempts
        return self._run.log(name, attempts[name]) if name in attempts else None

    def read(self, names: tuple[str, ...]) -> list[LogEntry]:
        """Return the due lines; after a seek or a change of `names`, the last minute."""
        if (names, self._clock.jumps) != (self._following, self._jumps):
            self._begin(names)
        entries: deque[LogEntry] = deque(maxlen=LINES_AT_ONCE)
        now, passed = self._clock.now(), 0
        while (line := self._waiting or next(self._lines, None)) is not None:
            self._waiting = line
            if line.time > now:
                break  # keep it in `_waiting` until it is due
            self._waiting = None
            for entry in self._maker.entries([line]):
                passed += len(entries) == LINES_AT_ONCE
                entries.append(entry)
        if not passed:
            return list(entries)
        words = f"··· {passed:,} lines passed over at this speed ···"
        return [LogEntry("note", words, time=entries[0].time), *entries]

    def _begin(self, names: tuple[str, ...]) -> None:
        self._following, self._jumps, self._waiting = names, self._clock.jumps, None
        since = self._clock.now() - LOOKBACK_S
        readers = [LogReader(self._run.logs / name, "all") for name in names]
        for reader in readers:
            reader.skip(since=since)
        self._merged.close()
        self._merged, self._maker = MergedLogs(readers), EntryMaker()
        self._lines = (line for line in self._merged.rest() if line.time >= since)


class Replay:
    """Feed, control, logs and clock of one recording."""

    def __init__(
        self, recording: Recording, speed: float = 1.0, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        self.recording = recording
        self.clock = ReplayClock(recording.times[0], recording.times[-1], speed, ticks)
        self.feed = ReplayFeed(recording, self.clock)
        self.control = ReplayControl(self.feed)
        self.logs = ReplayLogs(recording.run, self.clock)
