"""What a run writes down and tells: its journal, the table of its processes, its result, and the hub of its events.

`supervisor.jsonl` (`Journal`: every record, one writer), `journal.json` (`ProcessTable`: who lives) and `result.json`
(`RunResult`: how it ended). Records go to the file before anyone hears of them (`Store.emit`, `Hub`). On open a torn
last line is repaired and the sequence goes on. A full disk does not stop the run: lines wait in memory and are written,
in order, as soon as the disk takes them.
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

from atropos_common.files import is_own, read_regular, write_private
from atropos_common.record_tail import next_seq
from atropos_common.records import ComponentRecord, DiagnosisRecord, Record, RecordError, StateRecord, parse_line
from atropos_tui.diagnoses.ledger import Ledger
from atropos_tui.profile.spec import StackSpec
from atropos_tui.supervisor.seal import is_sealed, mac_of

AnyRecord = TypeVar("AnyRecord", bound=Record)
OnEvent = Callable[[Record], object]

_SEQ = re.compile(rb'"seq":\s*(\d+)')
BACKLOG_LINES = 10_000
"""Lines kept in memory while the disk refuses them."""


class RunInUseError(ValueError):
    """Another supervisor owns this run directory."""


class Journal:
    """The single writer of `supervisor.jsonl`."""

    def __init__(self, path: Path, run_id: str, descriptor: int | None = None) -> None:
        """Open `path`, repairing its end.

        Args:
            descriptor: what `locked(path)` gave; it is closed with the journal.

        Raises:
            RunInUseError: another supervisor has it open.
        """
        self.path = path
        self.run_id = run_id
        self._fd = locked(path) if descriptor is None else descriptor
        self.seq = next_seq(path) - 1
        self._backlog: deque[bytes] = deque(maxlen=BACKLOG_LINES)
        self._torn = b""

    def fileno(self) -> int:
        """The locked descriptor: who inherits it keeps the run directory locked."""
        return self._fd

    def append(self, record: AnyRecord) -> AnyRecord:
        """Stamp `record` with run, time and sequence, write it, and give back the stamped one."""
        self.seq += 1
        stamped = record.model_copy(update={"run_id": self.run_id, "time": time.time(), "seq": self.seq})
        self._backlog.append(stamped.to_line().encode())
        self._flush()
        return stamped

    def _flush(self) -> None:
        while self._torn or self._backlog:
            line = self._torn or self._backlog.popleft()
            try:
                written = os.write(self._fd, line)
            except OSError:
                self._torn = line
                return
            self._torn = line[written:]

    def between(self, after: int, upto: int) -> Iterator[str]:
        """Lines of the file with `after < seq <= upto`."""
        with self.path.open("rb") as file:
            for line in file:
                if after < _seq_of(line) <= upto:
                    yield line.decode()

    def diagnoses(self) -> Iterator[DiagnosisRecord]:
        """Every diagnosis and every end of one in the file."""
        with self.path.open("rb") as file:
            for line in file:
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
    """Open `supervisor.jsonl` and lock it; who inherits the descriptor keeps the lock.

    Raises:
        RunInUseError: another process has the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise RunInUseError(
            f"{path.parent}: another supervisor runs here; attach to it, or name another --run-dir"
        ) from None
    return descriptor


def _seq_of(line: bytes) -> int:
    """Sequence of a line, -1 if it has none; without parsing it, since a long run has many."""
    found = _SEQ.search(line)
    return int(found.group(1)) if found else -1


class Entry(BaseModel):
    """A part of a file of the run directory; what a later version has besides is left out."""

    model_config = ConfigDict(extra="ignore", defer_build=True)


class Kept(Entry):
    """A file of the run directory that is replaced as a whole."""

    def write(self, path: Path) -> None:
        """Replace `path` atomically. A disk that refuses leaves the old file: the run goes on, and ends, without."""
        with contextlib.suppress(OSError):
            write_private(path, self.model_dump_json(indent=1))


class FarEntry(Entry, frozen=True):
    """A component on another node, and how that node is reached."""

    name: str
    node: str
    host: str
    command: list[str]
    """Starts a far end there."""
    pid: int = 0
    """On that node; 0 until it is known."""
    ticks: int = 0
    end_pid: int = 0
    """Of its far end."""
    end_ticks: int = 0
    clears: list[str] = Field(default_factory=list)
    """Files that must not outlive it."""
    folders: list[str] = Field(default_factory=list)
    """Names of its temporary folders there."""
    turn: str = ""
    """Of SLURM's job, whose end is that of all that was started in it."""


class ProcessEntry(Entry, frozen=True):
    """One process that the supervisor started. `create_time` counts seconds after the boot named by `boot_id`."""

    pid: int
    create_time: float
    ticks: int
    """The same in clock ticks, exact."""
    pgid: int
    boot_id: str
    attempt: int = 0
    group: str = ""
    """Its control group, if it has one."""
    clears: list[str] = Field(default_factory=list)
    """Files that must not outlive it."""
    sessions: dict[int, int] = Field(default_factory=dict)
    """Sessions that its descendants started: session id -> start ticks of its leader."""
    keeper: str = ""
    """Address of the process that keeps it while no supervisor runs (`survive`)."""
    keeper_pid: int = 0
    keeper_ticks: int = 0
    digest: str = ""
    """Of what was started, to tell whether the plan still says the same."""
    far: FarEntry | None = None
    """Where the component really is, if this process only reaches it."""
    proven: bool = False
    """It was healthy once."""
    seen: list[str] = Field(default_factory=list)
    """Patterns of its log checks and stages that a line has matched."""
    stages: dict[str, float] = Field(default_factory=dict)
    """Stages that it has reached, and when, in Unix seconds."""


class ProcessTable(Kept):
    """`journal.json`: which processes a crashed supervisor may have left. Where it is old, the marker finds them."""

    run_id: str
    supervisor: ProcessEntry | None = None
    components: dict[str, ProcessEntry] = Field(default_factory=dict)
    group: str = ""
    """The run's control group, if it has one."""
    done: list[str] = Field(default_factory=list)
    """One-shot steps that were done; they are not repeated under components that live on."""
    written_at: float = Field(0.0, exclude=True)
    """Of a table that was read: when its file was written, in Unix seconds."""

    def write(self, path: Path) -> None:
        content = self.model_dump(mode="json")
        sealed = content | {"mac": mac_of(path.parent, content)}
        with contextlib.suppress(OSError):
            write_private(path, json.dumps(sealed, indent=1))

    @classmethod
    def load(cls, path: Path) -> ProcessTable | None:
        """Read the table in `path`. `None` if it is missing, unreadable or not sealed by this installation for this
        run directory: `clean` and `up --resume` end processes and run commands that the table names."""
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
    """Exit code as in the table of exit codes: 0 done, 1 fault, 3 failed, 4 timed out, 130 interrupted."""

    exit_code: int
    reason: str
    component: str | None = None
    """The component that decided it."""
    last_lines: list[str] = Field(default_factory=list)
    """The end of its log."""
    ended_by: Literal["", "command", "signal", "time_limit"] = ""
    """Origin of an end that was asked for: `down`, SIGTERM or SIGINT, or SLURM's signal before its time limit."""
    ended_at: float = Field(default_factory=time.time)

    def write(self, path: Path) -> None:
        """Write `result.json` into the room that `reserve` took at the start of the run, else as any other file."""
        try:
            self._write_in_place(path)
        except OSError:
            super().write(path)

    def _write_in_place(self, path: Path) -> None:
        room = _room(path)
        data = self.model_dump_json(indent=1).encode()
        if len(data) > RESULT_BYTES:  # long lines of a log: the rest matters more
            data = self.model_copy(update={"last_lines": [], "reason": self.reason[:4096]}).model_dump_json().encode()
        with room.open("r+b") as file:
            file.write(data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        room.replace(path)

    @classmethod
    def load(cls, path: Path) -> RunResult | None:
        """The result in `path`; None while the run goes on, or when it was cut short."""
        try:
            return cls.model_validate_json(read_regular(path))
        except (OSError, ValueError):
            return None


RESULT_BYTES = 32 * 1024
"""Room for `result.json`: the forty last lines of a log are most of it."""


def _room(path: Path) -> Path:
    return path.with_name(f"{path.name}.reserved")


def reserve(path: Path) -> None:
    """Take the room of a `result.json` on the disk, so that a run which ends on a full disk can say how."""
    with contextlib.suppress(OSError):
        descriptor = os.open(_room(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(RESULT_BYTES))
            file.flush()
            os.fsync(file.fileno())


class SubscriberDroppedError(Exception):
    """This subscriber was too slow and has lost events; subscribe again for a fresh snapshot."""


class Subscription:
    """Asynchronous iterator over records in order; ends when the hub closes."""

    def __init__(self, hub: Hub, limit: int) -> None:
        self._hub = hub
        self._limit = limit
        self._events: deque[Record] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self.dropped = False

    def _offer(self, event: Record) -> None:
        if len(self._events) >= self._limit:
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
        """Stop receiving."""
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
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()


class Hub:
    """Hands every record to every subscriber.

    The publisher never waits; a subscriber that falls behind is dropped, and told so. All methods belong to the thread
    of the event loop: what is looked at after `subscribe` and before the next `await` is as of its first record.
    """

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._subscribers: set[Subscription] = set()
        self._closed = False

    def publish(self, event: Record) -> None:
        """Give `event` to all; never waits."""
        for subscriber in list(self._subscribers):
            subscriber._offer(event)

    def subscribe(self) -> Subscription:
        """All records from now on."""
        subscription = Subscription(self, self._limit)
        if self._closed:
            subscription._end()
        else:
            self._subscribers.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscribers.discard(subscription)

    def close(self) -> None:
        """End every subscription once it has delivered what it holds."""
        self._closed = True
        for subscriber in list(self._subscribers):
            subscriber._end()
        self._subscribers.clear()


class Store:
    """The stream of a run's records: written to the journal, then told to everyone."""

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
        """Stamp a component's record with its role and this node, journal it, then tell everyone."""
        if isinstance(record, ComponentRecord):
            role = self._roles.get(record.component or "", record.role)
            node = self._nodes.get(record.component or "", self._node)
            record = record.model_copy(update={"role": role, "node": node})
        stamped = self.journal.append(record)
        self.hub.publish(stamped)
        if self._on_event:
            with contextlib.suppress(Exception):  # a listener's fault must not stop the run
                self._on_event(stamped)
        if isinstance(record, StateRecord):
            self.diagnoses.moved(record)
        self.notify()

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change; take it before looking, then wait for it."""
        return self._changed
