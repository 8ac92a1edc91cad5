"""Where the panels are: one tree of widgets, and which of them each view shows."""

from __future__ import annotations

from collections.abc import Iterator

from textual.app import ComposeResult
from textual.containers import Horizontal, ScrollableContainer
from textual.widget import Widget
from textual.widgets import Footer, Static

from atropos_tui.ui.alignment import Alignment
from atropos_tui.ui.benchmark import Benchmark
from atropos_tui.ui.command_bar import CommandBar
from atropos_tui.ui.components import Components
from atropos_tui.ui.curves import Chart, chart
from atropos_tui.ui.details import Details
from atropos_tui.ui.events import Events
from atropos_tui.ui.header import Header
from atropos_tui.ui.log_view import LogView
from atropos_tui.ui.machine import Machine
from atropos_tui.ui.notices import Notices
from atropos_tui.ui.rollouts import RolloutDetail, Rollouts
from atropos_tui.ui.search_bar import SearchBar
from atropos_tui.ui.summary import Summary

VIEWS: dict[str, tuple[str, str, type[Widget]]] = {
    "overview": ("Overview", "Everything", Components),
    "training": ("Training", "Reward, loss, ratio, clipping, gradient, lag, queue", Components),
    "logs": ("Logs", "The log of the selected component, or of all", LogView),
    "rollouts": ("Rollouts", "The newest rollouts by group", Rollouts),
    "benchmark": ("Benchmark", "Where the time goes; the summary, beside another run", Components),
    "machine": ("Machine", "GPUs, or the host's memory and CPU", Components),
    "alignment": ("Alignment", "Trainer against engine: logprobs, KL, verdict", Components),
    "events": ("Events", "Transitions, diagnoses, commands", Events),
    "component": ("Component", "Everything known of the selected component", Components),
}
"""Title, what it is for, and the panel that gets the keys, by name; in the order of the number keys."""

SHOWN = {
    "training": {"training"},
    "logs": {"bottom", "log"},
    "rollouts": {"bottom", "rollouts", "rollout-detail"},
    "benchmark": {"compare"},
    "machine": {"machine-large"},
    "alignment": {"agreement"},
    "events": {"bottom", "events"},
    "component": {"details"},
}
"""What stands below the components, by view; the overview leaves it to the style sheet, by the size of the terminal."""
CHANGING = "#middle, #more, #bottom, #bottom > *, #training, #compare, #machine-large, #agreement, #details"

TRAINING = ("reward", "loss", "ratio", "clip", "grad", "lag", "queue", "time", "tokens")


def panels() -> ComposeResult:
    """Every widget of the main screen."""
    yield Header()
    yield Notices()
    with Horizontal(id="top"):
        yield Components()
        yield Machine(id="machine")
    with Horizontal(id="middle"):
        yield chart("reward")
        yield chart("diff")
        yield Benchmark(id="benchmark")
    with Horizontal(id="more"):
        yield chart("loss")
        yield chart("ratio")
        yield chart("lag")
        yield Alignment(id="alignment")
    with Horizontal(id="bottom"):
        yield LogView()
        yield Rollouts()
        yield RolloutDetail()
        yield Events()
    with ScrollableContainer(id="training", classes="charts"):
        for name in TRAINING:
            yield chart(name)
    with Horizontal(id="compare"):
        yield Benchmark(id="benchmark-large")
        yield Summary()
    yield Machine(id="machine-large")
    with Horizontal(id="agreement"):
        yield Alignment(id="alignment-large")
        with ScrollableContainer(id="agreement-charts", classes="charts"):
            for name in ("diff", "diff-max", "logprobs", "kl"):
                yield chart(name)
    yield Details()
    yield SearchBar()
    yield CommandBar()
    yield Footer()
    yield Static("the terminal is too small:\n40 × 12 shows something, 80 × 24 all", id="too-small")


def arrange(root: Widget, view: str) -> None:
    """Show the panels of `view`, and no others."""
    shown = SHOWN.get(view)
    for widget in root.query(CHANGING):
        _display(widget, None if shown is None else widget.id in shown)
    _display(root.query_one("#machine"), False if view == "machine" else None)


def _display(widget: Widget, shown: bool | None) -> None:
    """Show or hide; None leaves it to the style sheet."""
    if shown is not None:
        widget.styles.display = "block" if shown else "none"
    elif widget.styles.inline.has_rule("display"):
        widget.styles.clear_rule("display")
        widget.styles.refresh(layout=True, parent=True)


PANELS = (
    Header, Notices, Components, Machine, Chart, Benchmark, Alignment, Rollouts, Events, Summary, Details, CommandBar,
)  # fmt: skip
"""Everything that draws a `View`."""
SELF_HIDING = (Notices, CommandBar)
"""Shown only while they have something to say, which they have to be asked."""


def visible(root: Widget) -> Iterator[Widget]:
    """Every widget below `root` that the present view shows, and those that hide themselves."""
    for child in root.children:
        if child.display or isinstance(child, SELF_HIDING):
            yield child
            yield from visible(child)
