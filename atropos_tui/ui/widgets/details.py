"""Details of one component, or of one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from atropos_common.protocol.control import ComponentStatus, Role
from atropos_common.protocol.trainer_records import RanksRecord
from atropos_tui.monitor.bench import PARTS
from atropos_tui.monitor.charts import CHARTS, COUNTS, MARKS, WRITERS, chart_of, value_at
from atropos_tui.monitor.format import (
    bytes_text,
    clock,
    duration,
    one_line,
    percent,
    real,
    seconds_text,
)
from atropos_tui.monitor.run.run_files import PlannedComponent
from atropos_tui.monitor.run.series import Series
from atropos_tui.ui.theme import state_text, title
from atropos_tui.ui.widgets.panel import Panel, TextPanel, View, hidden

_LABEL = 12
_DIAGNOSES = 5  # newest diagnoses that are listed
COLUMN = 36  # cells of a metric's name with its value
# Metrics with a chart are listed first, in the order of the charts.
_ORDER = {
    curve.metric: at
    for at, curve in enumerate(curve for spec in CHARTS.values() for curve in spec.curves)
}


class Details(VerticalScroll, Panel):
    """Everything known about the selected component."""

    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("y", "copy", "Copy", "Component: copy all lines, with the command")
    ]
    best = ("copy", "app.last_words", "app.zoom")

    def __init__(self) -> None:
        super().__init__(id="details")
        self._text = Text()

    def compose(self) -> ComposeResult:
        yield Static(id="details-text")

    def on_mount(self) -> None:
        self.border_title = title("Component")

    def show(self, view: View) -> None:
        row = next((row for row in view.rows if row.name == view.selected), None)
        self.set_title(title("Component", (view.selected, "primary")))
        lines = self._lines(view, row) if row else [Text("no component is selected")]
        text = Text("\n").join(lines)
        # An update causes a new layout, so skip it without a change.
        if text != self._text:
            self._text = text
            self.query_one("#details-text", Static).update(text)

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._text.plain)
        self.app.notify("copied", timeout=2)

    def _line(self, label: str, words: str, tone: str = "") -> Text:
        line = Text(f"{label:<{_LABEL}}", self.style("dim"))
        return line.append(words, self.style(tone) if tone else None)

    def _lines(self, view: View, row: ComponentStatus) -> Iterator[Text]:
        words, tone = state_text(row.state)
        since = f" for {duration(view.now - row.since)}" if row.since else ""
        state = self._line("state", words, tone).append(since)
        yield state.append(f"   {one_line(row.reason)}", self.style("dim"))
        if row.waiting_for:
            yield self._line("waits for", one_line(row.waiting_for))
        yield self._line("health", _health(row))
        yield self._line("attempt", f"{row.attempt}, {row.restarts} restarts after a crash")
        pids = row.pids or ([row.pid] if row.pid else [])
        yield self._line("processes", ", ".join(map(str, pids)) or "none")
        memory, gpu = bytes_text(row.memory_bytes), bytes_text(row.gpu_bytes)
        yield self._line("uses", f"CPU {percent(row.cpu_percent)}, memory {memory}, GPU {gpu}")
        if row.port:
            yield self._line("port", str(row.port))
        planned = (item for item in view.info.components if item.name == row.name)
        yield from self._planned(next(planned, None))
        if row.role is Role.ENGINE and row.port:
            yield from self._engines(view, row)
        for stage in row.stages:
            when = f"not yet · {one_line(stage.usually)}" if stage.usually else "not yet"
            if stage.reached_at:
                when = f"after {duration(stage.reached_at - (row.started_at or 0))}"
            yield self._line("stage", f"{one_line(stage.name)}: {when}")
        if row.role == Role.TRAINER and view.state.ranks is not None:
            yield from self._ranks(view.state.ranks)
        yield from self._diagnoses(view, row)

    def _ranks(self, record: RanksRecord) -> Iterator[Text]:
        # All ranks wait for the slowest at every collective. `alone_s` excludes that wait.
        slowest = max(record.ranks, key=lambda use: real(use.alone_s), default=None)
        for use in record.ranks:
            where = "CPU" if use.gpu is None else f"GPU {one_line(use.gpu)}"
            # Peak GPU memory, or the resident memory of a rank on the CPU.
            memory = bytes_text(use.rss_bytes if use.peak_bytes is None else use.peak_bytes)
            alone = seconds_text(real(use.alone_s))
            words = f"{where}, memory {memory}, {use.tokens:,} tokens, alone {alone}"
            last = use is slowest and len(record.ranks) > 1
            words, tone = (f"{words}, the slowest", "warn") if last else (words, "")
            yield self._line(f"rank {use.rank}", words, tone)

    def _planned(self, plan: PlannedComponent | None) -> Iterator[Text]:
        if plan is None:
            return
        if plan.gpus:
            label = "on GPU" if len(plan.gpus) == 1 else "on GPUs"
            yield self._line(label, ", ".join(map(str, plan.gpus)))
        if plan.depends_on:
            needs = (f"{name} {what}" for name, what in plan.depends_on.items())
            yield self._line("depends on", ", ".join(needs))
        yield self._line("command", one_line(" ".join(plan.command)))

    def _engines(self, view: View, chosen: ComponentStatus) -> Iterator[Text]:
        heads = {"version": 8, "running": 9, "waiting": 9, "tokens/s": 10, "KV cache": 10}
        yield self._line("engines", "".join(f"{head:>{cells}}" for head, cells in heads.items()))
        # All engines: a difference in weight version or load shows only side by side.
        for row in view.rows:
            if row.role is Role.ENGINE and row.port:
                now = view.gauges.rates(row.name)
                figures: list[float | None] = [None] * 4
                if now:
                    figures = [now.weight_version, now.running, now.waiting, now.generated_per_s]
                words = ["–" if value is None else f"{value:,.0f}" for value in figures]
                words.append("–" if now is None or now.kv_use is None else f"{now.kv_use:.0%}")
                cells = zip(words, heads.values(), strict=True)
                name = Text(f"{one_line(row.name):<{_LABEL}.{_LABEL - 1}}")
                name.stylize("bold" if row is chosen else self.style("dim"))
                yield name.append("".join(f"{word:>{width}}" for word, width in cells))

    def _diagnoses(self, view: View, row: ComponentStatus) -> Iterator[Text]:
        own = [item for item in view.state.diagnoses if item.component == row.name]
        # The last `_DIAGNOSES` of the list, backwards.
        for item in own[: -_DIAGNOSES - 1 : -1]:
            yield Text()
            yield self._line(clock(item.time), f"▲ {one_line(item.title)}", "warn")
            for label, words in (("evidence", item.evidence), ("fix", item.fix)):
                if words:
                    yield self._line(label, one_line(words))


def _health(row: ComponentStatus) -> str:
    if row.healthy is None:
        return "no health check now"
    verdict = "passes" if row.healthy else "fails"
    words = f"{row.probe or 'newest'} check {verdict} in {seconds_text(row.probe_latency_s)}"
    return words + (f": {one_line(row.probe_detail)}" if row.probe_detail else "")


class StepPanel(TextPanel):
    """Step under the charts' cursor; means if several steps share a point."""

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
        self.set_title(title("Step" if first == last else "Steps", (words, "accent")))

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        step, (first, last) = view.cursor_step, view.cursor_steps
        found = [self._when(view, step)]
        here = (mark for _, mark in view.marks if first <= mark.step <= last)
        for mark in here:
            found.append(Text(f"{MARKS[mark.kind]} {one_line(mark.words)}", self.style("warn")))
        if (time := self._time(view, step)) is not None:
            found.append(time)
        names = sorted(view.state.names(), key=lambda name: _ORDER.get(name, len(_ORDER)))
        cells = [self._cell(name, view.state.metric(name), step) for name in names]
        columns = max(1, width // COLUMN)
        rows = -(-len(cells) // columns)  # rounded up; the order runs down the columns
        return found + [Text("", no_wrap=True, end="").join(cells[at::rows]) for at in range(rows)]

    def _when(self, view: View, step: int) -> Text:
        steps = view.state.metric("step_s")
        time = value_at(steps.steps, steps.times, step)
        # A mean of weight versions has no meaning.
        of_many = len(set(view.cursor_steps)) > 1
        weights = None if of_many else view.state.metric("weight_version").at(step)
        words = [] if time is None else [clock(time)]
        words += [] if weights is None else [f"weights {weights:.0f}"]
        return Text("  ".join(words), self.style("dim"))

    def _time(self, view: View, step: int) -> Text | None:
        whole = view.state.metric("step_s").at(step)
        if not whole:
            return None
        parts = {name: view.state.metric(metric).at(step) for name, metric in PARTS.items()}
        shares = [f"{name} {100 * value / whole:.0f}%" for name, value in parts.items() if value]
        return Text(f"{seconds_text(whole)}: {'  '.join(shares)}", no_wrap=True, end="")

    def _cell(self, name: str, series: Series, step: int) -> Text:
        value = value_at(series.steps, series.values, step)
        cut = one_line(name)
        # The end of a metric's name tells more than its beginning.
        cut = cut if len(cut) <= COLUMN - 12 else f"…{cut[-(COLUMN - 13) :]}"
        text = Text(f"{cut:<{COLUMN - 11}}", self.style("dim"), no_wrap=True, end="")
        is_count = name in COUNTS and value is not None and float(value).is_integer()
        words = f"{value:,.0f}" if is_count else WRITERS[chart_of(name).unit](value)
        return text.append(f"{words:>9}  ")
