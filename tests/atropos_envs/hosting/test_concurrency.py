"""The number of sequences in flight finds the knee of an engine whose curve is known, and stays
there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atropos_common.protocol.bridge import EngineLoad
from atropos_common.system.run_dir import ENV_AHEAD, ENV_CONCURRENCY, ENV_ENGINE_SHARE
from atropos_envs.hosting.concurrency import (
    Concurrency,
    GroupMeter,
    LoadReader,
    Targets,
    batches_ahead,
    from_environment,
)
from vllm_server.capacity import KNEE_GAIN, StepCurve

FIXED_S, EACH_S = 1.83e-3, 2.92e-5
"""A 0.5B model on one H100."""
KNEE = (1 / KNEE_GAIN - 1) * FIXED_S / EACH_S
"""833 sequences."""


@dataclass
class Engine:
    """An engine with a known cost of a step, whose curve is measured as a server measures it."""

    slots: int = 1024
    cache: float = float("inf")
    """Sequences that its KV cache holds."""
    slowed: float = 0.0
    """Share of the time in which a trainer on the same GPU doubles a step's time."""
    curve: StepCurve = field(init=False)
    full_s: int = 0
    tokens: int = 0
    steps_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.curve = StepCurve(self.slots)

    def second(self, asked: float, beside: float = 0.0) -> EngineLoad:
        """Run `asked` sequences for a second, beside those of another engine on the same GPU."""
        running = int(min(asked, self.slots, self.cache))
        self.full_s += int(asked > self.cache)
        spent = 0.0
        while spent < 1.0:
            one = (FIXED_S + EACH_S * (running + beside)) * self.rng.uniform(0.98, 1.02)
            one *= 2.0 if self.rng.random() < self.slowed else 1.0
            self.curve.add(running, one)
            self.tokens += running
            spent += one
        self.steps_s += spent
        return EngineLoad(
            running=running,
            waiting=int(max(0.0, min(asked, self.cache) - self.slots)),
            kv_use=min(1.0, running / self.cache),
            generated_tokens=self.tokens,
            steps_s=self.steps_s,
            slots=self.slots,
            knee=self.curve.knee(),
        )


def run(
    engine: Engine, target: Concurrency, seconds: int, limit: float = float("inf")
) -> list[float]:
    """Targets after each second; no more than `limit` sequences are ever in flight."""
    found = []
    for now in range(seconds):
        own = min(target.target, limit)
        target.look(engine.second(own), min(own, engine.slots), float(now))
        found.append(target.target)
    return found


@pytest.mark.parametrize("slowed", [0.0, 0.3])
@pytest.mark.parametrize("first", [4, 16, 32])
def test_it_finds_the_knee_within_a_minute_and_stays(first: int, slowed: float) -> None:
    target = Concurrency(first, ahead=4)
    targets = run(Engine(slowed=slowed), target, 300)
    # The slots end a trial at 1.2 times the knee.
    assert targets[59] == pytest.approx(KNEE, rel=0.25)
    assert median(targets[60:]) == pytest.approx(KNEE, rel=0.2)
    assert target.phase == "knee"
    assert len(set(targets[60:])) <= 3, "it hardly moves"
    assert max(targets) < 1.3 * KNEE


def told_too_low(engine: Engine, target: Concurrency, seconds: range) -> list[float]:
    """Targets after each second of an engine that takes 90 sequences for its knee, and whose rate
    is 4 % higher or lower from one second to the next."""
    found = []
    for now in seconds:
        load = engine.second(target.target * engine.rng.uniform(0.96, 1.04))
        target.look(load.model_copy(update={"knee": 90.0}), target.target, float(now))
        found.append(target.target)
    return found


def test_a_knee_that_is_far_too_low_is_corrected() -> None:
    """In one of two runs on H200s an engine took 91 sequences for its knee, and made 16,500 tokens
    a second instead of 22,500."""
    target, engine = Concurrency(16, ahead=8), Engine(slots=512)
    targets = told_too_low(engine, target, range(900))
    assert targets[90] == median(targets) == target.knee == 324.0
    before = engine.tokens
    targets = told_too_low(engine, target, range(900, 1800))
    best = 512 / (FIXED_S + EACH_S * 512)
    assert engine.tokens - before > 0.9 * 900 * best
    assert sum(each != target.knee for each in targets) < 0.12 * len(targets), "trials are rare"


@dataclass
class Flat:
    """An engine that makes as many tokens with any number of sequences, and says 90 is its knee."""

    slots: int = 512
    busy_s: Callable[[int], float] = lambda now: 1.0
    """Seconds of its steps in each second; the rest is a pause."""
    tokens: float = 0.0
    steps_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def second(self, now: int) -> EngineLoad:
        self.steps_s += (seconds := self.busy_s(now))
        self.tokens += 10_000 * seconds * self.rng.gauss(1.0, 0.2)
        return EngineLoad(
            running=64,
            waiting=0,
            kv_use=0.1,
            generated_tokens=int(self.tokens),
            steps_s=self.steps_s,
            slots=self.slots,
            knee=90.0,
        )


@pytest.mark.parametrize("slots", [324, 400, 512, 1024])
def test_a_number_that_is_worth_it_no_more_is_left(slots: int) -> None:
    target, engine = Concurrency(16, ahead=8), Engine(slots=slots)
    told_too_low(engine, target, range(300))
    assert target.target > 300
    flat = Flat(slots, tokens=engine.tokens, steps_s=engine.steps_s)
    targets = []
    for now in range(300, 7200):
        target.look(flat.second(now), target.target, float(now))
        targets.append(target.target)
    assert target.knee is not None and 75 <= target.knee < 120
    assert median(targets) < 120
    assert sum(a != b for a, b in pairwise(targets[3600:])) <= 20, "in an hour"


@pytest.mark.parametrize("pause", [(1, 10), (6, 30), (6, 45), (10, 60)])
def test_the_pauses_of_an_engine_decide_no_trial(pause: tuple[int, int]) -> None:
    lasts, every = pause
    flat = Flat(1024, busy_s=lambda now: 0.0 if now % every < lasts else 1.0)
    target = Concurrency(32, ahead=8)
    targets: list[float] = []
    for now in range(7200):
        target.look(flat.second(now), target.target, float(now))
        targets.append(target.target)
    assert sum(each > 150 for each in targets) < 0.12 * len(targets)


def test_a_trial_compares_with_the_target_and_not_with_less() -> None:
    """For 100 s of every 900 s the trainer is the bound, and a third of the target in flight."""
    target, tokens = Concurrency(32, ahead=8), 0.0
    targets: list[float] = []
    flat = Flat(1024)
    for now in range(7200):
        own = (0.3 if now % 900 < 100 else 1.0) * target.target
        tokens += 20_000 * own / (own + 10.0)
        load = flat.second(now).model_copy(update={"generated_tokens": int(tokens)})
        target.look(load, own, float(now))
        targets.append(target.target)
    assert sum(each > 150 for each in targets) < 0.12 * len(targets)


def test_a_trial_that_only_takes_from_another_engine_fails() -> None:
    """The lag bound lets 150 sequences in flight, for two engines that take 90 for their knee."""
    engines = {"a": Engine(slots=512), "b": Engine(slots=512)}
    targets = Targets(Concurrency(32, ahead=8), list(engines))
    found: list[float] = []
    for now in range(900):
        whole = targets.target
        own = {root: each * min(1.0, 150 / whole) for root, each in targets.targets.items()}
        told = {"knee": 90.0 if now > 40 else None}
        loads = {root: engines[root].second(own[root]).model_copy(update=told) for root in engines}
        targets.look(loads, own, float(now))
        found.append(max(targets.targets.values()))
    assert sum(each > 120 for each in found) < 0.25 * len(found) and found[-1] < 120


def test_an_engine_that_answers_now_and_then_leaves_no_trial_on() -> None:
    engines = {"a": Engine(slots=1024), "b": Engine(slots=1024)}
    targets = Targets(Concurrency(32, ahead=8), list(engines), on_one_gpu=[["a", "b"]])
    found = []
    for now in range(1800):
        own = targets.targets
        loads = {root: engines[root].second(own[root], beside=own[root]) for root in engines}
        loads = {root: load.model_copy(update={"knee": 400.0}) for root, load in loads.items()}
        if now > 100 and now % 12 == 0:
            del loads["b"]
        targets.look(loads, own, float(now))
        found.append(targets.targets["a"])
    assert sum(each > 500 for each in found) < 0.25 * len(found)


def test_a_full_cache_ends_a_trial() -> None:
    target, engine = Concurrency(16, ahead=8), Engine(slots=512, cache=150)
    targets = told_too_low(engine, target, range(600))
    assert engine.full_s < 0.05 * 600
    assert median(targets[60:]) < 150


def test_an_engine_with_few_slots_is_filled_and_not_queued() -> None:
    target = Concurrency(32, ahead=4)
    targets = run(Engine(slots=128), target, 120)
    assert target.phase == "engine full"
    assert min(targets[60:]) >= 0.8 * 128 and max(targets) <= 128


def test_a_small_cache_is_hardly_ever_full() -> None:
    engine = Engine(cache=200)
    target = Concurrency(64, ahead=4)
    targets = run(engine, target, 600)
    assert engine.full_s <= 10
    assert target.phase == "cache full"
    assert min(targets[30:]) > 100


def test_a_publish_that_recomputes_all_that_runs_is_no_full_engine() -> None:
    """Right after it, all requests wait for a moment, and the cache is nearly empty."""
    target, engine = Concurrency(32, ahead=4), Engine()
    for now in range(60):
        load = engine.second(target.target)
        if now % 2:
            load = load.model_copy(update={"running": 3, "waiting": 200, "kv_use": 0.1})
        target.look(load, target.target, float(now))
    assert target.target == pytest.approx(KNEE, rel=0.2)


def test_a_bound_elsewhere_ends_the_rise() -> None:
    """The lag bound allows no more than 100 sequences: a higher target would change nothing."""
    target = Concurrency(64, ahead=1)
    targets = run(Engine(), target, 120, limit=100)
    assert target.phase == "queue slots"
    assert max(targets) <= 100 / 0.8 * 1.5


def test_half_of_an_engine_is_half_of_its_knee() -> None:
    target = Concurrency(64, ahead=4, share=0.5)
    engine = Engine()
    for now in range(120):
        target.look(engine.second(2 * target.target), target.target, float(now))
    assert target.target == pytest.approx(KNEE / 2, rel=0.2)


def test_a_number_of_the_profile_stays() -> None:
    target = Concurrency(300, ahead=4, fixed=True)
    assert set(run(Engine(cache=200), target, 60)) == {300.0}
    assert target.phase == "fixed" and target.knee is None


async def test_an_engine_that_reports_no_load_has_two_batches_in_flight() -> None:
    async def other(request: web.Request) -> web.Response:
        return web.json_response({"error": "no such route"}, status=404)

    app = web.Application()
    app.router.add_get("/engine/load", other)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        reader = LoadReader([f"{server.make_url('/v1')}"], lambda: session)
        assert await reader.read() == {} and reader.has_no_route
        away = LoadReader(["http://127.0.0.1:9/v1"], lambda: session)
        assert await away.read() == {} and not away.has_no_route, "it may only be starting"
    for roots in (["a"], ["a", "b"]):
        target = Targets(Concurrency(32, ahead=8, share=0.5), roots)
        target.without_load(128)
        assert (target.target, target.phase) == (128.0, "fixed")


def test_each_of_two_engines_gets_what_it_can_take() -> None:
    """The first shares its GPU with the trainer: it has a small cache and is slowed down."""
    engines = {"a": Engine(cache=200, slowed=0.5), "b": Engine()}
    targets = Targets(Concurrency(32, ahead=4), list(engines))
    assert targets.targets == {"a": 16.0, "b": 16.0}
    for now in range(300):
        own = {root: min(targets.targets[root], engines[root].cache) for root in engines}
        loads = {root: engine.second(own[root]) for root, engine in engines.items()}
        targets.look(loads, own, float(now))
    assert 100 < targets.targets["a"] <= 200
    assert targets.targets["b"] == pytest.approx(KNEE, rel=0.2)
    assert targets.target == sum(targets.targets.values())
    assert targets.phase == "cache full"
    both = targets.target
    targets.look({"b": loads["b"]}, own, 301.0)
    assert targets.target < both - 100, "nothing is kept in flight for an engine that is away"
    assert targets.phase == "knee"


@dataclass
class Pair:
    """An engine beside the trainer, which slow each other, and one on a GPU of its own."""

    train_s: float
    """Seconds of a step of 64 sequences, with the trainer alone on its GPU."""
    room: bool
    queue: float = 0.0
    steps: float = 0.0
    waited: float = 0.0

    def run(self, seconds: int) -> Targets:
        roots = ("beside", "own")
        targets = Targets(Concurrency(256, ahead=8), roots, roots[:1] if self.room else ())
        for now in range(seconds):
            # A group in the queue takes the place of one in flight.
            free = max(0.0, 512 - 64 * self.queue)
            whole = sum(targets.targets.values())
            own = {root: min(1.0, free / whole) * n for root, n in targets.targets.items()}
            rates = {root: n / (FIXED_S + EACH_S * n) / 2.0 for root, n in own.items()}
            busy = 1.0 if self.queue > 0 else 0.5
            rates["beside"] *= 1.0 - 0.5 * busy
            self.queue += sum(rates.values()) / (512 * 64)
            slower = 1.0 + own["beside"] / 256
            done = min(self.queue, 1.0 / (self.train_s * slower))
            self.waited += 1.0 - done * self.train_s * slower
            self.queue, self.steps = self.queue - done, self.steps + done
            loads = {
                root: EngineLoad(
                    running=int(n), waiting=0, kv_use=0.1, generated_tokens=0, slots=512, knee=400
                )
                for root, n in own.items()
            }
            targets.look(loads, own, float(now))
            targets.look_at_queue(self.queue, int(self.steps), float(now))
        return targets


def test_an_engine_beside_a_busy_trainer_makes_room_for_it() -> None:
    plain, room = Pair(1.2, room=False), Pair(1.2, room=True)
    plain.run(600)
    targets = room.run(600)
    assert room.steps > 1.08 * plain.steps
    assert room.queue < 0.5 * plain.queue, "what waits trains late"
    assert room.waited < 0.05 * 600
    assert targets.phase == "trainer"
    assert targets.targets["beside"] < 0.7 * targets.targets["own"]


def test_an_engine_beside_a_waiting_trainer_generates_all_it_can() -> None:
    targets = (pair := Pair(0.2, room=True)).run(300)
    assert pair.waited > 0.3 * 300
    assert targets.phase != "trainer"
    assert targets.targets["beside"] == targets.targets["own"]


def _pair_on_one_gpu(on_one_gpu: list[list[str]]) -> tuple[dict[str, float], int]:
    """Return the targets of two engines on one GPU, and their tokens in ten minutes."""
    engines = {root: Engine(slots=512) for root in ("a", "b")}
    for running in [128] * 12 + [90] * 4 + [60] * 4 + [30] * 4:
        engines["a"].second(running)  # an evaluation, before the other engine has started
    targets = Targets(Concurrency(32, ahead=8), list(engines), on_one_gpu=on_one_gpu)
    found = []
    for now in range(600):
        own = targets.targets
        found.append(own)
        loads = {
            root: engines[root].second(own[root], beside=own[other])
            for root, other in (("a", "b"), ("b", "a"))
        }
        targets.look(loads, own, float(now))
    settled = {root: median(each[root] for each in found[200:]) for root in engines}
    return settled, sum(load.generated_tokens for load in loads.values())


def test_equal_engines_on_one_gpu_run_equally_many() -> None:
    each, tokens_each = _pair_on_one_gpu([])
    assert sum(each.values()) > 900, "by itself each takes from the other in its trials"
    together, tokens = _pair_on_one_gpu([["a", "b"]])
    assert together["a"] == together["b"] > 200
    assert sum(together.values()) < sum(each.values()), "fewer in flight, for as many tokens"
    assert tokens > 0.94 * tokens_each


def test_a_number_of_the_profile_makes_no_room() -> None:
    targets = Targets(Concurrency(64, ahead=8, fixed=True), ["a"], ["a"])
    for now in range(100):
        targets.look_at_queue(8.0, 10, float(now))
    assert targets.target == 64


def test_an_engine_keeps_its_number_while_another_of_its_gpu_is_away() -> None:
    targets = Targets(Concurrency(32, ahead=8), ["a", "b"], on_one_gpu=[["a", "b"]])
    found = []
    for now in range(320):
        roots = ["a"] if 200 <= now < 280 else ["a", "b"]
        load = EngineLoad(
            running=64, waiting=0, kv_use=0.1, generated_tokens=0, slots=512, knee=64.0
        )
        targets.look(dict.fromkeys(roots, load), targets.targets, float(now))
        found.append((targets.targets["a"], targets.target))
    assert {each for each, _ in found[100:]} == {64.0}
    assert (found[250][1], found[300][1]) == (64.0, 128.0)


def test_what_the_plan_says_becomes_the_target() -> None:
    assert from_environment({}, 128) is None
    auto = from_environment({ENV_CONCURRENCY: "auto", ENV_AHEAD: "4", ENV_ENGINE_SHARE: "0.5"}, 128)
    assert auto == Concurrency(16, 4, 0.5)
    assert from_environment({ENV_CONCURRENCY: "300", ENV_AHEAD: "2"}, 128) == Concurrency(
        300, 2, fixed=True
    )


def test_groups_whose_short_completions_end_early_are_more() -> None:
    meter = GroupMeter(8)
    assert meter.groups(400) == 50
    for _ in range(50):
        meter.add(5 * 60, 60)
    assert meter.groups(400) == 80
    for _ in range(100):
        meter.add(0.0, 60)
    assert meter.groups(400) == 200, "never more than four times as many"


@pytest.mark.parametrize(
    ("groups", "most", "ahead"), [(16, 8, 2), (96, 8, 7), (96, 4, 4), (8, 8, 2)]
)
def test_queue_slots_for_groups_in_flight_and_one_batch(groups: int, most: int, ahead: int) -> None:
    assert batches_ahead(groups, 16, most) == ahead
