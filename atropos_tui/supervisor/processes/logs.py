"""Logs of a component: the drain of its pipe, the files of each attempt, and arrival times.

`LogFile` writes two segments, `ATTEMPT.log` and the older `ATTEMPT.log.1`, each at most half of
`max_bytes`. What rotation or a full disk dropped is counted in the log.

Times are in `ATTEMPT.times` and `.times.1`: a head names the log's inode; each entry of 16 bytes
says "from this offset on, bytes arrived at this Unix time". An entry is written before its bytes.
In a flood a line's time is up to 1/`RATE` s too early.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from atropos_common.system.files import IN_LOGS, names_in, open_regular
from atropos_tui.supervisor.processes.log_watch import LineWatch

CHUNK = 256 * 1024
"""Bytes per read from a component's pipe."""
MOST_LEFT = 64 * 1024 * 1024
"""Bytes drained at the end from a pipe that another process keeps flooding."""
PIPE_BYTES = 1024 * 1024
F_SETPIPE_SZ = 1031
SAY_AGAIN_S = 60.0
"""Seconds between two reports of refused writes."""
RECOVERED_S = 10.0
"""Seconds without a refused write after which a disk has recovered."""
FULL = (errno.ENOSPC, errno.EDQUOT)
TAIL_BYTES = 64 * 1024
RATE = 20.0
"""Time entries per second."""
RESERVE = 50.0
"""Time entries in a burst after a quiet time."""
MAGIC = b"atropos1"
_HEAD = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<Qd")


class LogDrain:
    """Moves bytes from a component's pipe to its log file, in the event loop."""

    def __init__(
        self,
        descriptor: int | None,
        file: LogFile | None,
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        """`descriptor` None: another object reads the output and calls `take`."""
        self.file = file
        self._fd = -1 if descriptor is None else descriptor
        self._tail = bytearray()
        self._lines = LineWatch()
        self._on_problem = on_problem
        self.scanner: Callable[[bytes], None] | None = None
        """Called with every chunk; must only store it."""
        self._reported = (-SAY_AGAIN_S, 0)
        self._failed_at: float | None = None
        self._loop = asyncio.get_running_loop()
        if self._fd >= 0:
            # A blocking read would stop the whole event loop.
            os.set_blocking(self._fd, False)
            self._loop.add_reader(self._fd, self._read_once)

    def watch(self, pattern: str) -> None:
        self._lines.watch(pattern, bytes(self._tail))

    def seen(self, pattern: str) -> bool:
        """True if a line has matched since `watch(pattern)`."""
        return self._lines.seen(pattern)

    def tail(self, count: int = 40) -> list[str]:
        return bytes(self._tail).decode(errors="replace").splitlines()[-count:]

    def _read_once(self) -> bool:
        data = read_some(self._fd)
        if data:
            self.take(data)
        elif data is not None:
            self._close_pipe()
        return bool(data)

    def take(self, data: bytes) -> None:
        self.note(data)
        self._lines.take(data)

    def note(self, data: bytes) -> None:
        """Write our own text. Diagnosis rules read it; patterns of health checks do not."""
        if self.file:
            problem = self.file.write(data)
            if problem and time.monotonic() - self._reported[0] >= SAY_AGAIN_S:
                self._report(problem)
            self._note_recovery(bool(problem))
        self._tail += data[-TAIL_BYTES:]
        if len(self._tail) > 2 * TAIL_BYTES:
            # Cut only at double size, so that not every chunk moves the buffer.
            del self._tail[:-TAIL_BYTES]
        if self.scanner:
            self.scanner(data)

    def _note_recovery(self, failed: bool) -> None:
        """Report an empty problem once the disk has accepted every write for `RECOVERED_S`."""
        now = time.monotonic()
        if failed:
            self._failed_at = now
        elif self._failed_at is not None and now - self._failed_at >= RECOVERED_S:
            self._failed_at = None
            if self._on_problem:
                self._on_problem("")

    def _report(self, problem: str) -> None:
        if self._on_problem and self.file:
            self._reported = time.monotonic(), self.file.lost_bytes
            self._on_problem(f"{problem}; {self.file.lost_bytes:,} bytes of output are lost so far")

    def _close_pipe(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def finish(self) -> None:
        """Read the rest of the pipe and close it, even if another process holds the other end."""
        taken = 0
        # Count whole chunks: short reads of a flood would otherwise keep this loop alive.
        while self._fd >= 0 and taken < MOST_LEFT and self._read_once():
            taken += CHUNK
        self._close_pipe()
        if self.file:
            if self.file.lost_bytes > self._reported[1]:
                self._report(f"{self.file.path}: the disk was full{free_space(self.file.path)}")
            self.file.close()


def read_some(descriptor: int) -> bytes | None:
    """One chunk; b"" at the end; None if there is nothing to read yet."""
    try:
        return os.read(descriptor, CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def widen(pipe: int) -> None:
    """Enlarge a pipe to a megabyte, if the user's limit allows."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)


class LogFile:
    """Append-only file in two segments."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """A full disk delays the opening to the first write that has space.

        Raises:
            OSError: it cannot be opened for another reason.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self.older = path.with_name(path.name + ".1")
        self.max_bytes = max_bytes
        self.dropped_bytes = self.dropped_lines = self.lost_bytes = 0
        self._half = max(max_bytes // 2, 1)
        self._size = self._lines = self._older_size = self._older_lines = 0
        self._end = 0
        """Bytes in the file, our own notes included."""
        self._unnoted = 0
        self._midline = False
        self._times = TimesWriter(path)
        self._fd = -1
        try:
            self._begin(_open(path))
        except OSError as error:
            if error.errno not in FULL:
                raise

    def _begin(self, descriptor: int) -> None:
        self._fd, self._end = descriptor, 0
        self._times.begin(descriptor)
        self._times.mark(0)

    def write(self, data: bytes) -> str:
        """Append `data`. Return the disk's problem, or "". Lost bytes are counted."""
        while data:
            space = self._half - self._size
            # Cut at the last line end that fits; a single line longer than a segment is split.
            cut = (
                len(data)
                if len(data) <= space
                else data.rfind(b"\n", 0, space) + 1
                if space > 0
                else 0
            )
            if cut == 0 and self._size == 0:
                cut = space
            problem = self._put(data[:cut])
            data = data[cut:]
            if problem:
                self._lose(len(data))
                return problem
            if data and not self._rotate():
                return self._put(data)  # a file over its limit is better than lost output
        return ""

    def _put(self, data: bytes) -> str:
        # The time entry comes before its bytes (see the module docstring).
        if b"\n" in data:
            self._times.mark(self._end)
        problem = self._note_lost()
        written = 0
        if not problem:
            written, problem = self._append(data)
        if problem:
            self._lose(len(data) - written)
        self._size += written
        self._lines += data.count(b"\n", 0, written)
        self._midline = data[written - 1] != ord("\n") if written else self._midline
        return problem

    def _lose(self, count: int) -> None:
        self.lost_bytes += count
        self._unnoted += count

    def _note_lost(self) -> str:
        """Note missing output as soon as the disk accepts it. Return the disk's problem, or ""."""
        if not self._unnoted:
            return ""
        break_line = "\n" if self._midline else ""
        note = (
            f"{break_line}[atropos] {self._unnoted} bytes of output are missing here: the disk "
            f"did not take them\n"
        )
        written, problem = self._append(note.encode())
        if not problem:
            self._unnoted, self._midline = 0, False
        elif written:
            # Remove the half of the note, so that the next try writes it whole.
            self._end -= written
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
        return problem

    def _append(self, data: bytes) -> tuple[int, str]:
        view = memoryview(data)
        try:
            if self._fd < 0:
                self._begin(_open(self.path))
            while view:
                written = os.write(self._fd, view)
                self._end += written
                view = view[written:]
        except OSError as error:
            return len(data) - len(view), f"{self.path}: {error.strerror}{free_space(self.path)}"
        return len(data), ""

    def _rotate(self) -> bool:
        """Begin a new file; False if that fails, and the present file goes on."""
        aside = self.path.with_name(self.path.name + ".new")
        try:
            descriptor = _open(aside)  # first, since a full disk may refuse it
            self._times.step_aside()
            with contextlib.suppress(FileNotFoundError):
                self.path.replace(self.older)
            aside.replace(self.path)
        except OSError:
            return False
        os.close(self._fd)
        self._begin(descriptor)
        self.dropped_bytes += self._older_size
        self.dropped_lines += self._older_lines
        # The new older segment; its numbers count as dropped at the next rotation.
        self._older_size, self._older_lines = self._size, self._lines
        self._size = self._lines = 0
        if self.dropped_bytes:
            note = (
                f"[atropos] {self.dropped_bytes} bytes ({self.dropped_lines} lines) of this "
                f"attempt were dropped: "
                f"logs.max_bytes = {self.max_bytes}; {self.older.name} holds what came just "
                f"before this line\n"
            )
            self._append(note.encode())  # not counted: the numbers are the component's output
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._times.close()


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)


def free_space(path: Path) -> str:
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return ""
    free, size = disk.f_bavail * disk.f_frsize / 1e6, disk.f_blocks * disk.f_frsize / 1e6
    return f" ({free:,.1f} MB of {size:,.1f} MB and {disk.f_favail:,} inodes are free there)"


def times_path(log: Path) -> Path:
    """`N.log` -> `N.times`, `N.log.1` -> `N.times.1`."""
    return log.with_name(log.name.replace(".log", ".times"))


class TimesWriter:
    """Writes the times of the current segment."""

    def __init__(self, log: Path) -> None:
        self._path = times_path(log)
        self._older = times_path(log.with_name(log.name + ".1"))
        self._fd = -1
        self._head = b""
        self._size = 0
        self._left = RESERVE
        self._last = time.monotonic()

    def begin(self, log: int) -> None:
        """Begin the index of the log open as descriptor `log`."""
        self.close()
        self._head = _HEAD.pack(MAGIC, os.fstat(log).st_ino)
        self._size = 0
        with contextlib.suppress(OSError):
            self._fd = _open(self._path)

    def step_aside(self) -> None:
        """Rename the index, before its log is renamed: no index may outlive the log whose inode
        it names."""
        with contextlib.suppress(OSError):
            self._path.replace(self._older)

    def mark(self, offset: int) -> None:
        """Bytes at `offset` arrive now."""
        now = time.monotonic()
        # Token bucket: `RATE` tokens per second, at most `RESERVE`.
        self._left = min(RESERVE, self._left + (now - self._last) * RATE)
        self._last = now
        # The first entry is always written, because it carries the head.
        if self._left < 1 and self._size:
            return
        self._left = max(self._left - 1, 0.0)
        entry = _ENTRY.pack(offset, time.time())
        self._append(entry if self._size else self._head + entry)

    def _append(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if os.write(self._fd, data) == len(data):
                self._size += len(data)
            else:
                os.ftruncate(
                    self._fd, self._size
                )  # the disk is full: a torn entry would shift all that follow

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LogTimes:
    """Reads the times of the log at `path`, open as `log`."""

    def __init__(self, path: Path, log: BinaryIO) -> None:
        self._path = path
        self._log = log
        self._file: BinaryIO | None = None
        self._offsets: list[int] = []
        self._times: list[float] = []

    def refresh(self) -> None:
        """Read new entries; call it after reading their bytes."""
        if self._file is None:
            self._file = self._find()
        if self._file is None:
            return
        data = self._file.read()
        whole = len(data) - len(data) % _ENTRY.size
        if whole < len(data):
            # The last entry may be half written: read it again next time.
            self._file.seek(whole - len(data), os.SEEK_CUR)
        for offset, when in _ENTRY.iter_unpack(data[:whole]):
            self._offsets.append(offset)
            self._times.append(when)

    def at(self, offset: int) -> float:
        if not self._times:
            return os.fstat(self._log.fileno()).st_mtime
        return self._times[max(bisect_right(self._offsets, offset) - 1, 0)]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _find(self) -> BinaryIO | None:
        """The index that names this log's inode; in a copied folder the one beside it."""
        base = self._path.with_suffix("") if self._path.name.endswith(".1") else self._path
        logs = [base, base.with_name(base.name + ".1")]
        # Rotation may have renamed the log since it was opened, so the inode decides.
        inode = os.fstat(self._log.fileno()).st_ino
        named = {path: _inode_named_in(times_path(path)) for path in logs}
        found = next((path for path in logs if named[path] == inode), None)
        if found is None and not {_inode(path) for path in logs} & set(named.values()):
            found = self._path
        return _opened(times_path(found), named.get(found)) if found is not None else None


def _inode_named_in(path: Path) -> int | None:
    try:
        with open_regular(path, IN_LOGS) as file:
            magic, inode = _HEAD.unpack(file.read(_HEAD.size))
    except (OSError, struct.error):
        return None
    return int(inode) if magic == MAGIC else None


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _opened(path: Path, inode: int | None) -> BinaryIO | None:
    try:
        file = open_regular(path, IN_LOGS)
    except OSError:
        return None
    if inode is not None and file.read(_HEAD.size) == _HEAD.pack(MAGIC, inode):
        return file
    file.close()
    return None


def attempts(folder: Path) -> list[Path]:
    """Every `ATTEMPT.log` of a component, unordered."""
    names = names_in(folder, IN_LOGS - 1)
    return [
        folder / name
        for name in names
        if name.endswith(".log") and name.removesuffix(".log").isdecimal()
    ]


def latest_attempt(folder: Path) -> Path | None:
    """Newest `ATTEMPT.log` of a component."""
    return max(attempts(folder), key=lambda path: int(path.stem), default=None)
