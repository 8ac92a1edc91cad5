"""Connection between a run and the screen: reads, posts messages, sends commands.

History comes from the files; an event of the supervisor triggers a read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import httpx
from pydantic import ValidationError
from textual.message import Message

from atropos_common.protocol.control import (
    Accepted,
    Action,
    CommandRequest,
    Recipe,
    RunStatus,
    Snapshot,
)
from atropos_common.protocol.record_base import Record, RecordError
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.log_buffer import LogEntry, LogFeed
from atropos_tui.monitor.run.run_files import (
    RecordBatch,
    RunFeed,
    RunInfo,
    changed_at,
    last_starts,
    read_info,
)
from atropos_tui.supervisor.client import NoSupervisor, Refused, StreamLost
from atropos_tui.supervisor.processes.logs import latest_attempt

# Seconds between two polls of the status, the record streams and the log.
STATUS_S = 1.0
FEED_S = 0.25
LOG_S = 0.1
LONGEST_PAUSE_S = 0.5  # longest interval between two reads of files that do not grow
RETRY_S = 1.0
INFO_S = 1.0  # shortest interval between two reads of the run's plan
CONTROL_TIMEOUT_S = 5.0  # timeout of the supervisor's answer

# Errors of a supervisor that may still run.
NO_ANSWER = (TimeoutError, OSError, httpx.HTTPError, ValidationError)


class Control(Protocol):
    """Supervisor interface of the screen; implemented by `ControlClient`."""

    async def status(self) -> RunStatus: ...
    def events(self, after: int = -1) -> AsyncIterator[Snapshot | Record]: ...
    async def command(self, request: CommandRequest) -> Accepted: ...
    async def recipe(self, action: Action, component: str | None = None) -> Recipe: ...


class Streams(Protocol):
    """Source of records; implemented by `RunFeed`."""

    @property
    def bad_lines(self) -> int: ...
    def newest(self) -> list[Record]: ...
    def read(self) -> RecordBatch: ...


class Logs(Protocol):
    """Source of log lines; implemented by `LogFeed`."""

    def path(self, name: str) -> Path | None: ...
    def read(self, names: tuple[str, ...]) -> list[LogEntry]: ...


@dataclass(eq=False)
class StatusArrived(Message):
    status: RunStatus


@dataclass(eq=False)
class SupervisorGone(Message):
    """No supervisor answers; `ended`: none exists any more."""

    reason: str
    ended: bool


@dataclass(eq=False)
class NewestArrived(Message):
    """The last records of long streams, before their history is read."""

    records: list[Record]
    info: RunInfo


@dataclass(eq=False)
class RecordsArrived(Message):
    """New records; `reset`: drop the earlier ones; `behind`: more are waiting."""

    records: list[Record]
    reset: bool
    behind: bool
    bad_lines: int
    info: RunInfo


@dataclass(eq=False)
class LogArrived(Message):
    """New lines of the followed components; `path`: of a single one."""

    components: tuple[str, ...]
    path: Path | None
    entries: list[LogEntry]


class Feed:
    """Follows one run. Each `follow_*` runs forever in its own worker."""

    def __init__(
        self,
        run_dir: Path,
        control: Control,
        post: Callable[[Message], object],
        feed: Streams | None = None,
        logs: Logs | None = None,
    ) -> None:
        self.run = RunDir(run_dir)
        self.control = control
        self._feed = feed or RunFeed(self.run)
        self._logs = logs or LogFeed(self.run)
        self._post = post
        self._read_files_now = asyncio.Event()
        self._read_status_now = asyncio.Event()
        self._read_log_now = asyncio.Event()
        self._log_of: tuple[str, ...] = ()

    def follow_log_of(self, components: tuple[str, ...]) -> None:
        """Switch the log to these components; their latest lines are read again."""
        if components != self._log_of:
            self._log_of = components
            self._read_log_now.set()

    def log_of(self, component: str) -> Path | None:
        """Return the newest log file of a component, if any."""
        return latest_attempt(self.run.logs / component)

    def refresh(self) -> None:
        self._read_files_now.set()
        self._read_status_now.set()

    async def follow_status(self) -> None:
        while True:
            try:
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    status = await self.control.status()
                self._post(StatusArrived(status))
            except NoSupervisor as error:
                self._post(SupervisorGone(str(error), ended=True))
            # Not `ended`: a busy supervisor may answer the next poll.
            except (*NO_ANSWER, Refused) as error:
                reason = f"the supervisor does not answer ({type(error).__name__})"
                self._post(SupervisorGone(reason, ended=False))
            await _wait(self._read_status_now, STATUS_S)

    async def follow_events(self) -> None:
        while True:
            # Errors are dropped here because `follow_status` reports them.
            with contextlib.suppress(*NO_ANSWER, NoSupervisor, Refused, StreamLost, RecordError):
                async for item in self.control.events():
                    if isinstance(item, Snapshot):
                        self._post(StatusArrived(item.status))
                    self.refresh()
            await asyncio.sleep(RETRY_S)

    async def follow_files(self) -> None:
        feed, about, posted, pause = self._feed, _Info(self.run), None, FEED_S
        # Reading a long history takes seconds, so the screen first shows how the run stands now.
        if newest := await asyncio.to_thread(feed.newest):
            self._post(NewestArrived(newest, await asyncio.to_thread(about.read)))
        while True:
            # Files are read in a thread: on a network file system a read can block for seconds.
            batch, info = await asyncio.to_thread(lambda: (feed.read(), about.read()))
            news = (batch.behind, feed.bad_lines, info)
            if batch.records or batch.from_start or news != posted:
                posted = news
                self._post(RecordsArrived(batch.records, batch.from_start, *news))
            # While behind, read on without a pause.
            if not batch.behind:
                pause = FEED_S if batch.records else min(pause * 1.5, LONGEST_PAUSE_S)
                await _wait(self._read_files_now, pause)

    async def follow_log(self) -> None:
        feed, pause = self._logs, LOG_S
        while True:
            if wanted := self._log_of:
                entries = await asyncio.to_thread(feed.read, wanted)
                pause = LOG_S if entries else min(pause * 1.5, LONGEST_PAUSE_S)
                # The user may have switched components during the read.
                if entries and wanted == self._log_of:
                    path = feed.path(wanted[0]) if len(wanted) == 1 else None
                    self._post(LogArrived(wanted, path, entries))
            await _wait(self._read_log_now, pause)

    async def recipe(self, action: Action, component: str | None) -> Recipe:
        """Return what a command would stop and start.

        Raises:
            Refused: also if the supervisor does not answer.
        """
        async with _answering():
            return await self.control.recipe(action, component)

    async def send(self, request: CommandRequest) -> Accepted:
        """Send a command.

        Raises:
            Refused: the supervisor refuses it, or does not answer.
        """
        async with _answering():
            accepted = await self.control.command(request)
        self.refresh()
        return accepted


class _Info:
    # A resumed run may have more steps, so the description is read again when its files change.
    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._info = RunInfo()
        self._written: tuple[int, ...] = ()
        self._looked = -math.inf

    def read(self) -> RunInfo:
        if time.monotonic() - self._looked >= INFO_S:
            # Limits the stat calls, which cost a round trip on network file systems.
            self._looked = time.monotonic()
            files = (self._run.plan_json, self._run.run_json, self._run.profile_toml)
            if (written := tuple(map(changed_at, files))) != self._written:
                info = read_info(self._run)
                self._info = replace(info, last_start_s=last_starts(self._run, info.name))
                self._written = written
        return self._info


@contextlib.asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            yield
    except NoSupervisor as error:
        raise Refused("no supervisor runs this stack", str(error)) from error
    except NO_ANSWER as error:
        reason = f"the supervisor does not answer ({type(error).__name__})"
        raise Refused(reason, "try again in a moment") from error


async def _wait(wake: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
            # Merges a burst of events into one read.
            await asyncio.sleep(0.05)
    wake.clear()
