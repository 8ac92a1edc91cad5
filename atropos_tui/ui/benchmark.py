"""The benchmark panel: where a step's time goes, throughput, memory, lag, the alignment verdict."""

from __future__ import annotations

import math
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from atropos_tui.monitor.pace import Pace, pace
from atropos_tui.monitor.plain import bytes_text, duration, number, one_line, seconds_text
from atropos_tui.ui.look import title
from atropos_tui.ui.view import View

_LABEL = 13
_VALUE = 9
_VERDICTS = {"ok": ("✔", "good"), "drift": ("▲", "warn"), "mismatch": ("✖", "bad")}


class Benchmark(Widget):
    """Live figures over the newest steps."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "benchmark--label",
        "benchmark--bar",
        "benchmark--track",
        "benchmark--good",
        "benchmark--warn",
        "benchmark--bad",
    }

    view: reactive[View | None] = reactive(None)

    def show(self, view: View) -> None:
        self.view = view
        window = pace(view.state, None).window
        note = (f"last {window} steps", "secondary") if window else ("no data", "secondary")
        if view.state.benchmark:
            note = (f"final, all {window} steps", "success")
        self.border_title = title("Benchmark", note)

    def render(self) -> RenderResult:
        if self.view is None:
            return Text("")
        width, height = self.content_size
        speed = pace(self.view.state, self.view.info.training_steps)
        lines = [*self._split(speed, width), *self._figures(self.view, speed)]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", end="").join(lines[:height])

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"benchmark--{name}", partial=True)

    def _line(self, label: str, value: str, rest: Text | str = "", tone: str = "") -> Text:
        line = Text(f"{label:<{_LABEL}}", self._style("label"), no_wrap=True, end="")
        line.append(f"{value:>{_VALUE}}", self._style(tone) if tone else None)
        return line.append("  ").append_text(rest if isinstance(rest, Text) else Text(rest, self._style("label")))

    def _split(self, speed: Pace, width: int) -> list[Text]:
        """The mean step and a bar per part of it."""
        lines = [self._line("step", seconds_text(speed.step_s))]
        room = max(0, width - _LABEL - _VALUE - 2 - 6)
        for name, value in speed.parts.items():
            bar = Text(no_wrap=True, end="")
            if value is not None and speed.step_s and math.isfinite(value) and math.isfinite(speed.step_s):
                share = min(1.0, value / speed.step_s)
                bar.append("━" * round(share * room), self._style("bar"))
                bar.append("━" * (room - round(share * room)), self._style("track"))
                bar.append(f" {share:4.0%}", self._style("label"))
            lines.append(self._line(f"  {name}", seconds_text(value), bar))
        return lines

    def _figures(self, view: View, speed: Pace) -> list[Text]:
        state = view.state
        peak, rss = state.metric("peak_bytes").last, state.metric("rss_bytes").last
        total = [row.memory_bytes for row in view.status.components if row.memory_bytes] if view.status else []
        lag, most = state.metric("policy_lag_mean").last, state.metric("policy_lag_max").last
        lines = [
            self._line("tokens/s", number(speed.tokens_per_s, 0)),
            self._line("steps/h", number(speed.steps_per_hour, 0)),
            self._line("lag", number(lag, 1), f"max {number(most, 0)}" if most is not None else ""),
            self._line("trainer", bytes_text(rss), f"GPU peak {bytes_text(peak)}" if peak is not None else "no GPU"),
            self._line("stack", bytes_text(sum(total)) if total else "–", "memory" if total else ""),
        ]
        if state.alignment:
            glyph, tone = _VERDICTS[state.alignment.verdict]
            lines.append(
                self._line("alignment", f"{glyph} {state.alignment.verdict}", one_line(state.alignment.cause), tone)
            )
        if state.benchmark:
            lines.append(self._line("total", duration(state.benchmark.total_s), f"{state.benchmark.steps} steps"))
        if view.bad_lines:
            lines.append(self._line("bad lines", str(view.bad_lines), "in the run's streams, skipped", "warn"))
        return lines
