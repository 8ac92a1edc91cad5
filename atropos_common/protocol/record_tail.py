"""Read growing files in bounded chunks. Never raises for content, or for a missing or replaced
file."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from atropos_common.protocol.record_base import Record, RecordError
from atropos_common.protocol.records import parse_line
from atropos_common.system.files import cut_torn_line, next_data, open_regular

# A few hundred records, some ten milliseconds of parsing.
CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 4 * 1024 * 1024
"""Longer lines are counted and skipped."""
LOOK_BACK_BYTES = 256 << 20
"""Bytes at the end of a file in which `nth_from_end` searches."""
TAIL_BYTES = 1 << 20
"""Bytes at the end of a file in which `next_seq` searches the last complete record."""


@dataclass
class FileSource:
    """Read position in a file that may shrink or be replaced."""

    path: Path
    offset: int = 0
    identity: tuple[int, int] | None = None
    restarts: int = 0

    def read(self, limit: int) -> tuple[bytes, int, bool]:
        """Next bytes, the number of bytes left, and True if the file was replaced."""
        try:
            with open_regular(self.path) as file:
                info = os.fstat(file.fileno())
                # A replaced file has another inode; a truncated one is shorter than the position.
                identity = (info.st_dev, info.st_ino)
                anew = self.identity is not None and (
                    identity != self.identity or info.st_size < self.offset
                )
                if anew:
                    self.offset = 0
                    self.restarts += 1
                self.identity = identity
                self.offset = file.seek(next_data(file.fileno(), self.offset))
                data = file.read(limit)
        except OSError:
            return b"", 0, False
        self.offset += len(data)
        return data, max(0, info.st_size - self.offset), anew


def kind_words(kind: str) -> tuple[bytes, bytes]:
    """How lines name their kind: as our writers do, and as `json.dumps` does by default."""
    return f'"kind":"{kind}"'.encode(), f'"kind": "{kind}"'.encode()


def nth_from_end(path: Path, words: tuple[bytes, ...], count: int) -> int:
    """Offset of the `count`-th last occurrence of any of `words`; else the start of the last
    `LOOK_BACK_BYTES`."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            # `mmap` needs an offset that is a multiple of the page size.
            first = (
                max(0, size - LOOK_BACK_BYTES)
                // mmap.ALLOCATIONGRANULARITY
                * mmap.ALLOCATIONGRANULARITY
            )
            with mmap.mmap(
                file.fileno(), size - first, access=mmap.ACCESS_READ, offset=first
            ) as data:
                at = len(data)
                for _ in range(count):
                    at = max(data.rfind(each, 0, at) for each in words)
                    if at < 0:
                        return first
                return first + at
    except (OSError, ValueError):  # an empty file cannot be mapped
        return 0


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines in bounded memory; oversized ones are skipped."""
    skipping = False
    while line := file.readline(MAX_LINE_BYTES):
        ends = line.endswith(b"\n")
        if not skipping and (ends or len(line) < MAX_LINE_BYTES):
            yield line
        skipping = not ends
        if skipping:
            file.seek(next_data(file.fileno(), file.tell()))


@dataclass
class RecordTail:
    """Reader that returns each record of a JSONL file once, when its line is complete."""

    path: Path
    bad_lines: int = 0
    """Malformed or oversized lines."""
    behind: int = 0
    """Unread bytes after the last call."""
    from_end: bool = False
    """Skip the present content except its last `keep` bytes."""
    keep: int = 0
    unread: bytes = b""
    """Lines with these bytes are skipped up to offset `unread_before`."""
    unread_before: int = 0
    _partial: bytes = b""
    _skipping: bool = False
    _source: FileSource = field(init=False)

    def __post_init__(self) -> None:
        self._source = FileSource(self.path)
        if self.from_end and self.path.exists():
            self._source.offset = max(0, self.path.stat().st_size - self.keep)
            self._skipping = self.keep > 0 and self._source.offset > 0

    @property
    def restarts(self) -> int:
        """Times that the file shrank or was replaced; `read` then begins again at its start."""
        return self._source.restarts

    def read(self, limit: int = CHUNK_BYTES) -> list[Record]:
        """Records completed since the last call; call again while `behind`."""
        data, self.behind, anew = self._source.read(limit)
        if anew:
            self._partial, self._skipping, self.unread_before = b"", False, 0
        if not data:
            return []
        # The last element has no newline yet: keep it for the next call.
        *lines, self._partial = (self._partial + data).split(b"\n")
        # Drop the rest of an oversized line, or of the line in which reading began.
        if self._skipping and lines:
            lines = lines[1:]
            self._skipping = False
        if self._skipping:
            self._partial = b""
        elif len(self._partial) > MAX_LINE_BYTES:
            self.bad_lines += 1
            self._partial, self._skipping = b"", True
        # A cheap test on bytes, before any JSON is parsed.
        if self._source.offset <= self.unread_before:
            lines = [line for line in lines if self.unread not in line]
        return self._parse(lines)

    def rest(self) -> Iterator[Record]:
        """Read until nothing is `behind`."""
        while True:
            yield from self.read()
            if not self.behind:
                return

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


def next_seq(path: Path) -> int:
    """Next `seq` of a record file, after removing a torn last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        cut_torn_line(file.fileno())
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        # Bounded, because a device such as /dev/full has no end.
        lines = file.read(min(size, TAIL_BYTES)).splitlines()
    for line in reversed(lines):
        with contextlib.suppress(RecordError):
            return parse_line(line).seq + 1
    return 0
