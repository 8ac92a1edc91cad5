"""The supervisor's side of the guard: starts it, keeps it informed, replaces it when someone kills it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from atropos_common.run_dir import ENV_COMPONENT, ENV_RUN_ID
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.process import SPAWNED

ROOT = str(Path(__file__).resolve().parents[2])
MAX_DEATHS = 5
"""A guard that cannot live is given up; parent-death signals still end what the supervisor started itself."""
CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from atropos_tui.supervisor.guard import main; main()"


class Guard:
    """A process outside every session of the run that outlives the supervisor by some milliseconds.

    It inherits the lock of the run directory, so that no new supervisor begins there before it has finished.
    """

    def __init__(
        self, run_id: str, lock: int, *, group: str = "", own: Iterable[Path] = (), keep: bool = False
    ) -> None:
        """Start it.

        Args:
            lock: descriptor of the run directory's lock.
            group: the run's control group, if it has one.
            own: files that must not outlive the supervisor.
            keep: whether components live on when the supervisor is killed.
        """
        self._run_id = run_id
        self._lock = lock
        self.group = group
        self._own = [str(path) for path in own if "\n" not in str(path)]
        self._keep = keep
        self._sessions: dict[int, int] = {}
        self._popen: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._pidfd = -1
        self.pid = 0
        self._deaths = 0
        self._files: set[str] = set()
        self._start()

    def _start(self) -> None:
        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        env = {key: value for key, value in os.environ.items() if key not in (ENV_RUN_ID, ENV_COMPONENT)}
        arguments = [str(reading), self._run_id, self.group, "K" if self._keep else "E"]
        command = [sys.executable, "-I", "-S", "-c", CODE, ROOT, *arguments]
        null = subprocess.DEVNULL
        self._popen = subprocess.Popen(
            command,
            env=env,
            pass_fds=(reading, self._lock),
            stdin=null,
            stdout=null,
            stderr=null,
            cwd="/",
            start_new_session=True,
        )
        os.close(reading)
        self.pid = self._popen.pid
        SPAWNED.add(self.pid)
        self._pidfd = os.pidfd_open(self._popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)
        for path in self._own:
            self._note(f"A {path}\n")
        for session, ticks in self._sessions.items():
            self._note(f"S {session} {ticks}\n")
        for path in self._files:
            self._note(f"C {path}\n")

    def _died(self) -> None:
        self._release()
        self._deaths += 1
        if self._deaths <= MAX_DEATHS:
            with contextlib.suppress(OSError):
                self._start()

    def _release(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            os.close(self._pipe)
            self._pidfd = -1
        if self._popen is not None:
            self._popen.wait()
            SPAWNED.discard(self._popen.pid)

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, line.encode())

    @property
    def keeps(self) -> bool:
        """Whether the components would live on if the supervisor died now."""
        return self._keep

    def end_keeping(self) -> None:
        """The run is being ended: from here on whoever dies, nothing is left."""
        if self._keep:
            self._keep = False
            self._note("E\n")

    def remember(self, session: int, ticks: int) -> None:
        """A session of this run was started."""
        if self._sessions.get(session) != ticks:
            self._sessions[session] = ticks
            self._note(f"S {session} {ticks}\n")

    def forget(self, session: int) -> None:
        """Nothing of that session is left; its number may be given to a stranger."""
        if self._sessions.pop(session, None) is not None:
            self._note(f"F {session}\n")

    def remember_members(self, rows: list[procfs.Proc]) -> None:
        """Sessions that descendants started on their own."""
        for row in rows:
            if row.pid == row.session:
                self.remember(row.pid, row.ticks)

    def clear(self, paths: Iterable[Path]) -> None:
        """These files must not outlive the run: a manifest, weights in /dev/shm."""
        for path in map(str, paths):
            if "\n" not in path and path not in self._files:
                self._files.add(path)
                self._note(f"C {path}\n")

    def cleared(self, paths: Iterable[Path]) -> None:
        """They are gone, or someone else's from here on."""
        for path in map(str, paths):
            if path in self._files:
                self._files.discard(path)
                self._note(f"D {path}\n")

    async def close(self, timeout_s: float = 5.0) -> None:
        """Let it take its last look and leave."""
        if self._popen is None or self._pidfd < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        gone = loop.create_future()
        loop.add_reader(self._pidfd, lambda: None if gone.done() else gone.set_result(None))
        os.close(self._pipe)
        self._pipe = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gone, timeout_s)
        if not gone.done():
            self._popen.kill()
        self._release()
