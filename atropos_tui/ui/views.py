"""Layout of the main screen, and the table of views, one for each number key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Static

from atropos_tui.ui.widgets.bars import CommandBar, Keys, SearchBar, ViewsLine
from atropos_tui.ui.widgets.benchmark import AlignmentPanel, Benchmark, Summary
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.curves import Chart, ChartGrid
from atropos_tui.ui.widgets.details import Details, StepPanel
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.header import Header, Notices
from atropos_tui.ui.widgets.legend import RunsLegend
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.machine import MachinePanel, Nodes
from atropos_tui.ui.widgets.panel import Panel
from atropos_tui.ui.widgets.rollouts import RolloutDetail, Rollouts


class ViewSpec(NamedTuple):
    """Content of the screen below the components table."""

    title: str
    about: str
    focus: type[Widget] = Components
    panels: Callable[[], Sequence[Widget]] = tuple
    """Panels of this view alone, side by side."""
    bottom: tuple[type[Widget], ...] = ()
    """Panels of the overview's bottom row to show instead."""
    short: str = ""
    """Title on a narrow screen."""


TRAINING = (
    "reward",
    "useful",
    "loss",
    "entropy",
    "length",
    "truncated",
    "ratio",
    "clip",
    "grad",
    "lag",
    "lr",
    "time",
    "tokens",
    "queue",
)
ALIGNMENT = ("diff", "diff-max", "logprobs", "kl")

# In the order of the number keys. To add a panel, write its file and add a row here.
VIEWS = {
    "overview": ViewSpec("Overview", "Everything", short="Home"),
    "training": ViewSpec(
        "Training",
        "Training curves, and those you choose",
        Chart,
        panels=lambda: [ChartGrid(*TRAINING, columns="three")],
        short="Train",
    ),
    "logs": ViewSpec(
        "Logs", "The log of the selected component, or of all", LogView, bottom=(LogView,)
    ),
    "rollouts": ViewSpec(
        "Rollouts", "The newest rollouts by group", Rollouts, bottom=(Rollouts, RolloutDetail)
    ),
    "benchmark": ViewSpec(
        "Benchmark",
        "Where the time goes; the summary, beside other runs",
        panels=lambda: [Benchmark(), Summary()],
        short="Bench",
    ),
    "machine": ViewSpec(
        "Machine",
        "GPUs, or the host's memory and CPU; the nodes",
        panels=lambda: [Nodes(), MachinePanel()],
    ),
    "alignment": ViewSpec(
        "Alignment",
        "Trainer against engine: logprobs, KL, verdict",
        panels=lambda: [AlignmentPanel(), ChartGrid(*ALIGNMENT, columns="two")],
        short="Align",
    ),
    "events": ViewSpec("Events", "Transitions, diagnoses, commands", Events, bottom=(Events,)),
    "component": ViewSpec(
        "Component",
        "Everything known about the selected component",
        panels=lambda: [Details()],
        short="Comp",
    ),
}
ENLARGED = "enlarged"
NUMBERLESS = {
    ENLARGED: ViewSpec(
        "Chart",
        "One chart on the whole screen",
        Chart,
        panels=lambda: [Chart("reward"), StepPanel()],
    )
}


def compose_screen() -> ComposeResult:
    yield Header()
    yield Notices()
    with Horizontal(id="top"):
        yield Components()
        yield MachinePanel(id="machine")
    yield RunsLegend()
    with Horizontal(id="middle", classes="overview"):
        yield Chart("reward")
        yield Chart("diff")
        yield Benchmark(id="benchmark")
    with Horizontal(id="more", classes="overview"):
        yield Chart("loss")
        yield Chart("ratio")
        yield Chart("lag")
        yield AlignmentPanel()
    with Horizontal(id="bottom", classes="overview"):
        yield LogView()
        yield Rollouts()
        yield RolloutDetail()
        yield Events()
    # All panels exist from the start; a view only shows and hides them, so each keeps its cursor
    # and scroll position.
    for name, view in {**VIEWS, **NUMBERLESS}.items():
        if panels := view.panels():
            yield Horizontal(*panels, id=f"view-{name}", classes="view")
    yield SearchBar()
    yield CommandBar()
    yield ViewsLine({name: (view.title, view.short or view.title) for name, view in VIEWS.items()})
    yield Keys()
    yield Static("the terminal is too small:\n40 × 12 shows something, 80 × 24 all", id="too-small")


def view_spec(name: str) -> ViewSpec:
    return VIEWS.get(name) or NUMBERLESS[name]


def arrange(root: Widget, name: str) -> None:
    """Show the panels of a view and hide the others."""
    # Set `display` widget by widget: a class on the screen would restyle all widgets, which takes a
    # quarter of a second. In the overview the style sheet decides by the size of the terminal, so
    # inline rules are cleared.
    view, overview = view_spec(name), name == "overview"
    for row in root.query(".overview"):
        _display(row, None if overview else bool(view.bottom) and row.id == "bottom")
    for panel in root.query("#bottom > *"):
        _display(panel, None if overview else isinstance(panel, view.bottom))
    for own in root.query(".view"):
        _display(own, True if own.id == f"view-{name}" else None)
    _display(root.query_one("#top"), False if name == ENLARGED else None)
    # The machine view shows the same figures in its own panel.
    _display(root.query_one("#machine"), False if name == "machine" else None)


def _display(widget: Widget, shown: bool | None) -> None:
    # None leaves it to the style sheet.
    if shown is not None:
        widget.styles.display = "block" if shown else "none"
    elif widget.styles.inline.has_rule("display"):
        widget.styles.clear_rule("display")
        # `clear_rule` alone does not trigger a layout.
        widget.styles.refresh(layout=True, parent=True)


def visible(root: Widget) -> Iterator[Widget]:
    """Yield the widgets that the current view shows, and panels that hide themselves."""
    for child in root.children:
        # A hidden panel of this kind decides from each `View` whether to appear, so it must get
        # one.
        if child.display or (isinstance(child, Panel) and child.hides_itself):
            yield child
            yield from visible(child)
