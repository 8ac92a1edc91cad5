"""Follow a component's log line by line, losing and repeating nothing: `LogFollower(RUN/logs/COMPONENT)`.

Unlike `tail.LogTail`, which keeps a screen fresh and jumps ahead when it is late, this reads everything, for a pipe or
a terminal that scrolls. The file is held open, so a rotation (`N.log` becomes `N.log.1`) takes away nothing unread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from atropos_tui.monitor.tail import CHUNK_BYTES, MAX_LINE_BYTES
from atropos_tui.supervisor.logs import attempts, latest_attempt


class LogFollower:
    """Lines of the latest attempt from its oldest kept byte on, then of each attempt after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = latest_attempt(folder)
        self._file: BinaryIO | None = None
        self._partial = b""

    @property
    def begun(self) -> bool:
        """Whether any attempt has a log."""
        return self._path is not None

    def drain(self) -> Iterator[str]:
        """Complete lines up to the present end, decoded with replacement; call again for what comes later."""
        while True:
            later = self._next_attempt()  # looked up first: once it exists, the present one grows no more
            yield from self._attempt()
            if later is None:
                return
            yield from self.rest()
            self._close()
            self._path = later

    def rest(self) -> Iterator[str]:
        """The last line, if it has no newline; call when nothing more can come."""
        if self._partial:
            yield self._partial.decode("utf-8", "replace")
        self._partial = b""

    def _next_attempt(self) -> Path | None:
        now = int(self._path.stem) if self._path else -1
        return min(
            (path for path in attempts(self._folder) if int(path.stem) > now),
            key=lambda path: int(path.stem),
            default=None,
        )

    def _attempt(self) -> Iterator[str]:
        if self._path is None:
            return
        if self._file is None:
            self._open_first(self._path)
        while self._file is not None:
            newer = self._rotated(self._path, self._file)  # before reading: a renamed file grows no more
            yield from self._lines(self._file)
            if newer is None:
                return
            self._close()
            self._file = newer

    def _open_first(self, path: Path) -> None:
        for segment in (_older(path), path):
            with contextlib.suppress(OSError):
                self._file = segment.open("rb")
                return

    def _rotated(self, path: Path, file: BinaryIO) -> BinaryIO | None:
        """The segment that comes after `file`, opened, when `file` is no longer the one being written."""
        try:
            with contextlib.ExitStack() as stack:
                newest = stack.enter_context(path.open("rb"))
                if _same(newest, file):
                    return None
                # Looked at in this order, a rotation in between can only make the older one newer, never lost.
                older = _open(_older(path))
                if older is not None and not _same(older, file) and not _same(older, newest):
                    return older
                if older is not None:
                    again = _same(older, newest)
                    older.close()
                    if again:
                        return None  # rotated this very moment: decided at the next call
                stack.pop_all()
                return newest
        except OSError:
            return None  # between the two steps of a rotation

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        while data := file.read(CHUNK_BYTES):
            *lines, self._partial = (self._partial + data).split(b"\n")
            if len(self._partial) > MAX_LINE_BYTES:
                lines, self._partial = [*lines, self._partial], b""
            for line in lines:
                yield line.decode("utf-8", "replace")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except OSError:
        return None


def _same(one: BinaryIO, other: BinaryIO) -> bool:
    return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
