"""Client of a run's control socket, and the socket's path.

client = ControlClient(run_dir)
async for event in client.events():   # a snapshot, then records
accepted = await client.command(CommandRequest(action="restart", component="vllm"))
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from atropos_common.net.http import LIMITS, certificates
from atropos_common.protocol.control import (
    OTHER_RUN,
    RUN_ID_HEADER,
    Accepted,
    Action,
    CommandRequest,
    CommandStatus,
    Recipe,
    Refusal,
    RunStatus,
    Snapshot,
    WaitResult,
)
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import parse_line
from atropos_common.system.files import is_private, read_regular
from atropos_common.system.run_dir import LONGEST_SOCKET, RunDir, is_safe_name, registry
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.profile.ports import own_socket
from atropos_tui.supervisor.journal.store import ProcessTable
from atropos_tui.supervisor.processes import procfs

Answer = TypeVar("Answer", bound=BaseModel)

SHARED_TEMPORARY = Path("/tmp")
NAME_BYTES = 25
"""Longest file name of a socket, in bytes."""
CONTROL_TIMEOUT_S = 10.0
"""Timeout of one try, in seconds; `wait` and `events` take longer."""
FIRST_TIMEOUT_S = 2.0
"""Timeout of the first try, in seconds; then the client checks whether the supervisor is
stopped."""
TRIES = 3
"""Tries of a GET. A command is sent once: it must not run twice."""
RETRY_PAUSE_S = 0.2


class NoSupervisor(Exception):
    """No process listens for this run: it has ended, or never began."""


class NotAnswering(UserError, TimeoutError):
    """A supervisor exists but does not answer: it is stopped, or the machine is overloaded."""

    def __init__(self, run_dir: Path, reason: str, fix: str = "") -> None:
        busy = (
            f"try again in a moment; {RunDir(run_dir).journal_json} names its pid (a stopped "
            f"one: kill -CONT PID)"
        )
        super().__init__(
            f"the supervisor of {run_dir.name} does not answer",
            [Problem(reason, fix or busy)],
            Exit.TIMEOUT,
        )


class OtherRun(UserError, ConnectionError):
    """The supervisor on this socket belongs to another run than run.json names."""

    def __init__(self, run_dir: Path, reason: str) -> None:
        fix = (
            f"{run_dir} was replaced while its run goes on: restore its run.json, or kill that "
            f"supervisor by its pid"
        )
        super().__init__(
            "the supervisor of this directory belongs to another run",
            [Problem(reason, fix)],
            Exit.NO_RUN,
        )


class StreamLost(Exception):
    """The event stream broke. Call `events` again for a new snapshot."""


class Refused(Exception):
    """The supervisor refused the request: reason and fix."""

    def __init__(self, error: str, fix: str = "", status: int = 409) -> None:
        super().__init__(error + (f" ({fix})" if fix else ""))
        self.error = error
        self.fix = fix
        self.status = status


class ControlClient:
    """Client of one run's control socket. Every method raises `NoSupervisor` or `NotAnswering`."""

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = RunDir(Path(run_dir))
        self._http: httpx.AsyncClient | None = None
        self._target = ""

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def status(self) -> RunStatus:
        return await self._get("/status", RunStatus)

    async def events(self, after: int | None = None) -> AsyncIterator[Snapshot | Record]:
        """Yield a `Snapshot`, then records as they come; ends with the run.

        Args:
            after: also yield the records after this sequence number (-1: all), before the live
                ones.

        Raises:
            StreamLost: the stream broke before the end of the run.
        """
        params = {} if after is None else {"after": after}
        http = self._connection()
        try:
            async with http.stream(
                "GET", "/events", params=params, timeout=httpx.Timeout(CONTROL_TIMEOUT_S, read=None)
            ) as answer:
                if answer.status_code != 200:
                    raise _failure(self.run_dir.root, answer.status_code, await answer.aread())
                first = True
                async for line in answer.aiter_lines():
                    yield Snapshot.model_validate_json(line) if first else parse_line(line)
                    first = False
        except httpx.ConnectError as error:
            raise self._nobody() from error
        except httpx.TimeoutException as error:
            raise self._silent(error) from error
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            raise StreamLost(str(error)) from error

    async def command(self, request: CommandRequest) -> Accepted:
        """Send a command, which is executed after this returns.

        Raises:
            Refused: it is not possible now.
        """
        answer = await self._request("POST", "/commands", content=request.model_dump_json())
        return Accepted.model_validate_json(answer.content)

    async def command_status(self, command_id: str) -> CommandStatus:
        return await self._get(f"/commands/{quote(command_id, safe='')}", CommandStatus)

    async def recipe(
        self,
        action: Action,
        component: str | None = None,
        initiator: Literal["user", "trainer"] = "user",
    ) -> Recipe:
        """Return the recipe of a command without executing it."""
        params = {"action": action, "initiator": initiator} | (
            {"component": component} if component else {}
        )
        return await self._get("/recipe", Recipe, params=params)

    async def wait(self, for_: str = "ready", timeout: float | None = None) -> WaitResult:
        """Wait for `ready`, `done` or a component; `timeout` in seconds."""
        params = {"for": for_} | ({} if timeout is None else {"timeout": str(timeout)})
        # The supervisor answers at the end of `timeout`, so the client waits a little longer.
        patience = httpx.Timeout(
            CONTROL_TIMEOUT_S, read=None if timeout is None else timeout + CONTROL_TIMEOUT_S
        )
        return await self._get("/wait", WaitResult, params=params, timeout=patience)

    async def _get(self, path: str, kind: type[Answer], **options: Any) -> Answer:
        return kind.model_validate_json((await self._request("GET", path, **options)).content)

    async def _request(
        self, method: str, path: str, *, timeout: httpx.Timeout | None = None, **options: Any
    ) -> httpx.Response:
        if timeout or method != "GET":
            self._refuse_stopped()  # else the call waits, or a command comes when it goes on
        tries = TRIES if method == "GET" else 1
        for left in reversed(range(tries)):
            http = self._connection()
            patience = httpx.Timeout(FIRST_TIMEOUT_S if left == TRIES - 1 else CONTROL_TIMEOUT_S)
            try:
                answer = await http.request(method, path, timeout=timeout or patience, **options)
                break
            except httpx.ConnectError as error:
                raise self._nobody() from error
            except httpx.TransportError as error:
                if method == "GET":
                    self._refuse_stopped()
                # `wait` has its own timeout and no retry. A broken connection may mean that the run
                # has ended.
                if not left or (timeout and isinstance(error, httpx.ReadTimeout)):
                    if method != "GET" and not isinstance(error, httpx.TimeoutException):
                        await self.status()  # raises NoSupervisor if it has gone
                    raise self._silent(error, command=method != "GET") from error
            await asyncio.sleep(RETRY_PAUSE_S)
        if answer.status_code >= 400:
            raise _failure(self.run_dir.root, answer.status_code, answer.content)
        return answer

    def _connection(self) -> httpx.AsyncClient:
        """Return a client for the target of `control.sock`; the link's own path may be too long
        for connect()."""
        try:
            target = os.readlink(self.run_dir.control_sock)  # noqa: PTH115
            # lstat: never follow a link that another user may have placed there.
            owner = Path(target).lstat().st_uid
        except OSError:
            raise self._nobody() from None
        if owner != os.getuid():
            raise NoSupervisor(
                f"the supervisor of {self.run_dir.root} is user {owner}'s; run this command "
                f"as that user"
            )
        if own_socket(self.run_dir) != target:
            raise NoSupervisor(
                f"{self.run_dir.control_sock} points to the socket of another run: {target}"
            )
        # A resumed run has a new socket: the old connection is useless.
        if self._http is None or target != self._target:
            self._target = target
            transport = httpx.AsyncHTTPTransport(
                uds=target, limits=LIMITS, verify=certificates("http:")
            )
            self._http = httpx.AsyncClient(
                transport=transport,
                base_url="http://supervisor",
                trust_env=False,
                headers=self._expected(),
            )
        return self._http

    def _expected(self) -> dict[str, str]:
        """Header with the run id of run.json, for the supervisor to compare."""
        try:
            meta = json.loads(read_regular(self.run_dir.run_json))
            run_id = meta.get("run_id")
        except (OSError, ValueError, RecursionError, AttributeError):
            return {}
        return {RUN_ID_HEADER: run_id} if isinstance(run_id, str) and is_safe_name(run_id) else {}

    def _nobody(self) -> NoSupervisor:
        return NoSupervisor(f"no supervisor runs in {self.run_dir.root}")

    def _refuse_stopped(self) -> None:
        table = ProcessTable.load(self.run_dir.journal_json)
        if table and table.supervisor and procfs.is_stopped(pid := table.supervisor.pid):
            raise NotAnswering(
                self.run_dir.root, f"its process (pid {pid}) is stopped", f"kill -CONT {pid}"
            )

    def _silent(self, error: httpx.TransportError, *, command: bool = False) -> NotAnswering:
        reason = (
            "no answer in time"
            if isinstance(error, httpx.TimeoutException)
            else f"connection lost: {error}"
        )
        fix = (
            "`atropos-tui events` shows if the command was accepted; if not, repeat it"
            if command
            else ""
        )
        return NotAnswering(self.run_dir.root, f"{reason} ({type(error).__name__})", fix)


def _failure(run_dir: Path, status: int, content: bytes) -> Refused | OtherRun:
    try:
        refusal = Refusal.model_validate_json(content)
    except ValidationError:
        refusal = Refusal(error=f"the supervisor answered {status}")
    if status == OTHER_RUN:
        return OtherRun(run_dir, refusal.error)
    return Refused(refusal.error, refusal.fix, status)


class SocketError(ValueError):
    """The socket cannot be created safely."""


def socket_folder() -> Path:
    """Return a private folder for sockets.

    Raises:
        SocketError: $XDG_RUNTIME_DIR is too long for a socket in it, or no folder is private.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "atropos-tui"
    else:
        folder = SHARED_TEMPORARY / f"atropos-tui-{os.getuid()}"
    if (size := _socket_size(folder)) > LONGEST_SOCKET:
        reason = (
            f"$XDG_RUNTIME_DIR is too long: a socket in {folder} would have a path of {size} bytes"
        )
        raise SocketError(
            f"{reason}, and the limit is {LONGEST_SOCKET}; set it to a shorter folder, or unset it"
        )
    other = registry().parent / "sockets"  # if another user owns the first
    for place in (folder, other):
        if _socket_size(place) <= LONGEST_SOCKET and _make_private(place):
            return place
    fix = "set XDG_RUNTIME_DIR to your own folder with mode 0700"
    raise SocketError(
        f"{folder} must be a folder of this user with mode 0700, and {other} cannot serve "
        f"either; {fix}"
    )


def _socket_size(folder: Path) -> int:
    return len(os.fsencode(folder)) + 1 + NAME_BYTES


def _make_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, exist_ok=True, parents=True)
    except OSError:
        return False
    return is_private(folder)


def socket_path(run: RunDir) -> Path:
    """Path of this run's socket, always under 108 bytes."""
    return socket_folder() / run.socket_name
