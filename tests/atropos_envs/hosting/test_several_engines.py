"""An environment with several engines: equal shares, a group stays on its engine, one may be
away."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

from atropos_common.system.run_dir import ENV_ENGINE_URLS
from atropos_envs.hosting import engine_client
from atropos_envs.hosting.engine_client import EngineClient, EngineUnavailable, begin_group
from atropos_envs.tiny_model import make_tokenizer
from tests.atropos_envs.support import Engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def served(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines, and atroposlib's manager over a client of ours that knows all of them."""
    monkeypatch.setattr(engine_client, "RETRY_S", 0.02)

    @asynccontextmanager
    async def serve(count: int) -> AsyncIterator[tuple[list[Engine], ServerManager]]:
        engines = [Engine(lambda prompt, body, index: [2, 1]) for _ in range(count)]
        running = [engine.running() for engine in engines]
        urls = [await each.__aenter__() for each in running]
        monkeypatch.setenv(ENV_ENGINE_URLS, " ".join(urls))
        config = APIServerConfig(
            base_url=urls[0], model_name=str(model), server_type="vllm", api_key="x"
        )
        manager = ServerManager([config], server_class=EngineClient)
        try:
            yield engines, manager
        finally:
            await manager.servers[0].close()
            for each in running:
                await each.__aexit__(None, None, None)

    return serve


@pytest.mark.parametrize(("weights", "share"), [((100.0, 100.0), 0.5), ((100.0, 300.0), 0.75)])
async def test_groups_are_divided_by_what_each_engine_can_take(
    served: Any, weights: tuple[float, float], share: float
) -> None:
    async with served(2) as (_, manager):
        client = manager.servers[0]
        first, second = client._servers
        client.weigh({first.root: weights[0], second.root: weights[1]})
        for _ in range(40):
            server = client._choose()
            server.asked += 1
            server.under_way += 8
        assert client.under_way_at == {first.root: 320 * (1 - share), second.root: 320 * share}


async def group(manager: ServerManager, turns: int = 1) -> None:
    """Open a managed server for the group and send a request for each turn, as a foreign
    environment does."""
    begin_group()
    async with manager.managed_server() as managed:
        for _ in range(turns):
            await managed.completion(prompt="1+1=", n=4, max_tokens=4)


async def test_groups_that_begin_together_are_shared_out_evenly(served: Any) -> None:
    """atroposlib's manager alone would send all of them to the server that has the freest
    semaphore: the first."""
    async with served(3) as (engines, manager):
        for engine in engines:
            engine.delay_s = 0.02
        await asyncio.gather(*(group(manager) for _ in range(30)))
        assert [len(engine.bodies) for engine in engines] == [10, 10, 10]


async def test_a_quick_server_gets_more(served: Any) -> None:
    async with served(2) as (engines, manager):
        engines[0].delay_s, engines[1].delay_s = 0.5, 0.005
        places = asyncio.Semaphore(8)

        async def one() -> None:
            async with places:
                await asyncio.create_task(group(manager))

        await asyncio.gather(*(one() for _ in range(40)))
        slow, quick = (len(engine.bodies) for engine in engines)
        assert slow + quick == 40 and quick > 2 * slow > 0


async def test_the_turns_of_a_group_go_to_one_server(served: Any) -> None:
    async with served(2) as (engines, manager):
        for turns in (3, 2, 4, 1):
            before = [len(engine.bodies) for engine in engines]
            await asyncio.create_task(group(manager, turns))
            came = sorted(
                len(engine.bodies) - old for engine, old in zip(engines, before, strict=True)
            )
            assert came == [0, turns]


async def test_a_server_that_is_away_costs_nobody_a_wait_and_comes_back(served: Any) -> None:
    async with served(2) as (engines, manager):
        engines[0].status = 503
        await asyncio.wait_for(asyncio.gather(*(group(manager, 2) for _ in range(20))), 5)
        assert len(engines[1].bodies) == 40 and manager.servers[0].server_healthy
        engines[0].status = 200
        await asyncio.sleep(0.03)
        engines[0].bodies.clear()
        await asyncio.gather(*(group(manager) for _ in range(20)))
        assert len(engines[0].bodies) >= 1, "tried again by one request"
        engines[0].bodies.clear()
        await asyncio.gather(*(group(manager) for _ in range(20)))
        assert len(engines[0].bodies) == 10


async def test_where_all_are_away_all_are_tried_in_turn(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(2) as (engines, manager):
        client = manager.servers[0]
        for engine in engines:
            engine.status = 503
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:\d+ and http://127"):
            await client.generate([3], wait=False)
        assert [len(engine.bodies) for engine in engines] == [1, 1]
        waiting = asyncio.create_task(client.generate([3]))
        while min(len(engine.bodies) for engine in engines) < 4:
            await asyncio.sleep(0.01)
        engines[1].status = 200
        assert (await asyncio.wait_for(waiting, 5)).token_ids == [[2, 1]]


async def test_places_for_requests_grow_with_the_servers_and_another_server_is_alone(
    served: Any, model: Path
) -> None:
    async with served(2) as (_, manager):
        client = manager.servers[0]
        assert client.sem.max_val == 2 * APIServerConfig().num_max_requests_at_once
        judge = EngineClient(
            APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name=str(model), api_key="x")
        )
        assert [server.root for server in judge._servers] == ["http://127.0.0.1:9"]
        assert Counter(server.root for server in client._servers).total() == 2


async def test_vllms_own_routes_are_asked_at_each_server(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server refuses chat requests for a while."""
    monkeypatch.setattr(engine_client, "RETRY_S", 0.02)
    seen: Counter[int] = Counter()
    away = {1}

    def app(number: int) -> web.Application:
        async def chat(request: web.Request) -> web.Response:
            await request.json()
            seen[number] += 1
            if number in away:
                return web.json_response({"error": {"message": "held"}}, status=503)
            message = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": str(number)},
            }
            return web.json_response(
                {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "m",
                    "choices": [message],
                }
            )

        made = web.Application()
        made.router.add_post("/v1/chat/completions", chat)
        return made

    async with TestServer(app(0)) as first, TestServer(app(1)) as second:
        urls = [f"http://127.0.0.1:{server.port}/v1" for server in (first, second)]
        monkeypatch.setenv(ENV_ENGINE_URLS, " ".join(urls))
        client = EngineClient(APIServerConfig(base_url=urls[0], model_name=str(model), api_key="x"))
        for answers in ({"0"}, {"0", "1"}):
            ask = [
                client.chat_completion(messages=[{"role": "user", "content": "1+1"}])
                for _ in range(10)
            ]
            found = await asyncio.gather(*ask)
            assert {answer.choices[0].message.content for answer in found} == answers
            away.clear()
            await asyncio.sleep(0.03)
            await client.chat_completion(messages=[{"role": "user", "content": "1+1"}])
            await client.chat_completion(messages=[{"role": "user", "content": "1+1"}])
        await client.close()
