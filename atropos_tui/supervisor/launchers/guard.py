"""The guard: a process that kills the rest of a run after the supervisor has died, and then exits.

    python -I -S -c '... from atropos_tui.supervisor.launchers.guard import main; main()' ROOT FD
    RUN_ID GROUP

Children of a killed supervisor die by their parent-death signal; their descendants and
double-forked processes do not. The guard reads notes from a pipe:

- `S SESSION TICKS`, `F SESSION`: a session of the run has started, is gone.
- `C PATH`, `D PATH`: remove the file with the run, keep it.
- `M PATH`: processes of the run have mapped this file in /dev/shm.

At end of file it kills the run's control group, the processes with the run id in their environment,
those of the sessions, and all descendants; then it removes the files.

`Guard` is the supervisor's side: it starts the process, sends notes, and replaces a dead guard. Its
imports are local, because the process must stay small.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from atropos_tui.supervisor import bare
from atropos_tui.supervisor.processes import procfs

TYPE_CHECKING = False  # importing `typing` would double the guard's memory
if TYPE_CHECKING:
    import asyncio
    import subprocess
    from collections.abc import Callable, Iterable
    from pathlib import Path

QUIET_ROUNDS = 3
"""Scans in a row without a process that end the sweep."""
GIVE_UP_S = 60.0
MAX_DEATHS = 5
"""Deaths after which a guard is restarted only every `AGAIN_S`."""
AGAIN_S = 60.0
"""Seconds between two starts of a guard that keeps dying."""


def sweep(run_id: str, sessions: dict[int, int], exclude: set[int], group: str = "") -> None:
    """Kill until `QUIET_ROUNDS` scans have found nothing, for at most `GIVE_UP_S` seconds."""
    give_up = time.monotonic() + GIVE_UP_S
    quiet = 0
    while quiet < QUIET_ROUNDS and time.monotonic() < give_up:
        members = procfs.run_members(run_id, sessions, exclude, group)
        for member in members:
            procfs.send(member, signal.SIGKILL)
        if members and group:
            procfs.kill_group(group)  # includes children forked since the scan
        quiet = 0 if members else quiet + 1
        time.sleep(0.01)


class Notes:
    def __init__(self) -> None:
        self.sessions: dict[int, int] = {}
        self.files: set[bytes] = set()
        """Files to remove with the components."""
        self.shared: set[str] = set()

    def read(self, line: bytes) -> None:
        kind, _, rest = line.rstrip(b"\n").partition(b" ")
        if kind == b"C":
            self.files.add(rest)
        elif kind == b"D":
            self.files.discard(rest)
        elif kind == b"M":
            self.shared.add(os.fsdecode(rest))
        elif kind == b"S":
            session, ticks = map(int, rest.split())
            self.sessions[session] = ticks
        elif kind == b"F":
            self.sessions.pop(int(rest), None)


def follow(descriptor: int) -> Notes:
    """Read notes until the supervisor is gone."""
    notes = Notes()
    with open(descriptor, "rb") as pipe:
        for line in pipe:
            # A supervisor killed in mid-write leaves a torn last line.
            if line.endswith(b"\n"):
                notes.read(line)
    return notes


def remove(path: bytes) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except IsADirectoryError:
        if os.path.basename(path).startswith(procfs.SCRATCH.encode()):  # noqa: PTH119
            import shutil

            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return


def main() -> None:
    # Only the end of the pipe ends the guard: Ctrl-C reaches the whole terminal.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    notes = follow(int(sys.argv[1]))
    sweep(sys.argv[2], notes.sessions, {os.getpid()}, sys.argv[3])
    procfs.remove_group(sys.argv[3])
    # After the kill, when only other users' processes may still map these files.
    procfs.remove_unused(notes.shared)
    for path in notes.files:
        remove(path)


class Guard:
    """The supervisor's side of the guard process, which is outside every session of the run.

    The guard inherits the lock of the run directory: no new supervisor starts there before the
    guard has finished.

    Args:
        lock: descriptor of the run directory's lock.
        group: the run's control group; "" if it has none.
        own: files to remove with the supervisor.
        on_trouble: called with the problem if the guard does not stay alive, and with "" once it
            does.
    """

    def __init__(
        self,
        run_id: str,
        lock: int,
        *,
        group: str = "",
        own: Iterable[Path] = (),
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        import asyncio

        self._loop = asyncio.get_running_loop()
        self._run_id, self._lock, self.group = run_id, lock, group
        self._sessions: dict[int, int] = {}
        # Notes end at a newline, so such a path cannot be sent.
        self._files = {str(path) for path in own if "\n" not in str(path)}
        self._shared: set[str] = set()
        self._deaths = 0
        self._on_trouble = on_trouble
        self._again: asyncio.TimerHandle | None = None
        self._unsent = b""
        self._pidfd = -1
        self._start()

    def _start(self) -> None:
        import subprocess

        from atropos_common.system.run_dir import ENV_COMPONENT, ENV_RUN_ID

        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        # A stopped guard must never block the supervisor's event loop.
        os.set_blocking(self._pipe, False)
        arguments = [str(reading), self._run_id, self.group]
        try:
            self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, *bare(__name__), *arguments],
                # Without the markers, so that the guard does not count as a member of the run.
                env={
                    key: value
                    for key, value in os.environ.items()
                    if key not in (ENV_RUN_ID, ENV_COMPONENT)
                },
                pass_fds=(reading, self._lock),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.close(self._pipe)
            self._pipe = -1
            raise
        finally:
            os.close(reading)
        procfs.SPAWNED.add(self._popen.pid)
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._died)
        for session, ticks in self._sessions.items():
            self._note(f"S {session} {ticks}")
        for path in self._files:
            self._note(f"C {path}")
        for path in self._shared:
            self._note(f"M {path}")

    def _died(self) -> None:
        self._release()
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            self._try_later(f"the guard of the run died {self._deaths} times")
        else:
            self._start_again()

    def _start_again(self) -> None:
        try:
            self._start()
        except OSError as error:
            self._try_later(f"the guard of the run cannot be started: {error.strerror}")
            return
        if self._deaths > MAX_DEATHS:
            self._again = self._loop.call_later(AGAIN_S, self._lives)

    def _try_later(self, words: str) -> None:
        if self._again:
            self._again.cancel()
        self._on_trouble(words)
        self._again = self._loop.call_later(AGAIN_S, self._start_again)

    def _lives(self) -> None:
        self._deaths, self._again = 0, None
        self._on_trouble("")

    def _release(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_writer(self._pipe)
        self._unsent = b""  # a new guard gets every note again
        os.close(self._pidfd)
        os.close(self._pipe)
        self._pidfd = self._pipe = -1
        self._popen.wait()
        procfs.SPAWNED.discard(self._popen.pid)

    def _note(self, line: str) -> None:
        if self._pipe < 0:
            return
        waits = bool(self._unsent)
        self._unsent += f"{line}\n".encode()
        if not waits:
            self._send()
            if self._unsent:
                self._loop.add_writer(self._pipe, self._send)

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._pipe, self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it has died; the next guard gets every note again
            self._unsent = b""
        if not self._unsent:
            self._loop.remove_writer(self._pipe)

    def remember(self, session: int, ticks: int) -> None:
        if self._sessions.get(session) != ticks:
            self._sessions[session] = ticks
            self._note(f"S {session} {ticks}")

    def forget(self, session: int) -> None:
        """Drop a session that is gone; the kernel may reuse its id."""
        if self._sessions.pop(session, None) is not None:
            self._note(f"F {session}")

    def clear(self, paths: Iterable[Path]) -> None:
        """Add files to remove with the run."""
        for path in map(str, paths):
            if "\n" not in path and path not in self._files:
                self._files.add(path)
                self._note(f"C {path}")

    def cleared(self, paths: Iterable[Path]) -> None:
        """Drop files that are removed, or have another owner now."""
        for path in map(str, paths):
            if path in self._files:
                self._files.discard(path)
                self._note(f"D {path}")

    def note_shared_memory(self, paths: set[str]) -> None:
        """Add files in /dev/shm that members have mapped."""
        for path in paths - self._shared:
            self._note(f"M {path}")
        self._shared |= paths

    async def close(self, timeout_s: float = 5.0) -> None:
        if self._again:
            self._again.cancel()
        if self._pidfd < 0:
            return
        self._loop.remove_writer(self._pipe)
        over = self._loop.create_future()

        def end() -> None:
            if not over.done():
                over.set_result(None)

        self._loop.add_reader(self._pidfd, end)
        timer = self._loop.call_later(timeout_s, end)
        os.close(self._pipe)
        # Later notes go to /dev/null: the descriptor stays valid for `_release`.
        self._pipe = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        await over
        timer.cancel()
        # Only if it has not finished in time; a dead process ignores this.
        self._popen.kill()
        self._release()
