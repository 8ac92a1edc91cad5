"""How fast a run goes, live: the split of a step, tokens/s, steps/h, time left. Pure functions of `RunState`.

The trainer's `step_s` is the whole step, so what its parts do not explain is shown as `other`; where a trainer counts
waiting outside of it, the parts are larger than the whole and `other` is absent.
"""

from __future__ import annotations

from dataclasses import dataclass

from atropos_tui.monitor.series import Series, mean
from atropos_tui.monitor.state import RunState

WINDOW = 20
"""Steps over which the live numbers are averaged."""

PARTS = {"fetch": "data_wait_s", "train": "train_s", "sync": "sync_s", "checkpoint": "checkpoint_s"}
"""Parts of a step as the screen names them, by field of the timing record."""


@dataclass(frozen=True)
class Pace:
    """Means over the newest `window` steps; None where there is no data. Seconds, tokens, bytes."""

    window: int
    step_s: float | None
    parts: dict[str, float | None]
    tokens_per_s: float | None
    steps_per_hour: float | None
    eta_s: float | None
    """Time left by the wall clock between steps, waiting included."""


def pace(state: RunState, training_steps: int | None, window: int = WINDOW) -> Pace:
    """Measure `state` over its newest steps; over all of them once the trainer has written its summary."""
    timing = state.metric("step_s")
    window = len(timing) if state.benchmark else window
    count = min(window, len(timing))
    wall = _wall_per_step(timing, window, state.attempt_steps.get(state.attempt, 0))
    step_s = mean(timing.tail(count))
    parts = {name: mean(state.metric(metric).tail(count)) for name, metric in PARTS.items()}
    known = [value for value in parts.values() if value is not None]
    if step_s is not None and known:
        other = step_s - sum(known)
        parts["other"] = other if not other < 0 else None
    basis = wall or step_s
    left = None if training_steps is None else max(0, training_steps - state.step)
    return Pace(
        window=count,
        step_s=step_s,
        parts=parts,
        tokens_per_s=tokens_per_second(state, count),
        steps_per_hour=3600 / basis if basis else None,
        eta_s=None if left is None or basis is None else left * basis,
    )


def _wall_per_step(series: Series, window: int, first_step: int) -> float | None:
    """Seconds between consecutive steps of the present attempt, so that a restart does not count as slow steps.

    None for fewer than two steps, and for clocks that run backwards.
    """
    newest = zip(series.steps[-window - 1 :], series.times[-window - 1 :], strict=True)
    points = [(step, time) for step, time in newest if step >= first_step]
    if len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


def tokens_per_second(state: RunState, count: int | None = None) -> float | None:
    """Tokens of the newest `count` steps (default: all) over their seconds: sums first, one division.

    The timing record holds a rate, counted by the trainer over every token of the batch; rate times seconds is tokens.
    """
    rates, seconds = state.metric("tokens_per_s"), state.metric("step_s")
    count = len(seconds) if count is None else count
    total = sum(seconds.tail(count))
    if len(rates) != len(seconds) or not total:
        return None
    return sum(rate * time for rate, time in zip(rates.tail(count), seconds.tail(count), strict=True)) / total
