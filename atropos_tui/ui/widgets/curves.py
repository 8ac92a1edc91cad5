"""Charts: curves with axes and healthy ranges, which share one `Lens`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from atropos_tui.monitor.charts import (
    CHARTS,
    HELD_OUT,
    MARKS,
    NOISY,
    QUEUE,
    WRITERS,
    Along,
    ChartSpec,
    CurveSpec,
    Lens,
    Ruler,
    axis_end,
    chart_of,
    is_smoothed,
    sensible_range,
    smooth,
    value_at,
)
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.overlay import lines
from atropos_tui.monitor.run.series import LARGEST, MOST_STEPS, Series, thin
from atropos_tui.ui.plot import Axes, Band, Curve, PlotStyles, plot
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.legend import (
    POINTS,
    RUN_COLOURS,
    Entry,
    legend_line,
    line_marks,
    run_mark,
)
from atropos_tui.ui.widgets.panel import Panel, View, after, hidden

SPLIT_COLOURS = ("accent", "success", "warning", "secondary")
# Points of the moving average, in the order of the key `m`; 0: none.
SMOOTHINGS = (10, 50, 0)
WINDOWS = (200.0, 50.0, None)  # newest steps, in the order of the key `w`; None: all
# Factor of one zoom step; share of the window of one pan step.
ZOOM, PAN = 2.0, 0.25
TINY = 1e-9
# A lens that shows the whole axis.
WHOLE: dict[str, None] = {"first": None, "last": None, "newest": None}
LEGEND_LINES = 8


@dataclass(frozen=True)
class Trace:
    """One curve of a chart, of this run or of several."""

    label: str
    colour: str
    places: Sequence[float]
    values: Sequence[float]
    scatter: bool = False
    mark: str = ""
    """Character before its name, and on it without colours."""
    smooth: Curve | None = None
    span: int = 0
    """Window of the moving average in points."""
    band: tuple[Sequence[float], Sequence[float]] | None = None
    last: float | None = None
    read: Curve | None = None
    """Means of merged steps, where their extremes are drawn."""

    def at(self, cursor: float | None) -> float | None:
        """Return the value under the cursor, otherwise the newest."""
        if cursor is None:
            return self.last
        if self.read:
            return value_at(self.read.steps, self.read.values, cursor)
        return value_at(self.places, self.values, cursor)


class Chart(Panel, can_focus=True):
    """Curves with axes; the title has the values under the cursor."""

    DEFAULT_CSS = """
    Chart {
        width: 1fr;
        height: 1fr;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        hidden(
            "left,h",
            "cursor(-1)",
            "Previous point",
            "Charts: read the values at the previous point",
        ),
        hidden("right", "cursor(1)", "Next point", "Charts: read the values at the next point"),
        hidden("shift+left", "cursor(-10)", "Ten back", "Charts: ten points back"),
        hidden("shift+right", "cursor(10)", "Ten ahead", "Charts: ten points ahead"),
        hidden("plus,equals_sign", "zoom(1)", "Nearer", "Charts: zoom in, around the cursor"),
        hidden("minus", "zoom(-1)", "Farther", "Charts: zoom out"),
        hidden("less_than_sign,comma", "pan(-1)", "Window back", "Charts: move the window back"),
        hidden(
            "greater_than_sign,full_stop", "pan(1)", "Window ahead", "Charts: move the window ahead"
        ),
        hidden("w", "window", "Newest", "Charts: the newest 200 steps, 50 steps, or all"),
        hidden(
            "W",
            "plan",
            "Plan",
            "Charts: the axis to the planned end of the run, or to the newest step",
        ),
        hidden("m", "smooth", "Smooth", "Charts: moving average over 10 points, over 50, or none"),
        hidden("l", "log", "Log axis", "Charts: logarithmic or linear axis of this chart"),
        hidden("b", "outliers", "Outliers", "Charts: cut outliers off the axis, or show all"),
        hidden("x", "along", "Axis", "Charts: over steps, tokens or minutes"),
        hidden(
            "enter,z",
            "enlarge",
            "Full screen",
            "Charts: full screen, with all values of the step; Esc returns",
        ),
        hidden(
            "g", "ask('rollouts')", "Rollouts", "Charts: the rollouts of the step under the cursor"
        ),
        hidden("o", "ask('log')", "Log", "Charts: the trainer's log at the step under the cursor"),
        hidden("v", "ask('events')", "Events", "Charts: the events at the step under the cursor"),
        hidden("e", "each_run", "Seeds", "Charts: each compared run alone, or seeds as one band"),
        hidden("pagedown", "of_grid('next')", "Next page", "Charts: the next page of charts"),
        hidden("pageup", "of_grid('previous')", "Page before", "Charts: the page of charts before"),
        hidden(
            "delete,backspace",
            "of_grid('hide')",
            "Hide",
            "Charts: hide this chart; your choice is kept",
        ),
        hidden("U", "of_grid('show all')", "Show all", "Charts: show hidden charts again"),
        hidden("y", "copy", "Copy", "Charts: copy the values under the cursor"),
        hidden(
            "escape",
            "back",
            "Back",
            "Charts: remove the cursor, the window, the full screen, in this order",
        ),
    ]

    best = ("enlarge", "cursor(-1)", "ask('rollouts')", "app.compare", "smooth")

    view: reactive[View | None] = reactive(None, layout=False)

    class Turned(Message):
        """The shared lens has changed."""

    @dataclass(eq=False)
    class Asked(Message):
        """A key wants something outside the chart; `step` is under the cursor."""

        chart: Chart
        what: Literal[
            "enlarge",
            "back",
            "rollouts",
            "log",
            "events",
            "next",
            "previous",
            "hide",
            "show all",
        ]
        step: int = 0

    def __init__(self, name: str) -> None:
        super().__init__()
        self.spec = CHARTS.get(name) or chart_of(name)
        self.follows_records = not self.spec.over_seconds
        # View, size and theme that `_strips` were drawn for.
        self._drawn_for: object = None
        # View, width and chart that `_traces` were built for.
        self._prepared_for: object = None
        self._strips: list[Strip] = []
        self._traces: list[Trace] = []
        # Ends of the x axis.
        self._first = self._last = 0.0
        # The plot starts with a legend line, because the title has no space for the names.
        self._has_legend = False

    def on_mount(self) -> None:
        self.set_title(title(one_line(self.spec.name)))

    def become(self, spec: ChartSpec) -> None:
        """Show another chart of the catalogue."""
        self.spec = spec
        if self.view is not None:
            self.show(self.view)

    def show(self, view: View) -> None:
        self.view = view
        self._drawn_for = None
        # A hidden chart has no size yet; it draws in `on_resize`.
        if self.size:
            self._prepare(view)
            self.set_title(self._title(view))
            self._name_marks()

    def _name_marks(self) -> None:
        # On the focused chart alone: the names are the same on all.
        words = ""
        if self.view and self.has_focus and not self.spec.over_seconds:
            seen = {mark.kind for at, mark in self.view.marks if self._first <= at <= self._last}
            words = "  ".join(f"{mark} {kind}" for kind, mark in MARKS.items() if kind in seen)
        if words != self.border_subtitle:
            self.border_subtitle = words

    def on_focus(self) -> None:
        self._name_marks()

    def on_blur(self) -> None:
        self._name_marks()

    def on_resize(self) -> None:
        # Another title may fit, and the number of points depends on the width.
        if self.view is not None:
            self.show(self.view)

    # What is drawn.

    def _prepare(self, view: View) -> None:
        wanted = (view, self.content_size.width, self.spec)
        if wanted == self._prepared_for:
            return
        self._prepared_for = wanted
        lens = self._lens(view)
        self._first, self._last = lens.window(*self._full_range(view, lens))
        if self._shows_runs:
            self._traces = self._traces_of_runs(view, lens)
        else:
            found = [self._trace(*curve, view, lens) for curve in curves_of(self.spec, view)]
            self._traces = self._marked([one for one in found if len(one.values)] or found[:1])

    @property
    def _shows_runs(self) -> bool:
        return self.view is not None and bool(self.view.runs) and not self.spec.over_seconds

    def _marked(self, traces: Sequence[Trace]) -> list[Trace]:
        joined = sum(not trace.scatter for trace in traces)
        strokes = iter(line_marks(joined, 1 if self.app.no_color else joined))
        points = iter(POINTS * len(traces))
        return [replace(trace, mark=next(points if trace.scatter else strokes)) for trace in traces]

    def _lens(self, view: View) -> Lens:
        return Lens(smoothing=0) if self.spec.over_seconds else view.lens

    def _full_range(self, view: View, lens: Lens) -> tuple[float, float]:
        # Both ends of the x axis: the whole planned run, or the observed time.
        found = [series for _, series in curves_of(self.spec, view) if len(series)]
        if self.spec.over_seconds:
            return min([-60.0, *(float(series.steps[0]) for series in found)]), 0.0
        # Places beyond MOST_STEPS come from corrupt records and would compress the whole axis.
        places = (_last_place(view.ruler, series) for series in found)
        ends = [place for place in places if place <= MOST_STEPS]
        for run in view.runs[1:]:
            if len(series := run.state.metric(self.spec.curves[0].metric)):
                ends.append(_last_place(Ruler(run.state, lens.along), series))
        end = float(max([*ends, TINY]))
        is_planned = lens.along is Along.STEPS and lens.newest is None
        planned = view.info.training_steps or 0 if is_planned else 0
        if planned > end:
            end = float(planned) if lens.whole_plan else axis_end(end, planned)
        return 0.0, end

    def _trace(self, curve: CurveSpec, series: Series, view: View, lens: Lens) -> Trace:
        if self.spec.over_seconds:
            return Trace(curve.label, curve.colour, series.steps, series.values, last=series.last)
        part = view.ruler.part(series, self._first, self._last)
        # Two points per column of dots, lowest and highest: more cannot be seen.
        raw = thin(part, 4 * max(self.content_size.width, 1))
        average = read = None
        if curve.metric in NOISY and is_smoothed(len(series), lens.smoothing):
            smoothed = smooth(part, lens.smoothing, 4 * max(self.content_size.width, 1))
            average = Curve(view.ruler.place(smoothed), smoothed.values, self.style(curve.colour))
        if part.is_merged:
            read = Curve(view.ruler.place(part), part.values, self.style(curve.colour))
        span = lens.smoothing if average else 0
        drawn = Trace(curve.label, curve.colour, view.ruler.place(raw), raw.values, curve.scatter)
        return replace(drawn, smooth=average, span=span, last=part.last, read=read)

    def _traces_of_runs(self, view: View, lens: Lens) -> list[Trace]:
        metric = self.spec.curves[0].metric
        found = []
        # Hidden runs count too: whether curves are smoothed must not depend on them.
        for at, one in enumerate(lines(view.settings, metric, lens.along, lens.smoothing)):
            if one and at not in lens.hidden_runs:
                drawn = Trace(one.label, RUN_COLOURS[at % len(RUN_COLOURS)], one.places, one.values)
                drawn = replace(drawn, mark=run_mark(at), last=one.last, span=one.smoothing)
                found.append(replace(drawn, band=(one.low, one.high) if one.low else None))
        return found

    # Title and plot.

    def _title(self, view: View) -> Content:
        # The longest title that fits and names every curve; else the plot gets a legend line.
        full, short = one_line(self.spec.name), one_line(self.spec.short or self.spec.name)
        self._has_legend = False
        if not any(len(trace.values) for trace in self._traces):
            return title(full, ("no data", "quiet"))
        room = self.outer_size.width - (2 if self.styles.border_left[0] in ("", "none") else 6)
        notes = self._notes(self._lens(view))
        for found in self._titles(full, short, notes):
            if found.cell_length <= room:
                return found
        self._has_legend = not self._shows_runs
        return title(short, (self._value(self._traces[0]), self._traces[0].colour), *notes)

    def _titles(self, full: str, short: str, notes: list[tuple[str, str]]) -> Iterator[Content]:
        values = [self._value(trace) for trace in self._traces]
        labels = [one_line(trace.label) for trace in self._traces]
        named = [f"{label} {value}" for label, value in zip(labels, values, strict=True)]
        if self._shows_runs:  # the view's legend line names the marks
            for count in range(len(values), 0, -1):
                more = [("…", "quiet")] if count < len(values) else []
                yield self._titled(
                    full if count == len(values) else short, values[:count], [*more, *notes], gap=2
                )
                yield self._titled(short, values[:count], more, gap=1)
            return
        yield self._titled(full, named, notes, gap=2)
        yield self._titled(short, named, notes, gap=1)
        yield self._titled(short, named, notes[:1], gap=1)
        yield self._titled(short, named, [], gap=1)
        yield self._titled(short, [named[0], *labels[1:]], notes[:1], gap=1)
        yield self._titled(short, [named[0], *labels[1:]], [], gap=1)
        if self.content_size.height < LEGEND_LINES:
            yield self._titled(short, labels, [], gap=1)
        if len(values) == 1:
            yield self._titled(short, values, [], gap=1)

    def _titled(
        self, name: str, words: Sequence[str], notes: Sequence[tuple[str, str]], *, gap: int
    ) -> Content:
        pairs = zip(self._traces, words, strict=False)
        curves = ((f"{trace.mark} {text}", trace.colour) for trace, text in pairs)
        return title(name, *curves, *notes, gap=gap)

    def _value(self, trace: Trace) -> str:
        cursor = self.view.lens.cursor if self.view and not self.spec.over_seconds else None
        return WRITERS[self.spec.unit](trace.at(cursor))

    def _legend(self, width: int) -> Text:
        entries = []
        for trace in self._traces:
            label = one_line(trace.label)
            texts = (f"{label} {self._value(trace)}", label)
            entries.append(Entry(trace.mark, self.style(trace.colour), texts))
        return legend_line(entries, width)

    def _notes(self, lens: Lens) -> list[tuple[str, str]]:
        notes = []
        if any(trace.span for trace in self._traces):
            notes.append((f"~{lens.smoothing}", "quiet"))
        if lens.cursor is not None:
            is_time = lens.along is Along.MINUTES
            place = f"@{lens.cursor:.2f} min" if is_time else f"@{lens.cursor:,.0f}"
            first, last = self.view.cursor_steps if self.view else (0, 0)
            of = f", mean of {last - first + 1}" if last > first else ""
            notes.insert(0, (place + of, "accent"))
        if self.spec.name in lens.other_axis:
            notes.append(("linear" if self.spec.log else "log", "quiet"))
        if lens.along is not Along.STEPS:
            notes.append((f"over {lens.along}", "quiet"))
        return notes

    def render_line(self, y: int) -> Strip:
        # Textual asks for single lines; the plot is drawn once for all of them.
        drawn_for = (self.view, self.content_size, self.app.theme)
        if drawn_for != self._drawn_for:
            self._drawn_for, self._strips = drawn_for, self._draw()
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.content_size.width, self.rich_style)

    def _draw(self) -> list[Strip]:
        width, height = self.content_size
        if self.view is None or height < 3:
            return []
        self._prepare(self.view)
        lens, curves, bands = self._lens(self.view), [], []
        letters = [trace.mark if trace.mark.isalnum() else "" for trace in self._traces]
        # Averages first: `plot` draws the first curves on top of the raw points.
        for trace, letter in zip(self._traces, letters, strict=True):
            if trace.smooth:
                curves.append(replace(trace.smooth, mark=letter))
            if trace.band:
                bands.append(Band(trace.places, *trace.band, self.style("lit")))
        for trace, letter in zip(self._traces, letters, strict=True):
            style = self.style("frame") if trace.smooth else self.style(trace.colour)
            mark = trace.mark if trace.scatter else "" if trace.smooth else letter
            curves.append(Curve(trace.places, trace.values, style, trace.scatter, mark))
        # `other_axis` holds the charts whose axis the user switched.
        log = self.spec.log != (self.spec.name in lens.other_axis)
        low, high = self._bounds(log=log, cut=lens.cuts_outliers)
        marks = [] if self.spec.over_seconds else self.view.marks
        axes = Axes(self._first, self._last, low, high, log, self.spec.healthy, lens.cursor)
        axes = replace(axes, marks=[(place, MARKS[mark.kind]) for place, mark in marks])
        named = {name: self.style(name) for name in ("grid", "limit", "bad", "healthy")}
        pens = PlotStyles(
            **named, axis=self.style("dim"), mark=self.style("dim"), cursor=self.style("accent")
        )
        drawn = plot(curves, axes, pens, width, height - self._has_legend, bands)
        base, strips = self.rich_style, [Strip(line) for line in drawn]
        if self._has_legend:
            strips.insert(0, Strip(self._legend(width).render(self.app.console, end="")))
        return [strip.adjust_cell_length(width, base).apply_style(base) for strip in strips]

    def _bounds(self, *, log: bool, cut: bool) -> tuple[float | None, float | None]:
        # Ends of the y axis; None: from the data. A fixed end holds unless a value lies beyond it;
        # other ends may leave out outliers.
        seen = [[value for value in trace.values if abs(value) < LARGEST] for trace in self._traces]
        seen = [values for values in seen if values]
        low, high = self.spec.low, self.spec.high
        if not seen:
            return low, high
        least, most = min(map(min, seen)), max(map(max, seen))
        low = low if low is not None and least >= low else None
        high = high if high is not None and most <= high else None
        if log or not cut or self.spec.over_seconds:
            return low, high
        # Per curve: an outlier of one curve must not hide the range of another.
        ranges = [sensible_range(values) or (min(values), max(values)) for values in seen]
        lowest, highest = min(low for low, _ in ranges), max(high for _, high in ranges)
        low = lowest if low is None and lowest > least else low
        return low, highest if high is None and highest < most else high

    # Keys and the mouse.

    @property
    def _shared(self) -> Lens:
        return self.view.lens if self.view else Lens()

    def _change_lens(self, **changes: object) -> None:
        if self.view is not None and not self.spec.over_seconds:
            self.view.shared.lens = replace(self.view.lens, **changes)  # type: ignore[arg-type]
            self.post_message(self.Turned())

    def action_cursor(self, by: int) -> None:
        """Move the cursor by points."""
        lines = (trace.places for trace in self._traces if len(trace.places) and not trace.scatter)
        # A set, because a point of merged steps is drawn twice, at its lowest and highest.
        places = sorted(set(next(lines, ())))
        if self.view is None or not places:
            return
        cursor, at = self.view.lens.cursor, len(places) - 1
        if cursor is not None:  # a mouse click may have put it between two points
            at = by + (bisect_right(places, cursor) - 1 if by > 0 else bisect_left(places, cursor))
        self._change_lens(cursor=float(places[min(max(at, 0), len(places) - 1)]))

    def action_zoom(self, direction: int, around: float | None = None) -> None:
        if self.view is None:
            return
        lens = self.view.lens
        width = (self._last - self._first) * (1 / ZOOM if direction > 0 else ZOOM)
        whole = self._full_range(self.view, replace(lens, newest=None))
        if width >= whole[1] - whole[0]:
            self._change_lens(**WHOLE)
            return
        if around is None:
            around = lens.cursor if lens.cursor is not None else self._last
        first = min(max(around - width / 2, whole[0]), whole[1] - width)
        # Do not zoom to less than two steps.
        if width > (2 if lens.along is Along.STEPS else TINY):
            self._change_lens(first=first, last=first + width, newest=None)

    def action_pan(self, direction: int) -> None:
        if self.view is None:
            return
        width = self._last - self._first
        whole = self._full_range(self.view, replace(self.view.lens, newest=None))
        newest = max(whole[1] - width, whole[0])
        first = min(max(self._first + direction * PAN * width, whole[0]), newest)
        self._change_lens(first=first, last=first + width, newest=None)

    def action_window(self) -> None:
        """Show the next number of newest steps."""
        if self.view is None:
            return
        lens, steps = self.view.lens, max(self.view.state.step, 1)
        # Length of the axis per step.
        scale = 1.0 if lens.along is Along.STEPS else self._full_range(self.view, lens)[1] / steps
        now = None if lens.newest is None else round(lens.newest / scale)
        wanted = after(now, WINDOWS) if now in WINDOWS else WINDOWS[0]
        self._change_lens(first=None, last=None, newest=None if wanted is None else wanted * scale)

    def action_plan(self) -> None:
        self._change_lens(whole_plan=not self._shared.whole_plan, **WHOLE)

    def action_smooth(self) -> None:
        now = self._shared.smoothing
        self._change_lens(smoothing=after(now, SMOOTHINGS) if now in SMOOTHINGS else 0)

    def action_log(self) -> None:
        self._change_lens(other_axis=self._shared.other_axis ^ {self.spec.name})

    def action_outliers(self) -> None:
        self._change_lens(cuts_outliers=not self._shared.cuts_outliers)

    def action_along(self) -> None:
        # A window and a cursor on the old axis mean nothing on the new one.
        self._change_lens(along=after(self._shared.along, list(Along)), cursor=None, **WHOLE)

    def action_each_run(self) -> None:
        self._change_lens(each_run=not self._shared.each_run, hidden_runs=frozenset())

    def action_of_grid(self, what: Literal["next", "previous", "hide", "show all"]) -> None:
        self.post_message(self.Asked(self, what))

    def action_enlarge(self) -> None:
        self.post_message(self.Asked(self, "enlarge"))

    def action_back(self) -> None:
        """Remove one thing: the cursor, then the window, then the full screen."""
        lens = self._shared
        if lens.cursor is not None:
            self._change_lens(cursor=None)
        elif (lens.first, lens.last, lens.newest) != (None, None, None):
            self._change_lens(**WHOLE)
        else:
            self.post_message(self.Asked(self, "back"))

    def action_ask(self, what: Literal["rollouts", "log", "events"]) -> None:
        if self.view is not None:
            self.post_message(self.Asked(self, what, self.view.cursor_step))

    def action_copy(self) -> None:
        if self.view is not None:
            cursor = self.view.lens.cursor
            first, last = self.view.cursor_steps
            step = f"step {first}" if first == last else f"steps {first} to {last}"
            lines = [f"{one_line(trace.label)}\t{trace.at(cursor)}" for trace in self._traces]
            self.app.copy_to_clipboard("\n".join([f"{self.spec.name}\t{step}", *lines]))
            self.app.notify(f"copied {self.spec.name} at {step}", timeout=2, markup=False)

    def _place_of(self, event: events.MouseEvent) -> float | None:
        # None outside of the plot.
        at = event.get_content_offset(self)
        texts = [strip.text for strip in self._strips]
        # The plot starts after the y axis, whose position depends on the labels.
        left = next((i for text in texts for i, char in enumerate(text) if char in "┤│"), -1) + 1
        columns = self.content_size.width - left
        if at is None or not left or not left <= at.x or columns < 2:
            return None
        return self._first + (at.x - left) / (columns - 1) * (self._last - self._first)

    def on_click(self, event: events.Click) -> None:
        if event.chain == 2:
            self.action_enlarge()
        elif (place := self._place_of(event)) is not None:
            self._change_lens(cursor=max(place, 0.0))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, -1)

    def _wheel(self, event: events.MouseEvent, direction: int) -> None:
        # Without the focus the wheel scrolls the grid that the chart is in.
        if self.has_focus:
            event.stop()
            self.action_zoom(direction, self._place_of(event))


def _last_place(ruler: Ruler, series: Series) -> float:
    return ruler.place(series.part(len(series) - 1, len(series)))[0]


def curves_of(spec: ChartSpec, view: View) -> list[tuple[CurveSpec, Series]]:
    """Return the curves of a chart with their points."""
    found: list[tuple[CurveSpec, Series]] = []
    for curve in spec.curves:
        if curve.metric == HELD_OUT:
            envs = {name.partition("/")[0] for name in view.state.evals}
            for at, (name, series) in enumerate(view.state.evals.items()):
                label = name.partition("/")[2] if len(envs) == 1 else name
                label, colour = label.replace("held_out", "held-out"), SPLIT_COLOURS[at % 4]
                found.append((replace(curve, label=label, colour=colour), series))
        elif curve.metric == QUEUE:  # sampled by the supervisor, so over seconds before now
            times, depths = view.gauges.queue()
            ages = [round(time - times[-1]) for time in times]
            found.append((curve, Series(ages, depths, times)))
        else:
            found.append((curve, view.state.metric(curve.metric)))
    return found
