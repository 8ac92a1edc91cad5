"""What a component prints: its pipe is drained into its log files (`log_file`) whatever else happens."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from atropos_tui.supervisor.log_file import CHUNK, SAY_AGAIN_S, LogFile, room_beside

__all__ = ["LogDrain", "LogFile", "attempts", "last_lines", "latest_attempt"]

TAIL_BYTES = 64 * 1024
LONGEST_LINE = 64 * 1024
"""A log probe looks at most at so many bytes of one line."""


class LogDrain:
    """Moves bytes from a component's pipe to its log file, inside the event loop, without waiting for anyone."""

    def __init__(
        self, descriptor: int | None, file: LogFile | None, on_problem: Callable[[str], None] | None = None
    ) -> None:
        """Without a `descriptor` somebody else reads the output, and hands it to `take`."""
        self.file = file
        self._fd = -1 if descriptor is None else descriptor
        self._tail = bytearray()
        self._watches: dict[str, tuple[re.Pattern[bytes], list[bool]]] = {}
        self._partial = b""
        self._on_problem = on_problem
        self.scanner: Callable[[bytes], None] | None = None
        """Gets every chunk; must only keep it."""
        self._said = (-SAY_AGAIN_S, 0)
        """When a problem was last told, and how much was lost by then."""
        self._loop = asyncio.get_running_loop()
        if self._fd >= 0:
            os.set_blocking(self._fd, False)
            self._loop.add_reader(self._fd, self._ready)

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
        self.take(data)
        return True

    def take(self, data: bytes) -> None:
        """What the component printed next."""
        if self.file:
            problem = self.file.write(data)
            if problem and time.monotonic() - self._said[0] >= SAY_AGAIN_S:
                self._tell(problem)
        self._tail += data[-TAIL_BYTES:]
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        if self.scanner:
            self.scanner(data)
        waiting = [entry for entry in self._watches.values() if not entry[1][0]]
        if waiting:
            self._look(waiting, data)

    def _tell(self, problem: str) -> None:
        if self._on_problem and self.file:
            self._said = time.monotonic(), self.file.lost_bytes
            self._on_problem(f"{problem}; {self.file.lost_bytes:,} bytes of output are lost so far")

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
            if self.file.lost_bytes > self._said[1]:
                self._tell(f"{self.file.path}: the disk was full{room_beside(self.file.path)}")
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
