"""Curves: a metric over optimizer steps (`Series`), long ones with few points (`thin`), and the catalogue of charts.

A metric is added once, to `CHARTS`; a view of the screen (`ui/views.py`) and `PAGE` say where it is drawn.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from atropos_common.records import HEALTHY_CLIP_FRACTION, HEALTHY_LOGPROB_DIFF, HEALTHY_RATIO
from atropos_tui.monitor.format import bytes_text, number, real, seconds_text

MOST_STEPS = 2**53
LARGEST, SMALLEST = 1e300, 1e-300
"""Beyond these a plot has no scale any more: figures of foreign records, which must not end what draws them."""


class Series:
    """Values by step, ascending. NaN and infinities are kept; a value that does not exist has no point.

    All three are packed, for a long run has a hundred thousand points.
    """

    def __init__(self, steps: Iterable[int] = (), values: Iterable[float] = (), times: Iterable[float] = ()) -> None:
        self.steps = array("q", steps)
        self.values = array("d", values)
        self.times = array("d", times)
        """Unix seconds of each point."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return NotImplemented
        return (self.steps, self.values, self.times) == (other.steps, other.values, other.times)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Series({list(self.steps)}, {list(self.values)}, {list(self.times)})"

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """Newest value, or None where there is no data."""
        return self.values[-1] if self.values else None

    def put(self, step: int, value: float, time: float = 0.0) -> None:
        """Add the point of `step`, replacing one that is there. A whole number beyond any float is infinite."""
        steps = self.steps
        if type(value) is not float:
            value = real(value)
        if not steps or step > steps[-1]:
            steps.append(step)
            self.values.append(value)
            self.times.append(time)
            return
        at = bisect_left(steps, step)
        if steps[at] == step:
            self.values[at], self.times[at] = value, time
        else:
            steps.insert(at, step)
            self.values.insert(at, value)
            self.times.insert(at, time)

    def cut(self, step: int) -> None:
        """Forget every point from `step` on."""
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:], self.times[at:]

    def at(self, step: int) -> float | None:
        """The value of this very step; None where it has none."""
        at = bisect_left(self.steps, step)
        return self.values[at] if at < len(self) and self.steps[at] == step else None

    def part(self, start: int, end: int) -> Series:
        """The points from number `start` to before `end`."""
        return Series(self.steps[start:end], self.values[start:end], self.times[start:end])

    def tail(self, count: int) -> list[float]:
        """The newest `count` values, oldest first."""
        return list(self.values[-count:]) if count > 0 else []


def on_scale(value: float) -> float:
    """`value` as a plot can place it: NaN where it is beyond `LARGEST`, 0 where it is nearer to 0 than `SMALLEST`."""
    if SMALLEST <= abs(value) < LARGEST or math.isinf(value):
        return value
    return 0.0 if abs(value) < SMALLEST else math.nan


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; NaN if one value is NaN, None for no values."""
    return sum(values) / len(values) if values else None


def thin(series: Series, most: int) -> Series:
    """At most about `most` points of `series`: first, last, and the extremes of each slice in their order.

    A slice that holds a value which is not finite keeps one such value, too, so that the gap is seen.
    """
    if len(series) <= most:
        return series
    kept = {0, len(series) - 1}
    for start, end in _slices(len(series), max(1, most // 2)):
        part = series.values[start:end]
        if math.isfinite(sum(part)):  # nearly always, and then at the speed of C
            kept |= {start + part.index(min(part)), start + part.index(max(part))}
            continue
        finite = [at for at in range(start, end) if math.isfinite(series.values[at])]
        if finite:
            kept.add(min(finite, key=series.values.__getitem__))
            kept.add(max(finite, key=series.values.__getitem__))
        if len(finite) < end - start:
            kept.add(next(at for at in range(start, end) if not math.isfinite(series.values[at])))
    order = sorted(kept)
    return Series(
        [series.steps[at] for at in order], [series.values[at] for at in order], [series.times[at] for at in order]
    )


def averaged(series: Series, most: int) -> Series:
    """Means over at most `most` slices of `series`; each stands at the first step of its slice."""
    if len(series) <= most:
        return series
    found = Series()
    for start, end in _slices(len(series), most):
        average = mean(series.values[start:end])
        found.put(series.steps[start], math.nan if average is None else average, series.times[start])
    return found


def _slices(length: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` or fewer ranges of like length that cover `length`."""
    edges = [length * at // count for at in range(count + 1)]
    yield from ((start, end) for start, end in pairwise(edges) if end > start)


WRITERS: dict[str, Callable[[float | None], str]] = {"": number, "s": seconds_text, "bytes": bytes_text}
"""How a value of a curve is written, by unit."""
Range = tuple[float | None, float | None]
"""From, to; None where it is open."""


@dataclass(frozen=True)
class CurveSpec:
    """One curve of a chart: its label, and the field of the trainer's records that it shows."""

    label: str
    metric: str
    colour: str = "primary"
    """Of the theme: primary, accent, success or warning."""
    scatter: bool = False


@dataclass(frozen=True)
class ChartSpec:
    """Some curves over optimizer steps with one vertical axis."""

    name: str
    curves: tuple[CurveSpec, ...]
    about: str = ""
    """What is drawn, in a sentence, for the page of a report."""
    short: str = ""
    """The name where there is little room."""
    unit: str = ""
    low: float | None = None
    """An end of the axis, unless a value lies beyond it."""
    high: float | None = None
    log: bool = False
    healthy: Range | None = None
    over_seconds: bool = False
    """Over seconds before now, not over steps."""

    @property
    def health(self) -> str:
        """The healthy range in words; empty where there is none."""
        if self.healthy is None:
            return ""
        low, high = self.healthy
        return f"healthy below {high:g}" if low is None else f"healthy from {low:g} to {high:g}"


HELD_OUT, QUEUE = "held-out", "queue"
"""Curves that are no field of a trainer's record: accuracy by environment and split, and groups that wait in run-api,
over seconds of the screen's own watching."""

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
        (CurveSpec("rollout", "logprob_diff_abs_mean"), CurveSpec("probe", "probe_diff_abs_mean", "success")),
        short="|diff|",
        high=1.0,
        log=True,
        healthy=(None, HEALTHY_LOGPROB_DIFF),
    ),
    "diff-max": ChartSpec(
        "Logprob |diff| max",
        (CurveSpec("rollout", "logprob_diff_abs_max", "warning"), CurveSpec("probe", "probe_diff_abs_max", "success")),
        short="|diff| max",
        log=True,
    ),
    "logprobs": ChartSpec(
        "Mean logprob",
        (CurveSpec("inference", "inference_mean"), CurveSpec("training", "train_mean", "accent")),
        short="logprob",
    ),
    "kl": ChartSpec("KL", (CurveSpec("k3", "kl_k3"),), "Estimate k3 of KL(rollout policy || trainer)", low=0.0),
    "useful": ChartSpec(
        "Useful groups",
        (CurveSpec("share", "useful_groups"),),
        "Share of a step's groups that teach something: in the others all scores are equal",
        short="Useful",
        low=0.0,
        high=1.0,
    ),
    "lr": ChartSpec("Learning rate", (CurveSpec("lr", "lr"),), "Of the optimizer", short="lr", low=0.0),
    "loss": ChartSpec("Loss", (CurveSpec("loss", "loss"),), "Of the objective, per token"),
    "ratio": ChartSpec(
        "Ratio",
        (CurveSpec("mean", "ratio_mean"),),
        "A token's probability under the trainer over that under the rollout policy",
        healthy=HEALTHY_RATIO,
    ),
    "clip": ChartSpec(
        "Clip fraction",
        (CurveSpec("clipped", "clip_fraction"),),
        "Share of tokens whose ratio the objective clips",
        short="Clip",
        low=0.0,
        healthy=(None, HEALTHY_CLIP_FRACTION),
    ),
    "ratio-max": ChartSpec(
        "Ratio max",
        (CurveSpec("max", "ratio_max", "warning"),),
        "The largest ratio of a token, before anything is clipped",
        log=True,
    ),
    "entropy": ChartSpec(
        "Entropy",
        (CurveSpec("mean", "entropy_mean"),),
        "How undecided the policy is at a trained token, in nats; near 0 it has stopped exploring",
        low=0.0,
    ),
    "length": ChartSpec(
        "Completion tokens",
        (CurveSpec("mean", "completion_tokens_mean"),),
        "Generated tokens of a sequence",
        short="Length",
        low=0.0,
    ),
    "truncated": ChartSpec(
        "Cut off",
        (CurveSpec("share", "truncated_fraction", "warning"),),
        "Share of completions that were cut off",
        low=0.0,
        high=1.0,
    ),
    "grad": ChartSpec("Gradient norm", (CurveSpec("norm", "grad_norm"),), "Before clipping", short="Gradient", low=0.0),
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
            CurveSpec("fetch", "data_wait_s", "warning"),
            CurveSpec("sync", "sync_s", "success"),
        ),
        short="Step",
        unit="s",
        low=0.0,
    ),
    "queue": ChartSpec("run-api queue", (CurveSpec("groups", QUEUE),), short="Queue", low=0.0, over_seconds=True),
    "tokens": ChartSpec("Tokens/s", (CurveSpec("trained", "tokens_per_s"),), low=0.0),
}
"""The charts of the screen, by name."""


def chart_of(metric: str) -> ChartSpec:
    """The chart of any curve, by the name that `RunState.metric` knows it by."""
    is_time = (metric.endswith("_s") and not metric.endswith("_per_s")) or metric.startswith("sync/")
    unit = "s" if is_time else "bytes" if metric.endswith("_bytes") else ""
    return ChartSpec(metric, (CurveSpec("value", metric),), unit=unit)


PAGE = (
    replace(
        CHARTS["reward"],
        curves=(CurveSpec("mean reward", "reward_mean"), CurveSpec("held-out", HELD_OUT, scatter=True)),
    ),
    CHARTS["useful"],
    CHARTS["loss"],
    CHARTS["lr"],
    CHARTS["ratio"],
    CHARTS["ratio-max"],
    CHARTS["clip"],
    CHARTS["entropy"],
    CHARTS["length"],
    CHARTS["truncated"],
    CHARTS["grad"],
    CHARTS["lag"],
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
        about="Trainer against engine: over rollouts, policy lag included, and by the probe at the same weights",
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
)
"""The charts of a report, in reading order. There is room for more curves and longer names; where a screen shows fixed
axes, most here are fitted to the data, which is read closely."""
