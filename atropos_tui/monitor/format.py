"""Short texts for display: lines, tables, and compact figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal

from atropos_common.protocol.control import State
from atropos_common.protocol.records import StateRecord
from atropos_tui.profile.errors import counted as counted
from atropos_tui.profile.redact import mask
from atropos_tui.streams import MAX_COLUMNS as MAX_COLUMNS
from atropos_tui.streams import one_line as one_line
from atropos_tui.streams import plain_lines as plain_lines
from atropos_tui.streams import plain_text as plain_text

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
# Everything coloured also has a glyph and a word.
TONES: dict[str, Tone] = {state: tone for state, (_, tone) in _LOOKS.items()}


def glyph_and_word(state: State) -> str:
    return f"{GLYPHS[state]} {state.value}"


def real(value: float) -> float:
    """Convert to float; an integer beyond its range becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def masked_line(text: str) -> str:
    """Return `one_line` without tokens of known services, for texts that leave this machine."""
    return mask(one_line(text))


def cut(text: str, room: int) -> str:
    """Return the beginning of `text`, with an ellipsis if it has more than `room` characters."""
    return text if len(text) <= room else f"{text[: max(0, room - 1)]}…"


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Align the cells of rows; the columns numbered in `right` are right-aligned."""
    right = set(right)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = (c.rjust(w) if at in right else c.ljust(w) for at, (c, w) in enumerate(cells))
        lines.append("  ".join(padded).rstrip())
    return lines


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return `columns` with the first row as titles above a rule."""
    titles, *lines = columns(rows)
    return "\n".join([titles, "-" * max(map(len, [titles, *lines])), *lines])


def duration(seconds: float | None) -> str:
    """Return `9.3 s`, `2:05`, `1:02:05` or `3 d 04 h`."""
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


def clock(at: float) -> str:
    """Return the local time of day."""
    try:
        return f"{datetime.fromtimestamp(at):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def seconds_text(value: float | None) -> str:
    """Return a measured time: `4.2 ms`, `0.31 s`, `12.00 s`."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else number(value)
    if 0 < abs(value) < 0.1:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s"


def bytes_text(value: float | None) -> str:
    """Return `512 MB`, `1.5 GB`; powers of ten."""
    if value is None:
        return "–"
    value = real(value)
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.{1 if unit == 'GB' else 0}f} {unit}"
    return f"{value:.0f} B"


def percent(value: float | None) -> str:
    """Return `37%` for the value 37."""
    return "–" if value is None else f"{value:.0f}%"


def number(value: float | None, digits: int = 3) -> str:
    """Return a short text for any magnitude: `0.912`, `4.1e-07`, `12,300`, `NaN`."""
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
    """Return the reason of a transition; in backoff with the time to the next start."""
    if record.retry_at is None:
        return one_line(record.reason)
    wait = max(0.0, record.retry_at - record.time)
    return f"{one_line(record.reason)}; again in {wait:.1f} s"
