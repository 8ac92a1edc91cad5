"""Charts in rows: pages, a filter by name, and charts that the user hides."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from textual.containers import Container
from textual.content import Content
from textual.message import Message

from atropos_tui.monitor.charts import CHARTS
from atropos_tui.monitor.format import counted, one_line
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.ui.widgets.curves import Chart

_CATALOGUE = {spec.name for spec in CHARTS.values()}


class ChartGrid(Container, can_focus=False):
    """Charts in rows, in pages if they do not fit."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    ChartGrid {
        layout: grid;
        overflow: hidden;
        width: 1fr;
        height: 1fr;
        grid-rows: 1fr;
        border-subtitle-color: $quiet;
        &.two { grid-size: 2; }
        &.three { grid-size: 3; }
        &.noted { border-bottom: solid $frame; }
    }
    .-narrow ChartGrid {
        &.two { grid-size: 1; }
        &.three { grid-size: 2; }
    }
    """
    LOWEST = 9  # lines of the lowest readable chart

    @dataclass(eq=False)
    class Changed(Message):
        """Other charts are shown; `hidden`: names of charts that the user has just hidden."""

        hidden: frozenset[str] | None = None

    def __init__(self, *charts: str, columns: Literal["two", "three"]) -> None:
        """Args: `columns`: charts side by side; one less on a narrow screen."""
        super().__init__(*map(Chart, charts), classes=columns)
        self._columns = 2 if columns == "two" else 3
        self.hidden: frozenset[str] = frozenset()
        self._pattern: Pattern | None = None
        self._page = 0

    @property
    def _charts(self) -> list[Chart]:
        return [one for one in self.children if isinstance(one, Chart)]

    def on_resize(self) -> None:
        self.fit()

    def fit(self) -> None:
        """Show the charts of the page that fits."""
        if not self.size.height:
            return  # not shown yet
        charts = self._charts
        wanted = [one for one in charts if self._is_wanted(one.spec.name)]
        columns = self._columns - self.app.screen_stack[0].has_class("-narrow")
        # Below `LOWEST` lines a chart cannot be read. One line is for the note.
        per_page = columns * max(1, self.outer_size.height // self.LOWEST)
        if len(wanted) > per_page:
            per_page = columns * max(1, (self.outer_size.height - 1) // self.LOWEST)
        pages = max(1, -(-len(wanted) // per_page))
        self._page = min(self._page, pages - 1)
        shown = wanted[self._page * per_page : (self._page + 1) * per_page]
        before = [one for one in charts if one.display]
        for chart in charts:
            chart.display = chart in shown
        self._note(pages, sum(one.spec.name in self.hidden for one in charts))
        if before != shown:
            self._refocus(before, shown)
            self.post_message(self.Changed())

    def _is_wanted(self, name: str) -> bool:
        return name not in self.hidden and (self._pattern is None or self._pattern.search(name))

    def _note(self, pages: int, hidden: int) -> None:
        parts = [f"page {self._page + 1} of {pages}: pgdn, pgup"] if pages > 1 else []
        if self._pattern:
            parts.append(f"/{one_line(self._pattern.text)}: esc drops it")
        if hidden:
            parts.append(f"{counted(hidden, 'chart')} hidden: U shows")
        self.set_class(bool(parts), "noted")
        self.border_subtitle = Content(" · ".join(parts))

    def _refocus(self, before: Sequence[Chart], shown: Sequence[Chart]) -> None:
        if shown and self.app.focused in before and self.app.focused not in shown:
            shown[0].focus()

    def on_chart_asked(self, message: Chart.Asked) -> None:
        if message.what in ("next", "previous"):
            self._page = max(0, self._page + (1 if message.what == "next" else -1))
        elif message.what == "hide":
            self.hide([*self.hidden, message.chart.spec.name])
        elif message.what == "show all":
            self.hide(())
        else:
            return
        message.stop()
        self.fit()

    def hide(self, names: Collection[str]) -> None:
        self.hidden = frozenset(names)
        self.post_message(self.Changed(self.hidden))

    # Filter.

    def focus(self, scroll_visible: bool = True) -> Self:
        """Focus the first chart."""
        first = next((one for one in self._charts if one.display), None)
        if first:
            first.focus(scroll_visible)
        return self

    def search(self, pattern: Pattern | None) -> str:
        """Show only charts whose name matches; return their number in words."""
        self._pattern, self._page = pattern, 0
        self.fit()
        return counted(sum(self._is_wanted(one.spec.name) for one in self._charts), "chart")

    def accept(self) -> None:
        """Keep the filter."""

    def drop(self) -> bool:
        """Remove the filter; False if there is none."""
        if self._pattern is None:
            return False
        self.search(None)
        return True

    async def set_extra(self, names: Sequence[str]) -> None:
        """Show charts of these metrics after the fixed ones."""
        chosen = [chart for chart in self._charts if chart.spec.name not in _CATALOGUE]
        for chart in chosen:
            if chart.spec.name not in names:
                await chart.remove()
        there = {chart.spec.name for chart in chosen}
        await self.mount_all(Chart(name) for name in names if name not in there)
        self.fit()
