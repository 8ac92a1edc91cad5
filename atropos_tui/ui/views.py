"""The main screen: its layout, its views, and when to draw."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from atropos_tui.ui import user_files
from atropos_tui.ui.commands import CommandApp
from atropos_tui.ui.widgets.bars import CommandBar, FoldedComponents, SearchBar, ViewsLine
from atropos_tui.ui.widgets.benchmark import AlignmentPanel, Benchmark, Summary
from atropos_tui.ui.widgets.chart_grid import ChartGrid
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.details import Details, StepPanel
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.footer import Footer
from atropos_tui.ui.widgets.header import Header, Notices
from atropos_tui.ui.widgets.legend import RunsLegend
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.machine import MachinePanel, Nodes
from atropos_tui.ui.widgets.panel import Guarded, Panel, View
from atropos_tui.ui.widgets.rollout_detail import RolloutDetail
from atropos_tui.ui.widgets.rollouts import Rollouts
from atropos_tui.ui.widgets.settings import Settings

# Seconds between two draws: of changes, and of curves.
REFRESH_S = 0.25
CURVES_S = 1.0
# Seconds between two draws of figures that always change (uptimes, ages, use of the machine):
# usually, and after `QUIET_S` seconds without another change.
CLOCKS_S, QUIET_CLOCKS_S = 1.0, 2.0
QUIET_S = 5.0


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


LEARNING = ("reward", "useful", "loss", "entropy", "length", "truncated", "ratio", "clip", "grad")
TRAINING = (*LEARNING, "lag", "lr", "time", "tokens", "queue")
ALIGNMENT = ("diff", "diff-max", "logprobs", "kl")

# In the order of the number keys. To add a panel, write its file and add a row here.
VIEWS = {
    "overview": ViewSpec("Overview", "Everything", short="Run"),
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
        Benchmark,
        panels=lambda: [Benchmark(), Summary()],
        short="Time",
    ),
    "machine": ViewSpec(
        "Machine",
        "GPUs, or the host's memory and CPU; the nodes",
        MachinePanel,
        panels=lambda: [Nodes(), MachinePanel()],
        short="Host",
    ),
    "alignment": ViewSpec(
        "Alignment",
        "Trainer against engine: logprobs, KL, verdict",
        Chart,
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
_ONE_CHART = ViewSpec("Chart", "One chart", Chart, lambda: [Chart("reward"), StepPanel()])
SETTINGS = "settings"
_SETTINGS = ViewSpec("Settings", "Settings of the run", Settings, lambda: [Settings()])
NUMBERLESS = {ENLARGED: _ONE_CHART, SETTINGS: _SETTINGS}


def compose_screen() -> ComposeResult:
    yield Header()
    yield Notices()
    yield FoldedComponents()
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
    yield Footer()
    yield Static("the terminal is too small:\n40 × 12 shows something, 80 × 24 all", id="too-small")


def view_spec(name: str) -> ViewSpec:
    return VIEWS.get(name) or NUMBERLESS[name]


def arrange(root: Widget, name: str, *, folded: bool) -> None:
    """Show the panels of a view and hide the others.

    Args:
        folded: show one line instead of the table of components.
    """
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
    _display(root.query_one("#machine"), False if folded or name == "machine" else None)
    _display(root.query_one(Components), False if folded else None)
    _display(root.query_one(FoldedComponents), True if folded and name != ENLARGED else None)


def isolate(root: Widget, panel: Widget) -> None:
    """Give a panel the whole screen; header, views and keys stay."""
    for node in panel.ancestors_with_self:
        if not isinstance(node, Widget) or node is root or not isinstance(node.parent, Widget):
            break
        node.add_class("-alone")
        for other in node.parent.children:
            if other is not node and (node.parent is not root or _is_row(other)):
                other.add_class("-beside")
                _display(other, False)
    _display(root.query_one(FoldedComponents), False)


def rejoin(root: Widget) -> None:
    """Undo `isolate`; `arrange` comes next."""
    for node in root.query(".-alone, .-beside"):
        if node.has_class("-beside"):
            _display(node, None)
        node.remove_class("-alone", "-beside")


def _is_row(widget: Widget) -> bool:
    return widget.id == "top" or widget.has_class("overview") or widget.has_class("view")


def _display(widget: Widget, shown: bool | None) -> None:
    # None leaves it to the style sheet.
    before = widget.display
    if shown is not None:
        widget.styles.display = "block" if shown else "none"
    elif widget.styles.inline.has_rule("display"):
        widget.styles.clear_rule("display")
        # `clear_rule` alone does not trigger a layout.
        widget.styles.refresh(layout=True, parent=True)
    if widget.display != before and isinstance(parent := widget.parent, Widget):
        # Textual keeps the parent's list of shown children, and computes its height from it.
        parent._nodes.updated()


def visible(root: Widget) -> Iterator[Widget]:
    """Yield the widgets that the current view shows, and panels that hide themselves."""
    for child in root.children:
        # A hidden panel of this kind decides from each `View` whether to appear, so it must get
        # one.
        if child.display or (isinstance(child, Panel) and child.hides_itself):
            yield child
            yield from visible(child)


def _panel_of(widget: Widget) -> Widget | None:
    nodes = (node for node in widget.ancestors_with_self if isinstance(node, Guarded))
    return next(nodes, None)


class Painter:
    """Draws the visible panels: at once for something new, else with the clocks."""

    def __init__(self, app: CommandApp, view: Callable[[], View]) -> None:
        self._app, self._view = app, view
        # Not drawn yet: anything; records of the streams, which alone move the curves.
        self.dirty = self.fresh_records = True
        # Panels that show the newest drawn records. One that appears later is missing here.
        self.current: set[Widget] = set()
        self._drawn_at = self._curves_at = self._news_at = float("-inf")

    def refresh(self, *, is_known: bool, is_loaded: bool, is_steady: bool) -> bool:
        """Draw if it is time; return True if it was. `is_steady`: clocks may be drawn less
        often."""
        now, main = time.monotonic(), self._app.main
        if self.dirty or not is_steady:
            self._news_at = now
        clocks = CLOCKS_S if now - self._news_at < QUIET_S else QUIET_CLOCKS_S
        # Under a dialog only the clocks trigger a draw, because each draw repaints the whole
        # screen. The slice, because the stack is empty while the app ends.
        at_once = self.dirty and is_known and self._app.screen_stack[-1:] == [main]
        if main is None or not (at_once or now - self._drawn_at >= clocks):
            return False
        curves = self.fresh_records and is_loaded and now - self._curves_at >= CURVES_S
        self._drawn_at, self.dirty = now, False
        if curves:
            self._curves_at, self.fresh_records = now, False
            self.current.clear()
        self.draw(visible(main), curves=curves)
        return True

    def draw(self, widgets: Iterable[Widget], *, curves: bool | None = None) -> None:
        """Draw the panels among `widgets`; `curves`: also those that follow only the records."""
        view = self._view()
        for widget in widgets:
            # Panels that follow records skip draws without new curves, unless they just appeared.
            needs_records = (view.loaded and widget not in self.current) or (
                view.loaded if curves is None else curves
            )
            if isinstance(widget, Panel) and (needs_records or not widget.follows_records):
                widget.present(view)
                self.current.add(widget)

    def draw_now(self, *kinds: type[Widget]) -> None:
        """Draw at once, for a key; `kinds`: only these panels."""
        if main := self._app.main:
            self.draw([one for one in visible(main) if isinstance(one, kinds or Widget)])


class Navigator:
    """The view on the screen, and the way back."""

    def __init__(self, app: CommandApp, painter: Painter) -> None:
        self._app, self._painter = app, painter
        self.name = "overview"
        self._before: list[str] = []
        self._enlarged: Chart | None = None
        # The panel that has the whole screen.
        self.alone: Widget | None = None
        self.folded = user_files.is_folded()

    def open(self, name: str) -> None:
        """Show a view; the overview forgets the way back."""
        if (main := self._app.main) is None:
            return
        self._join(main)
        if name != self.name:
            self._before = [*self._before, self.name] if name != "overview" else []
        self.name = name
        main.query_one(ViewsLine).highlight(name)
        before = set(visible(main))
        arrange(main, name, folded=self.folded)
        if name == "rollouts":
            main.query_one(Rollouts).point()
        self._focus(main)
        self._draw_new(main, before)
        if name == "events" and (diagnosis := main.query_one(Notices).diagnosis):
            main.query_one(Events).point(diagnosis)

    def _focus(self, main: Screen[object]) -> None:
        # The panel of the view, otherwise the first one: the table may be folded.
        shown = [widget for widget in visible(main) if widget.display and widget.focusable]
        kind = view_spec(self.name).focus
        if found := [widget for widget in shown if isinstance(widget, kind)] or shown:
            found[0].focus()

    def _draw_new(self, main: Screen[object], before: set[Widget]) -> None:
        # Now, or the old panels are painted once more before the layout.
        main.refresh(layout=True)
        self._painter.draw([widget for widget in visible(main) if widget not in before])
        # The footer offers the way back while a panel has the whole screen.
        self._app.refresh_bindings()

    @property
    def is_full(self) -> bool:
        """True while one panel has the whole screen."""
        return self.alone is not None or self.name == ENLARGED

    def zoom(self) -> None:
        """Give the focused panel the whole screen, or end that."""
        main, focused = self._app.main, self._app.focused
        if main is None or focused is None:
            return
        before, was_alone = set(visible(main)), self._join(main)
        if was_alone is None and (panel := _panel_of(focused)):
            self.alone = panel
            isolate(main, panel)
            panel.refresh(layout=True)
        self._draw_new(main, before)

    def _join(self, main: Screen[object]) -> Widget | None:
        # Returns the panel that had the whole screen.
        alone, self.alone = self.alone, None
        if alone is not None:
            rejoin(main)
            arrange(main, self.name, folded=self.folded)
        return alone

    def fold(self) -> None:
        """Fold the table of components into one line, or unfold it; for later screens too."""
        if (main := self._app.main) is None:
            return
        before = set(visible(main))
        self._join(main)
        self.folded = not self.folded
        user_files.keep(folded=self.folded)
        arrange(main, self.name, folded=self.folded)
        focused = self._app.focused
        if focused is None or not focused.display or focused not in set(visible(main)):
            self._focus(main)
        self._draw_new(main, before)

    def back(self) -> bool:
        """End the whole screen of a panel, else return to the view before; False if there is
        neither."""
        if self.alone is not None:
            self.zoom()
        elif self._before:
            *before, name = self._before
            self.open(name)
            self._before = before  # `open` has just added the view that was left
        else:
            return False
        return True

    def enlarge(self, chart: Chart) -> None:
        """Show a chart on the whole screen, or end that."""
        if (main := self._app.main) is None:
            return
        large = main.query_one(f"#view-{ENLARGED}").query_one(Chart)
        if chart is large:
            self.back()
            self.refocus(chart)
            return
        self._enlarged = chart
        large.become(chart.spec)
        self.open(ENLARGED)

    def refocus(self, chart: Chart) -> None:
        """Give the focus back to the chart that `chart` enlarged, if any."""
        if self._enlarged and any(node.id == f"view-{ENLARGED}" for node in chart.ancestors):
            self._enlarged.focus()
