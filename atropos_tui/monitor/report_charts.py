"""Which curves a report shows: `charts(state)`, pure data. `report_svg` draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atropos_tui.monitor.pace import PARTS
from atropos_tui.monitor.plain import bytes_text, number, said, seconds_text
from atropos_tui.monitor.series import MOST_STEPS, Series, on_scale
from atropos_tui.monitor.state import RunState
from atropos_tui.monitor.thinning import averaged, thin

POINTS = 1_000
"""Of one curve on the page; a longer one is thinned."""
STACKED = 250
"""Columns of the split of a step; more steps are averaged."""
Write = Callable[[float | None], str]
_WRITERS: dict[str, Write] = {"": number, "s": seconds_text, "bytes": bytes_text}


@dataclass(frozen=True)
class Line:
    """One curve: its points, thinned for the page, and what its legend says."""

    label: str
    colour: int
    """Which colour of the page's palette, from 1."""
    points: Series
    last: str
    span: str
    """Lowest and highest value, of all points."""
    scatter: bool = False
    not_finite: int = 0


@dataclass(frozen=True)
class Chart:
    """Some curves over optimizer steps with one vertical axis."""

    name: str
    about: str
    """What is drawn and what is healthy, in a sentence."""
    lines: list[Line]
    unit: str = ""
    """Of the vertical axis: `s`, `bytes`, or none."""
    log: bool = False
    stacked: bool = False
    low: float | None = None
    """An end of the axis, unless a value lies beyond it."""
    high: float | None = None
    healthy: tuple[float | None, float | None] | None = None
    """Shaded: from, to; None where it is open."""
    restarts: list[int] = field(default_factory=list)
    """First steps of later attempts of the trainer."""
    note: str = ""

    @property
    def not_finite(self) -> int:
        """Values that are NaN, infinite or beyond any scale."""
        return sum(line.not_finite for line in self.lines)


def charts(state: RunState) -> list[Chart]:
    """Every chart that `state` has data for, in reading order."""
    restarts = sorted(first for attempt, first in state.attempt_steps.items() if attempt > min(state.attempt_steps))

    def of(name: str, about: str, *curves: tuple[str, str], unit: str = "", **more: object) -> Chart:
        write = _WRITERS[unit]
        lines = [_line(label, at, state.metric(key), write) for at, (label, key) in enumerate(curves, 1)]
        kept = [line for line in lines if line is not None]
        return Chart(name, about, kept, unit, restarts=restarts, note=_note(state, curves), **more)  # type: ignore[arg-type]

    found = [
        _reward(state, restarts),
        of("Loss", "Of the objective, per token.", ("loss", "loss")),
        of(
            "Ratio",
            "A token's probability under the trainer over that under the rollout policy; healthy from 0.8 to 1.2.",
            ("mean", "ratio_mean"),
            healthy=(0.8, 1.2),
        ),
        of(
            "Clip fraction",
            "Share of tokens whose ratio the objective clips; healthy below 0.3.",
            ("clipped", "clip_fraction"),
            healthy=(None, 0.3),
            low=0.0,
        ),
        of("Gradient norm", "Before clipping.", ("norm", "grad_norm"), low=0.0),
        of(
            "Policy lag",
            "Weight versions between the generation of a completion and its training.",
            ("mean", "policy_lag_mean"),
            ("max", "policy_lag_max"),
            low=0.0,
        ),
        of(
            "Logprobs",
            "Mean logprob of the rollouts' tokens, by trainer and by engine; one line means aligned.",
            ("trainer", "train_mean"),
            ("engine", "inference_mean"),
        ),
        of(
            "Logprob |diff|",
            "Trainer against engine: over rollouts, policy lag included, and by the probe at the same weights; "
            "healthy below 0.1.",
            ("rollouts, mean", "logprob_diff_abs_mean"),
            ("rollouts, max", "logprob_diff_abs_max"),
            ("probe, mean", "probe_diff_abs_mean"),
            log=True,
            healthy=(None, 0.1),
        ),
        of("KL", "Estimate k3 of KL(rollout policy || trainer).", ("k3", "kl_k3")),
        of("Tokens per second", "Of training, over the whole step.", ("tokens/s", "tokens_per_s"), low=0.0),
        of(
            "Trainer memory",
            "Main memory of the process (RSS) and GPU memory of PyTorch's allocator.",
            ("main memory", "rss_bytes"),
            ("GPU allocated", "allocated_bytes"),
            ("GPU peak", "peak_bytes"),
            unit="bytes",
            low=0.0,
        ),
        _split(state, restarts),
    ]
    return [chart for chart in found if chart.lines]


def _reward(state: RunState, restarts: list[int]) -> Chart:
    lines = [_line("mean reward", 1, state.metric("reward_mean"), number)]
    for at, (name, series) in enumerate(state.evals.items(), 2):
        lines.append(_line(f"held-out accuracy, {said(name)}", at, series, number, scatter=True))
    about = "Mean reward of the batch; held-out accuracy where an environment evaluates."
    note = _note(state, [("", "reward_mean")])
    return Chart("Reward", about, [line for line in lines if line], restarts=restarts, low=0.0, high=1.0, note=note)


def _split(state: RunState, restarts: list[int]) -> Chart:
    """Where a step's seconds go, stacked; a part without a value counts as none of them."""
    whole = state.metric("step_s")
    parts = {name: _at_steps(state.metric(key), whole.steps) for name, key in PARTS.items()}
    known = [sum(part.values[at] for part in parts.values()) for at in range(len(whole))]
    rest = [max(0.0, value - sum_) for value, sum_ in zip(whole.values, known, strict=True)]
    parts["other"] = Series(list(whole.steps), rest, list(whole.times))
    lines = [_line(name, at, part, seconds_text, stacked=True) for at, (name, part) in enumerate(parts.items(), 1)]
    count = math.ceil(len(whole) / STACKED)
    note = f"{len(whole):,} steps, drawn as means of {count}." if count > 1 else ""
    return Chart(
        "Where a step's time goes",
        "Seconds of a step: waiting for rollouts, training, publishing weights, checkpoints.",
        [line for line in lines if line],
        unit="s",
        stacked=True,
        low=0.0,
        restarts=restarts,
        note=note,
    )


def _at_steps(series: Series, steps: Sequence[int]) -> Series:
    values = dict(zip(series.steps, series.values, strict=True))
    known = [values.get(step, 0.0) for step in steps]
    return Series(list(steps), [value if math.isfinite(value) else 0.0 for value in known], [0.0] * len(steps))


def _line(
    label: str, colour: int, series: Series, write: Write, *, scatter: bool = False, stacked: bool = False
) -> Line | None:
    """None where there is no data."""
    if not len(series):
        return None
    clean = Series()
    for step, value, time in zip(series.steps, series.values, series.times, strict=True):
        if 0 <= step <= MOST_STEPS:
            clean.steps.append(step)
            clean.values.append(on_scale(value) if math.isfinite(value) else math.nan)
            clean.times.append(time)
    finite = [value for value in clean.values if math.isfinite(value)]
    return Line(
        label=label,
        colour=colour,
        points=averaged(clean, STACKED) if stacked else thin(clean, POINTS),
        last=write(series.last),
        span=f"{write(min(finite))} to {write(max(finite))}" if finite else "no finite value",
        scatter=scatter,
        not_finite=len(series) - len(finite),
    )


def _note(state: RunState, curves: Sequence[tuple[str, str]]) -> str:
    longest = max((len(state.metric(key)) for _, key in curves), default=0)
    return f"{longest:,} points, thinned; every slice keeps its extremes." if longest > POINTS else ""
