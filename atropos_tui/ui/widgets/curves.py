"""Curves over optimizer steps, with axes; healthy ranges are shaded. `monitor.charts` has the catalogue."""

from __future__ import annotations

from typing import ClassVar, Literal

from rich.style import Style
from textual.containers import ScrollableContainer
from textual.content import Content
from textual.reactive import reactive
from textual.strip import Strip

from atropos_tui.monitor.charts import CHARTS, HELD_OUT, LARGEST, MOST_STEPS, QUEUE, WRITERS, CurveSpec, Series, thin
from atropos_tui.ui.plot import Axes, Curve, Ink, plot
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Panel, View, inks


class Chart(Panel):
    """Some curves over steps, with axes; the title carries the newest values."""

    INK = "chart"
    COMPONENT_CLASSES: ClassVar[set[str]] = inks(
        INK, "primary", "accent", "success", "warning", "axis", "grid", "limit", "bad", "healthy"
    )
    DEFAULT_CSS = """
    Chart {
        width: 1fr;
        height: 1fr;

        .chart--primary { color: $primary; }
        .chart--accent { color: $accent; text-style: bold; }
        .chart--success { color: $success; }
        .chart--warning { color: $warning; }
        .chart--axis { color: $quiet; }
        .chart--grid { color: $grid; }
        .chart--limit { color: $warning 60%; }
        .chart--bad { color: $error; text-style: bold; }
        .chart--healthy { background: $healthy; }
    }
    """

    view: reactive[View | None] = reactive(None, layout=False)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.spec = CHARTS[name]
        self.follows_records = not self.spec.over_seconds
        self._drawn_for: object = None
        """View, size and theme that the strips were made for."""
        self._strips: list[Strip] = []

    def on_mount(self) -> None:
        self.border_title = title(self.spec.name)

    def show(self, view: View) -> None:
        """Take the newest points; the last known run length spans the x axis."""
        self.view = view
        self.border_title = self._title(view)

    def on_resize(self) -> None:
        """Another title may fit now; a chart that was hidden had no width at all."""
        if self.view is not None:
            self.border_title = self._title(self.view)

    def _title(self, view: View) -> Content:
        """The fullest title that fits: all labels, then the short name, then the first trace without its label."""
        curves, full, short = self.spec.curves, self.spec.name, self.spec.short or self.spec.name
        found = [series_of(curve, view) for curve in curves]
        if not any(map(len, found)):
            return title(full, ("no data", "quiet"))
        write = WRITERS[self.spec.unit]
        marks = ["◆" if curve.scatter else "━" for curve in curves]
        values = [write(series.last) for series in found]
        colours = [curve.colour for curve in curves]
        labels = [f"{curve.label} " for curve in curves]
        room = self.outer_size.width - (2 if self.styles.border_left[0] in ("", "none") else 6)
        for name, words, gap in (
            (full, labels, 2),
            (short, labels, 1),
            (short, ["", *labels[1:]], 1),
            (short, [""] * len(labels), 1),
        ):
            texts = [f"{mark} {word}{value}" for mark, word, value in zip(marks, words, values, strict=True)]
            fullest = title(name, *zip(texts, colours, strict=True), gap=gap)
            if fullest.cell_length <= room:
                break
        return fullest

    def render_line(self, y: int) -> Strip:
        """One line of the plot, which is drawn once for all of them."""
        drawn_for = (self.view, self.content_size, self.app.theme)
        if drawn_for != self._drawn_for:
            self._drawn_for, self._strips = drawn_for, self._draw()
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.content_size.width, self.rich_style)

    def _draw(self) -> list[Strip]:
        width, height = self.content_size
        if self.view is None or height < 3:
            return []
        curves = [self._curve(curve, self.view) for curve in self.spec.curves]
        first, last = self._span(self.view, curves)
        low, high = self._bounds(curves)
        axes = Axes(first=first, last=last, low=low, high=high, log=self.spec.log, healthy=self.spec.healthy)
        healthy = Style(bgcolor=self.get_component_rich_style("chart--healthy").bgcolor)
        ink = Ink(**{name: self.ink(name) for name in ("axis", "grid", "limit", "bad")}, healthy=healthy)
        lines = plot(curves, axes, ink, width, height)
        base, strips = self.rich_style, [Strip(line) for line in lines]
        return [strip.adjust_cell_length(width, base).apply_style(base) for strip in strips]

    def _span(self, view: View, curves: list[Curve]) -> tuple[float, float | None]:
        """First and last of the x axis: the whole run as planned, or the time that was watched."""
        if self.spec.over_seconds:
            return min([-60, *(curve.steps[0] for curve in curves if curve.steps)]), 0
        ends = (next((step for step in reversed(curve.steps) if step <= MOST_STEPS), 0) for curve in curves)
        return 0, max(view.info.training_steps or 0, *ends) or None

    def _curve(self, curve: CurveSpec, view: View) -> Curve:
        series = thin(series_of(curve, view), 4 * self.content_size.width)
        return Curve(series.steps, series.values, self.ink(curve.colour), curve.scatter)

    def _bounds(self, curves: list[Curve]) -> tuple[float | None, float | None]:
        """The axis' own ends, each unless a value lies beyond it."""
        low, high = self.spec.low, self.spec.high
        values = [value for curve in curves for value in curve.values if abs(value) < LARGEST]
        if values and low is not None and min(values) < low:
            low = None
        if values and high is not None and max(values) > high:
            high = None
        return low, high


class ChartGrid(ScrollableContainer):
    """Charts in rows; scrolls where there is little room."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    ChartGrid {
        layout: grid;
        grid-rows: 1fr;
        overflow: hidden hidden;
        width: 1fr;
        height: 1fr;
        scrollbar-size: 1 1;
        &.two { grid-size: 2; }
        &.three { grid-size: 3; }
        &:focus { scrollbar-color: $primary; }
    }
    .-narrow ChartGrid {
        grid-rows: 7;
        overflow-y: auto;
        &.two { grid-size: 1; }
        &.three { grid-size: 2; }
    }
    """

    def __init__(self, *charts: str, columns: Literal["two", "three"]) -> None:
        """Args: `columns`: how many stand side by side; one less where the screen is narrow."""
        super().__init__(*map(Chart, charts), classes=columns)


def series_of(curve: CurveSpec, view: View) -> Series:
    """The points of a curve."""
    if curve.metric == HELD_OUT:
        return next(iter(view.state.evals.values()), Series())
    if curve.metric == QUEUE:
        times, depths = view.gauges.queue()
        return Series([round(time - times[-1]) for time in times], depths, times)
    return view.state.metric(curve.metric)
