"""Curves over optimizer steps, with axes; the guides' healthy ranges are shaded. `CHARTS` has one entry per chart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from rich.style import Style
from textual.content import Content
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from atropos_tui.monitor.plain import number, seconds_text
from atropos_tui.monitor.series import LARGEST, MOST_STEPS, Series
from atropos_tui.monitor.thinning import thin
from atropos_tui.ui.look import title
from atropos_tui.ui.plot import Axes, Curve, Ink, plot
from atropos_tui.ui.view import View


@dataclass(frozen=True)
class Trace:
    """One curve of a chart: its label, where its points come from, how a value is written."""

    label: str
    find: Callable[[View], Series]
    colour: str
    write: Callable[[float | None], str] = number
    scatter: bool = False


@dataclass(frozen=True)
class Spec:
    """What one chart shows."""

    name: str
    traces: list[Trace]
    axes: Axes = field(default_factory=Axes)
    short: str = ""
    seconds: bool = False
    """Over seconds before now, not over steps."""


def metric(name: str) -> Callable[[View], Series]:
    """Finder of a trainer metric."""
    return lambda view: view.state.metric(name)


def held_out(view: View) -> Series:
    """The held-out accuracy of the first environment that reports one."""
    return next(iter(view.state.evals.values()), Series())


class Chart(Widget):
    """Some traces over steps, with axes; the title carries the newest values."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "chart--primary",
        "chart--accent",
        "chart--success",
        "chart--warning",
        "chart--axis",
        "chart--grid",
        "chart--limit",
        "chart--bad",
        "chart--healthy",
    }

    view: reactive[View | None] = reactive(None, layout=False)

    def __init__(self, spec: Spec) -> None:
        super().__init__(classes="chart")
        self._names = (spec.name, spec.short or spec.name)
        self._traces = spec.traces
        self._axes = spec.axes
        self._seconds = spec.seconds
        self._drawn_for: object = None
        """View, size and theme that the strips were made for."""
        self._strips: list[Strip] = []

    @property
    def is_over_seconds(self) -> bool:
        """Whether its points come with the clock, not with the run's records."""
        return self._seconds

    def on_mount(self) -> None:
        self.border_title = title(self._names[0])

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
        full, short = self._names
        if not any(len(trace.find(view)) for trace in self._traces):
            return title(full, ("no data", "quiet"))
        marks = ["◆" if trace.scatter else "━" for trace in self._traces]
        values = [trace.write(trace.find(view).last) for trace in self._traces]
        colours = [trace.colour for trace in self._traces]
        labels = [f"{trace.label} " for trace in self._traces]
        room = self.outer_size.width - (2 if self.styles.border_left[0] in ("", "none") else 6)
        for name, words, gap in (
            (full, labels, 2),
            (short, labels, 1),
            (short, ["", *labels[1:]], 1),
            (short, [""] * len(labels), 1),
        ):
            texts = [f"{mark} {word}{value}" for mark, word, value in zip(marks, words, values, strict=True)]
            found = title(name, *zip(texts, colours, strict=True), gap=gap)
            if found.cell_length <= room:
                break
        return found

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
        curves = [self._curve(trace, self.view) for trace in self._traces]
        first, last = self._span(self.view, curves)
        low, high = self._bounds(curves)
        axes = Axes(first=first, last=last, low=low, high=high, log=self._axes.log, healthy=self._axes.healthy)
        style = self.get_component_rich_style
        inks = {name: style(f"chart--{name}", partial=True) for name in ("axis", "grid", "limit", "bad")}
        healthy = Style(bgcolor=style("chart--healthy").bgcolor)
        lines = plot(curves, axes, Ink(**inks, healthy=healthy), width, height)
        base, strips = self.rich_style, [Strip(line) for line in lines]
        return [strip.adjust_cell_length(width, base).apply_style(base) for strip in strips]

    def _span(self, view: View, curves: list[Curve]) -> tuple[float, float | None]:
        """First and last of the x axis: the whole run as planned, or the time that was watched."""
        if self._seconds:
            return min([-60, *(curve.steps[0] for curve in curves if curve.steps)]), 0
        ends = (next((step for step in reversed(curve.steps) if step <= MOST_STEPS), 0) for curve in curves)
        return 0, max(view.info.training_steps or 0, *ends) or None

    def _curve(self, trace: Trace, view: View) -> Curve:
        series = thin(trace.find(view), 4 * self.content_size.width)
        style = self.get_component_rich_style(f"chart--{trace.colour}", partial=True)
        return Curve(series.steps, series.values, style, trace.scatter)

    def _bounds(self, curves: list[Curve]) -> tuple[float | None, float | None]:
        """The axis' own ends, each unless a value lies beyond it."""
        low, high = self._axes.low, self._axes.high
        values = [value for curve in curves for value in curve.values if abs(value) < LARGEST]
        if values and low is not None and min(values) < low:
            low = None
        if values and high is not None and max(values) > high:
            high = None
        return low, high


def queue_depth(view: View) -> Series:
    """Groups that wait in run-api, over seconds of the screen's own watching; the newest is at 0."""
    times, depths = view.gauges.queue()
    return Series([round(time - times[-1]) for time in times], depths, times)


CHARTS = {
    "reward": Spec(
        "Reward",
        [Trace("mean", metric("reward_mean"), "primary"), Trace("held-out", held_out, "accent", scatter=True)],
        Axes(low=0.0, high=1.0),
    ),
    "diff": Spec(
        "Logprob |diff|",
        [
            Trace("rollout", metric("logprob_diff_abs_mean"), "primary"),
            Trace("probe", metric("probe_diff_abs_mean"), "success"),
        ],
        Axes(log=True, high=1.0, healthy=(None, 0.1)),
        short="|diff|",
    ),
    "diff-max": Spec(
        "Logprob |diff| max",
        [
            Trace("rollout", metric("logprob_diff_abs_max"), "warning"),
            Trace("probe", metric("probe_diff_abs_max"), "success"),
        ],
        Axes(log=True),
        short="|diff| max",
    ),
    "logprobs": Spec(
        "Mean logprob",
        [
            Trace("inference", metric("inference_mean"), "primary"),
            Trace("training", metric("train_mean"), "accent"),
        ],
        short="logprob",
    ),
    "kl": Spec("KL", [Trace("k3", metric("kl_k3"), "primary")], Axes(low=0.0)),
    "loss": Spec("Loss", [Trace("loss", metric("loss"), "primary")]),
    "ratio": Spec(
        "Ratio", [Trace("mean", metric("ratio_mean"), "primary")], Axes(low=0.7, high=1.3, healthy=(0.8, 1.2))
    ),
    "clip": Spec(
        "Clip fraction",
        [Trace("clipped", metric("clip_fraction"), "primary")],
        Axes(low=0.0, high=0.4, healthy=(None, 0.3)),
        short="Clip",
    ),
    "grad": Spec("Gradient norm", [Trace("norm", metric("grad_norm"), "primary")], Axes(low=0.0), short="Gradient"),
    "lag": Spec(
        "Policy lag",
        [Trace("mean", metric("policy_lag_mean"), "primary"), Trace("max", metric("policy_lag_max"), "warning")],
        Axes(low=0.0),
        short="Lag",
    ),
    "time": Spec(
        "Step time",
        [
            Trace("step", metric("step_s"), "primary", seconds_text),
            Trace("fetch", metric("data_wait_s"), "warning", seconds_text),
            Trace("sync", metric("sync_s"), "success", seconds_text),
        ],
        Axes(low=0.0),
        short="Step",
    ),
    "queue": Spec("run-api queue", [Trace("groups", queue_depth, "primary")], Axes(low=0.0), "Queue", seconds=True),
    "tokens": Spec("Tokens/s", [Trace("trained", metric("tokens_per_s"), "primary")], Axes(low=0.0)),
}
"""Every chart, by name."""


def chart(name: str) -> Chart:
    """A chart of `CHARTS`."""
    return Chart(CHARTS[name])
