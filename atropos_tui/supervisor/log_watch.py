"""Patterns that log checks wait for, matched against the lines of a component as a person sees them.

A carriage return ends a line as a newline does, colours are left out, and the last part of an over-long line counts. An
unfinished line counts after `SILENT_S`, and what is printed behind it then is tried as a line of its own: a progress
bar often leaves its last line without an end.

Imports little, because every keeper uses it, too.
"""

from __future__ import annotations

import re
import time

LONGEST_LINE = 64 * 1024
"""Limit of one look at one line, in bytes; of a longer line the last part is kept."""
SILENT_S = 1.0
"""Seconds without output after which an unfinished line counts."""
CUT = b"\0"
"""Stands for the first part of an over-long line, so that `^` does not match behind it."""
_CONTROL = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\))")
"""Colours, movements of the cursor, links and titles."""


class LineWatch:
    """The patterns of one attempt, and which of them a line has matched."""

    def __init__(self) -> None:
        self._patterns: dict[str, re.Pattern[bytes]] = {}
        self._waiting: set[str] = set()
        self._partial = b""
        self._fresh = 0
        """Where in the unfinished line begins what came after a silence."""
        self._arrived = time.monotonic()

    def watch(self, pattern: str, before: bytes) -> None:
        """Look for `pattern` in every line from now on, and in `before`, what was printed so far.

        Raises:
            re.error: it is no regular expression.
        """
        if pattern not in self._patterns:
            self._patterns[pattern] = re.compile(pattern.encode())
            self._waiting.add(pattern)
            self._partial, self._fresh = _unfinished(before), 0
            self._look(before)

    def seen(self, pattern: str) -> bool:
        """Return whether a line matched since `watch(pattern)`."""
        if pattern in self._waiting and self._partial and time.monotonic() - self._arrived >= SILENT_S:
            self._look(self._partial)
            self._look(self._partial[self._fresh :])
        return pattern in self._patterns and pattern not in self._waiting

    def note_seen(self, pattern: str) -> None:
        """Count `pattern` as seen."""
        self._waiting.discard(pattern)

    def take(self, data: bytes) -> None:
        """Look at the lines that `data` ends, and keep the one that it leaves unfinished."""
        if not self._waiting:
            return
        now = time.monotonic()
        if now - self._arrived >= SILENT_S:
            self._fresh = len(self._partial)
        self._arrived = now
        text = self._partial + data
        rest = _unfinished(text)
        if len(rest) < len(text):
            ended = text[: len(text) - len(rest) - 1]
            self._look(ended)
            if self._fresh:
                self._look(ended[self._fresh :])
            self._fresh = 0
        if (excess := len(rest) - LONGEST_LINE) > 0:
            self._look(rest)  # before its first part is dropped
            rest, self._fresh = CUT + rest[excess + 1 :], max(0, self._fresh - excess)
        self._partial = rest

    def _look(self, text: bytes) -> None:
        lines = _lines_of(text)
        for pattern in list(self._waiting):
            if any(map(self._patterns[pattern].search, lines)):
                self._waiting.discard(pattern)


def _lines_of(text: bytes) -> list[bytes]:
    """The lines of `text`, the last of which may be unfinished, without control sequences."""
    return _CONTROL.sub(b"", text).replace(b"\r", b"\n").split(b"\n")


def _unfinished(text: bytes) -> bytes:
    """The part of `text` behind the last end of a line."""
    return text[max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 :]
