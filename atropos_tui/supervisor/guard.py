"""The guard, the last one to leave: when the supervisor is gone, it ends every process of the run, then itself.

    python -I -S -c '... from atropos_tui.supervisor.guard import main; main()' ROOT FD RUN_ID GROUP E|K

Direct children of a killed supervisor die by their parent-death signal; their descendants do not, and double-forked
ones belong to nobody. The guard holds the read end of a pipe, learns from it the sessions that the run started
(`S SESSION TICKS`, `F SESSION` when one is gone) and the files that go with them (`C PATH`, `D PATH`), and acts on its
end of file: it kills the run's control group, if it has one, and by the run-id marker in the environment, by those
sessions, and all descendants of these; then it removes the files, and those in /dev/shm that only the run had mapped
(`M PATH`).

Components that shall survive the supervisor (`K`, until the note `E` says that the run is being ended) are left alone;
then only the files that speak of the supervisor itself are removed (`A PATH`).

`Guard` is the supervisor's side: it starts the process, keeps it informed, and replaces it when someone kills it. What
only that side needs is imported inside of it, since the process must stay small.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from atropos_tui.supervisor import bare, procfs

TYPE_CHECKING = False  # `typing` alone would double the guard
if TYPE_CHECKING:
    import asyncio
    import subprocess
    from collections.abc import Callable, Iterable
    from pathlib import Path

QUIET_ROUNDS = 3
"""Empty looks at the process table, one after the other, before the run counts as gone."""
GIVE_UP_S = 60.0
MAX_DEATHS = 5
"""Deaths after which a guard is started again only every `AGAIN_S`."""
AGAIN_S = 60.0
"""Seconds between two starts of a guard that cannot live."""


def sweep(run_id: str, sessions: dict[int, int], exclude: set[int], group: str = "") -> None:
    """Kill until nothing of the run has been seen for some rounds."""
    give_up = time.monotonic() + GIVE_UP_S
    quiet = 0
    while quiet < QUIET_ROUNDS and time.monotonic() < give_up:
        members = procfs.run_members(run_id, sessions, exclude, group)
        for member in members:
            procfs.send(member, signal.SIGKILL)
        if members and group:
            procfs.kill_group(group)  # and what they have forked since the look
        quiet = 0 if members else quiet + 1
        time.sleep(0.01)


class Notes:
    """What the supervisor has said so far."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.sessions: dict[int, int] = {}
        self.files: set[bytes] = set()
        """They must not outlive the components."""
        self.own: set[bytes] = set()
        """They must not outlive the supervisor."""
        self.shared: set[str] = set()
        """Files in /dev/shm that components had mapped."""

    def read(self, line: bytes) -> None:
        kind, _, rest = line.rstrip(b"\n").partition(b" ")
        if kind == b"E":
            self.keep = False
        elif kind == b"A":
            self.own.add(rest)
        elif kind == b"C":
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


def follow(descriptor: int, keep: bool) -> Notes:
    """Read notes until the supervisor is gone; what was so then."""
    notes = Notes(keep)
    with open(descriptor, "rb") as pipe:
        for line in pipe:
            if line.endswith(b"\n"):
                notes.read(line)
    return notes


def remove(path: bytes) -> None:
    """Delete one file, or one folder for temporary files, if it is there."""
    try:
        os.unlink(path)  # noqa: PTH108
    except IsADirectoryError:
        if os.path.basename(path).startswith(procfs.SCRATCH.encode()):  # noqa: PTH119
            import shutil

            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    notes = follow(int(sys.argv[1]), sys.argv[4] == "K")
    if not notes.keep:
        sweep(sys.argv[2], notes.sessions, {os.getpid()}, sys.argv[3])
        procfs.remove_group(sys.argv[3])
        procfs.remove_unused(notes.shared)
    for path in notes.own if notes.keep else notes.own | notes.files:
        remove(path)


class Guard:
    """A process outside every session of the run that outlives the supervisor by some milliseconds.

    It inherits the lock of the run directory, so that no new supervisor begins there before it has finished.

    Args:
        lock: descriptor of the run directory's lock.
        group: the run's control group, if it has one.
        own: files that must not outlive the supervisor.
        keep: whether components live on when the supervisor is killed.
        on_trouble: called with words when the guard cannot live, and with "" when it lives again.
    """

    def __init__(
        self,
        run_id: str,
        lock: int,
        *,
        group: str = "",
        own: Iterable[Path] = (),
        keep: bool = False,
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        import asyncio

        self._loop = asyncio.get_running_loop()
        self._run_id, self._lock, self.group = run_id, lock, group
        self._own = [str(path) for path in own if "\n" not in str(path)]
        self.keeps = keep
        """Whether the components would live on if the supervisor died now."""
        self._sessions: dict[int, int] = {}
        self._files: set[str] = set()
        self._shared: set[str] = set()
        self._deaths = 0
        self._on_trouble = on_trouble
        self._again: asyncio.TimerHandle | None = None
        """Starts it again, or counts its deaths anew once it has lived for a while."""
        self._unsent = b""
        self._pidfd = -1
        self._start()

    def _start(self) -> None:
        import subprocess

        from atropos_common.run_dir import ENV_COMPONENT, ENV_RUN_ID

        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        arguments = [str(reading), self._run_id, self.group, "K" if self.keeps else "E"]
        try:
            self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, *bare(__name__), *arguments],
                env={key: value for key, value in os.environ.items() if key not in (ENV_RUN_ID, ENV_COMPONENT)},
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
        for path in self._own:
            self._note(f"A {path}")
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
        self._unsent = b""  # a new guard is told everything
        os.close(self._pidfd)
        os.close(self._pipe)
        self._pidfd = self._pipe = -1
        self._popen.wait()
        procfs.SPAWNED.discard(self._popen.pid)

    def _note(self, line: str) -> None:
        """Tell the guard; what its pipe has no room for, since it stands still, waits here."""
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
        except OSError:  # it has died, and the next one is told everything
            self._unsent = b""
        if not self._unsent:
            self._loop.remove_writer(self._pipe)

    def end_keeping(self) -> None:
        """The run is being ended: from here on whoever dies, nothing is left."""
        if self.keeps:
            self.keeps = False
            self._note("E")

    def remember(self, session: int, ticks: int) -> None:
        """A session of this run was started."""
        if self._sessions.get(session) != ticks:
            self._sessions[session] = ticks
            self._note(f"S {session} {ticks}")

    def forget(self, session: int) -> None:
        """Nothing of that session is left; its number may be given to a stranger."""
        if self._sessions.pop(session, None) is not None:
            self._note(f"F {session}")

    def clear(self, paths: Iterable[Path]) -> None:
        """These files must not outlive the run: a manifest, weights in /dev/shm."""
        for path in map(str, paths):
            if "\n" not in path and path not in self._files:
                self._files.add(path)
                self._note(f"C {path}")

    def cleared(self, paths: Iterable[Path]) -> None:
        """They are gone, or someone else's from here on."""
        for path in map(str, paths):
            if path in self._files:
                self._files.discard(path)
                self._note(f"D {path}")

    def note_shared_memory(self, paths: set[str]) -> None:
        """Members of the run have these files in /dev/shm mapped."""
        for path in paths - self._shared:
            self._note(f"M {path}")
        self._shared |= paths

    async def close(self, timeout_s: float = 5.0) -> None:
        """Let it take its last look and leave."""
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
        self._pipe = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        await over
        timer.cancel()
        self._popen.kill()
        self._release()
