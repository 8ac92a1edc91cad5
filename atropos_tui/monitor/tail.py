"""Read component logs that grow: `LogTail` keeps a screen fresh, whatever a component prints.

It reads at most one bounded chunk per call and never raises for what is in the file or for a file that is missing, cut
or replaced; callers poll it from a thread (`asyncio.to_thread`) or a loop of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from atropos_tui.supervisor.logs import latest_attempt
from atropos_tui.supervisor.record_tail import CHUNK_BYTES, MAX_LINE_BYTES, FileSource

ROTATED = b"[atropos] the log was rotated here; its earlier part is in the file ending in .1\n"
"""Put in place of the lines that were not read before a rotation."""


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
    begun: bool = False
    """Whether it was read before."""
    anew: bool = False
    """Whether the last read found another file under the name."""
    ends: list[int] = field(default_factory=list)
    """Where in the file each line of the last read ended, newline included."""
    _source: FileSource = field(init=False)

    def __post_init__(self) -> None:
        self._source = FileSource(self.path)

    def read(self, limit: int = CHUNK_BYTES) -> tuple[list[str], int]:
        """New complete lines and the bytes skipped before them."""
        skipped = self._jump()
        data, _, self.anew = self._source.read(limit)
        self.ends = []
        if self.anew:
            self._partial, self._aligned, skipped = ROTATED, True, 0
        if not data and not self.anew:
            return [], skipped
        *lines, rest = (self._partial + data).split(b"\n")
        self._partial = rest[-MAX_LINE_BYTES:]
        if not self._aligned and lines:
            lines, self._aligned = lines[1:], True
        end = self._source.offset - len(rest)
        for line in reversed(lines):
            self.ends.append(max(end, 1))
            end -= len(line) + 1
        self.ends.reverse()
        return [line.decode("utf-8", "replace") for line in lines], skipped

    def _jump(self) -> int:
        """Move the position forward where the distance to the end is too great; bytes jumped over."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return 0
        allowed = self.max_behind if self.begun else self.history_bytes
        self.begun = True
        target = size - self.history_bytes
        if size - self._source.offset <= allowed or target <= self._source.offset:
            return 0
        skipped = target - self._source.offset
        self._source.offset, self._partial, self._aligned = target, b"", False
        return skipped


newest_log = latest_attempt
"""The log of the latest attempt in `RUN/logs/COMPONENT`, or None before the first start."""
