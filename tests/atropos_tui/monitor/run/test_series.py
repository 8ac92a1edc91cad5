"""A curve in bounded memory: original points, merged points, and sums that stay true."""

from __future__ import annotations

import math
import random
import sys

import pytest

from atropos_common.protocol.trainer_records import (
    StepRecord,
    SyncRecord,
    TimingRecord,
)
from atropos_tui.monitor.bench import benchmark_state, pace
from atropos_tui.monitor.charts import PAGE, Along, Ruler
from atropos_tui.monitor.report_charts import charts
from atropos_tui.monitor.run.series import (
    FIRST,
    MOST_MERGED,
    MOST_POINTS,
    NEWEST,
    Series,
    averaged,
    thin,
)
from atropos_tui.monitor.run.state import RunState
from tests.support.run_maker import T0, step_records

LONG = 5 * MOST_POINTS


def series_of(values: list[float], every: int = 1) -> Series:
    found = Series()
    for at, value in enumerate(values):
        found.put(1 + at * every, value, float(at))
    return found


def long_one() -> tuple[list[float], Series]:
    rng = random.Random(3)
    values = [rng.gauss(0.0, 1.0) for _ in range(LONG)]
    values[LONG // 3] = 987.5
    return values, series_of(values)


def test_a_run_of_ordinary_length_is_kept_whole() -> None:
    series = series_of([float(at) for at in range(MOST_POINTS)])
    assert not series.is_merged
    assert list(series.values) == [float(at) for at in range(MOST_POINTS)]
    assert series.reach(5) == (5, 5)


@pytest.mark.parametrize("every", [1, 10, 2**40])
def test_no_number_of_steps_makes_it_longer(every: int) -> None:
    series, longest = Series(), 0
    for at in range(LONG):
        series.put(at * every, 1.0)
        longest = max(longest, len(series))
    assert longest <= MOST_POINTS
    assert series.count == LONG
    for at in range(LONG, 0, -1):  # and not one that comes backwards
        series.put(-at, 1.0)
    assert len(series) <= MOST_POINTS


def size_of(series: Series) -> int:
    arrays = series.steps, series.values, series.times, series.counts, series.lows, series.highs
    return sum(map(sys.getsizeof, arrays))


def test_memory_of_a_long_run_stays_the_same() -> None:
    series, sizes = Series(), list[int]()
    for step in range(1, 130_001):
        series.put(step, 1.0)
        if step > 10_000 and step % 100 == 0:
            sizes.append(size_of(series))
    assert max(sizes) < 1.01 * min(sizes)
    assert max(sizes) < 270_000


def test_the_older_half_is_merged_in_turn() -> None:
    _, series = long_one()
    merged = series.counts[FIRST:-1]
    widths = sorted(set(merged[1:]), reverse=True)
    assert widths == [16, 8]
    assert list(merged[1:]) == sorted(merged[1:], reverse=True), "the oldest points are the widest"
    assert len(series.counts) == MOST_MERGED


def test_first_and_newest_stay_as_they_came_and_sums_stay_true() -> None:
    values, series = long_one()
    assert list(series.values[:FIRST]) == values[:FIRST]
    assert series.tail(NEWEST) == values[-NEWEST:]
    assert (series.count, series.highest) == (LONG, 987.5)
    assert series.total == pytest.approx(sum(values))
    assert series.mean == pytest.approx(sum(values) / LONG)
    newest = series.newest(2 * NEWEST)
    assert 2 * NEWEST <= newest.count < 3 * NEWEST
    assert newest.total == pytest.approx(sum(values[-newest.count :]))
    assert series.newest(10 * LONG).count == LONG


def test_each_merged_point_has_the_mean_and_the_ends_of_its_very_steps() -> None:
    values, series = long_one()
    at = 0
    for number, count in enumerate(series.counts):
        own = values[at : at + count]
        assert series.steps[number] == at + 1
        assert series.values[number] == pytest.approx(sum(own) / count)
        assert (series.lows[number], series.highs[number]) == (min(own), max(own))
        assert all(series.reach(at + 1 + inside) == (at + 1, at + count) for inside in range(count))
        at += count
    assert max(series.counts) > 2
    assert list(series.values[len(series.counts) :]) == values[at:]


def test_a_picture_keeps_every_spike_and_gap_that_was_merged() -> None:
    values, _ = long_one()
    values[LONG // 2] = math.nan
    series = series_of(values)
    drawn = thin(series, 600)
    assert len(drawn) <= 610
    assert 987.5 in drawn.values
    assert any(math.isnan(value) for value in drawn.values)
    assert abs(drawn.steps[drawn.values.index(987.5)] - LONG // 3) <= max(series.counts)
    means = averaged(series, 40)
    widths = [later - earlier for earlier, later in zip(means.steps, means.steps[1:], strict=False)]
    assert max(widths) <= 1.1 * min(widths), "slices are of like many steps, not of points"
    assert means.values[-1] == pytest.approx(sum(values[-(LONG // 40) :]) / (LONG // 40), abs=0.05)


def test_after_a_restart_nothing_of_the_lost_steps_is_left() -> None:
    _, series = long_one()
    at = next(number for number, count in enumerate(series.counts) if count > 1)
    inside = series.steps[at] + 1
    series.cut(inside)
    assert series.steps[-1] < inside
    assert series.count == series.steps[-1], "what stood for steps on both sides is gone as a whole"
    for step in range(inside, inside + LONG):
        series.put(step, 2.0)
    assert len(series) <= MOST_POINTS
    assert series.steps[-1] == inside + LONG - 1
    assert series.mean == pytest.approx(series.total / series.count)


def long_state(count: int) -> RunState:
    """A run with one slow step in ten, whose tokens a second are as few as its seconds are many."""
    state = RunState()
    kinds = (StepRecord, TimingRecord, SyncRecord)
    ordinary = [record for record in step_records(1, random.Random(1)) if isinstance(record, kinds)]
    for step in range(1, count + 1):
        slow = step % 10 == 0
        changes = {
            "step_s": 10.0 if slow else 1.0,
            "tokens_per_s": 10.0 if slow else 100.0,
            "engine_idle_fraction": 0.9 if slow else 0.0,
            "weight_version": step,
        }
        for record in ordinary:
            known = {
                name: value for name, value in changes.items() if name in type(record).model_fields
            }
            state.apply(record.model_copy(update={"step": step, "time": T0 + step, **known}))
    return state


def test_figures_of_a_run_that_was_merged_are_those_of_all_its_steps() -> None:
    count = MOST_POINTS + 2 * NEWEST
    state = long_state(count)
    assert state.metric("step_s").is_merged
    slow, fast = count // 10, count - count // 10
    figures = benchmark_state(state, run="run", mode="none")
    assert figures.total_step_s == pytest.approx(10.0 * slow + fast)
    assert figures.tokens_per_s == pytest.approx(100.0 * count / (10.0 * slow + fast))
    assert figures.engine_idle_fraction == pytest.approx(9.0 * slow / (10.0 * slow + fast))
    assert figures.syncs == count
    assert pace(state, None, window=count).window == count


def test_the_axis_of_tokens_counts_those_of_merged_steps() -> None:
    count = MOST_POINTS + NEWEST
    state = long_state(count)
    tokens = state.metric("tokens")
    assert tokens.is_merged
    assert Ruler(state, Along.TOKENS).place(tokens)[-1] == pytest.approx(384.0 * count)


def test_a_report_says_how_many_steps_it_drew() -> None:
    count = MOST_POINTS + NEWEST
    state = long_state(count)
    reward = next(chart for chart in charts(state) if chart.name == PAGE[0].name)
    assert f"{count:,} points" in reward.note
