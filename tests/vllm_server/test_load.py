"""The load of a server: counted by the auth middleware, shown in `/metrics` and `/bridge/info`."""

from __future__ import annotations

import asyncio

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from atropos_common.net.http import allowed_hosts
from atropos_common.protocol.bridge import (
    METRIC_CAPACITY,
    METRIC_IDLE_S,
    METRIC_RECOMPUTED,
    METRIC_REQUESTS,
    METRIC_SLOTS,
    METRIC_VERSION,
    TOKEN_HEADER,
)
from vllm_server.auth import Access, AuthMiddleware, GenerationHold, LoadMetrics, ServerLoad


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_is_the_time_without_any_request() -> None:
    clock = Clock()
    load = ServerLoad(clock)
    clock.now += 5
    assert load.idle_s == 5
    with load.request():
        clock.now += 2
        with load.request():
            clock.now += 3
        assert load.under_way == 1 and load.idle_s == 5, "the first is still under way"
    clock.now += 1.5
    assert (load.idle_s, load.requests, load.under_way) == (6.5, 2, 0)


def test_completions_are_counted_alone_and_none_that_waits_for_the_hold() -> None:
    asyncio.run(_through_the_middleware())


async def _through_the_middleware() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> JSONResponse:
        begun.set()
        await go_on.wait()
        return JSONResponse({})

    app = Starlette(
        routes=[Route("/{rest:path}", answer, methods=["POST"])],
        middleware=[Middleware(AuthMiddleware)],
    )
    access = app.state.atropos_access = Access(
        "secret", allowed_hosts("127.0.0.1"), GenerationHold(held=True), open=True
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as http:
        held = asyncio.ensure_future(http.post("/generate"))
        control = asyncio.ensure_future(
            http.post("/bridge/pause", headers={TOKEN_HEADER: "secret"})
        )
        await begun.wait()
        assert (access.load.requests, access.load.under_way) == (0, 0), (
            "one is held, the other makes no token"
        )
        access.gate.release()
        while not access.load.under_way:
            await asyncio.sleep(0.001)
        go_on.set()
        assert [(await each).status_code for each in (held, control)] == [200, 200]
    assert (access.load.requests, access.load.under_way) == (1, 0)


def test_prometheus_shows_the_counts_under_their_names() -> None:
    clock, registry = Clock(), CollectorRegistry()
    load = ServerLoad(clock)
    version: list[int | None] = [None]
    capacity: list[float | None] = [None]
    registry.register(LoadMetrics(load, 128, lambda: version[0], lambda: capacity[0], lambda: 900))
    assert METRIC_VERSION not in generate_latest(registry).decode(), (
        "nothing is said of weights without a name"
    )
    assert METRIC_CAPACITY not in generate_latest(registry).decode(), (
        "nor of a capacity that is not known"
    )
    version[0], capacity[0] = 7, 24_000.0
    clock.now += 12.25
    with load.request():
        pass
    lines = generate_latest(registry).decode().splitlines()
    assert f"{METRIC_IDLE_S} 12.25" in lines
    assert f"{METRIC_REQUESTS} 1.0" in lines and f"{METRIC_SLOTS} 128.0" in lines
    assert f"{METRIC_RECOMPUTED} 900.0" in lines
    assert f"{METRIC_VERSION} 7.0" in lines and f"{METRIC_CAPACITY} 24000.0" in lines
