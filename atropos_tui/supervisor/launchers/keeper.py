"""Parent of one component that may outlive its supervisor: reaps it, writes its log, and can be
taken over.

    python -I -S -c '... from atropos_tui.supervisor.launchers.keeper import main; main()' ROOT
    LISTENER

LISTENER is the descriptor of a Unix socket. The supervisor connects and sends `start` with the
marshalled fields of a `KeeperJob`. The component is the keeper's child, in a session of its own,
and dies with it. The keeper holds the zombie until `finish`, so that the kernel does not reuse pid
and process group. If the supervisor dies, the keeper goes on; the next supervisor sends `attach`.
Only the keeper reads the output, so none is lost.

Frames (`frames.Connection`) to the keeper: `start` or `attach`, later `finish`. Frames from it:
`kept` (its pid, the component's pid, start ticks and start time), `notes`, `ready`; then `output`,
`exit` (exit status), `problem`.
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

from atropos_common.system.parent_death import become
from atropos_tui.cluster.frames import Connection, ConnectionClosedError, is_own_peer
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.logs import MOST_LEFT, SAY_AGAIN_S, LogFile, read_some, widen

GREETING_S = 2.0
"""Seconds in which a new supervisor must send `attach`."""


class Keeper:
    """One component: its process, its output, and the connected supervisor, if any."""

    def __init__(self, job: dict[str, Any], listener: socket.socket) -> None:
        self._notes: str = job["notes"]
        self._listener = listener
        self._line: Connection | None = None
        self._muted = False
        """The supervisor no longer reads; the end of file has yet to arrive."""
        self._exit: int | None = None
        self._trouble = ""
        self._reported = -SAY_AGAIN_S, 0
        self._output, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        widen(self._output)
        # The component expects an ordinary, blocking stdout.
        os.set_blocking(writing, True)
        self._started = time.time()
        # The log is opened in `serve`, after the greeting: a slow disk must not delay the start.
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
        """Serve until a supervisor sends `finish`."""
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
            self._report()

    def _accept(self) -> None:
        line = accept(self._listener)
        if line is None:
            return
        try:
            kind, _ = line.receive(GREETING_S)
        except ConnectionClosedError:
            kind = ""
        if kind == "attach":
            self.greet(line)
        else:
            line.close()

    def greet(self, line: Connection) -> None:
        """Serve the supervisor at the other end of `line`."""
        self._drop_supervisor()
        self._line, self._muted = line, False
        self._poll.register(line.reading, select.POLLIN)
        self._send("kept", f"{os.getpid()} {self._pid} {self._ticks} {self._started}".encode())
        self._send("notes", self._notes.encode())
        self._report()
        if self._exit is not None:
            self._send("exit", b"%d" % self._exit)
        self._send("ready")

    def _drop_supervisor(self) -> None:
        if self._line is not None:
            self._poll.unregister(self._line.reading)
            self._line.close()
            self._line = None

    def _send(self, kind: str, payload: bytes = b"") -> None:
        """Send a frame to the supervisor, if there is one. Waits for a busy one, so that the
        component slows down."""
        if self._line is not None and not self._muted:
            try:
                self._line.send(kind, payload)
            except OSError:
                self._muted = True

    def _listen(self) -> None:
        assert self._line is not None
        frames = self._line.read()
        if frames is None:
            self._drop_supervisor()
        elif any(kind == "finish" for kind, _ in frames):
            self._finish()

    def _ended(self) -> None:
        self._exit = procfs.exit_of(self._child)
        if self._exit is not None:
            # `exit_of` leaves the zombie, so the pidfd would stay readable for ever.
            self._poll.unregister(self._child)
            self._send("exit", b"%d" % self._exit)

    def _copy(self) -> int:
        if self._output < 0:
            return 0
        data = read_some(self._output)
        if data is None:
            return 0
        if not data:
            # End of output; the component itself may go on.
            self._poll.unregister(self._output)
            os.close(self._output)
            self._output = -1
            return 0
        problem = self._log.write(data) if self._log else ""
        if problem:
            self._trouble = problem
            if time.monotonic() - self._reported[0] >= SAY_AGAIN_S:
                self._report()
        self._send("output", data)
        return len(data)

    def _report(self) -> None:
        """Report a new problem of the log. Without a supervisor it waits for the next one."""
        lost = self._log.lost_bytes if self._log else 0
        if (
            self._line is not None
            and self._trouble
            and (self._log is None or lost > self._reported[1])
        ):
            words = self._trouble + (f"; {lost:,} bytes of output are lost so far" if lost else "")
            self._send("problem", words.encode())
            self._reported = time.monotonic(), lost
            self._trouble = ""

    def _finish(self) -> None:
        """Read the rest of the pipe, even if another process holds its other end."""
        taken = 0
        while taken < MOST_LEFT and (count := self._copy()):
            taken += count
        self._report()
        if self._log:
            self._log.close()
        self._over = True


def _start(job: dict[str, Any], writing: int) -> int:
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
        # Never return into the keeper's code in the forked child.
        os._exit(code)


def accept(listener: socket.socket) -> Connection | None:
    """Accept a connection; None if it is of another user, which gets no answer."""
    caller, _ = listener.accept()
    if is_own_peer(caller):
        descriptor = caller.detach()
        return Connection(descriptor, descriptor)
    caller.close()
    return None


def begin(line: Connection, listener: socket.socket) -> None:
    """Start the component that the supervisor on `line` requests, and keep it; later supervisors
    come by `listener`."""
    try:
        kind, job_fields = line.receive()
    except ConnectionClosedError:
        return  # the supervisor is gone; nothing has started yet
    if kind == "start":
        job = marshal.loads(job_fields)  # trusted: `accept` admits only this user's processes
        keeper = Keeper(job, listener)
        keeper.greet(line)
        keeper.serve(job)


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        # Only `finish`, or the end of the supervisor before `start`, ends a keeper.
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        listener.setblocking(True)
        listener.set_inheritable(False)
        line = None
        while line is None:
            line = accept(listener)
        begin(line, listener)
