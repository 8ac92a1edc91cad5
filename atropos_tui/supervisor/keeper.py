"""The parent of one component that may outlive its supervisor: waits for it, writes its log, and can be taken over.

    python -I -S -c 'sys.path.insert(0, ROOT); from atropos_tui.supervisor.keeper import main; main()' LISTENER

LISTENER is the descriptor of a Unix socket. The supervisor connects and, when it wants a component, says `start` with
the marshalled fields of a `Job`. The component is the keeper's child, in a session of its own, and dies with it. From
then on the keeper says what it writes to the log, and tells the exit. It holds the zombie until it hears `finish`, so
that pid and process group stay the component's. When the supervisor dies, all this goes on without it; the next one
connects and says `attach`. Nothing passes through the hands of a process that may be killed on the way: only the keeper
reads the component's output.

What the two say goes in frames over a `KeeperLine`, that is any two file descriptors: of a socket, two pipes, an ssh. A
frame is `KIND LENGTH`, a newline, and LENGTH bytes. To the keeper: `start` or `attach`, later `finish`. From it: `kept`
(its pid, the component's pid, start ticks and time), `notes`, `ready`; then `output` as it is printed, `exit` with the
code, `problem`. The end of the file means that the other side is gone.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from atropos_common.parent_death import become
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.logs import CHUNK, SAY_AGAIN_S, LogFile, widen

MOST_LEFT = 64 * 1024 * 1024
"""At the end at most so much is read from a pipe whose other end a stranger floods."""
MOST_FRAME = 256 * 1024 * 1024
"""Bytes of a frame: no more is waited for, whoever is at the other end."""
GREETING_S = 2.0
"""A supervisor that takes over must say so within this time."""

Frame = tuple[str, bytes]


class LineClosedError(OSError):
    """The other side is gone, or says nothing for too long."""


class KeeperLine:
    """Both directions. Owns its descriptors, which may be one.

    Args:
        patience_s: so long a reader may be busy, where the descriptors do not block; None: for ever.
        after: what comes before these bytes is not ours; they are told as a frame `began`.
    """

    def __init__(self, reading: int, writing: int, patience_s: float | None = None, after: bytes = b"") -> None:
        self.reading, self.writing, self._patience_s, self._after = reading, writing, patience_s, after
        self._data = bytearray()
        self._frames: list[Frame] = []

    def say(self, kind: str, payload: bytes = b"") -> None:
        """Send one frame; waits for a busy reader.

        Raises:
            OSError: nobody is there to read it.
        """
        parts = [memoryview(f"{kind} {len(payload)}\n".encode()), memoryview(payload)]
        while parts:
            try:
                written = os.writev(self.writing, parts)
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self.writing, select.POLLOUT)
                if not waiting.poll(None if self._patience_s is None else self._patience_s * 1000):
                    raise LineClosedError(f"nothing was read for {self._patience_s:g} s") from None
                continue
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]

    def read(self) -> list[Frame] | None:
        """The frames that are complete with what can be read now; None at the end, or if it is no line of ours."""
        try:
            data = os.read(self.reading, CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self._data += data
        try:
            return self._complete() if data else None
        except ValueError:
            return None

    def hear(self, timeout_s: float | None = None) -> Frame:
        """The next frame; blocking.

        Raises:
            LineClosedError: there is none within `timeout_s`, or ever.
        """
        waiting = select.poll()
        waiting.register(self.reading, select.POLLIN)
        while not self._frames:
            if not waiting.poll(None if timeout_s is None else timeout_s * 1000):
                raise LineClosedError(f"no answer within {timeout_s:g} s")
            frames = self.read()
            if frames is None:
                raise LineClosedError("the other side has ended")
            self._frames += frames
        return self._frames.pop(0)

    def heard(self) -> list[Frame]:
        """Frames that came with the last one that `hear` gave."""
        frames, self._frames = self._frames, []
        return frames

    def close(self) -> None:
        for descriptor in {self.reading, self.writing} - {-1}:
            os.close(descriptor)
        self.reading = self.writing = -1

    def _complete(self) -> list[Frame]:
        frames = []
        if self._after:
            begin = self._data.find(self._after)
            if begin < 0:
                del self._data[: -len(self._after)]
                return []
            del self._data[: begin + len(self._after)]
            self._after = b""
            frames.append(("began", b""))
        while (end := self._data.find(b"\n")) >= 0:
            kind, _, length = bytes(self._data[:end]).partition(b" ")
            if not length.isdigit() or int(length[:20]) > MOST_FRAME:
                raise ValueError
            stop = end + 1 + int(length)
            if len(self._data) < stop:
                break
            frames.append((kind.decode(), bytes(self._data[end + 1 : stop])))
            del self._data[:stop]
        return frames


class Keeper:
    """One component: its process, its output, and the supervisor that listens, if one does."""

    def __init__(self, job: dict[str, Any], listener: socket.socket) -> None:
        self._notes: str = job["notes"]
        self._listener = listener
        self._line: KeeperLine | None = None
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

    def greet(self, line: KeeperLine) -> None:
        """Serve the supervisor at the other end of `line`."""
        self._let_go()
        self._line, self._muted = line, False
        self._poll.register(line.reading, select.POLLIN)
        self._say("kept", f"{os.getpid()} {self._pid} {self._ticks} {self._started}")
        self._say("notes", self._notes)
        self._tell()
        if self._exit is not None:
            self._say("exit", str(self._exit))
        self._say("ready")

    def _let_go(self) -> None:
        """The supervisor is gone, or another one has come."""
        if self._line is not None:
            self._poll.unregister(self._line.reading)
            self._line.close()
            self._line = None

    def _say(self, kind: str, text: str = "") -> None:
        self._send(kind, text.encode())

    def _send(self, kind: str, payload: bytes) -> None:
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
        found = os.waitid(os.P_PIDFD, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            self._poll.unregister(self._child)
            self._exit = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            self._say("exit", str(self._exit))

    def _copy(self) -> int:
        """Move one chunk; how many bytes it had."""
        if self._output < 0:
            return 0
        try:
            data = os.read(self._output, CHUNK)
        except BlockingIOError:
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
        self._send("output", data)
        return len(data)

    def _tell(self) -> None:
        """Tell of trouble with the log that was not told yet; without a listener it waits for the next one."""
        lost = self._log.lost_bytes if self._log else 0
        if self._line is not None and self._trouble and (self._log is None or lost > self._told[1]):
            self._say("problem", self._trouble + (f"; {lost:,} bytes of output are lost so far" if lost else ""))
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


def accept(listener: socket.socket) -> KeeperLine | None:
    """The line to the next caller; None if it is another user, to whom nothing is said."""
    caller, _ = listener.accept()
    _, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid == os.getuid():
        descriptor = caller.detach()
        return KeeperLine(descriptor, descriptor)
    caller.close()
    return None


def begin(line: KeeperLine, listener: socket.socket) -> None:
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
