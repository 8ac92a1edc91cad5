"""Slots in run-api's queue and spare groups: as numbers, then with a plain environment at the real
run-api."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from atroposlib.envs.base import EvalHandlingEnum

from atropos_common.net.http import AFTER_HEADER, BATCH_HEADER
from atropos_common.protocol.records import FLAT, SURPLUS
from atropos_envs.hosting.queue_slots import PendingGroup, QueueSlots, WorkerMeter, enough
from tests.atropos_envs.support import begin_at_once, plain_env, run_api, trainer_registration


@pytest.mark.parametrize(("useful", "share"), [(1, 0.75), (16, 0.5), (16, 0.8), (4, 0.95)])
def test_enough_groups_give_the_useful_ones_in_five_of_six_cases(useful: int, share: float) -> None:
    dice = random.Random(0)
    groups = enough(useful, share)
    hits = sum(sum(dice.random() >= share for _ in range(groups)) >= useful for _ in range(4000))
    assert 0.78 < hits / 4000 < 0.97
    assert enough(useful, 0.0) == useful and enough(0, share) == enough(-2, share) == 0


def test_means_are_over_the_samples_that_know_a_value() -> None:
    meter = WorkerMeter()
    meter.add(4, None, awaited=None, in_engine=None)
    meter.add(8, None, awaited=True, in_engine=30.0)
    assert meter.take() == {"workers": 6.0, "awaited": 1.0, "in_engine": 30.0} == meter.take()
    meter.add(2, None, awaited=None, in_engine=None)
    assert meter.take() == {"workers": 2.0}


def _looked(
    places: QueueSlots, *, queued: int = 0, step: int = 0, ahead: int = 1, **more: int
) -> list[PendingGroup]:
    return places.update(
        queued=queued, places=2 * ahead, ahead=ahead, step=step, **{"came": 0, "coming": 0} | more
    )


async def _groups(places: QueueSlots, count: int) -> list[PendingGroup]:
    return [places.begin(at, str(at))[0] for at in range(count)]


async def test_a_spare_group_waits_for_an_owner_to_come_out_flat_however_quick_it_is() -> None:
    places = QueueSlots()
    _looked(places)
    first, second, third, fourth = await _groups(places, 4)
    assert [slot.has_slot for slot in (first, second, third, fourth)] == [True, True, False, False]
    assert (places.all, places.free, places.waiting) == (2, 0, 0)
    fourth.made = True
    assert places.waiting == 1, "made, and without a place"
    waits = asyncio.create_task(fourth.wait_for_slot())
    await asyncio.sleep(0)
    places.end(first)
    assert third.has_slot and not fourth.has_slot, "in the order in which they began"
    assert not places.sent(second, 1) and places.open_slots == 1
    places.end(third)
    assert await waits and not places.full
    assert places.waiting == 0
    places.sent(fourth, 1)
    assert places.full and places.free == 0
    _looked(places, step=1)
    assert places.free == 2


async def test_spare_groups_are_dropped_with_the_last_place() -> None:
    places = QueueSlots()
    _looked(places)
    first, second, third = await _groups(places, 3)
    places.sent(first, 1)
    assert places.sent(second, 1) == [third] and not await third.wait_for_slot(), (
        "the next place is a batch later"
    )


async def test_spare_groups_are_for_the_slots_that_flat_groups_leave() -> None:
    """Without them a run with two batches ahead and 80 % flat groups was half as fast."""
    wanted = {}
    for ahead in (1, 4):
        places = QueueSlots()
        _looked(places, ahead=ahead)
        for flat in (True, False) * 20:
            (group,) = await _groups(places, 1)
            places.finish(group, useful=int(not flat), flat=flat)
            places.end(group)
        wanted[ahead] = (places.wanted(), places.wanted(most=20), places.open_slots)
    assert wanted[1] == (7, 7, 2), "in most cases two of them are useful"
    assert wanted[4] == (16, 16, 8), "eight on average: another begins while the trainer steps"
    assert places.wanted(most=5) == 5


async def test_with_several_batches_ahead_groups_get_slots_once_they_are_finished() -> None:
    """Finished spare groups waited for a slot until they were too late: 10 % of GSM8K's tokens."""
    places = QueueSlots()
    _looked(places, ahead=2)
    groups = await _groups(places, 6)
    assert not any(group.has_slot for group in groups) and places.waiting == 0
    for group in reversed(groups):
        assert places.finish(group, useful=1, flat=False) == []
    assert [group.has_slot for group in groups] == [False] * 2 + [True] * 4
    for group in groups[2:]:
        places.sent(group, 1)
    assert places.full and places.waiting == 2 and places.wanted() == 2
    assert _looked(places, queued=3, step=1, ahead=2) == []
    assert [group.has_slot for group in groups[:2]] == [True, False], "the older one first"
    places.sent(groups[0], 1)
    assert _looked(places, queued=4, step=2, ahead=2) == []
    assert _looked(places, queued=4, step=3, ahead=2) == [groups[1]]
    assert not await groups[1].wait_for_slot()


async def test_several_groups_of_one_rollout_take_a_slot_each() -> None:
    """They filled the queue with half as many again as it has slots."""
    places = QueueSlots()
    _looked(places, ahead=2)
    first, second, third = await _groups(places, 3)
    for group in (first, second, third):
        places.finish(group, useful=3, flat=False)
    assert [group.has_slot for group in (first, second, third)] == [True, True, False]
    for group in (first, first, first, second):
        places.sent(group, 1)
    assert places.open_slots == 0 and places.waiting == 1, "two of the second are on their way"
    places.sent(second, 1), places.sent(second, 1)
    assert _looked(places, queued=2, step=1, ahead=2) == [] and third.has_slot


async def test_a_group_that_is_sent_after_its_end_does_not_wait() -> None:
    """A task of the environment's own sends it; nothing decided it, and the task hung."""
    places = QueueSlots()
    _looked(places, ahead=2)
    (group,) = await _groups(places, 1)
    places.end(group)
    assert places.finish(group, useful=1, flat=False) == []
    assert await group.wait_for_slot()


async def test_the_flat_share_is_of_as_many_groups_as_are_in_flight() -> None:
    places = QueueSlots()
    _looked(places, ahead=2)
    for flat in [False] * 100 + [True] * 100:
        (group,) = await _groups(places, 1)
        places.finish(group, useful=int(not flat), flat=flat)
        places.end(group)
    assert places.flat_share == 64 / 65
    await _groups(places, 200)
    assert places.flat_share == 100 / 201


async def test_a_group_that_took_long_waits_as_long_as_a_quick_one() -> None:
    places = QueueSlots()
    _looked(places, ahead=2)
    slow, *others = await _groups(places, 5)
    for group in others:
        places.finish(group, useful=1, flat=False)
        places.sent(group, 1)
    _looked(places, queued=4, step=5, ahead=2)
    places.finish(slow, useful=1, flat=False)
    assert places.full and places.waiting == 1
    assert _looked(places, queued=0, step=6, ahead=2) == [] and await slow.wait_for_slot()


async def test_what_run_api_says_while_groups_are_on_their_way_does_not_move_what_is_known() -> (
    None
):
    places = QueueSlots()
    _looked(places)
    assert places.open_slots == 2
    (slot,) = await _groups(places, 1)
    places.sent(slot, 1)
    for queued, came, coming in ((0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 1)):
        _looked(places, queued=queued, came=came, coming=coming)
        assert places.open_slots == 1, (queued, came, coming)
    _looked(places, queued=2)
    assert places.open_slots == 0, "another environment's"


# A plain environment at run-api

GROUP, BATCH = 4, 16


class World:
    """Rollouts that take a moment and come out flat by a rule."""

    def __init__(self, flat: float = 0.75) -> None:
        self.dice = random.Random(0)
        self.flat, self.version = flat, 0
        self.began: list[tuple[float, int]] = []
        self.evaluating = False
        self.seconds: Callable[[], float] = lambda: 0.02
        self.fails = False

    async def group(self, item: int) -> dict[str, Any]:
        assert not self.evaluating
        self.began.append((time.monotonic(), item))
        if self.fails:
            raise ValueError("no rollout")
        version, flat, seconds = self.version, self.dice.random() < self.flat, self.seconds()
        await asyncio.sleep(seconds)
        return {
            "tokens": [[3, version, int(seconds > 0.1)]] * GROUP,
            "masks": [[-100, version, 1]] * GROUP,
            "scores": [0.0 if flat else float(at) for at in range(GROUP)],
        }


def _env(world: World, folder: Path, api: str, **fields: Any) -> Any:
    async def evaluate() -> None:
        world.evaluating = True
        await asyncio.sleep(0.2)
        world.evaluating = False

    config = {
        "group_size": GROUP,
        "max_num_workers": 64,
        "eval_handling": EvalHandlingEnum.NONE,
        "wandb_name": "plain",
    }
    return plain_env(folder, api, world.group, evaluate, **config | fields)


class Trainer:
    """Fetches a batch ahead, takes a moment for each, and gives the rollouts a new version."""

    def __init__(self, http: aiohttp.ClientSession, api: str, world: World) -> None:
        self.http, self.api, self.world = http, api, world
        self.after = ""
        self.lags: list[int] = []
        self.said: set[int] = set()
        """`max_batches_offpolicy` in the groups."""
        self.long: list[int] = []

    async def fetch(self) -> list[dict[str, Any]]:
        while True:
            async with self.http.get(
                f"{self.api}/batch", headers={AFTER_HEADER: self.after}
            ) as response:
                if batch := (await response.json()).get("batch"):
                    self.after = response.headers[BATCH_HEADER]
                    return list(batch)

    async def train(self, steps: int, step_s: float = 0.03) -> float:
        """Return the seconds of `steps` steps, after a first one that does not count."""
        ahead = asyncio.create_task(self.fetch())
        began = 0.0
        for _ in range(steps + 1):
            batch = await ahead
            began = began or time.monotonic()
            ahead = asyncio.create_task(self.fetch())
            self.lags += [self.world.version - group["tokens"][0][1] for group in batch]
            self.long += [group["tokens"][0][2] for group in batch]
            self.said |= {group["generation_params"]["max_batches_offpolicy"] for group in batch}
            await asyncio.sleep(step_s)
            self.world.version += 1
        ahead.cancel()
        return time.monotonic() - began


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Any]]:
    """Runs an environment against a trainer; the trainer, the environment, and what `train`
    gave."""
    begin_at_once(monkeypatch)

    async def run(
        world: World, *, steps: int = 8, refill: bool = True, **fields: Any
    ) -> tuple[Trainer, Any, float]:
        monkeypatch.setenv("ATROPOS_REFILL", str(int(refill)))
        async with run_api(keeps=True) as api, aiohttp.ClientSession() as http:
            async with http.post(f"{api}/register", json=trainer_registration(BATCH)):
                pass
            trainer = Trainer(http, api, world)
            async with http.get(f"{api}/batch"):
                pass
            env = _env(world, tmp_path / "model", api, **fields)
            serving = asyncio.create_task(env.env_manager())
            try:
                seconds = await asyncio.wait_for(trainer.train(steps), 25) if steps else 0.0
                if not steps:
                    await asyncio.sleep(1.5)
            finally:
                serving.cancel()
                with suppress(asyncio.CancelledError):
                    await serving
        return trainer, env, seconds

    return run


async def test_flat_groups_are_replaced_at_once_and_no_group_is_older(
    stack: Callable[..., Any],
) -> None:
    trainer, env, quick = await stack(World())
    before, _, slow = await stack(World(), refill=False)
    assert quick < slow / 3
    assert max(trainer.lags) == 1 >= max(before.lags), "max_batches_offpolicy"
    assert (
        env.tally.left_out[FLAT] > env.tally.sent and env.tally.left_out[SURPLUS] < env.tally.sent
    )


async def test_lag_follows_max_batches_offpolicy_where_it_is_larger(
    stack: Callable[..., Any],
) -> None:
    trainer, _, _ = await stack(World(0.5), steps=12, max_batches_offpolicy=2)
    # Two batches in the queue, and a step that may train while a group is made.
    assert 2 <= max(trainer.lags) <= 3 and trainer.said == {2}


@pytest.mark.parametrize("ahead", [1, 2, 4])
async def test_long_rollouts_are_trained_as_often_as_short_ones(
    stack: Callable[..., Any], ahead: int
) -> None:
    world = World(0.5)
    world.seconds = lambda: world.dice.choice([0.15, 0.01])
    trainer, _, _ = await stack(world, steps=30, max_batches_offpolicy=ahead)
    assert 0.35 < sum(trainer.long) / len(trainer.long) < 0.65


async def test_what_fails_is_not_tried_again_faster_than_before(stack: Callable[..., Any]) -> None:
    world = World()
    world.fails = True
    await stack(world, steps=0)
    assert 0 < len(world.began) <= 4 * 16, (
        "as many groups as there are places, a round every tenth of a second"
    )


async def test_no_rollout_begins_while_an_evaluation_stops_training(
    stack: Callable[..., Any],
) -> None:
    """`World.group` fails where one does."""
    world = World(0.5)
    trainer, env, _ = await stack(
        world, steps=8, eval_handling=EvalHandlingEnum.STOP_TRAIN, steps_per_eval=2
    )
    assert not env.tally.failures and max(trainer.lags) <= 1


@pytest.mark.parametrize(
    ("queued", "demand"), [(0, 1.0), (16, 1.0), (32, 1.0), (48, 0.5), (64, 0.0), (80, 0.0)]
)
def test_a_trainer_that_falls_behind_lowers_the_demand(queued: int, demand: float) -> None:
    """Batches of 16 groups: one trains and one waits; what is beyond that only gets older."""
    slots = QueueSlots()
    slots.update(queued=queued, came=0, coming=0, places=112, ahead=7, step=0)
    assert slots.demand == demand
