"""Machine panel: GPUs or host, by component; and the nodes of the stack."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.style import Style
from rich.text import Text

from atropos_common.protocol.control import NODE_SILENT_S, GpuStatus, NodeStatus, Phase, Role
from atropos_tui.monitor.bench import ratio
from atropos_tui.monitor.format import bytes_text, clock, duration, one_line, percent
from atropos_tui.monitor.run.gauges import Split, split_cpu, split_gpu, split_memory
from atropos_tui.ui.plot import legend, sparkline, split_bar, textures
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import TextPanel, View

Write = Callable[[float], str]
_COLOURS = ("primary", "accent", "success", "warning", "error")
_LABEL = 8


def _note(view: View, gpus: list[GpuStatus]) -> str:
    last = view.gauges.last
    if gpus:
        return f"{len(gpus)} × {one_line(gpus[0].name)}" if gpus[0].name else ""
    if last and view.status and view.status.phase is Phase.ENDED:
        return f"as recorded at {clock(last.time)}"
    if view.status is None or view.gone:
        return "no figures of GPUs" if any(part.gpus for part in view.info.components) else ""
    return "no GPU"


def _node_of(view: View, gpu: GpuStatus) -> str:
    # Cards of the supervisor's own node have no name.
    return gpu.node or (view.status.nodes[0].name if view.status and view.status.nodes else "")


def _of(used: float, total: float) -> str:
    return f"{used / 1e9:.1f}/{bytes_text(total)}"


def _shares(gpu: GpuStatus) -> str:
    if gpu.sm_percent is not None or gpu.bandwidth_percent is not None:
        return f"SMs {percent(gpu.sm_percent)}, memory bandwidth {percent(gpu.bandwidth_percent)}"
    if gpu.memory_busy_percent is not None:
        return f"memory accessed {gpu.memory_busy_percent}% of the time"
    return ""


class MachinePanel(TextPanel, can_focus=True):
    """One group of lines per GPU, or for the host."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    .view MachinePanel { width: 1fr; height: 1fr; }
    """

    def show(self, view: View) -> None:
        super().show(view)
        gpus = view.status.gpus if view.status else []
        self.set_title(title("GPUs" if gpus else "Host", (_note(view, gpus), "quiet")))

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        gpus = view.status.gpus if view.status else []
        if not gpus:
            return self._host(view, width)
        # One line is kept for the count of the hidden cards.
        shown = gpus if len(gpus) <= height else gpus[: max(0, height - 1)]
        each = max(1, height // len(gpus))
        lines = [line for gpu in shown for line in self._gpu(view, gpu, width)[:each]]
        if hidden := len(gpus) - len(shown):
            lines.append(self.labelled("", _LABEL).append(f"{hidden} more: 6 shows them"))
        return lines

    def _use(
        self, view: View, label: str, split: Split, words: str, write: Write, width: int
    ) -> list[Text]:
        # One-shot steps end before the run and hold nothing.
        order = [row.name for row in view.rows if row.role is not Role.PREPARE]
        texture = textures(order, colours=not self.app.no_color)

        def style(part: str) -> Style:
            # Colours repeat after the last one; a component has the same colour in every bar.
            if part in order:
                return self.style(_COLOURS[order.index(part) % len(_COLOURS)])
            return self.style("track" if part == "free" else "dim")

        bar = split_bar(split, texture, style, max(4, width - _LABEL - len(words) - 1))
        parts = legend(split, texture, style, write, width - _LABEL)
        return [
            self.labelled(label, _LABEL).append_text(bar).append(f" {words}"),
            *(Text(" " * _LABEL, no_wrap=True, end="").append_text(line) for line in parts),
        ]

    def _gpu(self, view: View, gpu: GpuStatus, width: int) -> list[Text]:
        planned = {item.name: item.gpus for item in view.info.components}
        # Only components on the card's own node.
        there = [row for row in view.gauges.used(view.rows) if row.node == _node_of(view, gpu)]
        split = split_gpu(gpu, there, planned, view.state.metric("reserved_bytes").last)
        busy = percent(gpu.utilization_percent)
        power = "–" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        heat = "–" if gpu.temperature_c is None else f"{gpu.temperature_c} °C"
        words = f"{_of(gpu.used_bytes, gpu.total_bytes)}  {busy:>4}  {power:>5}  {heat}"
        history = view.gauges.card(gpu.index, gpu.node)
        label = f"{gpu.node[: _LABEL - 3]} {gpu.index}" if gpu.node else f"GPU {gpu.index}"
        # The most important line first, because a low panel shows only one for each card.
        lines = self._use(view, label, split, words, bytes_text, width)
        if split.note:
            lines.append(self.labelled("", _LABEL).append(split.note))
        if shares := _shares(gpu):
            lines.append(self.labelled("", _LABEL).append(shares))
        # A history sample is (utilization, memory), each a share, or None where it is missing.
        load, held = ([found and found[part] for found in history] for part in (0, 1))
        return [*lines, self._history("busy", load, width), self._history("memory", held, width)]

    def _history(self, label: str, values: Iterable[float | None], width: int) -> Text:
        line = self.labelled(label, _LABEL)
        return line.append(sparkline(values, width - _LABEL), self.style("primary"))

    def _host(self, view: View, width: int) -> list[Text]:
        host = view.gauges.last.host if view.gauges.last else None
        if host is None:
            runs = view.status is not None and view.status.phase is not Phase.ENDED
            return [self.labelled("no figures yet" if runs else "not recorded", _LABEL)]
        rows, lines, samples = view.gauges.used(view.rows), list[Text](), list(view.gauges.samples)
        if memory := split_memory(rows, host):
            words = _of(memory.used, memory.total)
            lines += self._use(view, "memory", memory, words, bytes_text, width)
        held = [ratio(s.host.memory_used or None, s.host.memory_total) for s in samples]
        lines.append(self._history("  past", held, width))
        if cpu := split_cpu(rows, host):
            # CPU amounts are percent of one core.
            words = f"{cpu.used / 100:.1f}/{cpu.total / 100:.0f} cores"
            lines += self._use(view, "CPU", cpu, words, percent, width)
        load = [None if s.host.cpu_percent is None else s.host.cpu_percent / 100 for s in samples]
        return [*lines, self._history("  past", load, width)]


class Nodes(TextPanel, can_focus=True):
    """Two lines per node: its figures, its components."""

    hides_itself = True
    SCOPED_CSS = False
    DEFAULT_CSS = """
    Nodes {
        display: none;
        width: 1fr;
        height: 1fr;
    }
    """

    def show(self, view: View) -> None:
        nodes = view.status.nodes if view.status else []
        self.display = len(nodes) > 1 and not self.has_class("-beside")
        self.set_title(title("Nodes", (str(len(nodes)), "quiet")))
        super().show(view)

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        if view.status is None:
            return []
        longest = max((len(node.name) for node in view.status.nodes), default=0)
        return [line for node in view.status.nodes for line in self._node(view, node, longest)]

    def _node(self, view: View, node: NodeStatus, width: int) -> list[Text]:
        assert view.status is not None
        rows = [row for row in view.rows if row.node == node.name]
        total = node.memory_total
        memory = _of(node.memory_used, total) if total and node.memory_used is not None else "–"
        cards = [gpu for gpu in view.status.gpus if _node_of(view, gpu) == node.name]
        busy = [gpu.utilization_percent for gpu in cards if gpu.utilization_percent is not None]
        load = f" {sum(busy) / len(busy):.0f}%" if busy else ""
        line = Text(f"{node.name:<{width}}  ", "bold", no_wrap=True, end="")
        line.append(f"CPU {percent(node.cpu_percent):>4}  memory {memory}  {node.gpus} GPUs{load}")
        words, tone = self._heard(node, view.now)
        if view.status.phase is not Phase.ENDED:
            line.append(f"  {words}", self.style(tone))
        # A lost node shows as a diagnosis of the components on it.
        lost = [row.diagnosis for row in rows if row.diagnosis and not row.state.is_resting]
        below = Text(f"{'':<{width}}  ", no_wrap=True, end="")
        below.append(", ".join(row.name for row in rows) or "nothing runs there", self.style("dim"))
        if lost:
            below.append(f"  {one_line(lost[0])}", self.style("error"))
        return [line, below]

    def _heard(self, node: NodeStatus, now: float) -> tuple[str, str]:
        if node.heard_at is None:
            return "not heard yet", "dim"
        quiet_s = max(0.0, now - node.heard_at)
        return f"heard {duration(quiet_s)} ago", "dim" if quiet_s < NODE_SILENT_S else "error"
