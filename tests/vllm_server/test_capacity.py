"""The token limit of an engine: learned from steps with a known cost, unknown where the steps do
not tell it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_server import compat
from vllm_server.capacity import EngineCapacity, Step, StepCurve

FIXED_S, EACH_S = 1.83e-3, 2.92e-5
"""A 0.5B model on one H100: 17,300 tokens a second at 64 requests, 23,000 at 128, 31,300 at 512."""


def curve(
    slots: int, sequences: list[int], *, fixed: float = FIXED_S, each: float = EACH_S
) -> StepCurve:
    """A curve of steps with these numbers of sequences, a third of them slowed down by a
    neighbour."""
    found, rng = StepCurve(slots), random.Random(1)
    for n in sequences:
        one = fixed + each * n
        for at in range(int(8.0 / one)):
            slow = 2.0 if at * one % 2.0 < 0.7 else 1.0
            found.add(n, one * slow * rng.uniform(0.98, 1.02))
    return found


def test_few_sequences_with_their_cost_tell_the_rate_at_many() -> None:
    ceiling = curve(512, [1, 2, 4, 8, 16, 32, 60]).ceiling()
    assert ceiling == pytest.approx(31_300, rel=0.1)


@pytest.mark.parametrize("sequences", [[1], [1, 2], [1, 2, 4], [4] * 3, [60], [40, 60]])
def test_an_engine_that_had_few_requests_or_always_as_many_has_no_known_ceiling(
    sequences: list[int],
) -> None:
    assert curve(1024, sequences).ceiling() is None


def test_an_engine_whose_steps_do_not_grow_with_sequences_has_no_known_ceiling() -> None:
    assert curve(1024, [1, 4, 16, 40], fixed=0.05, each=1e-5).ceiling() is None
    assert curve(8192, [1, 4, 16, 60, 120]).ceiling() is None, "68 times as many as were seen"


def test_an_engine_that_was_full_has_the_best_rate_seen() -> None:
    assert curve(64, [60]).ceiling() == pytest.approx(60 / (FIXED_S + EACH_S * 60), rel=0.03)


def test_a_cache_that_holds_fewer_sequences_lowers_the_ceiling() -> None:
    found = curve(1024, [1, 4, 16, 60])
    at_1024 = found.ceiling()
    for _ in range(1000):
        found.hold(50, 0.5)
    assert found.most == pytest.approx(100)
    at_100 = found.ceiling()
    assert at_100 == pytest.approx(100 / (FIXED_S + EACH_S * 100), rel=0.1)
    assert at_1024 is not None and at_100 < at_1024


def test_a_few_steps_say_nothing() -> None:
    found = StepCurve(8)
    for _ in range(140):
        found.add(8, 0.01)
    assert found.ceiling() is None
    for _ in range(20):
        found.add(8, 0.01)
    assert found.ceiling() == pytest.approx(800)


def test_steps_that_reach_the_server_together_are_not_fast() -> None:
    """A server whose process is the limit reads twenty steps at once, then none for twenty steps'
    time."""
    found = StepCurve(1000)
    for at in range(4000):
        found.add(1000, 1.0 if at % 20 == 19 else 1e-5)
    assert found.ceiling() == pytest.approx(20_000, rel=0.05)


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def test_the_time_without_work_is_no_step() -> None:
    clock = Clock()
    capacity = EngineCapacity(8, clock)
    for _ in range(160):
        clock.now += 5.0  # without work
        capacity.step(Step(0, 8, running=8, waiting=0, kv_use=0.1))
        clock.now += 0.01
        capacity.step(Step(0, 8, running=0, waiting=0, kv_use=0.0))
    assert capacity.generated == 2560
    assert capacity.ceiling() == pytest.approx(800)


def test_engines_with_data_parallelism_add_up() -> None:
    clock = Clock()
    capacity = EngineCapacity(8, clock)
    for _ in range(160):
        clock.now += 0.01
        for engine in (0, 1):
            capacity.step(Step(engine, 8, running=8, waiting=0, kv_use=0.1))
    assert capacity.ceiling() == pytest.approx(1600)


def test_steps_are_heard_as_vllm_tells_them() -> None:
    heard: list[Step] = []
    loggers: list[Any] = []
    engine = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=loggers))
    assert compat.hear_steps(engine, heard.append)
    scheduler = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.25)
    loggers[0].record(
        scheduler, SimpleNamespace(num_generation_tokens=3), mm_cache_stats=None, engine_idx=1
    )
    loggers[0].record(scheduler, None, mm_cache_stats=None, engine_idx=1)
    loggers[0].record(
        None, SimpleNamespace(num_generation_tokens=2), mm_cache_stats=None, engine_idx=0
    )
    loggers[0].log()
    loggers[0].record_sleep_state(1, 2)
    assert heard == [Step(1, 3, 3, 1, 0.25), Step(0, 2, None, None, None)]
    assert not compat.hear_steps(SimpleNamespace(logger_manager=None), heard.append), (
        "--disable-log-stats"
    )
