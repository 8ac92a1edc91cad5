r"""Patterns of log checks, matched against lines as a person sees them: `\r` ends a line, colours
are removed.

An unfinished line counts after `UNFINISHED_LINE_S`; later output is then also tried as a line of
its own, because a progress bar often leaves its last line unfinished.
"""

from __future__ import annotations

import re
import time

LONGEST_LINE = 64 * 1024
"""Bytes of a line that are kept: its last part."""
UNFINISHED_LINE_S = 1.0
"""Seconds without output after which an unfinished line counts."""
CUT = b"\0"
"""Replaces the cut part of a line, so that `^` does not match after it."""
_CONTROL = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\))")
"""Colours, cursor movements, links and titles."""


class LineWatch:
    """Patterns of one attempt, and which have matched."""

    def __init__(self) -> None:
        self._patterns: dict[str, re.Pattern[bytes]] = {}
        self._waiting: set[str] = set()
        self._partial = b""
        self._fresh = 0
        """Offset of the output after a silence in the unfinished line."""
        self._arrived = time.monotonic()

    def watch(self, pattern: str, before: bytes) -> None:
        """Match `pattern` against every line from now on, and against the output `before`.

        Raises:
            re.error: it is not a regular expression.
        """
        if pattern not in self._patterns:
            self._patterns[pattern] = re.compile(pattern.encode())
            self._waiting.add(pattern)
            # The unfinished line continues with the next output.
            self._partial, self._fresh = _unfinished(before), 0
            self._look(before)

    def seen(self, pattern: str) -> bool:
        if (
            pattern in self._waiting
            and self._partial
            and time.monotonic() - self._arrived >= UNFINISHED_LINE_S
        ):
            self._look(self._partial)
            self._look(self._partial[self._fresh :])
        return pattern in self._patterns and pattern not in self._waiting

    def take(self, data: bytes) -> None:
        """Match the lines that `data` completes; keep the unfinished one."""
        # Without patterns this costs nothing, even while a log floods.
        if not self._waiting:
            return
        now = time.monotonic()
        if now - self._arrived >= UNFINISHED_LINE_S:
            self._fresh = len(self._partial)
        self._arrived = now
        text = self._partial + data
        rest = _unfinished(text)
        if len(rest) < len(text):
            ended = text[: len(text) - len(rest) - 1]
            self._look(ended)
            # The line with its unfinished start, then without it.
            if self._fresh:
                self._look(ended[self._fresh :])
            self._fresh = 0
        if (excess := len(rest) - LONGEST_LINE) > 0:
            self._look(rest)  # match the whole line before its first part is dropped
            rest, self._fresh = CUT + rest[excess + 1 :], max(0, self._fresh - excess)
        self._partial = rest

    def _look(self, text: bytes) -> None:
        lines = _lines_of(text)
        for pattern in list(self._waiting):
            if any(map(self._patterns[pattern].search, lines)):
                self._waiting.discard(pattern)


def _lines_of(text: bytes) -> list[bytes]:
    return _CONTROL.sub(b"", text).replace(b"\r", b"\n").split(b"\n")


def _unfinished(text: bytes) -> bytes:
    return text[max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 :]
