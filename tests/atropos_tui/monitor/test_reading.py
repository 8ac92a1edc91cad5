"""Reading of curves: smoothing, ranges without outliers, axes, marks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from atropos_common.protocol.records import (
    DiagnosisRecord,
    EnvMetricsRecord,
    EvalRecord,
)
from atropos_common.protocol.trainer_records import CheckpointRecord, StepRecord
from atropos_tui.monitor.charts import (
    Along,
    Lens,
    Ruler,
    axis_end,
    marks,
    sensible_range,
    smooth,
    smoothed,
    value_at,
)
from atropos_tui.monitor.run.series import MOST_POINTS, Series
from atropos_tui.monitor.run.state import MOST_CURVES, USEFUL_GROUPS, RunState
from tests.atropos_tui.monitor.run.test_state import fed, steps
from tests.support.run_maker import T0


def test_the_average_has_no_bias_to_its_first_value_and_leaves_gaps() -> None:
    assert smoothed([2.0, 2.0, 2.0], 10) == pytest.approx([2.0, 2.0, 2.0])
    one, gap, three = smoothed([1.0, math.nan, 3.0], 3)  # half of the weight goes at each step
    assert one == 1.0 and math.isnan(gap)
    assert three == pytest.approx((3.0 + 0.5 * 1.0) / 1.5)


def test_a_long_curve_is_smoothed_over_its_slices() -> None:
    series = Series(range(1, 1001), [float(step % 2) for step in range(1, 1001)], [0.0] * 1000)
    smooth_ = smooth(series, 10, 100)
    assert len(smooth_) == 100
    assert list(smooth_.values) == pytest.approx([0.5] * 100)


def test_few_and_far_values_are_outliers_and_nothing_else_is() -> None:
    ordinary = [1.0 + 0.01 * (at % 7) for at in range(50)]
    assert sensible_range([19.3, *ordinary]) == (1.0, 1.06)
    assert sensible_range(ordinary) is None
    assert sensible_range([*ordinary, *[9.0] * 10]) is None, "too many to be outliers"
    assert sensible_range([0.0] * 50 + [0.3]) is None, (
        "a curve that stands still moves once: that is what one looks for"
    )
    assert sensible_range([19.3, 1.0, 1.1]) is None, "too few to judge by"


def test_steps_lie_where_the_axis_says() -> None:
    state = fed(*steps(range(1, 5)))
    series = state.metric("reward_mean")
    assert list(Ruler(state, Along.STEPS).place(series)) == [1, 2, 3, 4]
    assert list(Ruler(state, Along.TOKENS).place(series)) == [384.0, 768.0, 1152.0, 1536.0]
    minutes = list(Ruler(state, Along.MINUTES).place(series))
    assert minutes[1] - minutes[0] == pytest.approx(0.33 / 60)
    assert Ruler(state, Along.TOKENS).step_at(800.0, series) == 2
    assert list(Ruler(state, Along.TOKENS).part(series, 700.0, 1200.0).steps) == [2, 3]
    assert list(Ruler(state, Along.MINUTES).part(series, minutes[1], minutes[2]).steps) == [2, 3]


def test_the_axis_of_a_young_run_grows_with_it() -> None:
    """It was the plan from the first step on: at step 50 of 5,000 the curves had one column."""
    ends = [axis_end(newest, 5000) for newest in range(1, 2500)]
    assert ends == sorted(ends) and len(set(ends)) < 40, "in jumps"
    assert all(newest < end <= 1.4 * newest for newest, end in enumerate(ends, 1) if newest > 10)
    assert axis_end(2500, 5000) == 5000 and axis_end(6000, 5000) == 6000 and axis_end(3, 8) == 8


def _more(state: RunState) -> None:
    for record in steps(range(9, 30)):
        state.apply(record)


def _restart(state: RunState) -> None:
    for record in steps(range(3, 5), attempt=2):
        state.apply(record)


def _merge(state: RunState) -> None:
    for name in ("reward_mean", "tokens", "step_s"):
        for step in range(9, MOST_POINTS + 50):
            state.series[name].put(step, 1.0, T0 + 31 + 0.33 * step)


@pytest.mark.parametrize("along", list(Along))
@pytest.mark.parametrize("begun", [0, 8])
@pytest.mark.parametrize("change", [_more, _restart, _merge])
def test_a_ruler_places_series_that_have_changed_since_it_was_made(
    along: Along, begun: int, change: Callable[[RunState], None]
) -> None:
    """The screen keeps a ruler while records arrive. With tokens, each new step was an
    IndexError."""
    state = fed(*steps(range(1, begun + 1)))
    for name in ("reward_mean", "tokens", "step_s"):
        state.series.setdefault(name, Series())
    ruler = Ruler(state, along)
    change(state)
    for name in state.names():
        series = state.metric(name)
        places = list(ruler.place(series))
        assert len(places) == len(series) and places == sorted(places)
        assert len(ruler.part(series, 0.0, places[-1])) <= len(series)
        ruler.step_at(places[-1], series)


def test_a_window_of_the_newest_moves_along() -> None:
    assert Lens(newest=50).window(0, 300) == (250, 300)
    assert Lens(newest=50).window(0, 30) == (0, 30)
    assert Lens(first=10, last=20).window(0, 300) == (10, 20)
    assert value_at([1, 5], [0.1, 0.5], 4.9) == 0.1 and value_at([1, 5], [0.1, 0.5], 0.5) is None


def test_what_happened_stands_at_its_step() -> None:
    records = [*steps(range(1, 11)), *steps(range(7, 12), attempt=2)]
    found_at = next(record.time for record in records if record.kind == "step" and record.step == 3)  # type: ignore[attr-defined]
    state = fed(
        *records,
        CheckpointRecord(step=5, path="x", seconds=0.1, bytes=1),
        EvalRecord(env="e", accuracy=0.5, weight_version=4, time=1.0),
        DiagnosisRecord(component="trainer", title="slow", seq=1, time=found_at),
    )
    assert [(mark.step, mark.kind) for mark in marks(state)] == [
        (3, "diagnosis"),
        (4, "evaluation"),
        (5, "checkpoint"),
        (7, "restart"),
    ]


@pytest.mark.parametrize("evals_last", [False, True])
def test_evaluations_of_weights_that_a_resume_discarded_do_not_count(evals_last: bool) -> None:
    first, second = (
        [each.model_copy(update={"weight_version": each.step}) for each in part]
        for part in (steps(range(1, 11)), steps(range(7, 9), attempt=2))
    )
    began = second[0].time
    found = [
        EvalRecord(env="e", accuracy=accuracy, weight_version=at, time=time)
        for accuracy, at, time in ((0.3, 4, 1.0), (0.9, 9, 2.0), (0.5, 8, began + 1))
    ]
    stock = EvalRecord(env="stock", accuracy=0.2, policy_step=40, time=3.0)
    before = [] if evals_last else [*found[:2], stock]
    after = [*found, stock] if evals_last else found[2:]
    state = fed(*first, *before, *second, *after)
    kept = next(series for name, series in state.evals.items() if name.startswith("e/"))
    assert list(zip(kept.steps, kept.values, strict=True)) == [(4, 0.3), (8, 0.5)]
    assert len(state.evals) == 2, "run-api's steps go on over attempts"


def test_every_number_of_the_stream_is_a_curve() -> None:
    extra = {"groups": 8, "flat_groups": 6, "of_the_future": 2.5, "words": "no", "yes": True}
    step = next(record for record in steps(range(1, 2)) if isinstance(record, StepRecord))
    state = fed(step.model_copy(update={"left_out": {"too old": 3}, "tis_mean": 0.9}))
    assert state.metric("tis_mean").last == 0.9 and state.metric("left_out/too old").last == 3.0
    state = fed(
        StepRecord.model_validate(step.model_dump() | extra),
        EnvMetricsRecord(env="gsm", policy_step=4, metrics={"train/right": 0.25}),
    )
    assert state.metric(USEFUL_GROUPS).last == 0.25 and state.metric("of_the_future").last == 2.5
    assert state.metric("gsm:train/right").at(4) == 0.25
    assert not {"words", "yes"} & set(state.names()) and "gsm:train/right" in state.names()


def test_a_stream_of_ever_new_names_is_bounded() -> None:
    state = RunState()
    for at in range(MOST_CURVES + 50):
        state.apply(EnvMetricsRecord(env="e", policy_step=at, metrics={f"name{at}": 1.0}))
    assert len(state.env_metrics) == MOST_CURVES
