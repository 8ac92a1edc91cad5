"""Environments on atroposlib: engine client, rollouts, evaluation, run-api, recovery."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from atroposlib.api import server as api_module
from atroposlib.envs import base as atropos_base

from atropos_common.protocol.records import EvalRecord, parse_line
from atropos_envs import Dismissed, EnvFault
from atropos_envs.arithmetic import Sum, make_task, write_task
from atropos_envs.arithmetic_server import ArithmeticEnv
from atropos_envs.hosting import base, engine_client
from atropos_envs.hosting.engine_client import (
    EngineRefused,
    EngineUnavailable,
    _decoded,
    parse_generation,
)
from atropos_envs.hosting.rollout import begin_rollout
from atropos_envs.tiny_model import make_tokenizer
from tests.atropos_envs.support import EOS, Engine, run_api, trainer_registration

NOWHERE = "http://127.0.0.1:9/v1"
Make = Callable[..., ArithmeticEnv]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer and a split: all that an environment reads of a model."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    write_task(make_task(5), folder, {})
    return folder


@pytest.fixture
def make(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Environments in a run directory, with quick retries."""
    monkeypatch.setenv("ATROPOS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("ATROPOS_COMPONENT", "sums")
    monkeypatch.setattr(engine_client, "RETRY_S", 0.02)
    (tmp_path / "run").mkdir()

    def build(
        url: str = NOWHERE, *, api: str = "http://127.0.0.1:9", **fields: Any
    ) -> ArithmeticEnv:
        config, servers = ArithmeticEnv.config_init()
        fields = {"tokenizer_name": str(model), "rollout_server_url": api} | fields
        servers[0].base_url, servers[0].model_name = url, str(model)
        return ArithmeticEnv(config.model_copy(update=fields), servers)

    return build


def evaluations(tmp_path: Path) -> list[EvalRecord]:
    path = tmp_path / "run/eval.sums.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(parse_line, lines) if isinstance(record, EvalRecord)]


# Rollouts


async def test_a_group_has_the_tokens_masks_and_logprobs_of_the_engine_end_token_included(
    make: Make,
) -> None:
    async with Engine().running() as url:
        env = make(url)
        await env.setup()
        group = await env.rollout(Sum(7, 8))
        await env._close_servers()
    assert group["tokens"][0] == [9, 12, 10, 13, 3, 7, EOS]
    assert group["masks"][0] == [-100, -100, -100, -100, 3, 7, EOS]
    assert group["inference_logprobs"][0] == [1.0, 1.0, 1.0, 1.0, -0.25, -0.5, -0.75]
    assert group["tokens"][1] == [9, 12, 10, 13, 3]
    assert group["scores"] == [1.0, 0.0] * 4
    assert group["generation_params"] == {"temperature": 1.0, "max_tokens": 4, "env": "sums"}


async def test_generated_tokens_are_counted_whatever_becomes_of_the_group(make: Make) -> None:
    async with Engine().running() as url:
        env = make(url, group_size=4)
        await env.setup()
        rollout = begin_rollout()
        # A task of the environment's own counts for the same rollout.
        await asyncio.create_task(env.rollout(Sum(7, 8)))
        await env._close_servers()
    assert rollout.take() == 2 * 3 + 2 * 1, "two whole answers with their end, two cut-off ones"


async def test_one_request_asks_for_the_whole_group_at_temperature_one(make: Make) -> None:
    engine = Engine()
    async with engine.running() as url:
        env = make(url, group_size=4)
        await env.setup()
        await env.rollout(Sum(1, 2))
        await env._close_servers()
    assert engine.bodies == [
        {
            "prompt": {"prompt_token_ids": [3, 12, 4, 13]},
            "logprobs": 0,
            "n": 4,
            "temperature": 1.0,
            "max_tokens": 4,
        }
    ]


async def test_questions_come_in_epochs_by_seed_and_never_a_held_out_one(make: Make) -> None:
    orders = []
    for seed in (1, 1, 2):
        env = make(seed=seed)
        await env.setup()
        orders.append([await env.get_next_item() for _ in range(2 * len(env.task.training))])
    assert orders[0] == orders[1] != orders[2]
    half = len(orders[0]) // 2
    assert sorted(orders[0][:half]) == sorted(orders[0][half:]) == list(make_task(5).training)
    assert not set(orders[0]) & set(make_task(5).held_out), "the model's own split, not the seed's"


# The engine client


async def test_a_rollout_waits_while_the_engine_is_away_and_says_so_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    engine.status = 503
    async with engine.running() as url:
        env = make(url)
        await env.setup()
        with caplog.at_level(logging.INFO, logger="atropos_envs"):
            rollouts = [asyncio.create_task(env.rollout(Sum(n, 2))) for n in range(4)]
            while len(engine.bodies) <= 8:  # each has tried again
                await asyncio.sleep(0.01)
            assert not any(rollout.done() for rollout in rollouts)
            engine.status = 200
            groups = await asyncio.gather(*rollouts)
        await env._close_servers()
    assert [group["scores"] for group in groups] == [[1.0, 0.0] * 4] * 4
    assert [record.getMessage().split(" at ")[0] for record in caplog.records] == [
        "waiting for the inference server",
        "inference server",
    ]


async def test_who_does_not_want_to_wait_is_told_at_once(make: Make) -> None:
    env = make()
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
        await env.server.servers[0].generate([3], wait=False)
    await env._close_servers()


@pytest.mark.parametrize(
    ("status", "fatal"), [(404, True), (403, True), (400, False), (422, False)]
)
async def test_a_refusal_is_not_tried_again(make: Make, status: int, fatal: bool) -> None:
    engine = Engine()
    engine.status = status
    async with engine.running() as url:
        client = make(url).server.servers[0]
        with pytest.raises(EngineRefused) as caught:
            await client.generate([3])
        await client.close()
    assert caught.value.fatal is fatal
    assert len(engine.bodies) == 1


async def test_a_server_that_knows_no_arrays_gives_the_same_rollouts(make: Make) -> None:
    engine, made = Engine(), []
    async with engine.running() as url:
        client = make(url).server.servers[0]
        for engine.arrays in (True, False):
            made.append(await client.generate([3, 12, 4, 13], n=2, max_tokens=4))
        await client.close()
    assert made[0] == made[1] and made[0].logprobs[0][0] == -0.25
    assert engine.bodies[0] == engine.bodies[1]


def test_numbers_that_only_python_writes_are_read() -> None:
    assert _decoded('{"logprobs": [-Infinity, 1e-3]}') == {"logprobs": [-math.inf, 1e-3]}


def test_an_answer_without_logprobs_is_no_rollout() -> None:
    with pytest.raises(EngineRefused, match="vllm_server"):
        parse_generation([3], {"text": ["5"], "finish_reasons": ["stop"]})


def test_versions_that_the_server_cannot_name_are_null() -> None:
    answer = {"logprobs": [[[{"5": -0.1}]]] * 3, "finish_reasons": ["stop"] * 3}
    assert parse_generation([3], answer).weight_versions == [None, None, None]
    named = parse_generation([3], answer | {"weight_versions": [[1, 2], None, [None, None]]})
    assert named.weight_versions == [(1, 2), None, None]


# Evaluation


async def test_an_evaluation_is_greedy_and_writes_one_record_a_split(
    make: Make, tmp_path: Path
) -> None:
    def right_unless_carried(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
        left, right = "".join("0123456789+="[token - 2] for token in prompt).rstrip("=").split("+")
        question = Sum(int(left), int(right))
        return [*(int(digit) + 2 for digit in question.without_carry), EOS]

    engine = Engine(right_unless_carried)
    engine.version = 6
    async with engine.running() as url:
        env = make(url, carry_questions=10)
        await env._run_evaluate()
    held_out, carries = evaluations(tmp_path)
    easy = sum(not question.carries for question in make_task(5).held_out)
    assert 0 < easy < 25
    assert (held_out.split, held_out.correct, held_out.questions) == ("held_out", easy, 25)
    assert (carries.split, carries.correct, carries.questions) == ("carries", 0, 10)
    assert held_out.weight_version == 6
    assert all(body["temperature"] == 0.0 and body["max_tokens"] == 4 for body in engine.bodies)


async def test_evaluate_without_a_server_ends_with_a_sentence(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "ONE_OFF_PATIENCE_S", 0.05)
    with pytest.raises(EnvFault, match="Start the inference server"):
        await make()._run_evaluate()


async def test_process_writes_groups_to_a_file(make: Make, tmp_path: Path) -> None:
    target = tmp_path / "groups.jsonl"
    async with Engine().running() as url:
        env = make(url, data_path_to_save_groups=str(target), include_messages=True)
        env.n_groups_to_process, env.group_size_to_process = 3, 8
        await env.process_manager()
    groups = [json.loads(line) for line in target.read_text().splitlines()]
    assert [len(group["tokens"]) for group in groups] == [8, 8, 8]
    assert all(group["scores"] == [1.0, 0.0] * 4 for group in groups)


@pytest.mark.parametrize(
    ("every", "steps", "evaluated"), [(1, [1, 2, 3], [1, 2, 3]), (2, [2, 4, 5, 6], [2, 4, 6])]
)
async def test_every_multiple_of_steps_per_eval_has_an_evaluation(
    make: Make, every: int, steps: list[int], evaluated: list[int]
) -> None:
    """BaseEnv misses each multiple of 1, and one that passes between two of its checks."""
    found = []
    async with Engine().running() as url:
        env = make(url, steps_per_eval=every)

        async def evaluate(*_: Any, **__: Any) -> None:
            found.append(env.curr_step)

        env.evaluate, env.curr_step, env.checkpoint_interval = evaluate, 0, 0
        for step in steps:
            env.status_dict = {"current_step": step}
            await env.env_step_checks()
            await asyncio.sleep(0)
    assert found == evaluated


# With run-api


class Quick:
    """asyncio for BaseEnv, with its five seconds after registering shortened."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atropos_base, "asyncio", Quick())
    for name in ("atroposlib", "atroposlib.envs.base"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)


async def call(url: str, method: str, path: str, body: Any = None) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, json=body) as response,
    ):
        return await response.json()


async def next_batch(api: str) -> list[dict[str, Any]]:
    while True:
        answer = await call(api, "GET", "/batch")
        if answer.get("batch"):
            return list(answer["batch"])
        await asyncio.sleep(0.005)


async def test_serving_evaluates_first_keeps_one_batch_ahead_and_leaves_on_sigterm(
    make: Make, tmp_path: Path, quick: None
) -> None:
    engine = Engine()
    engine.delay_s = 0.01
    async with run_api() as api, engine.running() as url:
        await call(api, "POST", "/register", trainer_registration(batch_size=32))
        env = make(url, api=api, steps_per_eval=2)
        serving = asyncio.create_task(env.env_manager())
        await asyncio.sleep(0.1)
        assert not engine.bodies, "run-api takes nobody before the trainer's first GET /batch"
        await call(api, "GET", "/batch")
        ahead = []
        for step in range(1, 7):
            engine.version = step
            assert sum(len(group["tokens"]) for group in await next_batch(api)) == 32
            for _ in range(8):
                await asyncio.sleep(0.01)
                ahead.append(len(api_module.app.state.queue))
        greedy = [body["temperature"] == 0.0 for body in engine.bodies]
        assert all(greedy[:50]) and not all(greedy), (
            "the first evaluation comes before the first rollout"
        )
        assert max(ahead) == 4, (
            "one batch of four groups, never a group more: that one would be a step older"
        )
        while (before := len(evaluations(tmp_path))) % 2:  # one of the two splits still runs
            await asyncio.sleep(0.01)
        engine.version = 9
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Dismissed) as told:
            await asyncio.wait_for(serving, 5)
        assert told.value.exit_code == 143, (
            "not done: a supervisor that did not ask starts another one"
        )
        assert api_module.app.state.envs[0]["connected"] is False
    records = evaluations(tmp_path)
    assert (records[0].policy_step, records[0].split) == (0, "held_out")
    assert len(records) == before + 2
    assert records[-1].weight_version == 9, "the last evaluation sees the last weights"
    assert {record.policy_step for record in records} > {0, 6}
    assert not (tmp_path / "run/bridge/env.sums.json").exists()


async def test_a_killed_life_gives_its_place_back_but_not_after_run_api_restarted(
    make: Make,
) -> None:
    fields = {"max_token_length": 32, "desired_name": "sums", "weight": 1.0, "group_size": 8}

    async def live(api: str, lives: int) -> list[bool]:
        for _ in range(lives):
            registration = make(api=api)._registration
            await registration.register(**fields)
            await registration.close()
        return [each["connected"] for each in api_module.app.state.envs]

    for others, lives in ((0, 1), (1, 3)):
        async with run_api() as api:
            await call(api, "POST", "/register", trainer_registration(32))
            await call(api, "GET", "/batch")
            for _ in range(others):
                await call(api, "POST", "/register-env", fields | {"desired_name": "other"})
            connected = await live(api, lives)
    assert connected == [True, False, False, True], (
        "number 0 was ours before the restart, and is another's now"
    )


async def test_a_hopeless_server_ends_the_environment_with_the_way_out(
    make: Make, quick: None
) -> None:
    engine = Engine()
    engine.status = 404
    async with run_api() as api, engine.running() as url:
        await call(api, "POST", "/register", trainer_registration(32))
        await call(api, "GET", "/batch")
        with pytest.raises(EnvFault, match="vllm_server") as caught:
            await asyncio.wait_for(make(url, api=api).env_manager(), 10)
    assert caught.value.exit_code == 2


async def test_the_end_of_run_api_ends_the_environment_with_a_sentence(
    make: Make, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atropos_base.BaseEnv.get_status.retry, "wait", lambda state: 0.01)
    async with Engine().running() as url:
        async with run_api() as api:
            await call(api, "POST", "/register", trainer_registration(32))
            await call(api, "GET", "/batch")
            serving = asyncio.create_task(make(url, api=api).env_manager())
            await next_batch(api)
        with pytest.raises(EnvFault, match=r"run-api at .* is gone") as caught:
            await asyncio.wait_for(serving, 20)
    assert caught.value.exit_code == 1


async def test_after_a_reset_of_run_api_the_next_life_gets_in(
    make: Make, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run-api forgets its environments with the trainer: this life ends, and the supervisor's next
    one registers."""
    monkeypatch.setattr(atropos_base.BaseEnv.get_status.retry, "wait", lambda state: 0.01)
    async with Engine().running() as url, run_api() as api:
        await call(api, "POST", "/register", trainer_registration(32))
        await call(api, "GET", "/batch")
        first = asyncio.create_task(make(url, api=api).env_manager())
        await next_batch(api)
        async with aiohttp.ClientSession() as session, session.get(f"{api}/reset_data"):
            pass
        with pytest.raises(EnvFault) as caught:
            await asyncio.wait_for(first, 20)
        assert caught.value.exit_code == 1, "restarted by policy on-failure"
        async with aiohttp.ClientSession() as session, session.get(f"{api}/reset_data"):
            pass
        await call(api, "POST", "/register", trainer_registration(32))
        await call(api, "GET", "/batch")
        second = asyncio.create_task(make(url, api=api).env_manager())
        assert (
            sum(len(group["tokens"]) for group in await asyncio.wait_for(next_batch(api), 20)) == 32
        )
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)


async def test_groups_go_out_on_one_connection_and_uncompressed(make: Make) -> None:
    seen = []

    async def scored(request: web.Request) -> web.Response:
        seen.append(
            (request.transport, request.headers.get("Content-Encoding"), await request.json())
        )
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/scored_data", scored)
    async with TestServer(app) as api:
        env = make(api=f"http://127.0.0.1:{api.port}")
        for score in (1.0, 2.0):
            await env._send_scored_data_to_api({"tokens": [[3] * 5000], "scores": [score]})
        await env._registration.close()
    assert [(encoding, body["scores"]) for _, encoding, body in seen] == [
        (None, [1.0]),
        (None, [2.0]),
    ]
    assert seen[0][0] is seen[1][0] and env.tally.sent == 2


async def test_groups_received_while_run_api_answered_are_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make(batch_size=32)

    async def status(self: Any) -> None:
        self.tally.sent += 2
        self.status_dict = {"queue_size": 1, "self_queue_size": 1, "current_step": 0}

    monkeypatch.setattr(atropos_base.BaseEnv, "get_status", status)
    await env.get_status()
    assert env.status_dict["queue_size"] == 3
    env.workers = {object(), object()}
    await env.get_status()
    assert env.status_dict["queue_size"] == 2, (
        "two of four places are rollouts in flight; nobody is cancelled"
    )


# Mistakes


def test_a_server_type_without_logprobs_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, servers = ArithmeticEnv.config_init()
    servers[0].server_type = "openai"
    with pytest.raises(EnvFault, match=r"--openai\.server_type vllm"):
        ArithmeticEnv(config, servers)


def test_a_missing_tokenizer_is_a_sentence(make: Make) -> None:
    with pytest.raises(EnvFault, match="tokenizer_name") as caught:
        make(tokenizer_name="/nowhere/model")
    assert caught.value.exit_code == 2


class Exited(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (EnvFault("do this instead", exit_code=2), 2),
        (SystemExit(0), 0),
        (SystemExit(2), 2),
        (SystemExit("no"), 1),
    ],
)
def test_the_program_ends_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, outcome: BaseException, code: int
) -> None:
    class Program:
        @staticmethod
        def cli() -> None:
            raise outcome

    def leave(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(base, "configure_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", ["env", "serve"])
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Exited) as caught:
        base.run(Program)  # type: ignore[arg-type]
    assert caught.value.args == (code,)


def test_process_and_evaluate_need_no_wandb_unless_asked() -> None:
    assert base.one_off_defaults(["serve", "--slurm", "false"]) == ["serve", "--slurm", "false"]
    assert base.one_off_defaults(["evaluate"]) == ["evaluate", "--env.use_wandb", "false"]
    given = ["process", "--env.use_wandb=true", "--env.total_steps", "4"]
    assert base.one_off_defaults(given) == given


def test_the_log_keeps_base_env_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    base.configure_logging()
    noisy = logging.getLogger("atroposlib.envs.base")
    assert not noisy.isEnabledFor(logging.INFO) and noisy.isEnabledFor(logging.WARNING)
