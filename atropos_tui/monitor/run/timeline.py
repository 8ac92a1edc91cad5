"""Events of a run as one list: transitions, diagnoses, commands, checkpoints. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath

from atropos_common.protocol.control import State
from atropos_common.protocol.records import (
    CheckpointRecord,
    CommandRecord,
    DiagnosisRecord,
    StateRecord,
)
from atropos_tui.monitor.format import (
    TONES,
    Tone,
    bytes_text,
    glyph_and_word,
    one_line,
    plain_lines,
    reason_of,
    seconds_text,
)
from atropos_tui.monitor.run.state import RunState


@dataclass(frozen=True)
class Event:
    """One line of the timeline. All texts are plain."""

    time: float
    component: str
    mark: str
    """Glyph and word."""
    text: str
    tone: Tone
    detail: str = ""


def clock(at: float) -> str:
    """Return the local time of day."""
    try:
        return f"{datetime.fromtimestamp(at):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def timeline(state: RunState) -> list[Event]:
    """Return every event, oldest first."""
    sources = (
        (_moved(record) for record in state.transitions),
        (diagnosed(record, state.over_at(record)) for record in state.diagnoses),
        (_commanded(record) for record in state.commands.values()),
        (_saved(record) for record in state.checkpoints),
    )
    return list(heapq.merge(*map(_ascending, sources), key=lambda event: event.time))


def _ascending(events: Iterator[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time)


def _moved(record: StateRecord) -> Event:
    known = next((state for state in State if state.value == record.new), None)
    mark = glyph_and_word(known) if known else f"· {one_line(record.new)}"
    attempt = (
        f"attempt {record.attempt}" if record.attempt > 1 and record.new == State.STARTING else ""
    )
    words = [reason_of(record), attempt]
    return Event(
        record.time,
        one_line(record.component or ""),
        mark,
        " · ".join(word for word in words if word),
        TONES.get(record.new, "dim"),
        f"from {one_line(record.old)}"
        + (f", exit code {record.exit_code}" if record.exit_code is not None else ""),
    )


def diagnosed(record: DiagnosisRecord, over_at: float | None = None) -> Event:
    """Return a diagnosis as an event."""
    over = "" if over_at is None else f"at {clock(over_at)}"
    parts = [
        ("evidence", record.evidence),
        ("fix", record.fix),
        ("rule", record.rule),
        ("over", over),
    ]
    detail = "\n".join(f"{name}: {plain_lines(text)}" for name, text in parts if text)
    return Event(
        record.time,
        one_line(record.component or ""),
        "▲ diagnosis",
        one_line(record.title),
        "warn",
        detail,
    )


def _commanded(record: CommandRecord) -> Event:
    whose = one_line(record.component or "the stack")
    by = "" if record.initiator == "user" else f" by the {one_line(record.initiator)}"
    tone: Tone = "bad" if record.status in ("failed", "refused") else "busy"
    text = f"{one_line(record.action)} {whose}{by}: {record.status}"
    detail = one_line(record.detail)
    return Event(record.time, one_line(record.component or ""), "→ command", text, tone, detail)


def _saved(record: CheckpointRecord) -> Event:
    name = PurePath(one_line(record.path)).name or f"step {record.step}"
    text = f"{name}: {bytes_text(record.bytes)} in {seconds_text(record.seconds)}"
    return Event(record.time, "trainer", "▪ checkpoint", text, "dim", one_line(record.path))
