"""The machine panel: a bar per GPU split by component, utilisation, power, temperature, history.

Without a GPU the same panel shows the host's memory and CPU by component, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from atropos_common.control import GpuStatus, Role
from atropos_tui.monitor.plain import bytes_text, one_line
from atropos_tui.monitor.shares import Split, split_cpu, split_gpu, split_memory
from atropos_tui.ui.bars import legend, sparkline, split_bar, textures
from atropos_tui.ui.look import title
from atropos_tui.ui.view import View

_COLOURS = ("primary", "accent", "success", "warning", "error")
_LABEL = 8


def _note(view: View, gpus: list[GpuStatus]) -> str:
    """Which cards these are, or why there are none."""
    if gpus:
        return f"{len(gpus)} × {one_line(gpus[0].name)}" if gpus[0].name else ""
    if view.status is None or view.gone:
        return "no figures of GPUs" if any(part.gpus for part in view.info.components) else ""
    return "no GPU"


class Machine(Widget):
    """GPUs, or the host; as many lines each as there is room for."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"machine--{name}" for name in (*_COLOURS, "other", "free", "label")}

    view: reactive[View | None] = reactive(None)

    def show(self, view: View) -> None:
        self.view = view
        gpus = view.status.gpus if view.status else []
        self.border_title = title("GPUs" if gpus else "Host", (_note(view, gpus), "quiet"))

    def render(self) -> RenderResult:
        if self.view is None:
            return Text("")
        width, height = self.content_size
        gpus = self.view.status.gpus if self.view.status else []
        if not gpus:
            lines = self._host(self.view, width)
        else:
            shown = gpus if len(gpus) <= height else gpus[: max(0, height - 1)]
            each = max(1, height // len(gpus))
            lines = [line for gpu in shown for line in self._gpu(self.view, gpu, width)[:each]]
            if len(shown) < len(gpus):
                words = f"{len(gpus) - len(shown)} more: 6 shows them"
                lines.append(Text(" " * _LABEL + words, self._style("label"), no_wrap=True, end=""))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", end="").join(lines[:height])

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"machine--{name}", partial=True)

    @property
    def _order(self) -> list[str]:
        """Components as their colours go round: one-shot steps hold nothing."""
        return [row.name for row in self.view.rows if row.role is not Role.PREPARE] if self.view else []

    def _part_style(self, order: list[str]) -> Callable[[str], Style]:
        def style(label: str) -> Style:
            if label in order:
                return self._style(_COLOURS[order.index(label) % len(_COLOURS)])
            return self._style("free" if label == "free" else "other")

        return style

    def _bar(self, label: str, split: Split, words: str, width: int) -> Text:
        """Label, bar, and what it comes to."""
        order = self._order
        texture = textures(order, colours=not self.app.no_color)
        room = max(4, width - _LABEL - len(words) - 1)
        line = Text(f"{label:<{_LABEL}}", self._style("label"), no_wrap=True, end="")
        line.append_text(split_bar(split, texture, self._part_style(order), room))
        return line.append(f" {words}")

    def _legend(self, split: Split, write: Callable[[float], str], width: int) -> list[Text]:
        order = self._order
        indent = " " * _LABEL
        texture = textures(order, colours=not self.app.no_color)
        found = legend(split, texture, self._part_style(order), write, width - _LABEL)
        return [Text(indent, no_wrap=True, end="").append_text(line) for line in found]

    def _gpu(self, view: View, gpu: GpuStatus, width: int) -> list[Text]:
        """The most important line first: memory; then load and history; then who holds what."""
        planned = {item.name: item.gpus for item in view.info.components}
        split = split_gpu(gpu, view.rows, planned, view.state.metric("reserved_bytes").last)
        busy = "–" if gpu.utilization_percent is None else f"{gpu.utilization_percent}%"
        power = "–" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        heat = "–" if gpu.temperature_c is None else f"{gpu.temperature_c} °C"
        memory = f"{gpu.used_bytes / 1e9:.1f}/{bytes_text(gpu.total_bytes)}"
        one = self._bar(f"GPU {gpu.index}", split, f"{memory}  {busy:>4}  {power:>5}  {heat}", width)
        load = [cards[gpu.index][0] if gpu.index in cards else None for cards in view.gauges.cards]
        lines = [one, *self._legend(split, bytes_text, width)]
        if split.note:
            lines.append(Text(" " * _LABEL + split.note, self._style("label"), no_wrap=True, end=""))
        held = [cards[gpu.index][1] if gpu.index in cards else None for cards in view.gauges.cards]
        return [*lines, self._history("busy", load, width), self._history("memory", held, width)]

    def _history(self, label: str, values: Iterable[float | None], width: int) -> Text:
        line = Text(f"{label:<{_LABEL}}", self._style("label"), no_wrap=True, end="")
        return line.append(sparkline(values, width - _LABEL), self._style("primary"))

    def _host(self, view: View, width: int) -> list[Text]:
        host = view.gauges.last.host if view.gauges.last else None
        if host is None:
            return [Text("no figures yet", self._style("label"), no_wrap=True, end="")]
        lines: list[Text] = []
        if memory := split_memory(view.rows, host):
            words = f"{memory.used / 1e9:.1f}/{bytes_text(memory.total)}"
            lines += [self._bar("memory", memory, words, width), *self._legend(memory, bytes_text, width)]
        if cpu := split_cpu(view.rows, host):
            words = f"{cpu.used / 100:.1f}/{cpu.total / 100:.0f} cores"
            lines += [self._bar("CPU", cpu, words, width), *self._legend(cpu, lambda value: f"{value:.0f}%", width)]
        samples = list(view.gauges.samples)
        load = [None if s.host.cpu_percent is None else s.host.cpu_percent / 100 for s in samples]
        held = [s.host.memory_used / s.host.memory_total if s.host.memory_used and s.host.memory_total else None
                for s in samples]  # fmt: skip
        return [*lines, self._history("CPU", load, width), self._history("memory", held, width)]
