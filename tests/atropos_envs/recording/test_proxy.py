"""Requests that the proxy of a rollout sends on; scores and tool servers of many rollouts."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from atropos_common.protocol.bridge import TAKE_PATH, RecordedTurn, RecordedTurns
from atropos_common.system.run_dir import ENV_ENGINE_URLS
from atropos_envs.hosting import engine_client
from atropos_envs.hosting.engine_client import EngineClient, with_one_bos
from atropos_envs.recording.groups import _advantages
from atropos_envs.recording.proxy import LIMITS, RolloutProxy
from atropos_envs.recording.recorder import Recorder
from atropos_envs.recording.scoring import Scorer, _score
from atropos_envs.verifiers import tool_servers
from atropos_envs.verifiers.sequences import branches_of
from tests.atropos_envs.support import text_tokenizer


def _proxy(**options: Any) -> RolloutProxy:
    client: Any = SimpleNamespace(config=SimpleNamespace(model_name="m"))
    return RolloutProxy(client, options)


def test_a_smaller_limit_of_the_program_stays_by_whichever_name() -> None:
    most = dict.fromkeys(LIMITS, 512)
    for asked, sent in (({"max_tokens": 4}, 4), ({"max_output_tokens": 900}, 512), ({}, 512)):
        body = _proxy(**most)._changed({"model": "m", **asked})
        assert {body[name] for name in LIMITS} == {sent}
    assert _proxy()._changed({"max_tokens": 4}) == {"max_tokens": 4, "model": "m"}


@pytest.mark.parametrize(("n", "temperature"), [(2, 0.01), (1, 0.0), (None, 0.0)])
def test_several_greedy_answers_are_nearly_greedy(n: int | None, temperature: float) -> None:
    """vLLM refuses `n` above 1 at temperature 0, so each held-out task failed."""
    assert _proxy(temperature=0.0)._changed({"n": n})["temperature"] == temperature


async def test_an_engine_that_did_not_answer_has_no_turns(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each episode that tried the absent engine first was thrown away."""
    text_tokenizer().save_pretrained(tmp_path)
    turn = RecordedTurn.model_construct(
        prompt_ids=[1],
        token_ids=[3],
        logprobs=[-0.1],
        token_versions=[(0, 1)],
        temperature=1.0,
        finish_reason="stop",
    )

    async def chat(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "4"}}]})

    async def take(request: web.Request) -> web.Response:
        return web.Response(text=RecordedTurns(turns=[turn]).model_dump_json())

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post(TAKE_PATH, take)
    monkeypatch.setattr(engine_client, "RETRY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        away = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        monkeypatch.setenv(ENV_ENGINE_URLS, f"{away} {server.make_url('/v1')}")
        config = APIServerConfig(
            base_url=away, model_name=str(tmp_path), server_type="vllm", api_key="x"
        )
        client = EngineClient(config)
        for _ in range(3):
            async with Recorder(client).rollout(temperature=1.0) as rollout:
                answer = await http.post(
                    f"{rollout.base_url}/chat/completions",
                    json={"messages": []},
                    headers={"Authorization": f"Bearer {rollout.api_key}"},
                )
                assert answer.status == 200
                assert len((await rollout.collect()).turns) == 1
            await asyncio.sleep(0.3)
        await client.close()


def _slowly(episode: Any) -> float:
    time.sleep(0.3)
    return 1.0


async def test_scores_do_not_wait_for_each_other() -> None:
    scorer = Scorer(f"{__name__}:_slowly", timeout_s=0.9)
    scores = await asyncio.gather(*(scorer.score(SimpleNamespace()) for _ in range(32)))  # type: ignore[arg-type]
    assert [one.value for one in scores] == [1.0] * 32


def test_what_is_no_finite_number_is_no_score() -> None:
    assert _score({"score": 1, "all": np.zeros(3)}).metrics == {}
    assert _advantages([math.nan, 1.0]) == [0.0, 0.0], "the group is left out, and counted"


_CHILD = """
import sys, time
time.sleep(0.5)
for number, _ in enumerate(sys.stdin):
    print(2**22 + number, flush=True)
"""


async def test_a_cancelled_rollout_does_not_take_the_next_one_s_tool_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, killed = asyncio.create_subprocess_exec, []

    async def child(*_: Any, **options: Any) -> Any:
        return await start(sys.executable, "-c", _CHILD, **options)

    monkeypatch.setattr("asyncio.create_subprocess_exec", child)
    monkeypatch.setattr(tool_servers, "_end_unused", lambda task: killed.append(task.result().pid))
    monkeypatch.setattr(tool_servers, "Fork", lambda pid: SimpleNamespace(pid=pid))
    server = tool_servers.ForkServer()
    first = asyncio.create_task(server.fork("a", {}, "/", "x"))
    await asyncio.sleep(0.1)
    first.cancel()
    assert [(await server.fork(name, {}, "/", "x")).pid for name in "bc"] == [2**22 + 1, 2**22 + 2]
    assert killed == [2**22], "nobody has the handle of the first one"
    await server.close()


def test_equal_answers_of_one_trace_may_differ_in_their_last_bits() -> None:
    def node(ids: list[int], logprobs: list[float]) -> Any:
        return SimpleNamespace(
            token_ids=[1, *ids], mask=[False, *[True] * len(ids)], sampled=True, logprobs=logprobs
        )

    answers = [[-0.101], [-0.102]]
    turns: Any = [
        SimpleNamespace(prompt_ids=[1], token_ids=[[7]], logprobs=[each]) for each in answers
    ]
    branches = [
        SimpleNamespace(trainable=True, sampled_mask=[False, True], nodes=[node([7], each)])
        for each in answers
    ]
    made = branches_of(SimpleNamespace(branches=branches), turns, 1.0)
    assert [one.logprobs[-1] for one in made] == [-0.101, -0.102]


def test_only_the_second_of_two_first_tokens_goes() -> None:
    tokenizer = SimpleNamespace(bos_token_id=0)
    assert with_one_bos([0, 0, 5], tokenizer) == [0, 5] == with_one_bos([0, 5], tokenizer)
    assert with_one_bos([3, 3], SimpleNamespace(bos_token_id=None)) == [3, 3]
