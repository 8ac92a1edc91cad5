"""The guides' benchmark summary of this run, and beside it the run that was chosen with `c`, with ratios per row."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from atropos_tui.monitor.bench import benchmark_state, render_benchmarks
from atropos_tui.ui.look import title
from atropos_tui.ui.view import View


class Summary(VerticalScroll):
    """A table that scrolls where it is wider or longer than its room."""

    def __init__(self) -> None:
        super().__init__(id="summary")
        self._text = ""

    def compose(self) -> ComposeResult:
        yield Static(id="summary-text")

    def on_mount(self) -> None:
        self.border_title = title("Summary")

    def show(self, view: View) -> None:
        """Measure again: sums over all steps."""
        mine = benchmark_state(view.state, run=view.info.name or "this run", mode=view.info.mode)
        text = render_benchmarks([mine, view.other] if view.other else [mine])
        about = f"beside {view.other.run}, x is the ratio to this run" if view.other else "c compares with another run"
        self.border_title = title("Summary", (about, "quiet"))
        if text != self._text:
            self._text = text
            self.query_one("#summary-text", Static).update(Text(text, no_wrap=True))
