"""One command: what it is started with, its child in a session of its own, and the end of its whole set.

The exit of a child is seen through a pidfd within a millisecond. The leader stays a zombie until its whole set is gone
(`reap`): as long as it is not reaped the kernel gives neither its pid nor its process group to anyone else, so
signalling the group is safe. Imports only the standard library, because the far end of a launcher uses it, too.
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

from atropos_common import parent_death
from atropos_common.files import is_private
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.logs import widen

SHIM = str(parent_death.__file__)
PR_SET_CHILD_SUBREAPER = 36
FOLLOWERS_S = 2.0
"""After the leader went by itself, others of its group get at most this much of the grace."""
STUCK_S = 10.0
"""A process that SIGKILL has not ended after this long waits inside the kernel."""
LOOK_S = (0.005, 0.1)
"""Shortest and longest pause between two looks at the process table."""


class LaunchError(ValueError):
    """A component that cannot be started as written: what is wrong, and the way out."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


def gpus_within(env: Mapping[str, str], given: str | None) -> dict[str, str]:
    """`env` with the GPUs that it names counted among those that a batch system has given here: the others of this
    node are somebody else's."""
    name, there = "CUDA_VISIBLE_DEVICES", (given or "").split(",")
    wanted = env.get(name, "").split(",")
    if not given or not all(each.isdecimal() and int(each) < len(there) for each in wanted):
        return dict(env)
    return {**env, name: ",".join(there[int(each)] for each in wanted)}


def make_scratch(folder: Path | None) -> None:
    """Make a folder for temporary files, if there shall be one.

    Raises:
        LaunchError: somebody else has made it.
    """
    if folder is None:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise LaunchError(f"{folder} is not a folder of this user with mode 0700", "remove it, or set TMPDIR")


def remove_files(paths: list[Path]) -> None:
    """Delete files that must not outlive a process; missing ones are fine, folders other than ours are left alone."""
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.name.startswith(procfs.SCRATCH):
            shutil.rmtree(path, ignore_errors=True)


def become_subreaper() -> bool:
    """Orphans of our components become our children instead of init's. False where the kernel refuses."""
    return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@dataclass(frozen=True)
class Ending:
    """How a whole set is ended."""

    number: int
    """First signal, sent to the process group; SIGKILL means at once."""
    grace_s: float
    """Seconds between that signal and SIGKILL."""
    hurry: asyncio.Event
    """Set by anyone who wants the rest killed now."""
    members: Callable[[], list[procfs.Proc]]
    """Live processes of the set; called in a thread."""
    on_leftover: Callable[[int], None]
    """Told how many were still there when the leader had already ended by itself."""
    on_stuck: Callable[[str], None]
    """Told once, by pid and state, what is still there `STUCK_S` after SIGKILL."""
    group: str = ""
    """Their control group, if they have one: it is killed as a whole, too."""


def end_words(number: int, grace_s: float) -> bytes:
    """What `end` says over a line."""
    return f"{number:d} {grace_s}".encode()


class Leader(Protocol):
    """The main process of a component, whoever its parent is: leader of a session and a process group of its own."""

    pid: int
    ticks: int
    started_at: float
    exit_code: int | None
    """Negative for a signal; None while it runs."""
    exited: asyncio.Event
    lost: str
    """In words, how whoever held it was lost, if that is why it counts as ended."""

    def signal_group(self, number: int) -> None:
        """Signal its process group."""

    async def end_set(self, ending: Ending) -> int:
        """End its whole set, as the function `end_set` does."""

    async def settle(self) -> None:
        """Nothing of its set is left: its last output is on its way to the log."""

    def reap(self) -> None:
        """Let its pid and group go."""


class Local:
    """What leaders on this machine have in common."""

    lost = ""

    async def end_set(self: Leader, ending: Ending) -> int:
        return await end_set(self, ending)


class Child(Local):
    """One spawned process, leader of its own session and process group; `exit_code` is negative for a signal."""

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
        row = procfs.read(popen.pid)
        self.ticks = row.ticks if row else 0
        procfs.SPAWNED.add(self.pid)
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        self.exit_code = procfs.exit_of(self._pidfd)
        if self.exit_code is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.exited.set()
        if self._abandoned:
            self.reap()
        if self._on_exit:
            self._on_exit(self)

    def begin(self, on_exit: Callable[[Child], None]) -> None:
        """Its time as a component counts from now, and its end is told to `on_exit`."""
        self.started_at, self._on_exit = time.time(), on_exit

    def signal_group(self, number: int) -> None:
        """Signal the process group of the launch; safe because the leader is not reaped."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def settle(self) -> None:
        """Its output is drained here already."""

    def reap(self) -> None:
        """Collect the exit status: pid and group may be re-used from here on."""
        if self._reaped or self.exit_code is None:
            return
        self._reaped = True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self._popen.returncode = self.exit_code
        procfs.SPAWNED.discard(self.pid)

    def abandon(self) -> None:
        """Kill the group and collect the status whenever it comes."""
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
    """Start `command` through the shim; the child and the read end of the pipe with its stdout and stderr.

    `group` is the control group that it joins, if any; with `stdout` the pipe has its stderr alone. Must run in the
    main thread: the parent-death signal of the child follows the thread that forks.

    Raises:
        OSError: the working directory is missing, or the system is out of processes or descriptors.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    widen(reading)
    try:
        popen = subprocess.Popen(
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
        os.close(writing)
    try:
        return Child(popen), reading
    except OSError:  # no descriptor is left to watch it with
        popen.kill()
        popen.wait()
        os.close(reading)
        raise


async def end_set(child: Leader, ending: Ending) -> int:
    """Return when no process of the set is left; how many had to be killed."""
    if child.exit_code is not None:
        left = await asyncio.to_thread(ending.members)
        if left:
            ending.on_leftover(len(left))
    elif ending.number != signal.SIGKILL and ending.grace_s > 0 and not ending.hurry.is_set():
        await _ask(child, ending)
    return await _kill(child, ending)


async def _ask(child: Leader, ending: Ending) -> None:
    hurry, deadline = ending.hurry, time.monotonic() + ending.grace_s
    child.signal_group(ending.number)
    waiting = [asyncio.create_task(child.exited.wait()), asyncio.create_task(hurry.wait())]
    await asyncio.wait(waiting, timeout=ending.grace_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    deadline = min(deadline, time.monotonic() + FOLLOWERS_S)
    pause = LOOK_S[0]
    while not hurry.is_set() and time.monotonic() < deadline:
        rows = await asyncio.to_thread(ending.members)
        if not any(child.pid in (row.pgrp, row.session) for row in rows):
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), pause)
        pause = min(pause * 2, LOOK_S[1])


async def _kill(child: Leader, ending: Ending) -> int:
    told, patience = False, time.monotonic() + STUCK_S
    killed: set[tuple[int, int]] = set()
    pause = LOOK_S[0]
    while True:
        rows = await asyncio.to_thread(ending.members)
        if not rows and child.exit_code is not None:
            return len(killed)
        if child.exit_code is None:
            child.signal_group(signal.SIGKILL)
        for row in rows:
            if procfs.send(row, signal.SIGKILL):
                killed.add(row.key)
        if rows and ending.group:
            procfs.kill_group(ending.group)  # and what they have forked since the look
        if not told and time.monotonic() > patience:
            told = True
            ending.on_stuck(describe(rows))
        await asyncio.sleep(pause)
        pause = min(pause * 2, LOOK_S[1])


def describe(rows: list[procfs.Proc]) -> str:
    """Processes by pid and state."""
    return ", ".join(f"pid {row.pid} (state {row.state})" for row in rows)
