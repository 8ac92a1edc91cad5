"""The supervisor's side of the keepers: starts one with its component, or takes over what an earlier supervisor left.

A `Kept` component is not our child, but serves like one: the keeper, its parent, holds the zombie and tells the exit
code. The address of a keeper is an abstract socket of a random name: no file that stays behind or that a clean-up of
/run or /tmp removes under a week-long run. Both ends check that the other is the same user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atropos_common.run_dir import ENV_RUN_ID, RunDir
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.keeper_line import Frame, Line
from atropos_tui.supervisor.log_file import FULL
from atropos_tui.supervisor.process import SPAWNED

ROOT = str(Path(__file__).resolve().parents[2])
CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from atropos_tui.supervisor.keeper import main; main()"
GREETING_S = 15.0
"""A keeper answers within milliseconds; on a machine that swaps, or whose disk hangs, it may take long."""
SETTLE_S = 15.0
"""So long a keeper may take to write what is left; then it is killed."""


class KeeperError(OSError):
    """A keeper that cannot be started or reached."""


@dataclass
class Handle:
    """A keeper that has answered, and what it said."""

    address: str
    line: Line
    keeper_pid: int = 0
    pid: int = 0
    ticks: int = 0
    started_at: float = 0.0
    notes: Mapping[str, str] | None = None
    exit_code: int | None = None
    rest: list[Frame] = field(default_factory=list)
    """What it said besides its greeting."""
    popen: subprocess.Popen[bytes] | None = None
    """Set where the keeper is our own child."""

    def close(self) -> None:
        """Let the keeper go on alone."""
        self.line.close()


@dataclass(frozen=True)
class Job:
    """What a keeper starts and keeps."""

    command: list[str]
    env: dict[str, str]
    cwd: str
    group: str
    log: str
    max_bytes: int
    notes: dict[str, str]
    """Given back to whoever takes over; not part of any file."""


class Kept:
    """A component whose parent is a keeper; has the interface of `process.Leader`."""

    def __init__(
        self,
        handle: Handle,
        on_output: Callable[[bytes], None],
        on_exit: Callable[[], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self._line, self._popen = handle.line, handle.popen
        self._on_output, self._on_exit, self._on_problem = on_output, on_exit, on_problem
        self._loop = asyncio.get_running_loop()
        self._left = asyncio.Event()
        self.pid, self.ticks, self.started_at = handle.pid, handle.ticks, handle.started_at
        self.keeper_pid = handle.keeper_pid
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        self._loop.add_reader(self._line.reading, self._hear)
        if handle.exit_code is not None:
            self._end(handle.exit_code)
        self._loop.call_soon(self._take, handle.rest)

    def _hear(self) -> None:
        frames = self._line.read()
        if frames is not None:
            self._take(frames)
            return
        self._loop.remove_reader(self._line.reading)
        self._line.close()
        self._left.set()
        if self.exit_code is None:
            self._end(-signal.SIGKILL)  # it died with its keeper

    def _take(self, frames: list[Frame]) -> None:
        for kind, payload in frames:
            if kind == "output":
                self._on_output(payload)
            elif kind == "exit":
                self._end(int(payload))
            elif kind == "problem":
                self._on_problem(payload.decode(errors="replace"))

    def _end(self, code: int) -> None:
        self.exit_code = code
        self.exited.set()
        self._loop.call_soon(self._on_exit)

    def signal_group(self, number: int) -> None:
        """Signal its process group; safe because its keeper holds the zombie."""
        row = procfs.read(self.pid)
        if row is not None and row.ticks == self.ticks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def settle(self) -> None:
        """Let the keeper write what is left and leave; the view ends with it."""
        if not self._left.is_set():
            with contextlib.suppress(OSError):
                self._line.say("finish")
        try:
            await asyncio.wait_for(self._left.wait(), SETTLE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.keeper_pid, signal.SIGKILL)  # it holds the line open, so the pid is still its own
            await self._left.wait()
        if self._popen is not None:
            await asyncio.to_thread(self._popen.wait)

    def reap(self) -> None:
        """The keeper has let its pid go when it settled."""
        SPAWNED.discard(self.keeper_pid)


class Spare:
    """A keeper that has nothing to keep yet: Python takes its time to start, and the supervisor must not wait for it.

    It leaves when this process does.
    """

    def __init__(self, run: RunDir, run_id: str) -> None:
        """Start it.

        Raises:
            OSError: the system is out of processes or descriptors.
        """
        self.address = f"atropos-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{self.address}")
            listener.listen(8)
            stderr = os.open(run.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                self.popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", CODE, ROOT, str(listener.fileno())],
                    env={ENV_RUN_ID: run_id},
                    pass_fds=(listener.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                os.close(stderr)
        SPAWNED.add(self.popen.pid)
        self._line = _connect(self.address)

    def start(self, job: Job) -> Handle:
        """Let it start a component; waits until that has a pid: a millisecond, if the keeper is ready.

        Raises:
            OSError: the log cannot be made, or the keeper failed.
        """
        _create(Path(job.log))
        try:
            handle = _exchange(self.address, self._line, "start", packed(job))
        except KeeperError:
            self.discard()
            raise
        handle.popen = self.popen
        return handle

    def discard(self) -> None:
        """It is not needed, or not fit."""
        self._line.close()
        self.popen.kill()
        self.popen.wait()
        SPAWNED.discard(self.popen.pid)


def packed(job: Job) -> bytes:
    """What `start` says. It holds the component's environment, and with it secrets: it is written nowhere."""
    return marshal.dumps(vars(job) | {"notes": json.dumps(job.notes)})


def lost(pid: int, ticks: int) -> Handle:
    """A stand-in for a keeper that was killed, and its component with it: ended by SIGKILL, nothing more to hear."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.close(writing)
    return Handle("", Line(reading, -1), pid=pid, ticks=ticks, started_at=time.time(), exit_code=-signal.SIGKILL)


def attach(address: str) -> Handle:
    """Take over a keeper; blocking.

    Raises:
        KeeperError: nobody there, another user, or no answer in time.
    """
    return _exchange(address, _connect(address), "attach")


def _connect(address: str) -> Line:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(GREETING_S)
        line.connect(f"\0{address}")
        _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            raise KeeperError("the keeper's address belongs to another user")
    except OSError as error:
        line.close()
        raise KeeperError(f"its keeper cannot be reached: {error}") from None
    line.setblocking(False)
    descriptor = line.detach()
    return Line(descriptor, descriptor, GREETING_S)


def _exchange(address: str, line: Line, kind: str, payload: bytes = b"") -> Handle:
    """Say what is wanted, and hear the greeting."""
    handle = Handle(address, line)
    try:
        line.say(kind, payload)
        _greet(handle)
    except OSError as error:
        handle.close()
        raise KeeperError(f"its keeper does not answer: {error}") from None
    return handle


def _greet(handle: Handle) -> None:
    deadline = time.monotonic() + GREETING_S
    while True:
        kind, payload = handle.line.hear(max(0.0, deadline - time.monotonic()))
        if kind == "kept":
            keeper, pid, ticks, started = payload.split()
            handle.keeper_pid, handle.pid, handle.ticks = int(keeper), int(pid), int(ticks)
            handle.started_at = float(started)
        elif kind == "notes":
            handle.notes = json.loads(payload)
        elif kind == "exit":
            handle.exit_code = int(payload)
        elif kind == "ready":
            break
        else:
            handle.rest.append((kind, payload))
    handle.rest += handle.line.heard()
    if not handle.pid:
        raise KeeperError("the component could not be started")


def _create(log: Path) -> None:
    """Make the log now: the attempt counts even if its keeper dies at once. A full disk is no reason not to start."""
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in FULL:
            raise
