"""Start of a component's process, and the end of its whole set.

The leader stays a zombie until its set is gone (`reap`), so the kernel reuses neither pid nor
process group, and signals to the group are safe. Standard library only: node agents import this
module.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atropos_common.system import parent_death
from atropos_common.system.files import is_private
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.logs import widen

SHIM = str(parent_death.__file__)
PR_SET_CHILD_SUBREAPER = 36
FOLLOWERS_S = 2.0
"""Seconds of the grace period for other members after the leader's exit."""
STUCK_S = 10.0
"""Seconds after SIGKILL before a live process counts as stuck in the kernel."""
SCAN_PAUSE_S = (0.005, 0.1)
"""Shortest and longest pause between two scans, in seconds."""


class LaunchError(ValueError):
    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


def make_scratch(folder: Path | None) -> None:
    """Create a folder for temporary files.

    Raises:
        LaunchError: its parent does not exist, it belongs to another user or has another mode.
    """
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        reason = f"there is no folder {folder.parent} for temporary files"
        raise LaunchError(reason, "set TMPDIR to a folder that exists") from None
    if not is_private(folder):
        raise LaunchError(
            f"{folder} is not a folder of this user with mode 0700", "remove it, or set TMPDIR"
        )


def remove_files(paths: list[Path]) -> None:
    """Delete files, and folders only if they are our temporary ones. Missing ones are fine."""
    for path in paths:
        # A symbolic link to a folder is removed itself, never its target.
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.name.startswith(procfs.SCRATCH):
            shutil.rmtree(path, ignore_errors=True)


def become_subreaper() -> bool:
    """Become the parent of orphans of our components, instead of init."""
    return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@dataclass(frozen=True)
class Ending:
    """How to end a process set."""

    number: int
    """First signal to the group; SIGKILL skips the grace period."""
    grace_s: float
    hurry: asyncio.Event
    """Set to skip the rest of the grace period."""
    members: Callable[[], list[procfs.Proc]]
    """Live processes of the set; called in a thread."""
    on_leftover: Callable[[int], None]
    """Called with the number of processes left after the leader's own exit."""
    on_stuck: Callable[[str], None]
    """Called with the processes alive `STUCK_S` after SIGKILL."""
    group: str = ""
    """Control group, killed as a whole."""


def end_words(number: int, grace_s: float) -> bytes:
    """Arguments of the command `end` of the frame protocol."""
    return f"{number:d} {grace_s}".encode()


class Leader(Protocol):
    pid: int
    ticks: int
    started_at: float
    exit_code: int | None
    exited: asyncio.Event
    lost: str
    """How its node was lost, if that counts as its end."""

    def signal_group(self, number: int) -> None: ...

    async def end_set(self, ending: Ending) -> int:
        """End its whole set (see `end_set`)."""

    async def settle(self) -> None: ...

    def reap(self) -> None: ...


class Local:
    lost = ""

    async def end_set(self: Leader, ending: Ending) -> int:
        return await end_set(self, ending)


class Child(Local):
    """A process that we spawned, leader of its own session and group."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._on_exit: Callable[[Child], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._abandoned = False
        self._reaped = False
        self.pid = popen.pid
        self.started_at = time.time()
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        # The start ticks identify the process; 0 if /proc cannot be read.
        row = procfs.read(popen.pid)
        self.ticks = row.ticks if row else 0
        procfs.SPAWNED.add(self.pid)
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        self.exit_code = procfs.exit_of(self._pidfd)
        if self.exit_code is None:
            return
        # `exit_of` does not reap: the zombie keeps pid and group reserved.
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.exited.set()
        # Nobody else will reap it.
        if self._abandoned:
            self.reap()
        if self._on_exit:
            self._on_exit(self)

    def begin(self, on_exit: Callable[[Child], None]) -> None:
        """Call `on_exit` at its exit."""
        self.started_at, self._on_exit = time.time(), on_exit

    def signal_group(self, number: int) -> None:
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def settle(self) -> None:
        """No-op: its output is drained in this process."""

    def reap(self) -> None:
        if self._reaped or self.exit_code is None:
            return
        self._reaped = True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        # Otherwise `Popen.__del__` would wait for the pid, which may be another process by then.
        self._popen.returncode = self.exit_code
        procfs.SPAWNED.discard(self.pid)

    def abandon(self) -> None:
        """Kill the group; reap the leader whenever it exits."""
        self._on_exit = None
        self._abandoned = True
        self.signal_group(signal.SIGKILL)
        if self.exit_code is not None:
            self.reap()


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
    *,
    group: str = "",
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
) -> tuple[Child, int]:
    """Start `command` through the shim; return the child and the read end of its output pipe.

    Call it in the main thread: the parent-death signal follows the thread that forks.

    Args:
        stdout: descriptor for its stdout; the pipe then has only its stderr.

    Raises:
        OSError: no such working directory, or the system is out of processes or descriptors.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    widen(reading)
    try:
        popen = subprocess.Popen(
            # The shim sets the parent-death signal, joins the control group, and executes the
            # command.
            [sys.executable, "-I", "-S", SHIM, str(os.getpid()), group, *command],
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=writing if stdout is None else stdout,
            stderr=writing,
            start_new_session=True,
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        # Only the child may hold the write end, or the pipe never reports its end.
        os.close(writing)
    try:
        return Child(popen), reading
    except OSError:  # out of descriptors: it cannot be watched
        popen.kill()
        popen.wait()
        os.close(reading)
        raise


async def end_set(child: Leader, ending: Ending) -> int:
    """End the set; return the number of killed processes when none is left."""
    if child.exit_code is not None:
        left = await asyncio.to_thread(ending.members)
        if left:
            ending.on_leftover(len(left))
    elif ending.number != signal.SIGKILL and ending.grace_s > 0 and not ending.hurry.is_set():
        await _terminate(child, ending)
    return await _kill(child, ending)


async def _terminate(child: Leader, ending: Ending) -> None:
    hurry, deadline = ending.hurry, time.monotonic() + ending.grace_s
    child.signal_group(ending.number)
    # Whichever comes first: the leader's exit or `hurry`.
    waiting = [asyncio.create_task(child.exited.wait()), asyncio.create_task(hurry.wait())]
    await asyncio.wait(waiting, timeout=ending.grace_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    # Other members of the group get the same signal, and a short time to finish.
    deadline = min(deadline, time.monotonic() + FOLLOWERS_S)
    pause = SCAN_PAUSE_S[0]
    while not hurry.is_set() and time.monotonic() < deadline:
        rows = await asyncio.to_thread(ending.members)
        # Processes that left group and session did not get the signal; they are killed at once.
        if not any(child.pid in (row.pgrp, row.session) for row in rows):
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), pause)
        pause = min(pause * 2, SCAN_PAUSE_S[1])


async def _kill(child: Leader, ending: Ending) -> int:
    reported, stuck_at = False, time.monotonic() + STUCK_S
    killed: set[tuple[int, int]] = set()
    pause = SCAN_PAUSE_S[0]
    while True:
        rows = await asyncio.to_thread(ending.members)
        if not rows and child.exit_code is not None:
            return len(killed)
        if child.exit_code is None:
            # The group first: it is one atomic call, the scan below may miss a new fork.
            child.signal_group(signal.SIGKILL)
        for row in rows:
            if procfs.send(row, signal.SIGKILL):
                killed.add(row.key)
        if rows and ending.group:
            procfs.kill_group(ending.group)  # includes children forked since the scan
        if not reported and time.monotonic() > stuck_at:
            reported = True
            ending.on_stuck(describe(rows))
        await asyncio.sleep(pause)
        pause = min(pause * 2, SCAN_PAUSE_S[1])


def describe(rows: list[procfs.Proc]) -> str:
    return ", ".join(f"pid {row.pid} (state {row.state})" for row in rows)
