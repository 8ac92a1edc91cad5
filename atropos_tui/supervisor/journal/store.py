"""Files of a run that the supervisor writes, and the event hub.

- `supervisor.jsonl` (`Journal`): every record, one writer.
- `journal.json` (`ProcessTable`): the run's processes.
- `result.json` (`RunResult`): how the run ended.

A record reaches the file before the subscribers. While the disk is full, records wait in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from atropos_common.protocol.record_base import Record, RecordError
from atropos_common.protocol.record_tail import next_seq
from atropos_common.protocol.records import (
    ComponentRecord,
    DiagnosisRecord,
    StateRecord,
    parse_line,
)
from atropos_common.system.files import is_own, read_regular, write_private
from atropos_tui.diagnoses.ledger import Ledger
from atropos_tui.profile.spec import StackSpec
from atropos_tui.supervisor.journal.seal import is_sealed, mac_of

AnyRecord = TypeVar("AnyRecord", bound=Record)
OnEvent = Callable[[Record], object]

_SEQ = re.compile(rb'"seq":\s*(\d+)')
BACKLOG_LINES = 10_000
"""Records kept in memory while the disk refuses them."""


class RunInUseError(ValueError):
    pass


class Journal:
    """Only writer of `supervisor.jsonl`."""

    def __init__(self, path: Path, run_id: str, descriptor: int | None = None) -> None:
        self.path = path
        self.run_id = run_id
        self._fd = locked(path) if descriptor is None else descriptor
        self.seq = next_seq(path) - 1
        self._backlog: deque[bytes] = deque(maxlen=BACKLOG_LINES)
        self._torn = b""

    def fileno(self) -> int:
        return self._fd

    def append(self, record: AnyRecord) -> AnyRecord:
        """Set run id, time and sequence number, write the record, and return it."""
        self.seq += 1
        stamped = record.model_copy(
            update={"run_id": self.run_id, "time": time.time(), "seq": self.seq}
        )
        # The deque drops the oldest line when it is full.
        self._backlog.append(stamped.to_line().encode())
        self._flush()
        return stamped

    def _flush(self) -> None:
        while self._torn or self._backlog:
            line = self._torn or self._backlog.popleft()
            try:
                written = os.write(self._fd, line)
            except OSError:
                # The rest of a partly written line goes first at the next append, so no line is
                # torn.
                self._torn = line
                return
            self._torn = line[written:]

    def between(self, after: int, upto: int) -> Iterator[str]:
        """Lines with `after < seq <= upto`."""
        with self.path.open("rb") as file:
            for line in file:
                if after < _seq_of(line) <= upto:
                    yield line.decode()

    def diagnoses(self) -> Iterator[DiagnosisRecord]:
        """All records of diagnoses, ends included."""
        with self.path.open("rb") as file:
            for line in file:
                # Cheap text test before the JSON parser.
                if b'"diagnosis"' in line:
                    with contextlib.suppress(RecordError):
                        if isinstance(record := parse_line(line), DiagnosisRecord):
                            yield record

    def close(self) -> None:
        if self._fd >= 0:
            self._flush()
            os.close(self._fd)
            self._fd = -1


def locked(path: Path) -> int:
    """Open and lock `supervisor.jsonl`. A process that inherits the descriptor keeps the lock.

    Raises:
        RunInUseError: another process has the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        # The kernel releases the lock when the last process with this descriptor ends, even after
        # SIGKILL.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise RunInUseError(
            f"{path.parent}: another supervisor runs here; attach to it, or name another --run-dir"
        ) from None
    return descriptor


def _seq_of(line: bytes) -> int:
    # A regular expression is faster than parsing each line of a long journal as JSON.
    found = _SEQ.search(line)
    return int(found.group(1)) if found else -1


class Entry(BaseModel):
    """Part of a file of the run directory; fields of later versions are ignored."""

    model_config = ConfigDict(extra="ignore", defer_build=True)


class Kept(Entry):
    def write(self, path: Path) -> None:
        """Replace `path` atomically. If the disk refuses, the old file stays."""
        with contextlib.suppress(OSError):
            write_private(path, self.model_dump_json(indent=1))


class FarEntry(Entry, frozen=True):
    """A component on another node."""

    name: str
    node: str
    host: str
    command: list[str]
    """Command that starts a node agent there."""
    pid: int = 0
    """Process id there; 0 until known."""
    ticks: int = 0
    end_pid: int = 0
    """Process id of its node agent."""
    end_ticks: int = 0
    clears: list[str] = Field(default_factory=list)
    folders: list[str] = Field(default_factory=list)
    """Its temporary folders there."""
    turn: str = ""
    """SLURM job id: the end of the job ends everything in it."""


class ProcessEntry(Entry, frozen=True):
    """One process of the run. `create_time`: seconds since the boot `boot_id`."""

    pid: int
    create_time: float
    ticks: int
    """`create_time` in clock ticks."""
    pgid: int
    boot_id: str
    attempt: int = 0
    group: str = ""
    clears: list[str] = Field(default_factory=list)
    """Files to delete when it ends."""
    far: FarEntry | None = None
    """The component, if this process only connects to another node."""


class ProcessTable(Kept):
    """Processes that a crashed supervisor may have left (`journal.json`)."""

    run_id: str
    supervisor: ProcessEntry | None = None
    components: dict[str, ProcessEntry] = Field(default_factory=dict)
    group: str = ""
    """Control group of the run, if it has one."""
    written_at: float = Field(0.0, exclude=True)
    """Unix time of the file; set by `load`."""

    def write(self, path: Path) -> None:
        content = self.model_dump(mode="json")
        # `clean` and `up --resume` kill processes and run commands from this file, so a MAC guards
        # it.
        sealed = content | {"mac": mac_of(path.parent, content)}
        with contextlib.suppress(OSError):
            write_private(path, json.dumps(sealed, indent=1))

    @classmethod
    def load(cls, path: Path) -> ProcessTable | None:
        """None if the table is missing, unreadable or not sealed for this run directory."""
        # Refuse a file or folder of another user before reading it.
        if not (is_own(path) and is_own(path.parent)):
            return None
        try:
            content = json.loads(read_regular(path))
            mac = content.pop("mac", None)
            table = cls.model_validate(content)
            table.written_at = path.stat().st_mtime
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return None
        return table if is_sealed(path.parent, content, mac) else None


class RunResult(Kept):
    """Exit codes: 0 done, 1 internal error, 3 failed, 4 timeout, 130 interrupted."""

    exit_code: int
    reason: str
    component: str | None = None
    last_lines: list[str] = Field(default_factory=list)
    ended_by: Literal["", "command", "signal", "time_limit"] = ""
    """Origin of a requested end; `time_limit` is SLURM's signal."""
    ended_at: float = Field(default_factory=time.time)

    def write(self, path: Path) -> None:
        """Write into the space that `reserve` took, or as an ordinary file if that fails."""
        try:
            self._write_in_place(path)
        except OSError:
            super().write(path)

    def _write_in_place(self, path: Path) -> None:
        reserved = _reserved(path)
        data = self.model_dump_json(indent=1).encode()
        if len(data) > RESULT_BYTES:  # very long log lines: drop them and keep the rest
            data = (
                self.model_copy(update={"last_lines": [], "reason": self.reason[:4096]})
                .model_dump_json()
                .encode()
            )
        with reserved.open("r+b") as file:
            file.write(data)
            # The reserved file is longer than the result: cut it after the write.
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        reserved.replace(path)

    @classmethod
    def load(cls, path: Path) -> RunResult | None:
        """None while the run goes on, or if the file was cut short."""
        try:
            return cls.model_validate_json(read_regular(path))
        except (OSError, ValueError):
            return None


RESULT_BYTES = 32 * 1024
"""Bytes reserved for `result.json`, mostly for the last forty log lines."""


def _reserved(path: Path) -> Path:
    return path.with_name(f"{path.name}.reserved")


def reserve(path: Path) -> None:
    """Reserve disk space, so that a run can write its result on a full disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(
            _reserved(path),
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        with os.fdopen(descriptor, "wb") as file:
            # Write zeros: a sparse file would reserve no blocks.
            file.write(bytes(RESULT_BYTES))
            file.flush()
            os.fsync(file.fileno())


class SubscriberDroppedError(Exception):
    """A subscriber was too slow and has lost events."""


class Subscription:
    """Asynchronous iterator over records; ends when the hub closes."""

    def __init__(self, hub: Hub, limit: int) -> None:
        self._hub = hub
        self._limit = limit
        self._events: deque[Record] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self.dropped = False

    def _offer(self, event: Record) -> None:
        if len(self._events) >= self._limit:
            # Free the memory at once: the subscriber needs a new snapshot anyway.
            self.dropped = True
            self._events.clear()
            self._hub.unsubscribe(self)
        else:
            self._events.append(event)
        self._wake.set()

    def _end(self) -> None:
        self._closed = True
        self._wake.set()

    def close(self) -> None:
        self._hub.unsubscribe(self)
        self._end()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Record:
        while not self._events:
            if self.dropped:
                raise SubscriberDroppedError
            if self._closed:
                raise StopAsyncIteration
            # Cleared before the wait; records that arrive in between set it again.
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()


class Hub:
    """Passes every record to every subscriber; drops one that falls behind.

    All methods run in the event loop's thread, so state read between `subscribe` and the next
    `await` is consistent with the first record.
    """

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._subscribers: set[Subscription] = set()
        self._closed = False

    def publish(self, event: Record) -> None:
        for subscriber in list(self._subscribers):
            subscriber._offer(event)

    def subscribe(self) -> Subscription:
        subscription = Subscription(self, self._limit)
        if self._closed:
            subscription._end()
        else:
            self._subscribers.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscribers.discard(subscription)

    def close(self) -> None:
        self._closed = True
        for subscriber in list(self._subscribers):
            subscriber._end()
        self._subscribers.clear()


class Store:
    """Record stream of a run: journal first, then subscribers."""

    def __init__(self, stack: StackSpec, journal: Journal, on_event: OnEvent | None = None) -> None:
        self.journal = journal
        self.hub = Hub()
        self._roles = {spec.name: spec.role.value for spec in stack.components}
        self._node = platform.node()
        self._nodes = {spec.name: spec.place.node for spec in stack.components if spec.place}
        self._on_event = on_event
        self._changed = asyncio.Event()
        self.diagnoses = Ledger(self.emit)

    def emit(self, record: Record) -> None:
        """Complete a component's record, write it to the journal, then publish it."""
        if isinstance(record, ComponentRecord):
            role = self._roles.get(record.component or "", record.role)
            node = self._nodes.get(record.component or "", self._node)
            record = record.model_copy(update={"role": role, "node": node})
        stamped = self.journal.append(record)
        self.hub.publish(stamped)
        if self._on_event:
            with contextlib.suppress(Exception):  # an error in a listener must not stop the run
                self._on_event(stamped)
        if isinstance(record, StateRecord):
            self.diagnoses.moved(record)
        self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change. Take it before reading the state, then wait for it."""
        return self._changed
