"""Logs of a component: its pipe is drained whatever else happens, into files that do not grow without bound.

`ATTEMPT.log` is what is being written, `ATTEMPT.log.1` what came just before; together they hold `max_bytes`, each
at most half. Output that rotation drops is counted and said in the first line of the new file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

CHUNK = 256 * 1024
TAIL_BYTES = 64 * 1024
LONGEST_LINE = 64 * 1024
"""A log probe looks at most at so many bytes of one line."""
PIPE_BYTES = 1024 * 1024
F_SETPIPE_SZ = 1031


class LogFile:
    """Append-only file in two segments."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self.older = path.with_name(path.name + ".1")
        self.max_bytes = max_bytes
        self.dropped_bytes = self.dropped_lines = self.lost_bytes = 0
        self._half = max(max_bytes // 2, 1)
        self._size = self._lines = self._older_size = self._older_lines = 0
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> str:
        """Append `data`; what is wrong with the disk, or nothing. Never raises for a full disk: it counts."""
        while data:
            room = self._half - self._size
            if len(data) <= room:
                return self._put(data)
            cut = data.rfind(b"\n", 0, room) + 1 if room > 0 else 0
            if cut == 0 and self._size == 0:
                cut = room
            problem = self._put(data[:cut])
            if problem:
                self.lost_bytes += len(data) - cut
                return problem
            self._rotate()
            data = data[cut:]
        return ""

    def _put(self, data: bytes) -> str:
        problem = self._append(data)
        if not problem:
            self._size += len(data)
            self._lines += data.count(b"\n")
        return problem

    def _append(self, data: bytes) -> str:
        view = memoryview(data)
        while view:
            try:
                written = os.write(self._fd, view)
            except OSError as error:
                self.lost_bytes += len(view)
                return f"{self.path}: {error.strerror}"
            view = view[written:]
        return ""

    def _rotate(self) -> None:
        if self._size == 0:
            return
        self.dropped_bytes += self._older_size
        self.dropped_lines += self._older_lines
        with contextlib.suppress(OSError):
            self.path.replace(self.older)
            new = self._open()
            os.close(self._fd)
            self._fd = new
        self._older_size, self._older_lines = self._size, self._lines
        self._size = self._lines = 0
        if self.dropped_bytes:
            note = (
                f"[atropos] {self.dropped_bytes} bytes ({self.dropped_lines} lines) of this attempt were dropped: "
                f"logs.max_bytes = {self.max_bytes}; {self.older.name} holds what came just before this line\n"
            )
            self._append(note.encode())  # not counted: the numbers speak of the component's own output

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LogDrain:
    """Moves bytes from a component's pipe to its log file, inside the event loop, without waiting for anyone."""

    def __init__(self, descriptor: int, file: LogFile | None, on_problem: Callable[[str], None] | None = None) -> None:
        os.set_blocking(descriptor, False)
        self.file = file
        self._fd = descriptor
        self._tail = bytearray()
        self._watches: dict[str, tuple[re.Pattern[bytes], list[bool]]] = {}
        self._partial = b""
        self._on_problem = on_problem
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._ready)

    def watch(self, pattern: str) -> None:
        """Look for `pattern` in every line from now on (and in the tail kept so far)."""
        if pattern not in self._watches:
            compiled = re.compile(pattern.encode())
            seen = any(compiled.search(line) for line in bytes(self._tail).splitlines())
            self._watches[pattern] = (compiled, [seen])

    def seen(self, pattern: str) -> bool:
        """Whether a line matched since `watch(pattern)`."""
        return pattern in self._watches and self._watches[pattern][1][0]

    def tail(self, count: int = 40) -> list[str]:
        """The last lines, decoded with replacement."""
        return bytes(self._tail).decode(errors="replace").splitlines()[-count:]

    def _ready(self) -> None:
        self._read_once()

    def _read_once(self) -> bool:
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_pipe()
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        if self.file:
            lost = self.file.lost_bytes
            problem = self.file.write(data)
            if problem and lost == 0 and self._on_problem:
                self._on_problem(problem)
        self._tail += data[-TAIL_BYTES:]
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        waiting = [entry for entry in self._watches.values() if not entry[1][0]]
        if waiting:
            self._look(waiting, data)

    def _look(self, waiting: list[tuple[re.Pattern[bytes], list[bool]]], data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[:LONGEST_LINE]
        for pattern, seen in waiting:
            seen[0] = any(pattern.search(line[:LONGEST_LINE]) for line in lines)

    def _close_pipe(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def finish(self, limit: int = 64 * 1024 * 1024) -> None:
        """Take what is still in the pipe and close it, even if a stranger holds the other end."""
        taken = 0
        while self._fd >= 0 and taken < limit and self._read_once():
            taken += CHUNK
        self._close_pipe()
        if self.file:
            self.file.close()


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a log, over both of its segments; empty when there is none."""
    data = b""
    for part in (path, path.with_name(path.name + ".1")):
        data = _end_of(part, count - data.count(b"\n")) + data
        if data.count(b"\n") >= count:
            break
    return data.decode(errors="replace").splitlines()[-count:] if count > 0 else []


def _end_of(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            data = b""
            while position > 0 and data.count(b"\n") <= count:
                step = min(CHUNK, position)
                position -= step
                file.seek(position)
                data = file.read(step) + data
            return data
    except OSError:
        return b""


def attempts(folder: Path) -> list[Path]:
    """Every `ATTEMPT.log` in a component's log folder, in no order; empty when there is no folder."""
    return [path for path in folder.glob("*.log") if path.stem.isdecimal()]


def latest_attempt(folder: Path) -> Path | None:
    """The newest `ATTEMPT.log` in a component's log folder."""
    return max(attempts(folder), key=lambda path: int(path.stem), default=None)
