"""Requests that the proxy of a rollout sends on."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig

from atropos_common.protocol.bridge import TAKE_PATH, RecordedTurn, RecordedTurns
from atropos_common.system.run_dir import ENV_ENGINE_URLS
from atropos_envs.hosting import engine_client
from atropos_envs.hosting.engine_client import EngineClient, with_one_bos
from atropos_envs.recording.proxy import LIMITS, RolloutProxy
from atropos_envs.recording.recorder import Recorder
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


async def test_the_engine_forgets_a_rollout_that_nobody_collects(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns of an episode that timed out stayed at the engine."""
    text_tokenizer().save_pretrained(tmp_path)
    forgotten: list[str] = []
    slow = asyncio.Event()

    async def chat(request: web.Request) -> web.Response:
        slow.set()
        await asyncio.sleep(60)
        raise AssertionError

    async def take(request: web.Request) -> web.Response:
        forgotten.append((await request.json())["rollout"])
        return web.Response(text=RecordedTurns(turns=[]).model_dump_json())

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post(TAKE_PATH, take)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        url = str(server.make_url("/v1"))
        monkeypatch.setenv(ENV_ENGINE_URLS, url)
        client = EngineClient(
            APIServerConfig(base_url=url, model_name=str(tmp_path), server_type="vllm", api_key="x")
        )
        async with Recorder(client).rollout() as rollout:
            name = rollout.base_url.split("/")[-2]
            asking = asyncio.create_task(
                http.post(
                    f"{rollout.base_url}/chat/completions",
                    json={"messages": []},
                    headers={"Authorization": f"Bearer {rollout.api_key}"},
                )
            )
            await slow.wait()
            asking.cancel()
        assert forgotten == [name]
        async with Recorder(client).rollout() as rollout:
            pass
        await client.close()
    assert len(forgotten) == 1, "an engine that was not asked has nothing to forget"


def test_only_the_second_of_two_first_tokens_goes() -> None:
    tokenizer = SimpleNamespace(bos_token_id=0)
    assert with_one_bos([0, 0, 5], tokenizer) == [0, 5] == with_one_bos([0, 5], tokenizer)
    assert with_one_bos([3, 3], SimpleNamespace(bos_token_id=None)) == [3, 3]
