"""Curves over optimizer steps: reward with held-out accuracy, alignment, policy lag, step time, loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import RenderResult
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from atropos_tui.monitor.plain import number, seconds_text
from atropos_tui.monitor.series import Series
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
    }

    view: reactive[View | None] = reactive(None, layout=False)

    def __init__(self, name: str, traces: list[Trace], axes: Axes | None = None, *, id: str, short: str = "") -> None:
        super().__init__(id=id, classes="chart")
        self._names = (name, short or name)
        self._traces = traces
        self._axes = axes or Axes()

    def on_mount(self) -> None:
        self.border_title = title(self._names[0])

    def show(self, view: View) -> None:
        """Take the newest points; the last known run length spans the x axis."""
        self.view = view
        self.border_title = self._title(view)

    def _title(self, view: View) -> Content:
        """The fullest title that fits: all labels, then the short name, then the first trace without its label."""
        full, short = self._names
        if not any(len(trace.find(view)) for trace in self._traces):
            return title(full, ("no data", "secondary"))
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

    def render(self) -> RenderResult:
        width, height = self.content_size
        if self.view is None or height < 3:
            return Text("")
        curves = [self._curve(trace, self.view) for trace in self._traces]
        steps = self.view.info.training_steps
        last = max([steps or 0, *(curve.steps[-1] for curve in curves if curve.steps)])
        low, high = self._bounds(curves)
        axes = Axes(first=0, last=last or None, low=low, high=high, log=self._axes.log, limit=self._axes.limit)
        style = self.get_component_rich_style
        ink = Ink(*(style(f"chart--{name}", partial=True) for name in ("axis", "grid", "limit", "bad")))
        return Text("\n", end="").join(plot(curves, axes, ink, width, height))

    def _curve(self, trace: Trace, view: View) -> Curve:
        series = trace.find(view)
        style = self.get_component_rich_style(f"chart--{trace.colour}", partial=True)
        return Curve(series.steps, series.values, style, trace.scatter)

    def _bounds(self, curves: list[Curve]) -> tuple[float | None, float | None]:
        """The axis' own ends, each unless a value lies beyond it."""
        low, high = self._axes.low, self._axes.high
        values = [value for curve in curves for value in curve.values if math.isfinite(value)]
        if values and low is not None and min(values) < low:
            low = None
        if values and high is not None and max(values) > high:
            high = None
        return low, high


def reward_chart() -> Chart:
    return Chart(
        "Reward",
        [
            Trace("mean", metric("reward_mean"), "primary"),
            Trace("held-out", held_out, "accent", scatter=True),
        ],
        Axes(low=0.0, high=1.0),
        id="reward",
    )


def alignment_chart() -> Chart:
    """Trainer against engine logprobs: over rollouts (policy lag included), and the probe at the same weights."""
    return Chart(
        "Logprob |diff|",
        [
            Trace("rollout", metric("logprob_diff_abs_mean"), "primary"),
            Trace("probe", metric("probe_diff_abs_mean"), "success"),
        ],
        Axes(log=True, high=1.0, limit=0.1),
        id="alignment",
        short="|diff|",
    )


def lag_chart() -> Chart:
    return Chart(
        "Policy lag",
        [Trace("mean", metric("policy_lag_mean"), "primary"), Trace("max", metric("policy_lag_max"), "warning")],
        Axes(low=0),
        id="lag",
    )


def time_chart() -> Chart:
    return Chart(
        "Step time",
        [
            Trace("step", metric("step_s"), "primary", seconds_text),
            Trace("fetch", metric("data_wait_s"), "warning", seconds_text),
            Trace("sync", metric("sync_s"), "success", seconds_text),
        ],
        Axes(low=0),
        id="time",
    )


def loss_chart() -> Chart:
    return Chart("Loss", [Trace("loss", metric("loss"), "primary")], id="loss")
