"""Read files that others append to: stream records (`RecordTail`) and component logs (`LogTail`).

Both are plain objects that read at most one bounded chunk per call and never raise for what is in the file or for a
file that is missing, cut or replaced; callers poll them from a thread (`asyncio.to_thread`) or a loop of their own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from atropos_tui.supervisor.logs import latest_attempt
from trainer_core.contracts.records import Record, RecordError, parse_line

CHUNK_BYTES = 256 * 1024
"""Read per call: a few hundred records, some ten milliseconds of parsing."""
MAX_LINE_BYTES = 4 * 1024 * 1024
"""A longer line is no record: it is counted and skipped up to its newline."""
ROTATED = b"[atropos] the log was rotated here; its earlier part is in the file ending in .1\n"
"""Put in place of the lines that were not read before a rotation."""


@dataclass
class _Source:
    """Byte position in a file that may be missing, shrink, or be replaced by another of the same name."""

    path: Path
    offset: int = 0
    identity: tuple[int, int] | None = None
    restarts: int = 0
    """How often reading began again because the file shrank or was replaced."""

    def read(self, limit: int) -> tuple[bytes, int, bool]:
        """Next bytes, the bytes left behind them, and whether the file began anew since the last call."""
        try:
            with self.path.open("rb") as file:
                info = os.fstat(file.fileno())
                identity = (info.st_dev, info.st_ino)
                anew = self.identity is not None and (identity != self.identity or info.st_size < self.offset)
                if anew:
                    self.offset = 0
                    self.restarts += 1
                self.identity = identity
                file.seek(self.offset)
                data = file.read(limit)
        except OSError:
            return b"", 0, False
        self.offset += len(data)
        return data, max(0, info.st_size - self.offset), anew


@dataclass
class RecordTail:
    """Records of one JSONL file, in order, each once. Reads up to the last newline; the torn rest waits."""

    path: Path
    bad_lines: int = 0
    """Lines that were no record, or too long to be one."""
    behind: int = 0
    """Bytes known to be unread after the last call."""
    _partial: bytes = b""
    _skipping: bool = False
    _source: _Source = field(init=False)

    def __post_init__(self) -> None:
        self._source = _Source(self.path)

    @property
    def restarts(self) -> int:
        """How often the file was cut or replaced; its records come again from the first."""
        return self._source.restarts

    def read(self, limit: int = CHUNK_BYTES) -> list[Record]:
        """Records completed since the last call, from at most `limit` new bytes; call again while `behind`."""
        data, self.behind, anew = self._source.read(limit)
        if anew:
            self._partial, self._skipping = b"", False
        if not data:
            return []
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._skipping and lines:
            lines = lines[1:]
            self._skipping = False
        if self._skipping:
            self._partial = b""
        elif len(self._partial) > MAX_LINE_BYTES:
            self.bad_lines += 1
            self._partial, self._skipping = b"", True
        return self._parse(lines)

    def _parse(self, lines: list[bytes]) -> list[Record]:
        records = []
        for line in lines:
            if not line.strip():
                continue
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise RecordError("too long")
                records.append(parse_line(line))
            except (RecordError, UnicodeDecodeError):
                self.bad_lines += 1
        return records


@dataclass
class LogTail:
    """Lines of one growing log, bytes decoded with replacement. Starts near the end and never falls far behind.

    A reader that is more than `max_behind` bytes late jumps ahead: the file keeps everything, the screen does not
    have to. What was jumped over is returned in `skipped` (bytes) of that call.
    """

    path: Path
    history_bytes: int = CHUNK_BYTES
    max_behind: int = 4 * CHUNK_BYTES
    _partial: bytes = b""
    _aligned: bool = True
    _started: bool = False
    _source: _Source = field(init=False)

    def __post_init__(self) -> None:
        self._source = _Source(self.path)

    def read(self, limit: int = CHUNK_BYTES) -> tuple[list[str], int]:
        """New complete lines and the bytes skipped before them."""
        skipped = self._jump()
        data, _, anew = self._source.read(limit)
        if anew:
            self._partial, self._aligned, skipped = ROTATED, True, 0
        if not data and not anew:
            return [], skipped
        *lines, rest = (self._partial + data).split(b"\n")
        self._partial = rest[-MAX_LINE_BYTES:]
        if not self._aligned and lines:
            lines, self._aligned = lines[1:], True
        return [line.decode("utf-8", "replace") for line in lines], skipped

    def _jump(self) -> int:
        """Move the position forward where the distance to the end is too great; bytes jumped over."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return 0
        allowed = self.max_behind if self._started else self.history_bytes
        self._started = True
        target = size - self.history_bytes
        if size - self._source.offset <= allowed or target <= self._source.offset:
            return 0
        skipped = target - self._source.offset
        self._source.offset, self._partial, self._aligned = target, b"", False
        return skipped


newest_log = latest_attempt
"""The log of the latest attempt in `RUN/logs/COMPONENT`, or None before the first start."""
