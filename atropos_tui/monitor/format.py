"""Text that is safe and short enough to show: foreign output made plain, and figures in a few characters.

Programs and models may print anything. `plain_text` keeps what can be read and drops what a terminal would obey:
escape sequences (CSI, OSC with clipboard writes, DCS and the like), control characters, bidirectional overrides.
Half a surrogate pair, which neither a terminal nor a file can be given, becomes a question mark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from atropos_common.control import State
from atropos_tui.profile.errors import counted as counted
from atropos_tui.profile.redact import mask

MAX_COLUMNS = 4096
"""A longer line is cut for display; its file has the rest."""

_ESCAPES = re.compile(
    r"""
    (?:\x1b\[|\x9b) [0-?]* [ -/]* [@-~]?                     # CSI: colours, cursor
  | (?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])                     # OSC, DCS, SOS, PM, APC ...
        [^\x07\x1b\x9c]* (?:\x07|\x1b\\|\x9c)?               # ... to their end, or to the end of the line
  | \x1b [ -/]* [0-~]?                                       # two-character sequences
    """,
    re.VERBOSE,
)
_CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001"
    "\U000e0020-\U000e007f]"
)
"""Controls, and what Unicode calls format characters (category Cf): they change how others are read."""
_HALVES = re.compile("[\ud800-\udfff]")

Tone = Literal["good", "busy", "warn", "bad", "dim"]
_LOOKS: dict[State, tuple[str, Tone]] = {
    State.PENDING: ("○", "dim"),
    State.STARTING: ("◔", "busy"),
    State.HEALTHY: ("●", "good"),
    State.UNHEALTHY: ("▲", "warn"),
    State.STOPPING: ("◕", "busy"),
    State.STOPPED: ("■", "dim"),
    State.BACKOFF: ("↻", "warn"),
    State.FAILED: ("✖", "bad"),
    State.COMPLETED: ("✔", "good"),
}
GLYPHS = {state: glyph for state, (glyph, _) in _LOOKS.items()}
TONES: dict[str, Tone] = {state: tone for state, (_, tone) in _LOOKS.items()}
"""How a state is to be taken, by its name; what is shown in a colour has a glyph and a word, too."""


def glyph_and_word(state: State) -> str:
    """A state as people see it everywhere; never by colour alone."""
    return f"{GLYPHS[state]} {state.value}"


def real(value: float) -> float:
    """`value` as a float; a whole number beyond any float, in a foreign record, is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def plain_text(line: str) -> str:
    """One line of foreign output as text to show: after its last carriage return, tabs expanded, controls gone."""
    if len(line) > 4 * MAX_COLUMNS:
        line = line[: 4 * MAX_COLUMNS]
    if not line.isprintable():
        line = _ESCAPES.sub("", line)
        line = line.rstrip("\r").rpartition("\r")[2]
        line = _HALVES.sub("?", _CONTROL.sub("", line.expandtabs(8)))
    return line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + "…"


def one_line(text: str) -> str:
    """Text of several lines as one: line breaks are shown as `⏎`, the rest is made plain."""
    return plain_text(text[: 4 * MAX_COLUMNS].replace("\r\n", "\n").replace("\n", "⏎"))


def plain_lines(text: str) -> str:
    """Text of several lines, each made plain by itself: what one of them does not end never hides the next."""
    return "\n".join(map(plain_text, text.split("\n")))


def masked_line(text: str) -> str:
    """`one_line` for what is passed on to others: tokens of known services are left out."""
    return mask(one_line(text))


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """A line for each row, its cells below one another; `right`: numbers of the columns that end at the same place."""
    right = set(right)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.rjust(w) if number in right else cell.ljust(w) for number, (cell, w) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return lines


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """`columns`, the first of them as titles over a line."""
    titles, *lines = columns(rows)
    return "\n".join([titles, "-" * max(map(len, [titles, *lines])), *lines])


def duration(seconds: float | None) -> str:
    """`9.3 s`, `2:05`, `1:02:05` or `3 d 04 h`; `–` where there is none."""
    if seconds is None or not math.isfinite(seconds):
        return "–" if seconds is None else str(seconds)
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def seconds_text(value: float | None) -> str:
    """A measured time: `0.31 s`, `4.2 ms`, `12.0 s`."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else number(value)
    if 0 < abs(value) < 0.1:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s"


def bytes_text(value: float | None) -> str:
    """`512 MB`, `1.5 GB`; powers of ten."""
    if value is None:
        return "–"
    value = real(value)
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.{1 if unit == 'GB' else 0}f} {unit}"
    return f"{value:.0f} B"


def percent(value: float | None) -> str:
    """`37%` of a value that counts percent already; `–` where there is none."""
    return "–" if value is None else f"{value:.0f}%"


def number(value: float | None, digits: int = 3) -> str:
    """Few characters for any magnitude: `0.912`, `4.1e-07`, `12,300`, `NaN`; `–` where there is none."""
    if value is None:
        return "–"
    value = real(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    if value and not 10**-digits <= size < 1e6:
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}" if size < 10 else f"{value:.1f}"
