"""Text that is short enough to show: lines, tables, and figures in a few characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from atropos_common.control import State
from atropos_common.records import StateRecord
from atropos_tui.gate import MAX_COLUMNS as MAX_COLUMNS
from atropos_tui.gate import one_line as one_line
from atropos_tui.gate import plain_lines as plain_lines
from atropos_tui.gate import plain_text as plain_text
from atropos_tui.profile.errors import counted as counted
from atropos_tui.profile.redact import mask

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


def reason_of(record: StateRecord) -> str:
    """The reason of a transition and, in backoff, the seconds to the next start."""
    again = "" if record.retry_at is None else f"; again in {max(0.0, record.retry_at - record.time):.1f} s"
    return one_line(record.reason) + again
