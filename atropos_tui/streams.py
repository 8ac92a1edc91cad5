"""Standard streams of a command that may be closed or full, and a filter of what they print.

Call `prepare` first and `finish` last. `gated()` filters a command, `harmless` a line of the
screen.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

# These keep their exit code when output is lost, because it reports the outcome of a run.
KEEPS_ITS_CODE = frozenset(
    {"up", "attach", "down", "start", "stop", "restart", "kill", "wait", "sweep", "compare"}
)
OUTPUT_LOST = 2


class Output(io.FileIO):
    """A file descriptor whose failed writes are dropped and counted."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.lost = 0  # bytes that were not written
        self.problem = ""
        self._unreported = 0

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            self._report_loss()
            written = super().write(view)
            while written is None:  # another process made the shared descriptor non-blocking
                select.select([], [self], [])
                written = super().write(view)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.problem = error.strerror or str(error)
            self.lost += len(view)
            self._unreported += len(view)
            return len(view)  # reported as written, so that the buffer above does not try again
        return written

    def _report_loss(self) -> None:
        if self._unreported:
            super().write(
                f"[atropos] {self._unreported} bytes of output are missing here: "
                f"{self.problem}\n".encode()
            )
            self._unreported = 0


_outputs: list[Output] = []


def prepare() -> None:
    """Make the standard streams safe against closed descriptors, bad text and a full disk."""
    # A closed descriptor 0 to 2 would be reused by the next file that opens, and `print` would
    # write into that file.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115
    _outputs[:] = [Output(1), Output(2)]
    sys.stdout = _stream(_outputs[0], sys.stdout, "replace")
    sys.stderr = _stream(_outputs[1], sys.stderr, "backslashreplace")


def _stream(raw: Output, before: TextIO | None, errors: str) -> TextIO:
    encoding = before.encoding if before else "utf-8"
    lines = raw.isatty() or raw.fileno() == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=lines)


def finish(code: int, argv: Sequence[str]) -> int:
    """Flush, report lost bytes, and return the final exit code."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left; without this, Python reports it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    output = _outputs[0]
    if not output.lost:
        return code
    with contextlib.suppress(OSError):
        print(
            f"atropos-tui: {output.lost} bytes of the output are lost: {output.problem}",
            file=sys.stderr,
        )
    return code or (0 if argv[:1] and argv[0] in KEEPS_ITS_CODE else OUTPUT_LOST)


# The filter. Programs, models and files of others may print anything: escape sequences, control
# characters and bidirectional overrides are dropped. Only our colours and `write_own` pass.

# Lines are cut here for display; the file keeps the rest.
MAX_COLUMNS = 4096
# SGR codes that our commands print: dim, and seven colours of the terminal's palette.
COLOURS = ("2", "31", "32", "33", "34", "35", "36", "96")
OWN_STYLES = frozenset({"\x1b[0m", *(f"\x1b[{code}m" for code in COLOURS)})

_ESCAPES = re.compile(
    r"""
    (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]?                     # CSI: colours, cursor
  | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])                     # OSC, DCS, SOS, PM, APC ...
        [^\x07\x1b\x9c\n]* (?:\x07|\x1b\\|\x9c)?             # ... to their end or the line's
  | \x1b [ -/]* [0-~]?                                       # two-character sequences
    """,
    re.VERBOSE,
)
# C1 control characters, and Unicode's format characters (category Cf), which change how other
# characters are read.
_FORMATS = (
    "\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f"
)
_CONTROL = re.compile(f"[\x00-\x08\x0a-\x1f{_FORMATS}]")
# All but tab, line feed and ESC, which `_ESCAPES` handles.
_CONTROL_BUT_LINES = re.compile(f"[\x00-\x08\x0b-\x1a\x1c-\x1f{_FORMATS}]")
_HALVES = re.compile("[\ud800-\udfff]")


def plain_text(line: str) -> str:
    """Make one line safe to show: its text after the last carriage return."""
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
