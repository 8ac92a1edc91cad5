"""Shares of a batch by weight: as numbers, and with two environments of different speed at the real
run-api."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

from atropos_api.batches import DEAD_AFTER_S, LEND_S, Shares
from atropos_common.net.http import AFTER_HEADER, BATCH_HEADER
from atropos_envs.hosting.runner import hosted
from atropos_envs.tiny_model import make_tokenizer
from tests.atropos_envs.support import Engine, begin_at_once, run_api, trainer_registration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def envs(*weights: float, group: int = 4) -> list[dict[str, Any]]:
    """Registrations as atroposlib keeps them."""
    return [
        {
            "registered_id": at,
            "desired_name": f"env{at}",
            "weight": weight,
            "connected": True,
            "group_size": group,
        }
        for at, weight in enumerate(weights)
    ]


def groups(number: int, count: int, size: int = 4) -> list[dict[str, Any]]:
    return [{"env_id": number, "tokens": [[1]] * size} for _ in range(count)]


def _batches(
    shares: Shares, known: list[dict[str, Any]], queue: list[Any], size: int, count: int
) -> list[Counter[int]]:
    """Form `count` batches of a queue that is never short of anybody's groups."""
    made = []
    for _ in range(count):
        batch = shares.form(queue, size, known)
        assert batch and sum(len(group["tokens"]) for group in batch) == size
        made.append(Counter(group["env_id"] for group in batch))
    return made


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0, 1.0), (0.5, 0.2, 0.2, 0.1)])
def test_over_some_batches_each_has_its_share_by_weight(weights: tuple[float, ...]) -> None:
    known, shares = envs(*weights), Shares()
    queue = [group for at in range(len(weights)) for group in groups(at, 40)]
    made = sum(_batches(shares, known, queue, 32, 30), Counter[int]())
    for at, weight in enumerate(weights):
        assert abs(made[at] - 240 * weight / sum(weights)) <= 2, made


def test_a_batch_waits_for_a_share_and_places_are_what_the_next_batches_take() -> None:
    known, shares = envs(3.0, 1.0), Shares()
    queue = groups(1, 40) + groups(0, 5)
    assert shares.form(queue, 32, known) is None, "six of eight groups are the slow one's"
    for number, places in ((0, 12), (1, 4)):
        found = shares.places(number, queue, [], 32, 2, known, barren=False)
        assert found is not None and found.places == places
    queue += groups(0, 1)
    batch = shares.form(queue, 32, known)
    assert batch is not None and Counter(group["env_id"] for group in batch) == {0: 6, 1: 2}
    assert batch == [group for group in queue if any(group is each for each in batch)], (
        "the oldest first"
    )


def test_places_never_fall_short_of_what_the_next_batch_asks_for() -> None:
    """Else the batch would wait for ever: the shares of three in eight groups differ from batch to
    batch."""
    known, shares = envs(1.0, 1.0, 1.0), Shares()
    for _ in range(20):
        queue: list[Any] = []
        for number in range(3):
            found = shares.places(number, queue, [], 32, 1, known, barren=False)
            assert found is not None
            queue += groups(number, found.places)
        assert len(queue) == 8 and shares.form(queue, 32, known)


def test_other_sizes_and_environments_that_are_gone() -> None:
    known, shares = envs(1.0, 1.0, 1.0), Shares()
    known[1]["group_size"], known[2]["connected"] = 16, False
    queue = groups(0, 9) + groups(1, 2, 16) + groups(2, 2)
    batch = shares.form(queue, 32, known)
    assert batch is not None and Counter(group["env_id"] for group in batch) == {2: 2, 1: 1, 0: 2}
    assert shares.form(groups(0, 9) + groups(1, 2, 16), 30, known) == [], (
        "these never add up: the old rules decide"
    )


def test_nobody_waits_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    known, shares = envs(1.0, 1.0), Shares(clock)
    queue = groups(1, 8)
    assert shares.form(queue, 32, known) is None
    clock.now += LEND_S + 1
    assert not shares.is_shared(queue, known), (
        "its share is lent, and the old rules take what is there"
    )
    assert not shares.is_shared(queue, known)
    assert capsys.readouterr().out.count("env0 sent no group in 120 s") == 1
    queue += groups(0, 1)
    assert shares.is_shared(queue, known) and shares.form(queue, 32, known) is None, (
        "it sends again"
    )

    known = envs(1.0, 1.0)
    shares.places(0, queue, [], 32, 1, known, barren=True)
    assert not shares.is_shared(groups(1, 8), known), "nothing of what it makes can be sent"
    shares.places(0, queue, [], 32, 1, known, barren=False)
    assert shares.is_shared(groups(1, 8), known)
    clock.now += DEAD_AFTER_S + 1
    assert not shares.is_shared(groups(1, 8), known), "its process is dead or stands still"


def test_an_environment_that_no_batch_waits_for_is_not_reported_as_awaited() -> None:
    clock = Clock()
    known, shares = envs(1.0, 1.0), Shares(clock)
    queue = groups(1, 8)

    def awaited(*, barren: bool = False) -> bool:
        found = shares.places(0, queue, [], 32, 1, known, barren=barren)
        assert found is not None
        return found.awaited

    assert not awaited(), "no batch has been short of its groups"
    assert shares.form(queue, 32, known) is None
    assert awaited()
    assert not awaited(barren=True), "none of its groups can be sent"
    assert awaited(), "it can send again, and the batch is still short"
    clock.now += LEND_S + 1
    assert not awaited(), "the others have its share"
    queue += groups(0, 1)
    assert not awaited(), "its group ends the wait"
    assert shares.form(queue, 32, known) is None
    assert awaited()


# Two environments at the real run-api

GROUP, BATCH, JUDGE_S = 4, 32, 0.3


class Asks(BaseEnv):
    """Asks the engine for a group; a judge takes its time, and sometimes fails."""

    seconds, fails = 0.0, 0.0

    async def setup(self) -> None:
        self.dice = random.Random(0)

    async def get_next_item(self) -> int:
        return self.dice.randint(1, 9)

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=f"{item}+1=", n=GROUP, max_tokens=4, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        await asyncio.sleep(self.seconds)
        if self.dice.random() < self.fails:
            raise RuntimeError("judge: 503")
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": list(range(GROUP)),
        }, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


class Judged(Asks):
    seconds, fails = JUDGE_S, 0.2


def _env(
    env_class: type[BaseEnv], name: str, folder: Path, api: str, engine: str, **fields: Any
) -> Any:
    config = {
        "group_size": GROUP,
        "tokenizer_name": str(folder),
        "rollout_server_url": api,
        "use_wandb": False,
        "total_steps": 10**6,
        "wandb_name": name,
        "max_num_workers": 64,
    }
    server = APIServerConfig(
        base_url=engine, api_key="x", model_name=str(folder), server_type="vllm"
    )
    env = hosted(env_class)(BaseEnvConfig(**config | fields), [server])
    env.component = name
    return env


async def _consume(http: aiohttp.ClientSession, api: str, batches: int) -> Counter[str]:
    """Take batches as the trainer does; count groups by environment."""
    after, came = "", Counter[str]()
    for _ in range(batches):
        while True:
            async with http.get(f"{api}/batch", headers={AFTER_HEADER: after}) as response:
                if batch := (await response.json()).get("batch"):
                    break
        after = response.headers[BATCH_HEADER]
        came.update(group["generation_params"]["env"] for group in batch)
        await asyncio.sleep(0.02)
    return came


@pytest.mark.parametrize("ahead", [1, 3])
async def test_a_slow_environment_beside_a_fast_one_has_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Weights 3 and 1. The fast one filled every batch, and the workers of the slow one were ended
    again and again."""
    begin_at_once(monkeypatch)
    make_tokenizer().save_pretrained(tmp_path)
    async with (
        run_api(keeps=True) as api,
        Engine().running() as engine,
        aiohttp.ClientSession() as http,
    ):
        await http.post(f"{api}/register", json=trainer_registration(BATCH))
        await http.get(f"{api}/batch")
        both = [
            _env(
                Judged,
                "judge",
                tmp_path,
                api,
                engine,
                inference_weight=3.0,
                max_batches_offpolicy=ahead,
            ),
            _env(
                Asks,
                "fast",
                tmp_path,
                api,
                engine,
                inference_weight=1.0,
                max_batches_offpolicy=ahead,
            ),
        ]
        serving = [asyncio.create_task(env.env_manager()) for env in both]
        try:
            came = await asyncio.wait_for(_consume(http, api, 14), 40)
        finally:
            for task in serving:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
    judge, fast = (env._worker_meter.take()["awaited"] for env in both)
    # Means of about 25 samples: on a busy machine the judge's part is smaller.
    assert judge > 0.25 and fast < judge / 2, "each knows whether the batch waits for it"
    share = came["judge"] / came.total()
    assert 0.75 * 0.8 <= share <= 0.75 * 1.2 and 1 - share >= 0.25 * 0.8, came
