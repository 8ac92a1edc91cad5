"""The machines of a stack that runs on several: what each is used for and how much, and when it was last heard.

Their GPUs stand in the machine panel beside it. Where there is one machine the panel is not shown.
"""

from __future__ import annotations

from rich.text import Text

from atropos_common.control import SILENT_S, NodeStatus, Phase
from atropos_tui.monitor.format import bytes_text, duration, one_line
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import TextPanel, View


class Nodes(TextPanel):
    """Two lines a node: its figures, and what runs there."""

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
        self.display = len(nodes) > 1
        self.entitle(title("Nodes", (str(len(nodes)), "quiet")))
        super().show(view)

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        if view.status is None:
            return []
        longest = max((len(node.name) for node in view.status.nodes), default=0)
        return [line for node in view.status.nodes for line in self._node(view, node, longest)]

    def _node(self, view: View, node: NodeStatus, width: int) -> list[Text]:
        assert view.status is not None
        rows = [row for row in view.rows if row.node == node.name]
        cpu = "–" if node.cpu_percent is None else f"{node.cpu_percent:.0f}%"
        total = node.memory_total
        memory = f"{node.memory_used / 1e9:.1f}/{bytes_text(total)}" if total and node.memory_used is not None else "–"
        own = view.status.nodes[0].name  # the supervisor's: its cards bear no name
        cards = [gpu for gpu in view.status.gpus if (gpu.node or own) == node.name]
        busy = [gpu.utilization_percent for gpu in cards if gpu.utilization_percent is not None]
        load = f" {sum(busy) / len(busy):.0f}%" if busy else ""
        line = Text(f"{node.name:<{width}}  ", "bold", no_wrap=True, end="")
        line.append(f"CPU {cpu:>4}  memory {memory}  {node.gpus} GPUs{load}")
        words, ink = self._heard(node, view.now)
        if view.status.phase is not Phase.ENDED:
            line.append(f"  {words}", self.ink(ink))
        lost = next((row.diagnosis for row in rows if row.diagnosis and not row.state.is_resting), "")
        below = Text(f"{'':<{width}}  ", no_wrap=True, end="")
        below.append(", ".join(row.name for row in rows) or "nothing runs there", self.ink("dim"))
        if lost:
            below.append(f"  {one_line(lost)}", self.ink("error"))
        return [line, below]

    def _heard(self, node: NodeStatus, now: float) -> tuple[str, str]:
        """When it last spoke, and the ink for that."""
        if node.heard_at is None:
            return "not heard yet", "dim"
        quiet_s = max(0.0, now - node.heard_at)
        return f"heard {duration(quiet_s)} ago", "dim" if quiet_s < SILENT_S else "error"
