"""The benchmark panel: where a step's time goes, throughput of trainer and engines, memory, lag, the verdict."""

from __future__ import annotations

import math
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from atropos_common.control import Role
from atropos_tui.monitor.pace import Pace, pace
from atropos_tui.monitor.plain import bytes_text, duration, number, one_line, seconds_text
from atropos_tui.monitor.series import mean
from atropos_tui.ui.alignment import verdict_text
from atropos_tui.ui.bars import progress_bar
from atropos_tui.ui.look import title
from atropos_tui.ui.view import View

_LABEL = 12
_VALUE = 9


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
        note = (f"last {window} steps", "quiet") if window else ("no data", "quiet")
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
                bar = progress_bar(share, room, self._style("bar"), self._style("track"))
                bar.append(f" {share:4.0%}", self._style("label"))
            lines.append(self._line(f"  {name}", seconds_text(value), bar))
        return lines

    def _figures(self, view: View, speed: Pace) -> list[Text]:
        """The most telling first: what does not fit is cut at the end."""
        state = view.state
        mfu = state.metric("mfu").last
        lag, most = state.metric("policy_lag_mean").last, state.metric("policy_lag_max").last
        used = f"MFU {mfu:.1%}" if mfu is not None and math.isfinite(mfu) else "trained"
        lines = [
            self._line("tokens/s", number(speed.tokens_per_s, 0), used),
            *(line for row in view.rows if row.role is Role.ENGINE for line in self._engine(view, row.name)),
            self._line("steps/h", number(speed.steps_per_hour, 0)),
            self._line("lag", number(lag, 1), f"max {number(most, 0)}" if most is not None else ""),
            *self._memory(view),
        ]
        if state.alignment:
            words, tone = verdict_text(state.alignment)
            lines.insert(1, self._line("alignment", words, one_line(state.alignment.cause), tone))
        if state.benchmark:
            lines.append(self._line("total", duration(state.benchmark.total_s), f"{state.benchmark.steps} steps"))
        return lines

    def _engine(self, view: View, name: str) -> list[Text]:
        """Tokens a second of one engine, its batch and its caches, from its own counters."""
        rates = view.gauges.rates(name)
        label = one_line(name)[: _LABEL - 1]
        if rates is None:
            return [self._line(label, "–", "no metrics")]
        running, waiting = (("–" if value is None else f"{value:.0f}") for value in (rates.running, rates.waiting))
        hits = "" if rates.prefix_hit_rate is None else f"prefix hits {rates.prefix_hit_rate:.0%}"
        used = "–" if rates.kv_use is None else f"{rates.kv_use:.0%}"
        return [
            self._line(label, number(rates.generated_per_s, 0), f"{running} run, {waiting} wait"),
            self._line("  KV cache", used, hits),
        ]

    def _memory(self, view: View) -> list[Text]:
        state = view.state
        gpu, rss = state.metric("peak_bytes").values, state.metric("rss_bytes").values
        held = state.metric("allocated_bytes").values
        total = [row.memory_bytes for row in view.rows if row.memory_bytes]
        queue = view.gauges.last.queue if view.gauges.last else None
        lines = [self._line("queue", "–" if queue is None else str(queue), "groups in run-api")]
        if gpu:
            words = f"peak, mean {bytes_text(mean(held))}" if held else "peak"
            lines.append(self._line("GPU memory", bytes_text(max(gpu)), words))
        words = f"peak, mean {bytes_text(mean(rss))}" if rss else ""
        lines.append(self._line("trainer", bytes_text(max(rss, default=None)), words))
        return [*lines, self._line("stack", bytes_text(sum(total)) if total else "–", "memory" if total else "")]
