"""The one crossing between the run and the screen: supervisor and files in, Textual messages out, commands back.

Loops here only post messages; the app's handlers change what is shown. History is read from the run's files, which
hold all of it; the supervisor's event stream rings the bell, so that a transition is read at once.
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

from atropos_common.control import Accepted, Action, CommandRequest, Recipe, RunStatus, Snapshot
from atropos_common.records import Record, RecordError
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.log_buffer import LogEntry, LogFeed
from atropos_tui.monitor.run_files import RecordBatch, RunFeed, RunInfo, changed_at, last_starts, read_info
from atropos_tui.supervisor.client import NoSupervisor, Refused, StreamLost
from atropos_tui.supervisor.logs import latest_attempt

STATUS_S = 1.0
FEED_S = 0.25
LOG_S = 0.1
QUIET_S = 0.5
"""Files that do not grow are looked at less and less often, but at least so often."""
RETRY_S = 1.0
INFO_S = 1.0
"""At most so often is it looked whether a run was planned anew."""
ANSWER_S = 5.0
"""A supervisor that says nothing for this long is shown as silent."""

UNANSWERED = (TimeoutError, OSError, httpx.HTTPError, ValidationError)
"""What goes wrong with a supervisor that may still be there."""


class Control(Protocol):
    """What the screen needs of the supervisor; `ControlClient` has it."""

    async def status(self) -> RunStatus: ...
    def events(self, after: int = -1) -> AsyncIterator[Snapshot | Record]: ...
    async def command(self, request: CommandRequest) -> Accepted: ...
    async def recipe(self, action: Action, component: str | None = None) -> Recipe: ...


class Streams(Protocol):
    """What the screen needs of the run's records; `RunFeed` has it."""

    @property
    def bad_lines(self) -> int: ...
    def newest(self) -> list[Record]: ...
    def read(self) -> RecordBatch: ...


class Logs(Protocol):
    """What the screen needs of the components' logs; `LogFeed` has it."""

    def path(self, name: str) -> Path | None: ...
    def read(self, names: tuple[str, ...]) -> list[LogEntry]: ...


@dataclass(eq=False)
class StatusArrived(Message):
    """The supervisor answered."""

    status: RunStatus


@dataclass(eq=False)
class SupervisorGone(Message):
    """No supervisor answers; `ended` when there is none any more, so that the files have the last word."""

    reason: str
    ended: bool


@dataclass(eq=False)
class NewestArrived(Message):
    """The end of streams that are long: how the run stands, while its history is read."""

    records: list[Record]
    info: RunInfo


@dataclass(eq=False)
class RecordsArrived(Message):
    """New records of the run's streams. `anew`: forget earlier ones, they come again; `behind`: more waits."""

    records: list[Record]
    anew: bool
    behind: bool
    bad_lines: int
    info: RunInfo


@dataclass(eq=False)
class LogArrived(Message):
    """New lines of the followed components, plain text; `path` is the log they are from, where it is one."""

    components: tuple[str, ...]
    path: Path | None
    entries: list[LogEntry]


class Feed:
    """Follows one run and posts what it learns. Each `follow_*` runs for ever in its own worker."""

    def __init__(
        self,
        run_dir: Path,
        control: Control,
        post: Callable[[Message], object],
        feed: Streams | None = None,
        logs: Logs | None = None,
    ) -> None:
        """Args: `feed`, `logs`: read in a thread (default: the run's files)."""
        self.run = RunDir(run_dir)
        self.control = control
        self._feed = feed or RunFeed(self.run)
        self._logs = logs or LogFeed(self.run)
        self._post = post
        self._feed_bell = asyncio.Event()
        self._status_bell = asyncio.Event()
        self._log_bell = asyncio.Event()
        self._log_of: tuple[str, ...] = ()

    def follow_log_of(self, components: tuple[str, ...]) -> None:
        """Switch the log to these components; their lines start anew."""
        if components != self._log_of:
            self._log_of = components
            self._log_bell.set()

    def log_of(self, component: str) -> Path | None:
        """The newest log of a component."""
        return latest_attempt(self.run.logs / component)

    def refresh(self) -> None:
        """Read status and files now."""
        self._feed_bell.set()
        self._status_bell.set()

    async def follow_status(self) -> None:
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    status = await self.control.status()
                self._post(StatusArrived(status))
            except NoSupervisor as error:
                self._post(SupervisorGone(str(error), ended=True))
            except (*UNANSWERED, Refused) as error:
                self._post(SupervisorGone(f"the supervisor does not answer ({type(error).__name__})", ended=False))
            await _wait(self._status_bell, STATUS_S)

    async def follow_events(self) -> None:
        """Ring the bells at every record. A stream that breaks is opened again; status tells whether all is well."""
        while True:
            with contextlib.suppress(*UNANSWERED, NoSupervisor, Refused, StreamLost, RecordError):
                async for item in self.control.events():
                    if isinstance(item, Snapshot):
                        self._post(StatusArrived(item.status))
                    self.refresh()
            await asyncio.sleep(RETRY_S)

    async def follow_files(self) -> None:
        feed, about, posted, pause = self._feed, _Info(self.run), None, FEED_S
        if newest := await asyncio.to_thread(feed.newest):
            self._post(NewestArrived(newest, await asyncio.to_thread(about.read)))
        while True:
            batch, info = await asyncio.to_thread(lambda: (feed.read(), about.read()))
            news = (batch.behind, feed.bad_lines, info)
            if batch.records or batch.anew or news != posted:
                posted = news
                self._post(RecordsArrived(batch.records, batch.anew, batch.behind, feed.bad_lines, info))
            if not batch.behind:
                pause = FEED_S if batch.records else min(pause * 1.5, QUIET_S)
                await _wait(self._feed_bell, pause)

    async def follow_log(self) -> None:
        feed, pause = self._logs, LOG_S
        while True:
            if wanted := self._log_of:
                entries = await asyncio.to_thread(feed.read, wanted)
                pause = LOG_S if entries else min(pause * 1.5, QUIET_S)
                if entries and wanted == self._log_of:
                    self._post(LogArrived(wanted, feed.path(wanted[0]) if len(wanted) == 1 else None, entries))
            await _wait(self._log_bell, pause)

    async def recipe(self, action: Action, component: str | None) -> Recipe:
        """What a command would touch. Raises Refused, also when nobody answers."""
        async with _answering():
            return await self.control.recipe(action, component)

    async def send(self, request: CommandRequest) -> Accepted:
        """Hand a command over. Raises Refused, also when nobody answers."""
        async with _answering():
            accepted = await self.control.command(request)
        self.refresh()
        return accepted


class _Info:
    """What a run is, read again when its files are written again: resumed, it may have more steps."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._info = RunInfo()
        self._written: tuple[int, ...] = ()
        self._looked = -math.inf

    def read(self) -> RunInfo:
        if time.monotonic() - self._looked >= INFO_S:
            self._looked = time.monotonic()
            files = (self._run.plan_json, self._run.run_json, self._run.profile_toml)
            if (written := tuple(map(changed_at, files))) != self._written:
                info = read_info(self._run)
                self._info = replace(info, last_start_s=last_starts(self._run, info.name))
                self._written = written
        return self._info


@contextlib.asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """Turn every way of not being answered into a `Refused` that can be shown."""
    try:
        async with asyncio.timeout(ANSWER_S):
            yield
    except NoSupervisor as error:
        raise Refused("no supervisor runs this stack", str(error)) from error
    except UNANSWERED as error:
        raise Refused(f"the supervisor does not answer ({type(error).__name__})", "try again in a moment") from error


async def _wait(bell: asyncio.Event, seconds: float) -> None:
    """Until the bell rings, at most `seconds`; a short pause follows, so that a flood of rings is one."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await bell.wait()
            await asyncio.sleep(0.05)
    bell.clear()
