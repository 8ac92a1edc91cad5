"""Group counts: run-api's answer decides what is sent; every other group is counted by its
reason."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from atroposlib.api import server as api_module
from atroposlib.envs import base as atropos_base

from atropos_common.protocol.records import (
    FAILED,
    FLAT,
    REFUSED,
    RETURNED_NONE,
    UNSENDABLE,
)
from atropos_envs import EnvFault
from atropos_envs.hosting import engine_client
from atropos_envs.hosting.groups import Unsendable, convert, encoded
from atropos_envs.hosting.registration import refusal
from atropos_envs.hosting.rollout import Rollout, ScoredDataGroup, present
from tests.atropos_envs.support import (
    Engine,
    begin_at_once,
    plain_env,
    run_api,
    trainer_registration,
)


def group(**fields: Any) -> dict[str, Any]:
    return {
        "tokens": [[3, 4], [3, 5, 6]],
        "masks": [[-100, 4], [-100, 5, 6]],
        "scores": [0.0, 1.0],
    } | fields


@pytest.mark.parametrize(
    "scores",
    [
        [np.float32(0), np.float32(1)],
        [np.int64(0), True],
        np.array([0, 1]),
        torch.tensor([0.0, 1.0]),
        [torch.tensor(0.0), torch.tensor([1.0])],
        (0, 1),
    ],
)
def test_scores_of_numpy_and_torch_are_numbers(scores: Any) -> None:
    made = group(scores=scores)
    convert(made)
    assert made["scores"] == [0.0, 1.0] and set(map(type, made["scores"])) == {float}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ([0.5, -0.5], [[0.5, 0.5], [-0.5, -0.5, -0.5]]),
        (np.array([0.5, -0.5]), [[0.5, 0.5], [-0.5, -0.5, -0.5]]),
        ([np.array([1, 2]), [3, 4, 5]], [[1.0, 2.0], [3.0, 4.0, 5.0]]),
        ([1], [[1.0, 1.0]]),
        (None, None),
        ([], []),
    ],
)
def test_an_advantage_of_a_sequence_is_that_of_its_tokens(given: Any, sent: Any) -> None:
    made = group(advantages=given)
    convert(made)
    assert made["advantages"] == sent


def test_arrays_are_sent_as_lists_and_what_an_environment_adds_as_well() -> None:
    made = group(
        tokens=np.array([[3, 4], [3, 5]]),
        masks=[torch.tensor([-100, 4]), (-100, 5)],
        inference_logprobs=[np.array([1.0, -0.5], dtype=np.float32)] * 2,
        overrides=[{"heat": np.float32(0.5)}, {"at": np.arange(2)}],
    )
    convert(made)
    assert json.loads(encoded(made)) == {
        "tokens": [[3, 4], [3, 5]],
        "masks": [[-100, 4], [-100, 5]],
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, -0.5]] * 2,
        "overrides": [{"heat": 0.5}, {"at": [0, 1]}],
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scores": [0.5, "1.0"]}, "scores[1] is a str and not a number"),
        ({"scores": [None, 1.0]}, "scores[0] is a NoneType"),
        ({"scores": None}, "it has no scores"),
        (
            {"tokens": [SimpleNamespace(), [3]]},
            "tokens[0] is a types.SimpleNamespace and not a list of numbers",
        ),
        ({"masks": [[-100, 4.5], [1]]}, "masks[0][1] is a float and not a whole number"),
        ({"advantages": ["high", 1]}, "advantages[0] is a str"),
    ],
)
def test_what_is_no_number_is_named_with_its_place_and_type(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(Unsendable) as caught:
        convert(group(**fields))
    assert words in str(caught.value)


def test_a_field_that_json_cannot_hold_is_named() -> None:
    with pytest.raises(Unsendable, match=r"^images: JSON cannot hold a types\.SimpleNamespace"):
        encoded(group(images=[SimpleNamespace()]))


def test_a_refusal_is_read_in_run_api_s_own_words() -> None:
    body = {"detail": [{"loc": ["body", "advantages", 1], "msg": "Input should be a valid list"}]}
    assert refusal(422, json.dumps(body)).words == "422: advantages.1: Input should be a valid list"
    other = {"detail": [{"loc": ["body", "advantages", 3], "msg": "Input should be a valid list"}]}
    assert refusal(422, json.dumps(body)).kind == refusal(422, json.dumps(other)).kind, (
        "the same field"
    )
    assert refusal(413, '{"error": "too large"}').words == "413: too large"
    assert refusal(500, "Internal Server Error").words == "500: Internal Server Error"


# An environment at the real run-api


def environment(folder: Path, api: str, made: Any, **fields: Any) -> Any:
    """An environment whose `collect_trajectories` returns what `made` gives for its item."""

    async def collect(item: int) -> Any:
        await asyncio.sleep(0.01)
        groups = made(item)
        return await groups if inspect.isawaitable(groups) else groups

    async def evaluate() -> None:
        raise ZeroDivisionError("division by zero")

    return plain_env(
        folder, api, collect, evaluate, **{"group_size": 2, "wandb_name": "theirs"} | fields
    )


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs an environment until `done(env)`."""
    begin_at_once(monkeypatch)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("ATROPOS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("ATROPOS_COMPONENT", "theirs")

    async def run(made: Any, done: Any, **fields: Any) -> Any:
        async with run_api() as api, aiohttp.ClientSession() as http:
            await http.post(f"{api}/register", json=trainer_registration(8))
            await http.get(f"{api}/batch")
            env = environment(tmp_path / "model", api, made, **fields)
            serving = asyncio.create_task(env.env_manager())
            try:
                async with asyncio.timeout(20):
                    while not serving.done() and not done(env):
                        await asyncio.sleep(0.02)
                        await http.get(f"{api}/batch")
                    if serving.done():
                        await serving
            finally:
                serving.cancel()
                with suppress(asyncio.CancelledError, EnvFault):
                    await serving
        return env

    return run


def _counts(tmp_path: Path) -> dict[str, Any]:
    lines = (tmp_path / "run/eval.theirs.jsonl").read_text().splitlines()
    return next(
        record for line in reversed(lines) if (record := json.loads(line))["kind"] == "env_counts"
    )


async def test_a_refused_group_is_left_out_in_run_api_s_words_and_said_once(
    served: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="atropos_envs")
    env = await served(
        lambda item: group(messages=[[{"role": "user"}]] * 2),
        lambda env: (
            env.tally.left_out[REFUSED] >= 4 and (tmp_path / "run/eval.theirs.jsonl").exists()
        ),
    )
    assert env.tally.sent == 0 and not api_module.app.state.queue
    counts = _counts(tmp_path)
    assert counts["sent"] == 0
    assert counts["left_out"] == env.tally.left_out, "the end is counted too"
    assert counts["examples"]["refused"].startswith("422: messages: ")
    assert counts["max_workers"] == env.max_num_workers and counts["group_size"] == 2
    assert (
        0 <= counts["workers"] <= counts["max_workers"]
        and counts["queue_slots"] == env.queue_slots.all > 0
    )
    assert counts["waiting_for_slot"] == 0 and counts["free_slots"] >= 0
    said = [line for line in caplog.messages if "is left out" in line]
    assert len(said) == 1 and "run-api refused it" in said[0] and "messages" in said[0]


async def test_of_a_list_of_groups_run_api_gets_all_that_are_well_formed(served: Any) -> None:
    env = await served(
        lambda item: [group(messages=[[{}]] * 2), group()], lambda env: env.tally.sent >= 4
    )
    assert env.tally.left_out[REFUSED] >= 3


async def test_what_json_cannot_hold_and_none_are_counted(served: Any, tmp_path: Path) -> None:
    made = [
        lambda: None,
        lambda: group(masks=[SimpleNamespace()] * 2),
        lambda: group(images=[object()]),
    ]
    env = await served(
        lambda item: made[item % 3](), lambda env: min(env.tally.left_out.values(), default=0) >= 2
    )
    assert set(env.tally.left_out) == {RETURNED_NONE, UNSENDABLE} and env.tally.sent == 0
    assert env.tally.examples[UNSENDABLE]


async def test_generated_tokens_are_counted_by_the_fate_of_their_group(served: Any) -> None:
    def made(item: int) -> Any:
        # What the engine client adds: 7 tokens, of which the masks of a group keep 3.
        present().tokens += 7
        if item % 4 == 0:
            raise KeyError("ground_truth")
        flat = group(scores=[1.0, 1.0])
        return [None, group(), flat][item % 4 - 1]

    env = await served(
        made,
        lambda env: env.tally.sent >= 3 and min(env.tally.left_out_tokens.values(), default=0) > 7,
        max_batches_offpolicy=4,
    )
    tally = env.tally
    assert tally.sent_tokens == 7 * tally.sent and tally.sent_flat == 0
    for reason in (FLAT, RETURNED_NONE):
        assert tally.left_out_tokens[reason] == 7 * tally.left_out[reason] > 0
    assert tally.examples[FLAT] == f"score 1 in {tally.left_out[FLAT]}"
    assert tally.left_out_tokens[FAILED] == 7 * tally.failures.total() > 0


async def test_a_flat_group_that_its_environment_drops_is_flat(served: Any) -> None:
    def made(item: int) -> Any:
        scored = ScoredDataGroup(**group(scores=[]))
        scored["scores"] += [1.0, float(item % 2)]
        return None if item % 2 else scored

    env = await served(made, lambda env: env.tally.sent >= 4 and env.tally.left_out[FLAT] >= 4)
    assert not env.tally.left_out[RETURNED_NONE]
    assert 0 < env.queue_slots.flat_share < 1, "so that spare groups are started"


async def test_flat_groups_that_are_sent_are_counted(served: Any) -> None:
    env = await served(
        lambda item: group(scores=[0.0, float(item % 2)]),
        lambda env: env.tally.sent >= 8,
        ensure_scores_are_not_same=False,
    )
    tally = env.tally
    assert 0 < tally.sent_flat < tally.sent
    assert (tally.sent_tokens, tally.sent_flat_tokens) == (3 * tally.sent, 3 * tally.sent_flat)


def test_each_generated_token_is_counted_once() -> None:
    rollout, (one, other) = Rollout(), (group(), group(masks=[[-100, 4], [-100, -100, 6]]))
    rollout.tokens = 10
    rollout.divide([one, other])
    assert (rollout.take(one), rollout.take(other), rollout.take()) == (6, 4, 0)
    rollout.divide([one])
    assert rollout.take(dict(one)) == 3, "a copy of the environment's own"


async def test_flat_advantages_and_numpy_numbers_train(served: Any) -> None:
    fields = {
        "advantages": [0.5, -0.5],
        "scores": [np.float32(1), np.float32(1)],
        "masks": [np.array([-100, 4])] * 2,
    }
    await served(lambda item: group(tokens=[[3, 4]] * 2, **fields), lambda env: env.tally.sent >= 4)
    latest = api_module.app.state.latest
    assert latest["advantages"] == [[0.5, 0.5], [-0.5, -0.5]] and latest["masks"] == [[-100, 4]] * 2


async def test_an_evaluation_that_fails_is_counted(served: Any, tmp_path: Path) -> None:
    env = await served(
        lambda item: group(),
        lambda env: env.tally.evaluation_failures.total() >= 2,
        steps_per_eval=1,
    )
    assert env.tally.evaluation_failures["ZeroDivisionError: division by zero"] >= 2
    env.tally.evaluated(None)
    assert not env.tally.evaluation_failures, "the newest one did not fail"


async def test_an_environment_without_a_weight_stays_at_run_api(served: Any) -> None:
    """atroposlib's word for "no share": alone it made run-api divide by zero, which was called
    "gone"."""
    env = await served(lambda item: group(), lambda env: env.tally.sent >= 4, inference_weight=-1)
    assert env.tally.sent >= 4


async def test_an_answer_with_an_error_is_never_called_gone(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atropos_base.BaseEnv.get_status.retry, "wait", lambda state: 0.01)

    def forgets(item: int) -> Any:
        api_module.app.state.envs.clear()
        return group()

    with pytest.raises(EnvFault, match=r"answers /status-env with 500") as caught:
        await served(forgets, lambda env: False)
    assert "gone" not in str(caught.value)


async def test_no_group_begins_and_none_is_lost_while_no_engine_answers(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An environment with a client of its own failed 64 times before vLLM was up, and was blamed
    for it."""
    monkeypatch.setattr(engine_client, "RETRY_S", 0.02)
    caplog.set_level(logging.INFO, logger="atropos_envs")
    engine, began, came = Engine(), Counter[int](), set[int]()
    away: list[int] = []
    engine.status = 503

    async def own_client(item: int) -> Any:
        began[item] += 1
        if len(came) >= 6 and not away:
            away.append(item)
            engine.status = 503  # it goes away in the middle of the run
            asyncio.get_running_loop().call_later(0.3, setattr, engine, "status", 200)
        if engine.status != 200:
            async with aiohttp.ClientSession() as http, http.get("http://127.0.0.1:9"):
                pass
        came.add(item)
        return group()

    async with engine.running() as url:
        monkeypatch.setenv("ATROPOS_ENGINE_URLS", url)
        asyncio.get_running_loop().call_later(0.5, setattr, engine, "status", 200)
        env = await served(own_client, lambda env: len(came) >= 20)
        assert not env.tally.failures and max(began.values()) > 1
        assert came >= set(range(1, max(came) - 8)), "items that failed because of it came again"
    said = [line for line in caplog.messages if "engine answers" in line]
    assert said[0].startswith("no engine answers at") and said[1].startswith(
        "an engine answers after"
    )


async def test_an_environment_that_always_fails_backs_off(served: Any) -> None:
    """Every request of an environment was refused 497 times in 6 s."""
    began: list[float] = []
    started = time.monotonic()

    async def refused(item: int) -> Any:
        began.append(time.monotonic() - started)
        raise KeyError("ground_truth")

    await served(refused, lambda env: time.monotonic() - started > 3)
    assert 8 <= len(began) < 60, "it was tried all the time"
    assert sum(at > 1.5 for at in began) < 20, "less and less often"


async def test_a_client_of_something_else_that_fails_is_a_failure(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def judge(item: int) -> Any:
        async with aiohttp.ClientSession() as http, http.get("http://127.0.0.1:9"):
            pass

    async with Engine().running() as url:
        monkeypatch.setenv("ATROPOS_ENGINE_URLS", url)
        env = await served(judge, lambda env: env.tally.failures.total() >= 2)
    assert "ClientConnectorError" in next(iter(env.tally.failures))


async def test_a_target_without_an_engine_s_address_leaves_it_to_the_worker_settings(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by hand with ATROPOS_CONCURRENCY alone, it kept one group in flight."""
    monkeypatch.setenv("ATROPOS_CONCURRENCY", "64")
    monkeypatch.delenv("ATROPOS_ENGINE_URLS", raising=False)
    running, most = 0, 0

    async def slow(item: int) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return group()

    await served(slow, lambda env: most > 1)
