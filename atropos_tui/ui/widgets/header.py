"""The lines on top: what runs and how it stands; progress, or what is waited for; then what has to be said of it."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive

from atropos_common.control import Phase, RunStatus, State
from atropos_common.records import SCHEMA_VERSION, DiagnosisRecord
from atropos_tui.monitor.bench import Pace, pace
from atropos_tui.monitor.format import GLYPHS, TONES, duration, one_line, seconds_text
from atropos_tui.monitor.why import open_diagnoses, overdue
from atropos_tui.ui.plot import progress_bar
from atropos_tui.ui.theme import COLOURS
from atropos_tui.ui.widgets.panel import Panel, TextPanel, View, inks

ROOM_FOR_SHARES = 110
"""Columns from which on the two idle shares stand in the header."""


class Header(TextPanel):
    """Profile, mode, model, health; step, progress and time left."""

    DEFAULT_CLASSES = ""
    INK = "header"
    COMPONENT_CLASSES: ClassVar[set[str]] = inks(INK, *COLOURS, "name", "quiet", "track")
    DEFAULT_CSS = """
    Header {
        height: 2;
        padding: 0 1;
        color: $foreground;

        .header--name { text-style: bold; color: $foreground; }
        .header--quiet { color: $quiet; }
        .header--track { color: $track; }
        .header--good { color: $success; }
        .header--busy { color: $primary; }
        .header--warn { color: $warning; text-style: bold; }
        .header--bad { color: $error; text-style: bold; }
        .header--dim { color: $quiet; }
    }
    """

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        return [self._identity(view, width), self._progress(view, width)]

    def _identity(self, view: View, width: int) -> Text:
        info, status = view.info, view.status
        glyph, words, tone = verdict(view)
        right = Text.assemble((f"{glyph} {words}", self.ink(tone)))
        if status and status.started_at:
            end = max((row.since or 0 for row in status.components), default=0) if _over(view) else view.now
            right.append(f"  {duration(max(0.0, end - status.started_at))}", self.ink("quiet"))
        left = Text.assemble((one_line(info.name or (status.name if status else "")), self.ink("name")))
        for part in (info.mode or (status.mode if status else ""), info.short_model):
            if part:
                left.append("  ·  ", self.ink("quiet")).append(one_line(part), self.ink("quiet"))
        left.truncate(max(0, width - right.cell_len - 2), overflow="ellipsis")
        left.append(" " * max(1, width - left.cell_len - right.cell_len))
        return left.append_text(right)

    def _progress(self, view: View, width: int) -> Text:
        state, steps = view.state, view.info.training_steps
        if waiting := stage(view):
            done, of = sum(row.state in (State.HEALTHY, State.COMPLETED) for row in view.rows), len(view.rows)
            left, share = Text(f"{done}/{of} up "), done / max(of, 1)
            right = Text(f" {waiting}")
        else:
            speed = pace(state, steps)
            left = Text(f"step {state.step}/{steps} " if steps else f"step {state.step} ", self.ink("name"))
            share = min(1.0, state.step / steps) if steps else 0.0
            right = Text(f" {share:.0%}  " if steps else " ")
            if not _over(view) and speed.eta_s is not None and state.step:
                right.append(f"ETA {duration(speed.eta_s)}  ", self.ink("name"))
            right.append(f"{seconds_text(speed.step_s)}/step", self.ink("quiet"))
            if width >= ROOM_FOR_SHARES:
                right.append(_shares(speed), self.ink("quiet"))
        right.truncate(max(0, width - left.cell_len - 8), overflow="ellipsis")
        room = max(0, width - left.cell_len - right.cell_len)
        filled = self.ink("good" if _over(view) and share == 1 else "busy")
        return left.append_text(progress_bar(share, room, filled, self.ink("track"))).append_text(right)


def _shares(speed: Pace) -> str:
    """How long trainer and engines wait for work, in shares of the newest steps; nothing where nobody knows."""
    known = {"trainer waits": speed.waiting, "engine idle": speed.engine_idle}
    return "".join(f"  {name} {value:.0%}" for name, value in known.items() if value is not None)


def verdict(view: View) -> tuple[str, str, str]:
    """How the run stands: glyph, words, tone."""
    status = view.status
    if status is None:
        return "◔", view.gone or "connecting", "busy"
    if status.phase is Phase.ENDED or view.gone:
        return _ended(view, status)
    if status.phase is Phase.STOPPING:
        return "◕", "stopping", "busy"
    for state in (State.FAILED, State.BACKOFF, State.UNHEALTHY):
        if names := [row.name for row in status.components if row.state is state]:
            return GLYPHS[state], f"{', '.join(names)} {state.value}", TONES[state]
    if status.phase is Phase.STARTING:
        return "◔", "starting", "busy"
    alignment = view.state.alignment
    if alignment and alignment.verdict != "ok":
        return "▲", f"logprob {alignment.verdict}", "bad" if alignment.verdict == "mismatch" else "warn"
    if overdue(view.state, status, view.now) or open_diagnoses(view.state, status):
        return "▲", "running", "warn"
    return "●", "running", "good"


def _ended(view: View, status: RunStatus) -> tuple[str, str, str]:
    if status.exit_code is None:
        words = "supervisor silent" if status.phase is not Phase.ENDED else "supervisor gone, no result written"
        return "▲", words, "bad"
    if status.exit_code == 0:
        return "✔", "done", "good"
    return "✖", f"ended with {status.exit_code}: {one_line(status.reason)}" if status.reason else "ended", "bad"


def stage(view: View) -> str:
    """What is waited for, and for how long; empty while it trains and once it is over."""
    status = view.status
    if status is None or status.phase in (Phase.STOPPING, Phase.ENDED) or view.gone:
        return ""
    waiting = [row for row in status.components if row.state in (State.STARTING, State.BACKOFF)]
    if waiting and (not view.state.step or status.phase is Phase.STARTING):
        row = min(waiting, key=lambda row: row.since or view.now)
        what = one_line(row.waiting_for) or "starting"
        return f"{row.name}: {what} · {duration(view.now - (row.since or view.now))}"
    if view.state.step:
        return overdue(view.state, status, view.now)
    since = max((row.since or 0 for row in status.components), default=0)
    return f"first optimizer step · {duration(view.now - since)}" if since else "first optimizer step"


def _over(view: View) -> bool:
    return bool(view.gone) or (view.status is not None and view.status.phase is Phase.ENDED)


class Notices(Panel):
    """Lines under the header when something has to be said: a diagnosis that holds, and what the files lack."""

    DEFAULT_CLASSES = ""
    DEFAULT_CSS = "Notices { height: auto; padding: 0 1; color: $text-warning; display: none; }"
    hides_itself = True

    texts: reactive[tuple[tuple[str, str], ...]] = reactive((), layout=True)
    """Words, and an end that is never cut; top to bottom."""

    def __init__(self) -> None:
        super().__init__(id="notices")
        self.diagnosis: DiagnosisRecord | None = None
        """The newest that holds."""

    def show(self, view: View) -> None:
        standing = diagnoses(view)
        self.diagnosis = standing[0] if standing else None
        texts = [diagnosed(standing)] if standing else []
        if words := notices(view):
            texts.append((" · ".join(words), ""))
        self.texts, self.display = tuple(texts), bool(texts)

    def render(self) -> RenderResult:
        return Text("\n").join(self._line(words, end) for words, end in self.texts)

    def _line(self, words: str, end: str) -> Text:
        line = Text(f"▲ {words}", no_wrap=True)
        line.truncate(max(0, self.content_size.width - len(end)), overflow="ellipsis")
        return line.append(end)


def diagnoses(view: View) -> list[DiagnosisRecord]:
    """Diagnoses that hold, newest first; none of a run that came to a good end."""
    if view.status is None or view.status.exit_code == 0 or not view.loaded:
        return []
    return open_diagnoses(view.state, view.status)


def diagnosed(standing: list[DiagnosisRecord]) -> tuple[str, str]:
    """The newest of them in one line, and where the others and the way out are."""
    more = f", {len(standing) - 1} more" if len(standing) > 1 else ""
    return f"{one_line(standing[0].component or '')}: {one_line(standing[0].title)}", f"  (8 ⏎ fix{more})"


def notices(view: View) -> list[str]:
    """What a reader of this screen has to know of what it was drawn from."""
    state = view.state
    words = [] if view.loaded else [f"reading the run's history: step {state.step}"]
    if view.bad_lines:
        words.append(f"bad lines: {view.bad_lines} in the run's streams are no records and were skipped")
    if state.newest_version > SCHEMA_VERSION:
        words.append(
            f"a newer version wrote this run (schema {state.newest_version}, known here {SCHEMA_VERSION}): "
            "what this one does not know is not shown"
        )
    elif state.unknown:
        words.append(f"{state.unknown} records are of a kind this version does not know")
    return words
