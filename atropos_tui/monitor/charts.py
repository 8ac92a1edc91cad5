"""Charts: the catalogue, and the view of a curve.

Names and descriptions come from the metrics of the records; one with a title gets a chart in the
report. A view of the screen (`ui/views.py`) and `PAGE` decide where `CHARTS` are drawn.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, repeat
from statistics import quantiles
from typing import Any

from atropos_common.protocol.trainer_records import (
    HEALTHY_CLIP_FRACTION,
    HEALTHY_LOGPROB_DIFF,
    HEALTHY_RATIO,
    AlignmentRecord,
    StepRecord,
    TimingRecord,
    metrics_of,
)
from atropos_tui.monitor.format import bytes_text, number, seconds_text
from atropos_tui.monitor.run.series import Series, averaged
from atropos_tui.monitor.run.state import RunState

# Formatter of curve values, by unit.
WRITERS: dict[str, Callable[[float | None], str]] = {
    "": number,
    "s": seconds_text,
    "bytes": bytes_text,
}
Range = tuple[float | None, float | None]  # lower and upper bound; None: open


@dataclass(frozen=True)
class CurveSpec:
    """One curve: its label, and the field of the trainer's records."""

    label: str
    metric: str
    colour: str = "primary"
    """Theme colour."""
    scatter: bool = False


@dataclass(frozen=True)
class ChartSpec:
    """Curves with one vertical axis."""

    name: str
    curves: tuple[CurveSpec, ...]
    about: str = ""
    """Description in one sentence, for the report."""
    short: str = ""
    """Name for narrow places."""
    unit: str = ""
    low: float | None = None
    """Lower end of the axis, unless a value is lower."""
    high: float | None = None
    log: bool = False
    healthy: Range | None = None
    over_seconds: bool = False
    """Over seconds before now instead of steps."""

    @property
    def health(self) -> str:
        """Healthy range in words."""
        if self.healthy is None:
            return ""
        low, high = self.healthy
        return f"healthy below {high:g}" if low is None else f"healthy from {low:g} to {high:g}"


# Curves that are no fields of a trainer's record: accuracy by environment and split, and groups
# queued in run-api.
HELD_OUT, QUEUE = "held-out", "queue"

MEASURED = metrics_of(StepRecord) | metrics_of(AlignmentRecord) | metrics_of(TimingRecord)
# Whole numbers, shown without decimals.
COUNTS = frozenset(
    name
    for kind in (StepRecord, AlignmentRecord, TimingRecord)
    for name, each in kind.model_fields.items()
    if each.annotation in (int, int | None)
)
# Batch means and durations are smoothed. Learning rate, maxima, policy lag and counts are exact:
# their averages would be values that never occurred.
NOISY = frozenset(name for name, metric in MEASURED.items() if metric.smooth) | {"useful_groups"}


def chart_of(metric: str) -> ChartSpec:
    """Return a chart for any curve of `RunState.metric`."""
    is_time = metric.endswith("_s") and not metric.endswith("_per_s")
    is_time = is_time or metric.startswith("sync/")
    unit = "s" if is_time else "bytes" if metric.endswith("_bytes") else ""
    return ChartSpec(metric, (CurveSpec("value", metric),), unit=unit)


def titled(name: str, label: str = "value", colour: str = "primary", **axis: Any) -> ChartSpec:
    """Return the chart of a metric that has a title."""
    metric = MEASURED[name]
    # The first sentence: the others are details of the record.
    about = metric.doc.partition(". ")[0]
    curves = (CurveSpec(label, name, colour),)
    return replace(chart_of(name), name=metric.title, curves=curves, about=about, **axis)


CHARTS = {
    "reward": ChartSpec(
        "Reward",
        (CurveSpec("mean", "reward_mean"), CurveSpec("held-out", HELD_OUT, "accent", scatter=True)),
        "Mean reward of the batch; held-out accuracy by split, where an environment evaluates",
        low=0.0,
        high=1.0,
    ),
    "diff": ChartSpec(
        "Logprob |diff|",
        (
            CurveSpec("rollout", "logprob_diff_abs_mean"),
            CurveSpec("probe", "probe_diff_abs_mean", "success"),
        ),
        short="|diff|",
        high=1.0,
        log=True,
        healthy=(None, HEALTHY_LOGPROB_DIFF),
    ),
    "diff-max": ChartSpec(
        "Logprob |diff| max",
        (
            CurveSpec("rollout", "logprob_diff_abs_max", "warning"),
            CurveSpec("probe", "probe_diff_abs_max", "success"),
        ),
        short="|diff| max",
        log=True,
    ),
    "logprobs": ChartSpec(
        "Mean logprob",
        (CurveSpec("inference", "inference_mean"), CurveSpec("training", "train_mean", "accent")),
        short="logprob",
    ),
    "kl": titled("kl_k3", "k3", low=0.0),
    "useful": ChartSpec(
        "Useful groups",
        (CurveSpec("share", "useful_groups"),),
        "Share of a batch's groups whose scores differ. Flat groups that an environment leaves out "
        "count as thrown away",
        short="Useful",
        low=0.0,
        high=1.0,
    ),
    "lr": titled("lr", "lr", short="lr", low=0.0),
    "loss": titled("loss", "loss"),
    "ratio": titled("ratio_mean", "mean", healthy=HEALTHY_RATIO),
    "clip": titled(
        "clip_fraction", "clipped", short="Clip", low=0.0, healthy=(None, HEALTHY_CLIP_FRACTION)
    ),
    "ratio-max": titled("ratio_max", "max", "warning", log=True),
    "entropy": titled("entropy_mean", "mean", low=0.0),
    "length": titled("completion_tokens_mean", "mean", short="Length", low=0.0),
    "truncated": titled("truncated_fraction", "share", "warning", low=0.0, high=1.0),
    "grad": titled("grad_norm", "norm", short="Gradient", low=0.0),
    "lag": ChartSpec(
        "Policy lag",
        (CurveSpec("mean", "policy_lag_mean"), CurveSpec("max", "policy_lag_max", "warning")),
        "Weight versions between the generation of a completion and its training",
        short="Lag",
        low=0.0,
    ),
    "time": ChartSpec(
        "Step time",
        (
            CurveSpec("step", "step_s"),
            CurveSpec("wait", "data_wait_s", "warning"),
            CurveSpec("sync", "sync_s", "success"),
        ),
        short="Step",
        unit="s",
        low=0.0,
    ),
    "queue": ChartSpec(
        "run-api queue", (CurveSpec("groups", QUEUE),), short="Queue", low=0.0, over_seconds=True
    ),
    "tokens": ChartSpec("Tokens/s", (CurveSpec("trained", "tokens_per_s"),), low=0.0),
}


_LISTED = {curve.metric for spec in CHARTS.values() for curve in spec.curves}
PAGE = (
    replace(
        CHARTS["reward"],
        curves=(
            CurveSpec("mean reward", "reward_mean"),
            CurveSpec("held-out", HELD_OUT, scatter=True),
        ),
    ),
    *(CHARTS[name] for name in ("useful", "loss", "lr", "ratio", "ratio-max", "clip")),
    *(CHARTS[name] for name in ("entropy", "length", "truncated", "grad", "lag")),
    ChartSpec(
        "Logprobs",
        (CurveSpec("trainer", "train_mean"), CurveSpec("engine", "inference_mean")),
        "Mean logprob of the rollouts' tokens, by trainer and by engine; one line means aligned",
    ),
    replace(
        CHARTS["diff"],
        high=None,
        curves=(
            CurveSpec("rollouts, mean", "logprob_diff_abs_mean"),
            CurveSpec("rollouts, max", "logprob_diff_abs_max"),
            CurveSpec("probe, mean", "probe_diff_abs_mean"),
        ),
        about="Trainer against engine: over rollouts, policy lag included, and by the probe at "
        "the same weights",
    ),
    replace(CHARTS["kl"], low=None),
    replace(
        CHARTS["tokens"],
        name="Tokens per second",
        curves=(CurveSpec("tokens/s", "tokens_per_s"),),
        about="Of training, over the whole step",
    ),
    ChartSpec(
        "Trainer memory",
        (
            CurveSpec("main memory", "rss_bytes"),
            CurveSpec("GPU allocated", "allocated_bytes"),
            CurveSpec("GPU peak", "peak_bytes"),
        ),
        "Main memory of the process (RSS) and GPU memory of PyTorch's allocator",
        unit="bytes",
        low=0.0,
    ),
    *(titled(name) for name, metric in MEASURED.items() if metric.title and name not in _LISTED),
)
"""Charts of a report, in reading order."""


# View of a curve: its axis, smoothing, value range, and marks of events.

# Outliers are this far from the middle half, in multiples of its width: Tukey's far-out values.
FENCE = 6.0
MOST_OUTLIERS = 0.05  # largest share of points that can be outliers
FEWEST = 12  # points needed for a range
SPANS = 5  # shortest curve that is smoothed, in spans of the moving average
# Axis of a young run: its first length in steps, its growth factor, and the factor of free space.
SHORTEST_AXIS, GROWTH, MARGIN = 10.0, 1.3, 1.05


class Along(StrEnum):
    """Unit of the horizontal axis."""

    STEPS = "steps"
    TOKENS = "tokens"
    MINUTES = "minutes"


@dataclass(frozen=True)
class Lens:
    """View settings that all charts of a screen share."""

    along: Along = Along.STEPS
    first: float | None = None
    """Start of the shown axis; None: its beginning."""
    last: float | None = None
    """End of the shown axis; None: its moving end."""
    newest: float | None = None
    """Length at the moving end to show, instead of `first` and `last`."""
    whole_plan: bool = False
    """Extend the axis to the planned end of the run."""
    cursor: float | None = None
    """Place at which values are read; None: the end."""
    smoothing: int = 10
    """Span of the moving average in points; 0: none."""
    cuts_outliers: bool = True
    other_axis: frozenset[str] = field(default_factory=frozenset)
    """Charts whose axis the user switched between linear and logarithmic."""
    hidden_runs: frozenset[int] = field(default_factory=frozenset)
    """Entries of the legend of compared runs that are not drawn."""
    each_run: bool = False
    """Draw the seeds of one setting as curves of their own, not as a band."""

    def window(self, first: float, last: float) -> tuple[float, float]:
        """Return the shown part of the axis."""
        if self.newest is not None:
            return max(first, last - self.newest), last
        return first if self.first is None else self.first, last if self.last is None else self.last


def axis_end(newest: float, planned: float) -> float:
    """Return the end of an axis: the plan from half of it on, before that a little more than
    `newest`."""
    if newest >= planned / 2:  # late enough that the rest of the plan is worth its width
        return max(newest, planned)
    end = SHORTEST_AXIS
    while end < MARGIN * newest:
        end *= GROWTH
    return min(float(math.ceil(end)), planned)


@dataclass
class SharedLens:
    """Holder of the shared lens."""

    lens: Lens


class Ruler:
    """Positions of a run's steps on an axis, at the moment of its creation."""

    def __init__(self, state: RunState, along: Along) -> None:
        self._along = along
        tokens = state.metric("tokens") if along is Along.TOKENS else Series()
        self._steps, self._sums = tokens.steps[:], list(_sums(tokens))
        times = state.metric("step_s")
        took = times.values[0] if len(times) and math.isfinite(times.values[0]) else 0.0
        # Without a step, all places are 0.
        self._start = times.times[0] - took if len(times) else math.inf

    def place(self, series: Series) -> Sequence[float]:
        """Return the positions of the points of `series`."""
        if self._along is Along.STEPS:
            return series.steps
        if self._along is Along.MINUTES:
            return [max(0.0, (time - self._start) / 60) for time in series.times]
        return [self._tokens(step) for step in series.steps]

    def part(self, series: Series, first: float, last: float) -> Series:
        """Return the points of `series` from `first` to `last` on the axis."""
        if self._along is Along.STEPS:
            return series.part(bisect_left(series.steps, first), bisect_right(series.steps, last))
        if self._along is Along.MINUTES:
            begin, end = self._start + 60 * first, self._start + 60 * last
            times = series.times
            # A millisecond more, because minutes as floats are rounded.
            return series.part(bisect_left(times, begin), bisect_right(times, end + 1e-3))
        within = self._steps[bisect_left(self._sums, first) : bisect_right(self._sums, last)]
        low, high = min(within, default=0), max(within, default=0)
        return series.part(bisect_left(series.steps, low), bisect_right(series.steps, high))

    def step_at(self, place: float, steps: Series) -> int:
        """Return the newest step of `steps` at or before `place`; 0 before the first."""
        at = bisect_right(self.place(steps), place)
        return steps.steps[at - 1] if at else 0

    def _tokens(self, step: int) -> float:
        at = bisect_right(self._steps, step)
        return self._sums[at - 1] if at else 0.0


def _sums(series: Series) -> Iterator[float]:
    total = 0.0
    for value, count in zip(series.values, chain(series.counts, repeat(1)), strict=False):
        total += value * count if math.isfinite(value) else 0.0
        yield total


def smoothed(values: Sequence[float], span: float) -> list[float]:
    """Exponential moving average with weight 2 / (span + 1), bias-corrected as in Adam."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight if math.isfinite(value) else value)
    return found


def smooth(series: Series, span: int, most: int) -> Series:
    """Smooth `series` over `span` steps; with more than `most` points, average slices first."""
    means = averaged(series, most)
    of_slices = span * len(means) / max(1, series.count)
    values = smoothed(means.values, of_slices) if of_slices > 1 else means.values
    return Series(means.steps, values, means.times)


def is_smoothed(points: int, span: int) -> bool:
    return span > 1 and points >= SPANS * span


def sensible_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the value range without outliers; None if there are none, or the range would hardly
    shrink."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < FEWEST:
        return None
    quarter, _, three_quarters = quantiles(finite, n=4)
    reach = FENCE * (three_quarters - quarter)
    if not reach > 0:
        return None  # at least half of the values are equal
    first = bisect_left(finite, quarter - reach)
    last = bisect_right(finite, three_quarters + reach) - 1
    left_out = first + len(finite) - 1 - last
    low, high = finite[first], finite[last]
    are_few = 0 < left_out <= max(1, MOST_OUTLIERS * len(finite))
    return (low, high) if are_few and finite[-1] - finite[0] >= 2 * (high - low) else None


def value_at(places: Sequence[float], values: Sequence[float], place: float) -> float | None:
    """Return the value at `place`, or of the last point before it."""
    at = bisect_right(places, place)
    return values[at - 1] if at else None


@dataclass(frozen=True)
class Mark:
    """An event at a step, drawn beside the curves."""

    step: int
    kind: str
    """restart, checkpoint, evaluation or diagnosis."""
    words: str
    time: float = 0.0


# At one place, the first kind in this order is shown.
MARKS = {"restart": "↻", "diagnosis": "▲", "evaluation": "◇", "checkpoint": "▪"}


def marks(state: RunState) -> list[Mark]:
    """Return restarts, checkpoints, evaluations and diagnoses, by step."""
    first_attempt = min(state.attempt_steps, default=0)
    steps = state.metric("step_s")
    found = [
        Mark(step, "restart", f"attempt {attempt} begins")
        for attempt, step in state.attempt_steps.items()
        if attempt > first_attempt
    ]
    found += [Mark(one.step, "checkpoint", "checkpoint", one.time) for one in state.checkpoints]
    for name, series in state.evals.items():
        for step, value, time in zip(series.steps, series.values, series.times, strict=True):
            found.append(Mark(step, "evaluation", f"{name} {value:.3g}", time))
    for record in state.diagnoses:
        at = bisect_right(steps.times, record.time)
        found.append(Mark(steps.steps[at - 1] if at else 0, "diagnosis", record.title, record.time))
    return sorted(found, key=lambda mark: mark.step)
