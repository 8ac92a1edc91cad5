"""The two lines on top: what runs and how it stands; then progress, or what is waited for."""

from __future__ import annotations

from pathlib import PurePath
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from atropos_common.control import Phase, RunStatus, State
from atropos_tui.monitor.pace import pace
from atropos_tui.monitor.plain import duration, one_line, seconds_text
from atropos_tui.monitor.trouble import open_diagnoses, overdue
from atropos_tui.ui.bars import progress_bar
from atropos_tui.ui.look import TONES, live_components
from atropos_tui.ui.view import View


class Header(Widget):
    """Profile, mode, model, health; step, progress and time left."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"header--{name}" for name in (*TONES, "name", "quiet", "track")}

    view: reactive[View | None] = reactive(None)

    def show(self, view: View) -> None:
        self.view = view

    def render(self) -> RenderResult:
        if self.view is None:
            return Text("")
        width = self.content_size.width
        return Text("\n").join([self._identity(self.view, width), self._progress(self.view, width)])

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"header--{name}", partial=True)

    def _identity(self, view: View, width: int) -> Text:
        info, status = view.info, view.status
        glyph, words, tone = verdict(view)
        right = Text.assemble((f"{glyph} {words}", self._style(tone)))
        if status and status.started_at:
            end = max((row.since or 0 for row in status.components), default=0) if _over(view) else view.now
            right.append(f"  {duration(max(0.0, end - status.started_at))}", self._style("quiet"))
        model = PurePath(info.model).name if info.model.startswith(("/", ".", "${")) else info.model
        left = Text.assemble((one_line(info.name or (status.name if status else "")), self._style("name")))
        for part in (info.mode or (status.mode if status else ""), model):
            if part:
                left.append("  ·  ", self._style("quiet")).append(one_line(part), self._style("quiet"))
        left.truncate(max(0, width - right.cell_len - 2), overflow="ellipsis")
        left.append(" " * max(1, width - left.cell_len - right.cell_len))
        return left.append_text(right)

    def _progress(self, view: View, width: int) -> Text:
        state, steps = view.state, view.info.training_steps
        if waiting := stage(view):
            done, of = (live_components(view.status), len(view.status.components)) if view.status else (0, 1)
            left, share = Text(f"{done}/{of} up "), done / max(of, 1)
            right = Text(f" {waiting}")
        else:
            speed = pace(state, steps)
            left = Text(f"step {state.step}/{steps} " if steps else f"step {state.step} ", self._style("name"))
            share = min(1.0, state.step / steps) if steps else 0.0
            right = Text(f" {share:.0%}  " if steps else " ")
            if not _over(view) and speed.eta_s is not None and state.step:
                right.append(f"ETA {duration(speed.eta_s)}  ", self._style("name"))
            right.append(f"{seconds_text(speed.step_s)}/step", self._style("quiet"))
        right.truncate(max(0, width - left.cell_len - 8), overflow="ellipsis")
        room = max(0, width - left.cell_len - right.cell_len)
        filled = self._style("good" if _over(view) and share == 1 else "busy")
        return left.append_text(progress_bar(share, room, filled, self._style("track"))).append_text(right)


def verdict(view: View) -> tuple[str, str, str]:
    """How the run stands: glyph, words, tone."""
    status = view.status
    if status is None:
        return "◔", view.gone or "connecting", "busy"
    if status.phase is Phase.ENDED or view.gone:
        return _ended(view, status)
    if status.phase is Phase.STOPPING:
        return "◕", "stopping", "busy"
    for state, glyph, tone in (
        (State.FAILED, "✖", "bad"),
        (State.BACKOFF, "↻", "warn"),
        (State.UNHEALTHY, "▲", "warn"),
    ):
        names = [row.name for row in status.components if row.state is state]
        if names:
            return glyph, f"{', '.join(names)} {state.value}", tone
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
