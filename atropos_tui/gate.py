"""Filter for text that reaches a terminal. Programs, models and files of others may print anything.

`gated()` filters the output of a command, `harmless` each line that the screen draws. Escape
sequences, control characters and bidirectional overrides are dropped. Only our own colours and
`write_own` pass.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

# Lines are cut here for display; the file keeps the rest.
MAX_COLUMNS = 4096
# SGR codes that our commands print: dim, and seven colours of the terminal's palette.
COLOURS = ("2", "31", "32", "33", "34", "35", "36", "96")
OWN_STYLES = frozenset({"\x1b[0m", *(f"\x1b[{code}m" for code in COLOURS)})

_ESCAPES = re.compile(
    r"""
    (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]?                     # CSI: colours, cursor
  | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])                     # OSC, DCS, SOS, PM, APC ...
        [^\x07\x1b\x9c\n]* (?:\x07|\x1b\\|\x9c)?             # ... to their end, or to the end of the line
  | \x1b [ -/]* [0-~]?                                       # two-character sequences
    """,
    re.VERBOSE,
)
# C1 control characters, and Unicode's format characters (category Cf), which change how other
# characters are read.
_FORMATS = (
    "\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001"
    "\U000e0020-\U000e007f"
)
_CONTROL = re.compile(f"[\x00-\x08\x0a-\x1f{_FORMATS}]")
# All but tab, line feed and ESC, which `_ESCAPES` handles.
_CONTROL_BUT_LINES = re.compile(f"[\x00-\x08\x0b-\x1a\x1c-\x1f{_FORMATS}]")
_HALVES = re.compile("[\ud800-\udfff]")


def plain_text(line: str) -> str:
    """Make one line safe to show; of text with carriage returns only the last part is kept."""
    # Cut before the expressions below, which would be slow on a line of megabytes; four characters
    # a column leave space for escape sequences.
    if len(line) > 4 * MAX_COLUMNS:
        line = line[: 4 * MAX_COLUMNS]
    if not line.isprintable():
        line = _ESCAPES.sub("", line)
        line = line.rstrip("\r").rpartition("\r")[2]
        line = _HALVES.sub("?", _CONTROL.sub("", line.expandtabs(8)))
    return line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + "…"


def one_line(text: str) -> str:
    """Join lines to one safe line, with `⏎` for each break."""
    return plain_text(text[: 4 * MAX_COLUMNS].replace("\r\n", "\n").replace("\n", "⏎"))


def plain_lines(text: str) -> str:
    """Make each line safe on its own."""
    return "\n".join(map(plain_text, text.split("\n")))


def harmless(text: str) -> str:
    """Remove control sequences, except line breaks, tabs and our own colours."""
    if text.isprintable():  # the usual case, without an expression
        return text
    text = _ESCAPES.sub(lambda found: found[0] if found[0] in OWN_STYLES else "", text)
    return _HALVES.sub("?", _CONTROL_BUT_LINES.sub("", text))


class Gate:
    """A text stream that writes `harmless` text to the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self.behind = stream

    def write(self, text: str) -> int:
        self.behind.write(harmless(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


@contextmanager
def gated() -> Iterator[None]:
    """Filter standard output and error inside the `with` block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, Gate(stream) if stream else stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def write_own(stream: TextIO, text: str) -> None:
    """Write past the gate; `text` may hold our own control sequences."""
    target = stream.behind if isinstance(stream, Gate) else stream
    target.write(text)
    target.flush()
