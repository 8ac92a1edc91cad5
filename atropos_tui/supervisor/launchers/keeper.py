"""The parent of one component that may outlive its supervisor: waits for it, writes its log, and can be taken over.

    python -I -S -c '... from atropos_tui.supervisor.launchers.keeper import main; main()' ROOT LISTENER

LISTENER is the descriptor of a Unix socket. The supervisor connects and, when it wants a component, says `start` with
the marshalled fields of a `Job`. The component is the keeper's child, in a session of its own, and dies with it. From
then on the keeper says what it writes to the log, and tells the exit. It holds the zombie until it hears `finish`, so
that pid and process group stay the component's. When the supervisor dies, all this goes on without it; the next one
connects and says `attach`. Nothing passes through the hands of a process that may be killed on the way: only the keeper
reads the component's output.

What the two say goes in frames over a `line.Line`. To the keeper: `start` or `attach`, later `finish`. From it: `kept`
(its pid, the component's pid, start ticks and time), `notes`, `ready`; then `output` as it is printed, `exit` with the
code, `problem`.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from atropos_common.parent_death import become
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.launchers.line import Line, LineClosedError, is_own_peer
from atropos_tui.supervisor.logs import MOST_LEFT, SAY_AGAIN_S, LogFile, read_some, widen

GREETING_S = 2.0
"""A supervisor that takes over must say so within this time."""


class Keeper:
    """One component: its process, its output, and the supervisor that listens, if one does."""

    def __init__(self, job: dict[str, Any], listener: socket.socket) -> None:
        self._notes: str = job["notes"]
        self._listener = listener
        self._line: Line | None = None
        self._muted = False
        """Nobody reads the line any more: its end of file is yet to come."""
        self._exit: int | None = None
        self._trouble = ""
        """Trouble with the log that nobody has heard of yet."""
        self._told = -SAY_AGAIN_S, 0
        """When trouble was last told, and how many bytes were lost by then."""
        self._output, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        widen(self._output)
        os.set_blocking(writing, True)
        self._started = time.time()
        self._pid = _start(job, writing)
        os.close(writing)
        row = procfs.read(self._pid)
        self._ticks = row.ticks if row else 0
        self._child = os.pidfd_open(self._pid)
        self._poll = select.poll()
        for descriptor in (self._output, self._child, listener.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._over = False
        self._log: LogFile | None = None

    def serve(self, job: dict[str, Any]) -> None:
        """Until a supervisor says that nothing of the component is left."""
        self._open_log(job["log"], job["max_bytes"])
        while not self._over:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._output:
                    self._copy()
                elif descriptor == self._child:
                    self._ended()
                elif descriptor == self._listener.fileno():
                    self._accept()
                elif self._line is not None and descriptor == self._line.reading:
                    self._listen()

    def _open_log(self, path: str, max_bytes: int) -> None:
        try:
            self._log = LogFile(Path(path), max_bytes)
        except OSError as error:
            self._trouble = f"{path}: {error.strerror}"
            self._tell()

    def _accept(self) -> None:
        line = accept(self._listener)
        if line is None:
            return
        try:
            kind, _ = line.hear(GREETING_S)
        except LineClosedError:
            kind = ""
        if kind == "attach":
            self.greet(line)
        else:
            line.close()

    def greet(self, line: Line) -> None:
        """Serve the supervisor at the other end of `line`."""
        self._let_go()
        self._line, self._muted = line, False
        self._poll.register(line.reading, select.POLLIN)
        self._say("kept", f"{os.getpid()} {self._pid} {self._ticks} {self._started}".encode())
        self._say("notes", self._notes.encode())
        self._tell()
        if self._exit is not None:
            self._say("exit", b"%d" % self._exit)
        self._say("ready")

    def _let_go(self) -> None:
        """The supervisor is gone, or another one has come."""
        if self._line is not None:
            self._poll.unregister(self._line.reading)
            self._line.close()
            self._line = None

    def _say(self, kind: str, payload: bytes = b"") -> None:
        """Say it, if somebody listens; wait for a busy one, as the component itself would."""
        if self._line is not None and not self._muted:
            try:
                self._line.say(kind, payload)
            except OSError:
                self._muted = True

    def _listen(self) -> None:
        assert self._line is not None
        frames = self._line.read()
        if frames is None:
            self._let_go()
        elif any(kind == "finish" for kind, _ in frames):
            self._finish()

    def _ended(self) -> None:
        self._exit = procfs.exit_of(self._child)
        if self._exit is not None:
            self._poll.unregister(self._child)
            self._say("exit", b"%d" % self._exit)

    def _copy(self) -> int:
        """Move one chunk; how many bytes it had."""
        if self._output < 0:
            return 0
        data = read_some(self._output)
        if data is None:
            return 0
        if not data:
            self._poll.unregister(self._output)
            os.close(self._output)
            self._output = -1
            return 0
        problem = self._log.write(data) if self._log else ""
        if problem:
            self._trouble = problem
            if time.monotonic() - self._told[0] >= SAY_AGAIN_S:
                self._tell()
        self._say("output", data)
        return len(data)

    def _tell(self) -> None:
        """Tell of trouble with the log that was not told yet; without a listener it waits for the next one."""
        lost = self._log.lost_bytes if self._log else 0
        if self._line is not None and self._trouble and (self._log is None or lost > self._told[1]):
            words = self._trouble + (f"; {lost:,} bytes of output are lost so far" if lost else "")
            self._say("problem", words.encode())
            self._told = time.monotonic(), lost
            self._trouble = ""

    def _finish(self) -> None:
        """Take what is still in the pipe, even if a stranger holds the other end."""
        taken = 0
        while taken < MOST_LEFT and (count := self._copy()):
            taken += count
        self._tell()
        if self._log:
            self._log.close()
        self._over = True


def _start(job: dict[str, Any], writing: int) -> int:
    """Fork the component; its pid."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.chdir(job["cwd"])
        code = become(keeper, job["group"], job["command"], job["env"])
    except OSError as error:
        print(f"atropos: cannot start in {job['cwd']}: {error.strerror}", file=sys.stderr)
    finally:
        os._exit(code)


def accept(listener: socket.socket) -> Line | None:
    """The line to the next caller; None if it is another user, to whom nothing is said."""
    caller, _ = listener.accept()
    if is_own_peer(caller):
        descriptor = caller.detach()
        return Line(descriptor, descriptor)
    caller.close()
    return None


def begin(line: Line, listener: socket.socket) -> None:
    """Start and keep what the supervisor at the other end of `line` asks for; others may come by `listener`."""
    try:
        kind, job_fields = line.hear()
    except LineClosedError:
        return  # the supervisor is gone, and nothing was started
    if kind == "start":
        job = marshal.loads(job_fields)  # from our own supervisor
        keeper = Keeper(job, listener)
        keeper.greet(line)
        keeper.serve(job)


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        listener.setblocking(True)
        listener.set_inheritable(False)
        line = None
        while line is None:
            line = accept(listener)
        begin(line, listener)
