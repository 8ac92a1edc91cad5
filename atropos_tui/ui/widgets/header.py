"""Lines at the top: identity, progress, verdict, notices."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual.geometry import Size

from atropos_common.protocol.control import Phase, RunStatus, State
from atropos_common.protocol.record_base import SCHEMA_VERSION
from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.monitor.bench import Pace, TokenUse, pace, reasons_text, token_use
from atropos_tui.monitor.format import (
    GLYPHS,
    TONES,
    counted,
    duration,
    one_line,
    seconds_text,
)
from atropos_tui.monitor.why import open_diagnoses
from atropos_tui.ui.plot import progress_bar
from atropos_tui.ui.widgets.panel import TextPanel, View

LEAST_BAR = 8  # cells of the progress bar that no figure takes


class Header(TextPanel):
    DEFAULT_CLASSES = ""
    DEFAULT_CSS = """
    Header {
        height: 2;
        padding: 0 1;
        color: $foreground;
    }
    """

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        return [self._identity(view, width), self._progress(view, width)]

    def _identity(self, view: View, width: int) -> Text:
        info, status = view.info, view.status
        glyph, words, tone = standing(view)
        right = Text.assemble((f"{glyph} {words}", self.style(tone)))
        if status and status.started_at:
            # The clock stops at the last transition.
            moves = (row.since or 0 for row in status.components)
            end = max(moves, default=0) if _over(view) else view.now
            right.append(f"  {duration(max(0.0, end - status.started_at))}", self.style("dim"))
        name = one_line(info.name or (status.name if status else ""))
        # As in the list of runs; most ids begin with the name.
        run = one_line(info.run_id or (status.run_id if status else "")) or name
        left = Text.assemble((run, self.style("title")))
        for part in (
            "" if run.startswith(name) else name,
            info.mode or (status.mode if status else ""),
            info.short_model,
        ):
            if part:
                left.append("  ·  ", self.style("dim")).append(one_line(part), self.style("dim"))
        # The state on the right is never cut.
        left.truncate(max(0, width - right.cell_len - 2), overflow="ellipsis")
        left.append(" " * max(1, width - left.cell_len - right.cell_len))
        return left.append_text(right)

    def _progress(self, view: View, width: int) -> Text:
        state, steps = view.state, view.info.training_steps
        if is_starting(view):
            # The bar counts components while the stack starts, later steps.
            done = sum(row.state in (State.HEALTHY, State.COMPLETED) for row in view.rows)
            of = len(view.rows)
            left, share, right = Text(f"{done}/{of} up "), done / max(of, 1), Text()
        else:
            speed = pace(state, steps)
            of_steps = f"/{steps}" if steps else ""
            left = Text(f"step {state.step}{of_steps} ", self.style("title"))
            share = min(1.0, state.step / steps) if steps else 0.0
            right = Text(f" {share:.0%}  " if steps else " ")
            if not _over(view) and speed.eta_s is not None and state.step:
                right.append(f"ETA {duration(speed.eta_s)}  ", self.style("title"))
            use = token_use(state, view.info.gpu_count, speed.window)
            if use:
                headline = f"{use.rate} accepted {use.unit}  "
                right.append(headline, self.style("title"))
            right.append(f"{seconds_text(speed.step_s)}/step", self.style("dim"))
            # The figures that fit, most important first.
            for words in _shares(speed, use):
                if left.cell_len + right.cell_len + len(words) + 2 + LEAST_BAR <= width:
                    right.append(f"  {words}", self.style("dim"))
        right.truncate(max(0, width - left.cell_len - LEAST_BAR), overflow="ellipsis")
        room = max(0, width - left.cell_len - right.cell_len)
        filled = self.style("good" if _over(view) and share == 1 else "busy")
        bar = progress_bar(share, room, filled, self.style("track"))
        return left.append_text(bar).append_text(right)


def _shares(speed: Pace, use: TokenUse | None) -> list[str]:
    # The idle share stands in while the capacity is unknown.
    known = {"trainer waits": speed.waiting, "capacity used": speed.engine_capacity}
    if speed.engine_capacity is None:
        known["engine idle"] = speed.engine_idle
    words = [f"{name} {value:.0%}" for name, value in known.items() if value is not None]
    if use:
        words.append(f"thrown away {1 - use.accepted:.0%}{reasons_text(use.thrown_away, ': ')}")
    return words


def standing(view: View) -> tuple[str, str, str]:
    """Return the state of the run: glyph, words, tone."""
    status = view.status
    if status is None:
        return "◔", view.gone or "connecting", "busy"
    # The order is by importance: the first reason found is shown.
    if status.phase is Phase.ENDED or view.gone:
        return _ended(status)
    if status.phase is Phase.STOPPING:
        return "◕", "stopping", "busy"
    # Worst state first.
    for state in (State.FAILED, State.BACKOFF, State.UNHEALTHY):
        if names := [row.name for row in status.components if row.state is state]:
            return GLYPHS[state], f"{', '.join(names)} {state.value}", TONES[state]
    if status.phase is Phase.STARTING:
        return "◔", "starting", "busy"
    alignment = view.state.alignment
    if alignment and alignment.verdict != "ok":
        tone = "bad" if alignment.verdict == "mismatch" else "warn"
        return "▲", f"logprob {alignment.verdict}", tone
    is_trouble = view.verdict is not None and view.verdict.is_trouble
    return ("▲", "running", "warn") if is_trouble else ("●", "running", "good")


def _ended(status: RunStatus) -> tuple[str, str, str]:
    if status.exit_code is None:
        is_gone = status.phase is Phase.ENDED
        words = "supervisor gone, no result written" if is_gone else "supervisor silent"
        return "▲", words, "bad"
    if status.exit_code == 0:
        return "✔", "done", "good"
    if status.exit_code == 130:
        return "■", "stopped by hand", "dim"
    return "✖", "failed", "bad"  # the verdict below has code and reason


def is_starting(view: View) -> bool:
    """True while components start, before the first step."""
    starts = any(row.state in (State.STARTING, State.PENDING, State.BACKOFF) for row in view.rows)
    return starts and not view.state.step and not _over(view)


def _over(view: View) -> bool:
    return bool(view.gone) or (view.status is not None and view.status.phase is Phase.ENDED)


class Notices(TextPanel):
    """Verdict about the run, and notices about the data on the screen."""

    DEFAULT_CLASSES = ""
    DEFAULT_CSS = """
    Notices {
        height: auto;
        max-height: 4;
        padding: 0 1;
    }
    """

    def __init__(self) -> None:
        super().__init__(id="notices")
        # The diagnosis of the verdict, otherwise the newest open one.
        self.diagnosis: DiagnosisRecord | None = None

    def show(self, view: View) -> None:
        found = view.verdict.diagnosis if view.verdict else None
        self.diagnosis = found or next(iter(diagnoses(view)), None)
        super().show(view)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if self.view and not self.failure:
            with self.guard():
                return max(1, len(self._sentences(self.view, width)))
        return 1

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        return self._sentences(view, width)

    def _sentences(self, view: View, width: int) -> list[Text]:
        found = view.verdict
        lines = []
        if found:
            # Without the diagnosis that the verdict already shows.
            more = len(diagnoses(view)) - (found.diagnosis is not None)
            end = f"  (8 ⏎ fix{f', {more} more' if more > 0 else ''})" if self.diagnosis else ""
            lines = in_two(found.line, end, width, self.style(f"text-{found.tone}"))
        if words := notices(view):
            lines.append(Text(f"▲ {' · '.join(words)}", self.style("warn"), no_wrap=True))
        return lines


def in_two(words: str, end: str, width: int, style: Style) -> list[Text]:
    """Wrap `words` into at most two lines; `end` is never cut."""
    first, rest = words, ""
    if len(words) + len(end) > width > 0:
        first, rest = words[:width], words[width:]
        if (at := words.rfind(" ", 0, width + 1)) > 0:
            first, rest = words[:at], f"  {words[at + 1 :]}"
    last = Text(rest or first, style, no_wrap=True)
    last.truncate(max(0, width - len(end)), overflow="ellipsis")
    last.append(end)
    return [Text(first, style, no_wrap=True), last] if rest else [last]


def diagnoses(view: View) -> list[DiagnosisRecord]:
    """Return the open diagnoses, newest first; none after a successful end."""
    if view.status is None or view.status.exit_code == 0 or not view.loaded:
        return []
    return open_diagnoses(view.state, view.status)


def notices(view: View) -> list[str]:
    """Return notices about gaps in the data on the screen."""
    state = view.state
    words = [] if view.loaded else [f"reading the run's history: step {view.read_to:,}"]
    if view.bad_lines:
        lines = counted(view.bad_lines, "line")
        words.append(f"{lines} of the run's streams skipped: not a valid record")
    if state.newest_version > SCHEMA_VERSION:
        words.append(
            f"a newer version wrote this run (schema {state.newest_version}, this one reads "
            f"{SCHEMA_VERSION}): what it added is not shown; update atropos-tui"
        )
    elif state.unknown:
        words.append(f"{state.unknown} records of an unknown kind are not shown")
    return words
