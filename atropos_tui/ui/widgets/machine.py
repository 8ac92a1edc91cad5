"""The machine panel: a bar per GPU split by component, utilisation, power, temperature, history.

Without a GPU the same panel shows the host's memory and CPU by component, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.style import Style
from rich.text import Text

from atropos_common.control import GpuStatus, Phase, Role
from atropos_tui.monitor.format import bytes_text, one_line
from atropos_tui.monitor.gauges import Split, split_cpu, split_gpu, split_memory
from atropos_tui.monitor.timeline import clock
from atropos_tui.ui.plot import legend, sparkline, split_bar, textures
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import TextPanel, View

_COLOURS = ("primary", "accent", "success", "warning", "error")
_LABEL = 8


def _note(view: View, gpus: list[GpuStatus]) -> str:
    """Which cards these are, or why there are none; of a run that is over, when the figures were recorded."""
    last = view.gauges.last
    if gpus:
        return f"{len(gpus)} × {one_line(gpus[0].name)}" if gpus[0].name else ""
    if last and view.status and view.status.phase is Phase.ENDED:
        return f"as recorded at {clock(last.time)}"
    if view.status is None or view.gone:
        return "no figures of GPUs" if any(part.gpus for part in view.info.components) else ""
    return "no GPU"


class MachinePanel(TextPanel):
    """GPUs, or the host; as many lines each as there is room for."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    .view MachinePanel { width: 1fr; height: 1fr; }
    """

    def show(self, view: View) -> None:
        super().show(view)
        gpus = view.status.gpus if view.status else []
        self.entitle(title("GPUs" if gpus else "Host", (_note(view, gpus), "quiet")))

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        gpus = view.status.gpus if view.status else []
        if not gpus:
            return self._host(view, width)
        shown = gpus if len(gpus) <= height else gpus[: max(0, height - 1)]
        each = max(1, height // len(gpus))
        lines = [line for gpu in shown for line in self._gpu(view, gpu, width)[:each]]
        if len(shown) < len(gpus):
            lines.append(self.labelled("", _LABEL).append(f"{len(gpus) - len(shown)} more: 6 shows them"))
        return lines

    def _use(
        self, view: View, label: str, split: Split, words: str, write: Callable[[float], str], width: int
    ) -> list[Text]:
        """A bar with what it comes to, and its legend below."""
        order = [row.name for row in view.rows if row.role is not Role.PREPARE]  # one-shot steps hold nothing
        texture = textures(order, colours=not self.app.no_color)

        def style(part: str) -> Style:
            """Components go round the colours."""
            if part in order:
                return self.ink(_COLOURS[order.index(part) % len(_COLOURS)])
            return self.ink("track" if part == "free" else "dim")

        bar = split_bar(split, texture, style, max(4, width - _LABEL - len(words) - 1))
        parts = legend(split, texture, style, write, width - _LABEL)
        return [
            self.labelled(label, _LABEL).append_text(bar).append(f" {words}"),
            *(Text(" " * _LABEL, no_wrap=True, end="").append_text(line) for line in parts),
        ]

    def _gpu(self, view: View, gpu: GpuStatus, width: int) -> list[Text]:
        """The most important line first: memory; then load and history; then who holds what."""
        planned = {item.name: item.gpus for item in view.info.components}
        own = view.status.nodes[0].name if view.status and view.status.nodes else ""  # its cards bear no name
        there = [row for row in view.gauges.used(view.rows) if row.node == (gpu.node or own)]
        split = split_gpu(gpu, there, planned, view.state.metric("reserved_bytes").last)
        busy = "–" if gpu.utilization_percent is None else f"{gpu.utilization_percent}%"
        power = "–" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        heat = "–" if gpu.temperature_c is None else f"{gpu.temperature_c} °C"
        memory = f"{gpu.used_bytes / 1e9:.1f}/{bytes_text(gpu.total_bytes)}"
        words = f"{memory}  {busy:>4}  {power:>5}  {heat}"
        history = view.gauges.card(gpu.index, gpu.node)
        label = f"{gpu.node[: _LABEL - 3]} {gpu.index}" if gpu.node else f"GPU {gpu.index}"
        lines = self._use(view, label, split, words, bytes_text, width)
        if split.note:
            lines.append(self.labelled("", _LABEL).append(split.note))
        load, held = ([found and found[part] for found in history] for part in (0, 1))
        return [*lines, self._history("busy", load, width), self._history("memory", held, width)]

    def _history(self, label: str, values: Iterable[float | None], width: int) -> Text:
        line = self.labelled(label, _LABEL)
        return line.append(sparkline(values, width - _LABEL), self.ink("primary"))

    def _host(self, view: View, width: int) -> list[Text]:
        host = view.gauges.last.host if view.gauges.last else None
        if host is None:
            words = "no figures yet" if view.status and view.status.phase is not Phase.ENDED else "not recorded"
            return [self.labelled(words, _LABEL)]
        rows, lines = view.gauges.used(view.rows), list[Text]()
        if memory := split_memory(rows, host):
            words = f"{memory.used / 1e9:.1f}/{bytes_text(memory.total)}"
            lines += self._use(view, "memory", memory, words, bytes_text, width)
        if cpu := split_cpu(rows, host):
            words = f"{cpu.used / 100:.1f}/{cpu.total / 100:.0f} cores"
            lines += self._use(view, "CPU", cpu, words, lambda value: f"{value:.0f}%", width)
        samples = list(view.gauges.samples)
        load = [None if s.host.cpu_percent is None else s.host.cpu_percent / 100 for s in samples]
        held = [s.host.memory_used / s.host.memory_total if s.host.memory_used and s.host.memory_total else None
                for s in samples]  # fmt: skip
        return [*lines, self._history("CPU", load, width), self._history("memory", held, width)]
