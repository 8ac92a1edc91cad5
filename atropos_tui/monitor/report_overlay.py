"""Several runs as one page: `render_overlay(RUNS)`, their curves on the same axes, how each ended, what differs.

Self-contained HTML without script or network, as the page of one run is; what programs wrote is plain and escaped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from atropos_tui import __version__
from atropos_tui.monitor.charts import CHARTS, WRITERS, ChartSpec, CurveSpec
from atropos_tui.monitor.overlay import (
    LAST,
    PLACES,
    MetricLine,
    RunCurves,
    Setting,
    by_setting,
    final_table,
    line,
    seeds_table,
    settings_table,
    splits,
)
from atropos_tui.monitor.reading import Along
from atropos_tui.monitor.report import environment
from atropos_tui.monitor.report_charts import PageChart, PageCurve, draw
from atropos_tui.monitor.series import Series

DRAWN = ("reward", "useful", "entropy", "length", "kl", "loss", "grad", "diff", "lag", "time", "tokens")
"""Charts of the catalogue, of each its first curve; held-out accuracy comes behind the reward."""
SMOOTHING = 10


def render_overlay(runs: Sequence[RunCurves], now: float) -> str:
    """The page as text, fit for UTF-8; `now` in Unix seconds."""
    settings = by_setting(runs)
    pictures = {
        along: [(chart, Markup(draw(chart, f"{along}{at}"))) for at, chart in enumerate(_charts(runs, settings, along))]
        for along in Along
    }
    tables = [("Final values", final_table(runs))]
    if spread := seeds_table(runs):
        tables.append(("Seeds of one setting: mean, lowest to highest", spread))
    if apart := settings_table(runs):
        tables.append(("Settings that differ", apart))
    page = environment().get_template("overlay.html.j2").render(
        title=" · ".join(setting.label for setting in settings),
        count=len(runs),
        pictures=pictures,
        tables=tables,
        last=LAST,
        made=f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))} by atropos-tui {__version__}",
    )  # fmt: skip
    return page.encode("utf-8", "replace").decode("utf-8")


def _charts(runs: Sequence[RunCurves], settings: Sequence[Setting], along: Along) -> Iterator[PageChart]:
    """Every chart that a run has data for, in reading order."""
    reward, *others = DRAWN
    for name in (reward, *splits(runs), *others):
        if chart := chart_over(name, settings, along):
            yield chart


def chart_over(name: str, settings: Sequence[Setting], along: Along) -> PageChart | None:
    """The first curve of a chart of the catalogue, or an accuracy by its environment and split, of every setting; None
    where none has it."""
    accuracy = ChartSpec(f"Accuracy, {name}", (CurveSpec("accuracy", name),), low=0.0, high=1.0)
    spec = CHARTS.get(name, accuracy)
    found = [line(setting, spec.curves[0].metric, along, SMOOTHING) for setting in settings]
    lines = [_curve(one, at, spec) for at, one in enumerate(found, 1) if one is not None]
    span = max((one.smoothing for one in found if one is not None), default=0)
    note = f"Moving average over {span} points." if span else ""
    return PageChart(spec, lines, [], note, over=along) if lines else None


def _curve(found: MetricLine, colour: int, spec: ChartSpec) -> PageCurve:
    write = WRITERS[spec.unit]
    values = Series(range(len(found.values)), found.values, [0.0] * len(found.values))
    low, high = (found.low, found.high) if found.low else (found.values, found.values)
    return PageCurve(
        label=found.label,
        colour=colour,
        points=values,
        last=write(found.last),
        span=f"{write(min(low))} to {write(max(high))}",
        places=found.places,
        band=(found.low, found.high) if found.low else None,
        scatter=len(values) <= PLACES // 20,
    )
