"""Everything that is known of one step, beside the chart that has the whole screen: where its time went, which weights
it made, what happened then, and every number of its records."""

from __future__ import annotations

from rich.text import Text

from atropos_tui.monitor.bench import PARTS
from atropos_tui.monitor.charts import CHARTS, WRITERS, chart_of
from atropos_tui.monitor.format import one_line, seconds_text
from atropos_tui.monitor.reading import MARKS, value_at
from atropos_tui.monitor.series import Series
from atropos_tui.monitor.timeline import clock
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import TextPanel, View

COLUMN = 36
"""Cells of a name with its value."""
_ORDER = {curve.metric: at for at, curve in enumerate(curve for spec in CHARTS.values() for curve in spec.curves)}
"""What has a chart comes first."""


class StepPanel(TextPanel):
    """The step under the charts' cursor, else the newest; of steps that share a point, their means."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    StepPanel {
        width: 42;
        height: 1fr;
    }
    .-narrow StepPanel { width: 1fr; height: 8; }
    """
    follows_records = True

    def show(self, view: View) -> None:
        super().show(view)
        first, last = view.cursor_steps
        words = f"{first:,}" if first == last else f"{first:,} to {last:,}, means"
        self.entitle(title("Step" if first == last else "Steps", (words, "accent")))

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        step, (first, last) = view.cursor_step, view.cursor_steps
        found = [self._when(view, step)]
        found += [
            Text(f"{MARKS[mark.kind]} {one_line(mark.words)}", self.ink("warn"))
            for _, mark in view.marks
            if first <= mark.step <= last
        ]
        if (time := self._time(view, step)) is not None:
            found.append(time)
        names = sorted(view.state.names(), key=lambda name: _ORDER.get(name, len(_ORDER)))
        cells = [self._cell(name, view.state.metric(name), step) for name in names]
        columns = max(1, width // COLUMN)
        rows = -(-len(cells) // columns)
        return found + [Text("", no_wrap=True, end="").join(cells[at::rows]) for at in range(rows)]

    def _when(self, view: View, step: int) -> Text:
        steps = view.state.metric("step_s")
        time = value_at(steps.steps, steps.times, step)
        of_many = len(set(view.cursor_steps)) > 1
        weights = None if of_many else view.state.metric("weight_version").at(step)
        words = [clock(time) if time is not None else "", f"weights {weights:.0f}" if weights is not None else ""]
        return Text("  ".join(filter(None, words)), self.ink("dim"))

    def _time(self, view: View, step: int) -> Text | None:
        """Where the seconds of the step went."""
        whole = view.state.metric("step_s").at(step)
        if not whole:
            return None
        parts = {name: view.state.metric(metric).at(step) for name, metric in PARTS.items()}
        shares = "  ".join(f"{name} {100 * value / whole:.0f}%" for name, value in parts.items() if value)
        return Text(f"{seconds_text(whole)}: {shares}", no_wrap=True, end="")

    def _cell(self, name: str, series: Series, step: int) -> Text:
        value = value_at(series.steps, series.values, step)
        cut = one_line(name)
        cut = cut if len(cut) <= COLUMN - 12 else f"…{cut[-(COLUMN - 13) :]}"
        text = Text(f"{cut:<{COLUMN - 11}}", self.ink("dim"), no_wrap=True, end="")
        return text.append(f"{WRITERS[chart_of(name).unit](value):>9}  ")
