"""The token limit of an engine: learned from steps with a known cost, unknown where the steps do
not tell it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_server import compat
from vllm_server.capacity import KNEE_GAIN, EngineCapacity, Step, StepCurve

FIXED_S, EACH_S = 1.83e-3, 2.92e-5
"""A 0.5B model on one H100: 17,300 tokens a second at 64 requests, 23,000 at 128, 31,300 at 512."""


SHARED = 0.35
"""Share of the time in which a trainer on the same GPU makes steps take twice as long."""
PRESENT = 1 - SHARED / 2
"""Token rate beside it, by the one of an engine alone."""


# Seconds of a step of one sequence that fills the KV cache, and the share that a sequence takes.
KV_S, SHARE = 2.0e-2, 1 / 4000


def curve(
    slots: int, sequences: list[int], *, fixed: float = FIXED_S, each: float = EACH_S
) -> StepCurve:
    """A curve of steps with these numbers of sequences, a third of them slowed down by a
    trainer."""
    found = StepCurve(slots)
    for n in sequences:
        run(found, n, fixed + each * n)
    return found


def run(
    found: StepCurve,
    sequences: int,
    step_s: float,
    *,
    kv_use: float = 0.0,
    seconds: float = 8.0,
    shared: float = SHARED,
) -> None:
    """Add steps of this length, slower in the share `shared` of every two seconds."""
    rng, now = random.Random(1), 0.0
    while now < seconds:
        slow = 2.0 if now % 2.0 < 2.0 * shared else 1.0
        now += (one := step_s * slow * rng.uniform(0.98, 1.02))
        found.add(sequences, one, kv_use)
        found.hold(sequences, kv_use)


RAMP = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("most", [360, 512, 1024])
def test_a_constant_number_of_sequences_is_read_with_the_ramp_before_it(most: int) -> None:
    found = StepCurve(most)
    for n in RAMP:
        run(found, n, FIXED_S + EACH_S * n, seconds=3.0, shared=0.0)
    for _ in range(10):  # far more samples than one bin keeps
        run(found, 300, FIXED_S + EACH_S * 300, seconds=20.0)
    assert found.ceiling() == pytest.approx(PRESENT * most / (FIXED_S + EACH_S * most), rel=0.05)


def test_half_as_many_more_sequences_are_contrast_enough_nearby() -> None:
    assert curve(512, [200, 300]).ceiling() == pytest.approx(
        PRESENT * 512 / (FIXED_S + EACH_S * 512), rel=0.05
    )
    assert curve(1024, [300]).ceiling() is None, "one level says nothing about three times as many"


@pytest.mark.parametrize("longer", [1, 2, 4])
def test_the_ceiling_follows_the_length_of_sequences(longer: int) -> None:
    """Those of the ramp were short; the cost of the KV cache grows with length."""
    found = StepCurve(1024)
    for n in RAMP:
        use = SHARE * n
        run(found, n, FIXED_S + EACH_S * n + KV_S * use, kv_use=use, shared=0.0)
    use = SHARE * longer * 300
    run(found, 300, FIXED_S + EACH_S * 300 + KV_S * use, kv_use=use, seconds=60.0)
    most = min(1024.0, 1 / (SHARE * longer))
    seconds = FIXED_S + EACH_S * most + KV_S * SHARE * longer * most
    assert found.most == pytest.approx(most)
    assert found.ceiling() == pytest.approx(PRESENT * most / seconds, rel=0.05)


def test_a_rate_of_short_sequences_is_no_ceiling_for_long_ones() -> None:
    found = StepCurve(64)
    run(found, 64, 0.01, kv_use=0.05)
    run(found, 16, 0.01, kv_use=0.95, seconds=60.0)
    ceiling = found.ceiling()
    assert found.most == pytest.approx(16 / 0.95)
    assert ceiling is not None and ceiling < 2000, "64 short ones made 6,400 tokens a second"


@pytest.mark.parametrize("most", [360, 512])
@pytest.mark.parametrize(("shared", "off"), [(0.0, 0.03), (0.6, 0.06), (0.8, 0.12)])
def test_the_ceiling_is_the_one_beside_a_trainer_on_the_same_gpu(
    shared: float, off: float, most: int
) -> None:
    """The share of the GPU that the trainer takes is no unused capacity of the engine."""
    found = StepCurve(most)
    for n in RAMP:
        run(found, n, FIXED_S + EACH_S * n, seconds=3.0, shared=0.0)
    run(found, 300, FIXED_S + EACH_S * 300, seconds=160.0, shared=shared)
    at = most if most > 400 else 300  # nearly all of 360, so what was seen counts
    alone = at / (FIXED_S + EACH_S * at)
    assert found.ceiling() == pytest.approx((1 - shared / 2) * alone, rel=off)


def test_the_ceiling_of_a_run_whose_trainer_began_later_follows_it() -> None:
    """Full before the first step: that rate does not come back."""
    found = StepCurve(512)
    for n in (*RAMP, 500):
        run(found, n, FIXED_S + EACH_S * n, seconds=20.0, shared=0.0)
    assert found.ceiling() == pytest.approx(500 / (FIXED_S + EACH_S * 500), rel=0.03)
    for _ in range(8):
        for n in (200, 300, 430):
            run(found, n, 2 * (FIXED_S + EACH_S * n), seconds=8.0, shared=0.0)
    assert found.ceiling() == pytest.approx(430 / (FIXED_S + EACH_S * 430) / 2, rel=0.03)


def test_few_sequences_with_their_cost_tell_the_rate_at_many() -> None:
    ceiling = curve(512, [1, 2, 4, 8, 16, 32, 60]).ceiling()
    assert ceiling == pytest.approx(PRESENT * 31_300, rel=0.1)


@pytest.mark.parametrize("sequences", [[1], [1, 2], [1, 2, 4], [4] * 3, [60], [40, 60]])
def test_an_engine_that_had_few_requests_or_always_as_many_has_no_known_ceiling(
    sequences: list[int],
) -> None:
    assert curve(1024, sequences).ceiling() is None


def test_an_engine_whose_steps_do_not_grow_with_sequences_has_no_known_ceiling() -> None:
    assert curve(1024, [1, 4, 16, 40], fixed=0.05, each=1e-5).ceiling() is None
    assert curve(8192, [1, 4, 16, 60, 120]).ceiling() is None, "68 times as many as were seen"


def test_an_engine_that_was_full_has_the_best_rate_seen() -> None:
    assert curve(64, [60]).ceiling() == pytest.approx(
        PRESENT * 60 / (FIXED_S + EACH_S * 60), rel=0.03
    )


@pytest.mark.parametrize("seen", [[1, 4, 16, 60], [32, 64, 128, 256, 440]])
def test_the_knee_is_where_little_of_the_rate_is_left_to_gain(seen: list[int]) -> None:
    knee = curve(1024, seen).knee()
    assert knee == pytest.approx((1 / KNEE_GAIN - 1) * FIXED_S / EACH_S, rel=0.1)
    rate = knee / (FIXED_S + EACH_S * knee)
    assert rate == pytest.approx((1 - KNEE_GAIN) / EACH_S, rel=0.03)
    assert curve(256, seen).knee() == 256, "no more can run at a time"


def test_slow_steps_above_a_size_end_the_knee_there() -> None:
    """Above 512 sequences there are no CUDA graphs, and a step takes four times as long."""
    found = curve(1024, [32, 64, 128, 256, 400, 500])
    for n in (700, 1000):
        for _ in range(200):
            found.add(n, 4 * (FIXED_S + EACH_S * n))
    assert 350 <= found.knee() <= 512


@pytest.mark.parametrize("seen", [[60], [40, 60], [1, 2, 4]])
def test_a_few_numbers_of_sequences_tell_no_knee(seen: list[int]) -> None:
    assert curve(1024, seen).knee() is None


def test_a_cache_that_holds_fewer_sequences_lowers_the_ceiling() -> None:
    found = curve(1024, [1, 4, 16, 60])
    at_1024 = found.ceiling()
    for _ in range(1000):
        found.hold(50, 0.5)
    assert found.most == pytest.approx(100)
    at_100 = found.ceiling()
    assert at_100 == pytest.approx(PRESENT * 100 / (FIXED_S + EACH_S * 100), rel=0.1)
    assert at_1024 is not None and at_100 < at_1024


def test_a_few_steps_say_nothing() -> None:
    found = StepCurve(8)
    for _ in range(390):
        found.add(8, 0.01)
    assert found.ceiling() is None
    for _ in range(20):
        found.add(8, 0.01)
    assert found.ceiling() == pytest.approx(800)


@pytest.mark.parametrize("tokens_a_step", [1, 3])
def test_tokens_that_come_in_lumps_are_as_many_a_step(tokens_a_step: int) -> None:
    """The engine holds tokens back, and with speculation makes several a step."""
    now = 10.0
    capacity = EngineCapacity(64)
    for step in range(400):
        now += 0.01
        come = 16 * 8 * tokens_a_step if step % 8 == 7 else 0
        capacity.step(Step(0, now, come, running=16, waiting=0, kv_use=0.2))
    assert capacity.generated == 400 * 16 * tokens_a_step
    (point,) = [p for each in capacity._curve._bins.values() if (p := each.point())][-1:]
    assert point.sequences == pytest.approx(16 * tokens_a_step, rel=0.1)


@pytest.mark.parametrize("late", [False, True])
def test_a_pause_and_the_tokens_that_it_releases_are_no_step(late: bool) -> None:
    """A busy server reads the last step before the pause only after it."""
    now = 10.0
    capacity = EngineCapacity(512)
    for running in (8, 16, 32, 64, 128, 256, 300):
        for number in range(3600):
            now += FIXED_S + EACH_S * running
            step = Step(0, now, 0, running=running, waiting=0, kv_use=running / 2000)
            if number % 12 != 11:
                capacity.step(step)
                continue
            now += 1.0
            released = Step(0, now, 12 * running, running=None, waiting=None, kv_use=None)
            read = [step, released]
            if late:
                capacity.resumes(now)
            for each in read:
                capacity.step(each)
            if not late:
                capacity.resumes(now)
    assert capacity.ceiling() == pytest.approx(512 / (FIXED_S + EACH_S * 512), rel=0.05)
    assert capacity.load().running == 300


def test_the_last_sequences_may_end_with_tokens_of_many_steps() -> None:
    now = 10.0
    capacity = EngineCapacity(64)
    for _ in range(400):
        for left in (8, 8, 8, 0):
            now += 0.01
            tokens = 0 if left else 8 * 4
            capacity.step(Step(0, now, tokens, running=left, waiting=1, kv_use=0.1))
    assert capacity.ceiling() in (None, pytest.approx(800, rel=0.05))
    assert max(capacity._curve._bins) == 6, "never more than eight sequences"


def test_the_time_without_work_is_no_step() -> None:
    now = 10.0
    capacity = EngineCapacity(8)
    for _ in range(450):
        now += 5.0  # without work
        capacity.step(Step(0, now, 8, running=8, waiting=0, kv_use=0.1))
        now += 0.01
        capacity.step(Step(0, now, 8, running=0, waiting=0, kv_use=0.0))
    assert capacity.generated == 7200
    assert capacity.ceiling() == pytest.approx(800)


def test_engines_with_data_parallelism_add_up() -> None:
    now = 10.0
    capacity = EngineCapacity(8)
    for _ in range(450):
        now += 0.01
        for engine in (0, 1):
            capacity.step(Step(engine, now, 8, running=8, waiting=0, kv_use=0.1))
    assert capacity.ceiling() == pytest.approx(1600)


async def test_steps_are_heard_as_vllm_tells_them() -> None:
    heard: list[Step] = []
    loggers: list[Any] = []
    sent = iter([1.5, 2.5, 3.0])

    async def read() -> Any:
        return SimpleNamespace(timestamp=next(sent))

    core = SimpleNamespace(get_output_async=read)
    engine = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=loggers), engine_core=core)
    assert compat.hear_steps(engine, heard.append)
    scheduler = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.25)
    for stats, tokens, number in ((scheduler, 3, 1), (scheduler, None, 1), (None, 2, 0)):
        assert (await core.get_output_async()).timestamp
        made = None if tokens is None else SimpleNamespace(num_generation_tokens=tokens)
        loggers[0].record(stats, made, mm_cache_stats=None, engine_idx=number)
    loggers[0].log()
    loggers[0].record_sleep_state(1, 2)
    assert heard == [
        Step(1, 1.5, 3, 3, 1, 0.25),
        Step(1, 2.5, 0, 3, 1, 0.25),  # its tokens are held back
        Step(0, 3.0, 2, None, None, None),
    ]
    assert not compat.hear_steps(SimpleNamespace(logger_manager=None), heard.append), (
        "--disable-log-stats"
    )
