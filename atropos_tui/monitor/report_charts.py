"""Charts of a report: `charts(state)` prepares them, `draw(chart)` renders one as SVG.

matplotlib draws in marker colours, which become the page's `var(--...)`: one picture fits light and
dark.
"""

from __future__ import annotations

import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from atropos_common.protocol.records import GaugesRecord
from atropos_tui.monitor.bench import PARTS
from atropos_tui.monitor.charts import (
    HELD_OUT,
    NOISY,
    PAGE,
    WRITERS,
    Along,
    ChartSpec,
    CurveSpec,
    Mark,
    marks,
    value_at,
)
from atropos_tui.monitor.format import bytes_text, masked_line, seconds_text
from atropos_tui.monitor.run.series import MOST_STEPS, Series, averaged, on_scale, thin
from atropos_tui.monitor.run.state import RunState

POINTS = 1_000  # of one curve; a longer one is thinned
# Columns of the time split of steps; more steps are averaged.
STACKED = 250
SIZE_IN = (5.6, 2.5)
FONT_PT = 9
# Width of a digit, height of a line, distance of labels from an axis, in points.
GLYPH_PT, LINE_PT, TICK_PT = 0.64 * FONT_PT, 1.2 * FONT_PT, 8
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
PALETTE = 6  # curve colours of the page: `--c1` to `--c6`
FEW = 40  # points up to which a curve has markers: a single point draws no line
MANY = 400  # points above which the line is thinner

_MARKERS = {f"#0102{at:02x}": f"var(--c{at})" for at in range(1, PALETTE + 1)}
_MARKERS |= {
    "#010301": "var(--axis)",
    "#010302": "var(--grid)",
    "#010303": "var(--good-area)",
    "#010304": "var(--bad)",
}
_AXIS, _GRID, _HEALTHY, _BAD = (name for name in _MARKERS if name.startswith("#0103"))
_LINES = {"restart": _AXIS, "diagnosis": _BAD}
# Marks are lines over the whole height, or points on the axis.
_POINTS = {"evaluation": "d", "checkpoint": "s"}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "atropos",
    "path.simplify": False,  # `thin` has reduced the points already, and keeps spikes
    "font.size": FONT_PT,
    "text.parse_math": False,
    "axes.edgecolor": _AXIS,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _AXIS,
    "ytick.color": _AXIS,
    "ytick.left": False,
    "ytick.minor.left": False,
    "lines.linewidth": 1.6,
}

ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)

STEP_PARTS = ChartSpec(
    "Where a step's time goes",
    (),
    "Shares of a step: waiting for rollouts, training, publishing weights, checkpoints",
    low=0.0,
    high=1.0,
)
SPOTS = 120  # places in a chart that show values on hover

Write = Callable[[float | None], str]
Gauge = Callable[[GaugesRecord], float | None]


@dataclass(frozen=True)
class PageCurve:
    """One curve: its points, thinned for the page, and its legend."""

    label: str
    colour: int
    """Colour in the page's palette, from 1."""
    points: Series
    last: str
    span: str
    """Lowest and highest of all values."""
    scatter: bool = False
    noisy: bool = False
    """The page may smooth it."""
    not_finite: int = 0
    places: Sequence[float] = ()
    """Positions of the points on the axis, if not their steps."""
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """Lowest and highest values of several runs."""

    @property
    def along(self) -> Sequence[float]:
        return self.places or self.points.steps


@dataclass(frozen=True)
class PageChart:
    """A chart with the curves for which a run has data."""

    spec: ChartSpec
    lines: list[PageCurve]
    marks: list[Mark]
    note: str
    stacked: bool = False
    over: str = "optimizer steps"
    """Unit of the horizontal axis."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def about(self) -> str:
        """Description and healthy range."""
        return f"{'; '.join(filter(None, (self.spec.about, self.spec.health)))}."

    @property
    def not_finite(self) -> int:
        """Values that are NaN, infinite or out of range."""
        return sum(line.not_finite for line in self.lines)


def charts(state: RunState) -> list[PageChart]:
    """Return every chart for which `state` has data, in reading order."""
    every = marks(state)
    # Many evaluations would hide restarts, so only their own chart has their marks.
    few = [mark for mark in every if mark.kind != "evaluation"]
    found = []
    for spec in PAGE:
        has_evaluations = any(curve.metric == HELD_OUT for curve in spec.curves)
        found.append(_chart(spec, state, _once(every) if has_evaluations else few))
    return [chart for chart in (*found, _split(state, few)) if chart.lines]


def _once(every: list[Mark]) -> list[Mark]:
    # Splits that are evaluated together make one mark.
    return list({(mark.kind, mark.step): mark for mark in every}.values())


def _chart(spec: ChartSpec, state: RunState, beside: list[Mark]) -> PageChart:
    lines: list[PageCurve | None] = []
    longest = 0
    for curve in spec.curves:
        for label, series in _found(curve, state):
            line = _line(label, len(lines) + 1, series, WRITERS[spec.unit], scatter=curve.scatter)
            lines.append(line and replace(line, noisy=curve.metric in NOISY))
            longest = max(longest, 0 if curve.metric == HELD_OUT else series.count)
    is_thin = longest > POINTS
    note = f"{longest:,} points, thinned; every slice keeps its extremes." if is_thin else ""
    return PageChart(spec, [line for line in lines if line], beside, note)


def _found(curve: CurveSpec, state: RunState) -> list[tuple[str, Series]]:
    # Held-out accuracy has a curve for each environment and split.
    if curve.metric == HELD_OUT:
        label = f"{curve.label} accuracy, "
        return [(label + masked_line(name), series) for name, series in state.evals.items()]
    return [(curve.label, state.metric(curve.metric))]


def _split(state: RunState, beside: list[Mark]) -> PageChart:
    # Stacked shares of step time. The first step compiles and warms up, so it is left out.
    seconds = state.metric("step_s")
    whole = seconds.part(1, len(seconds)) if len(seconds) > 1 else seconds
    parts = {name: _at_points(state.metric(key), whole) for name, key in PARTS.items()}
    known = [sum(part.values[at] for part in parts.values()) for at in range(len(whole))]
    sums = [max(value, sum_) for value, sum_ in zip(whole.values, known, strict=True)]
    rest = [sum_ - part for sum_, part in zip(sums, known, strict=True)]
    parts["other"] = whole.like(rest)
    count = math.ceil(whole.count / STACKED)
    note = f"Means of {count} steps. " if count > 1 else ""
    if len(seconds) > 1:
        note += f"Without the first step, which took {seconds_text(seconds.values[0])}."
    total = averaged(whole.like(sums), STACKED)
    lines = [
        _share(name, at, averaged(part, STACKED), total)
        for at, (name, part) in enumerate(parts.items(), 1)
    ]
    return PageChart(STEP_PARTS, lines if len(whole) else [], beside, note, stacked=True)


def _share(label: str, colour: int, part: Series, whole: Series) -> PageCurve:
    def share(value: float, total: float) -> float | None:
        return value / total if total > 0 and math.isfinite(total) else None

    pairs = zip(part.values, whole.values, strict=True)
    points = Series(part.steps, [share(*pair) or 0.0 for pair in pairs], part.times)
    overall = share(sum(part.values), sum(whole.values))
    words = "–" if overall is None else f"{overall:.0%}"
    return PageCurve(label, colour, points, words, "of all steps")


def system_charts(state: RunState) -> list[PageChart]:
    """Return charts of machine and engine use over minutes, as far as recorded."""
    samples = list(state.gauges.samples)
    if not samples:
        return []
    start = samples[0].time
    gpus = sorted({gpu.label for sample in samples for gpu in sample.gpus})
    engines = sorted({name for sample in samples for name in sample.engines})
    parts = sorted({name for sample in samples for name in sample.components})

    def curve(label: str, colour: int, unit: str, of: Gauge) -> PageCurve | None:
        found = [(sample.time, value) for sample in samples if (value := of(sample)) is not None]
        times, values = [time for time, _ in found], [value for _, value in found]
        series = Series(range(len(found)), values, times)
        line = _line(masked_line(label), colour, series, WRITERS[unit])
        return line and replace(line, places=[(time - start) / 60 for time in line.points.times])

    def card(label: str, name: str) -> Gauge:
        return lambda s: next((getattr(gpu, name) for gpu in s.gpus if gpu.label == label), None)

    def engine(which: str, name: str) -> Gauge:
        return lambda sample: getattr(sample.engines.get(which), name, None)

    def part(which: str) -> Gauge:
        return lambda sample: getattr(sample.components.get(which), "memory_bytes", None)

    drawn: list[tuple[ChartSpec, list[tuple[str, Gauge]]]] = [
        (
            ChartSpec("GPU in use", (), "Percent of time", low=0.0, high=100.0),
            [(f"GPU {label}", card(label, "utilization_percent")) for label in gpus],
        ),
        (
            ChartSpec("GPU memory", (), "In use by all processes", unit="bytes", low=0.0),
            [(f"GPU {label}", card(label, "used_bytes")) for label in gpus],
        ),
        (
            ChartSpec("Requests at the engines", (), "Being answered", low=0.0),
            [(name, engine(name, "running")) for name in engines],
        ),
        (
            ChartSpec("KV cache", (), "Share in use", low=0.0, high=1.0),
            [(name, engine(name, "kv_use")) for name in engines],
        ),
        (
            ChartSpec("run-api queue", (), "Groups that wait for the trainer", low=0.0),
            [("groups", lambda sample: sample.queue)],
        ),
        (
            ChartSpec("CPU", (), "Percent of the whole machine", low=0.0, high=100.0),
            [("host", lambda sample: sample.host.cpu_percent)],
        ),
        (
            ChartSpec("Main memory", (), "By component", unit="bytes", low=0.0),
            [(name, part(name)) for name in parts],
        ),
    ]
    found = []
    for spec, curves in drawn:
        lines = [curve(label, at, spec.unit, of) for at, (label, of) in enumerate(curves, 1)]
        if known := [line for line in lines if line]:
            found.append(PageChart(spec, known, [], "", over=Along.MINUTES))
    return found


def _at_points(series: Series, points: Series) -> Series:
    values = dict(zip(series.steps, series.values, strict=True))
    known = (values.get(step, 0.0) for step in points.steps)
    return points.like(value if math.isfinite(value) else 0.0 for value in known)


def _line(
    label: str, colour: int, series: Series, write: Write, *, scatter: bool = False
) -> PageCurve | None:
    if not len(series):
        return None
    clean, drawn = Series(), series.extremes()
    for step, value, time in zip(drawn.steps, drawn.values, drawn.times, strict=True):
        if 0 <= step <= MOST_STEPS:
            clean.steps.append(step)
            clean.values.append(on_scale(value) if math.isfinite(value) else math.nan)
            clean.times.append(time)
    finite = [value for value in clean.values if math.isfinite(value)]
    return PageCurve(
        label=label,
        colour=colour,
        points=thin(clean, POINTS),
        last=write(series.last),
        span=f"{write(min(finite))} to {write(max(finite))}" if finite else "no finite value",
        scatter=scatter,
        not_finite=len(drawn) - len(finite),
    )


def draw(chart: PageChart, name: str) -> str:
    """Return an `<svg>` element; `name` makes its ids unique on the page."""
    with rc_context(_STYLE), warnings.catch_warnings():  # type: ignore[arg-type]
        # For example of a log axis without positive values, which is drawn empty.
        warnings.simplefilter("ignore")
        figure = Figure(SIZE_IN)
        axes = figure.add_subplot()
        _paint(axes, chart)
        _make_room(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True)
        spots, plot = list(_spots(axes, chart)), _plot(axes, chart)
    return _embedded(buffer.getvalue(), chart, name, spots, plot)


def _plot(axes: Axes, chart: PageChart) -> dict[str, Any]:
    # Scales of the picture, from which the page's script zooms; the box in SVG units.
    scale = 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    extent, height = axes.get_window_extent(), SIZE_IN[1] * 72
    left, right = extent.x0 * scale, extent.x1 * scale
    top, bottom = height - extent.y1 * scale, height - extent.y0 * scale
    return {
        "box": [round(float(edge), 2) for edge in (left, top, right, bottom)],
        "x": list(map(float, axes.get_xlim())),
        "y": list(map(float, axes.get_ylim())),
        "log": chart.spec.log,
        "unit": chart.spec.unit,
        "whole": chart.over in ("optimizer steps", Along.STEPS),
        "stacked": chart.stacked,
    }


def _make_room(axes: Axes) -> None:
    # By the length of the labels: measuring with matplotlib takes a third of a page's time, and the
    # page uses other fonts anyway.
    beside, below = _labels(axes.yaxis), _labels(axes.xaxis)
    left = max(map(len, beside), default=0) * GLYPH_PT + TICK_PT
    right = max(len(below[-1]) if below else 0, 2) * GLYPH_PT / 2
    bottom, top = LINE_PT + TICK_PT, LINE_PT / 2
    width, height = (72 * inches for inches in SIZE_IN)
    size = 1 - (left + right) / width, 1 - (bottom + top) / height
    axes.set_position((left / width, bottom / height, *size))


def _labels(axis: Axis) -> list[str]:
    low, high = sorted(axis.get_view_interval())
    places = [float(place) for place in axis.get_majorticklocs() if low <= place <= high]
    return axis.get_major_formatter().format_ticks(places)


@dataclass(frozen=True)
class HoverSpot:
    """Part of a picture that shows values on hover, in SVG units."""

    left: float
    width: float
    top: float
    height: float
    words: str


def _spots(axes: Axes, chart: PageChart) -> Iterator[HoverSpot]:
    # Full-height strips, one for each place with a value, or for a sample of them.
    places = sorted({place for line in chart.lines for place in line.along})
    places = places[:: max(1, math.ceil(len(places) / SPOTS))]
    scale = 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    box, height = axes.get_window_extent(), SIZE_IN[1] * 72
    y = 1 if chart.spec.log else 0
    xs = [float(axes.transData.transform((place, y))[0]) * scale for place in places]
    for at, (place, x) in enumerate(zip(places, xs, strict=True)):
        left = (x + xs[at - 1]) / 2 if at else x - 2
        right = (x + xs[at + 1]) / 2 if at + 1 < len(xs) else x + 2
        named = "step " if chart.over in ("optimizer steps", Along.STEPS) else f"{chart.over} "
        words = "\n".join([f"{named}{place:,.6g}", *_values(chart, place)])
        top = height - box.y1 * scale
        yield HoverSpot(left, right - left, top, box.height * scale, words)


def _values(chart: PageChart, place: float) -> Iterator[str]:
    write = (lambda value: f"{value:.0%}") if chart.stacked else WRITERS[chart.spec.unit]
    for line in chart.lines:
        if (value := value_at(line.along, line.points.values, place)) is not None:
            yield f"{line.label}: {write(value)}"


def _paint(axes: Axes, chart: PageChart) -> None:
    if chart.spec.log:
        axes.set_yscale("log", nonpositive="clip")
    if chart.stacked:
        _stack(axes, chart.lines)
    else:
        # Later ones cover earlier ones, and the first curve belongs on top.
        for at, line in reversed(list(enumerate(chart.lines, 1))):
            _curve(axes, line, at)
    _limits(axes, chart)
    low, high = axes.get_ylim()  # the healthy band and marks must not widen the axis
    if chart.spec.healthy:
        start, end = chart.spec.healthy
        start, end = low if start is None else start, high if end is None else end
        axes.axhspan(start, end, color=_HEALTHY, zorder=0)
        axes.set_ylim(low, high)
    for line in chart.lines:
        points = zip(line.along, line.points.values, strict=True)
        if lost := [place for place, value in points if math.isnan(value)]:
            _signs(axes, lost, low, "x", color=_BAD, markersize=5, zorder=5)
    for mark in chart.marks:
        if mark.kind in _LINES:
            axes.axvline(mark.step, color=_LINES[mark.kind], linewidth=0.8, linestyle=(0, (2, 3)))
        else:
            shape = _POINTS[mark.kind]
            _signs(axes, [mark.step], low, shape, color=_AXIS, markersize=3.5, zorder=4)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=chart.over != Along.MINUTES))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if chart.spec.log:
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, chart.spec.unit)))


def _signs(axes: Axes, xs: Sequence[float], low: float, shape: str, **style: Any) -> None:
    # On the x axis, half of each below it.
    axes.plot(xs, [low] * len(xs), shape, clip_on=False, **style)


def _tick(value: float, unit: str) -> str:
    if unit == "bytes":
        return "0" if value == 0 else bytes_text(value)
    text = f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.6g}"
    return f"{text} {unit}" if unit and value else text


def _curve(axes: Axes, line: PageCurve, at: int) -> None:
    # By its id the page's script finds a curve.
    points, colour = line.points, _colour(line.colour)
    values = [value if math.isfinite(value) else math.nan for value in points.values]
    if line.band:
        axes.fill_between(
            line.along, *line.band, color=colour, alpha=0.16, linewidth=0, gid=f"curve-{100 + at}"
        )
    if line.scatter:
        axes.plot(line.along, values, "D", color=colour, markersize=4.5, gid=f"curve-{at}")
    else:
        mark, width = "o" if len(points) <= FEW else "", 1.6 if len(points) <= MANY else 0.9
        style = {"color": colour, "marker": mark, "markersize": 3, "linewidth": width}
        kind = "noisy" if line.noisy else "curve"
        axes.plot(line.along, values, gid=f"{kind}-{at}", **style)  # type: ignore[arg-type]


def _stack(axes: Axes, lines: Sequence[PageCurve]) -> None:
    if not lines:
        return
    steps = lines[0].points.steps
    wide = [*steps, steps[-1] + 1]  # each step is a column up to the next
    below = [0.0] * len(wide)
    for line in lines:
        values = [*line.points.values, line.points.values[-1]]
        above = [base + value for base, value in zip(below, values, strict=True)]
        axes.fill_between(wide, below, above, color=_colour(line.colour), step="post", linewidth=0)
        below = above


def _limits(axes: Axes, chart: PageChart) -> None:
    # The chart's own limits hold unless values lie beyond them.
    if not chart.stacked:
        every = (value for line in chart.lines for value in line.points.values)
        values = [value for value in every if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(values), max(values)
        if chart.spec.low is not None and low >= chart.spec.low:
            axes.set_ylim(bottom=chart.spec.low)
        if chart.spec.high is not None and high <= chart.spec.high:
            axes.set_ylim(top=chart.spec.high * 1.03)
    else:
        axes.set_ylim(bottom=0)
    if chart.spec.log:
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.0))


def _colour(number_: int) -> str:
    return f"#0102{(number_ - 1) % PALETTE + 1:02x}"


def _embedded(
    data: bytes, chart: PageChart, name: str, spots: Sequence[HoverSpot], plot: dict[str, Any]
) -> str:
    # For an HTML page: unique ids, page colours, title, description, hover values.
    root = ElementTree.fromstring(data)
    for tag in ("metadata", "defs"):
        for child in root.findall(f"{{{SVG}}}{tag}"):
            if tag == "metadata" or child.find(f"{{{SVG}}}style") is not None:
                root.remove(child)
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key == f"{{{XLINK}}}href":
                element.set(key, value.replace("#", f"#{name}-"))
            else:
                element.set(key, _styled(value.replace("url(#", f"url(#{name}-")))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc", "class": "chart"}
    root.set("data-plot", json.dumps(plot))
    for at, (tag, text) in enumerate((("title", chart.name), ("desc", _described(chart)))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(at, element)
    for spot in spots:
        size = {"x": spot.left, "width": spot.width, "y": spot.top, "height": spot.height}
        attributes = {key: f"{value:.1f}" for key, value in size.items()} | {"class": "spot"}
        strip = ElementTree.SubElement(root, f"{{{SVG}}}rect", attributes)
        ElementTree.SubElement(strip, f"{{{SVG}}}title").text = spot.words
    return ElementTree.tostring(root, encoding="unicode")


def _styled(value: str) -> str:
    return re.sub(r"#[0-9a-f]{6}", lambda found: _MARKERS.get(found.group(), found.group()), value)


def _described(chart: PageChart) -> str:
    lines = [f"{line.label}: last {line.last}, range {line.span}" for line in chart.lines]
    return f"{chart.about} Over {chart.over}. {'; '.join(lines)}."
