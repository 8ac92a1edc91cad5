"""Refused requests in the log: each reason once, then counted, at a bounded cost. On real ASGI
apps."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from atropos_common.net.http import allowed_hosts
from tests.vllm_server.test_auth import over
from vllm_server import refusals
from vllm_server.auth import Access, AuthMiddleware, GenerationHold, error_response
from vllm_server.generate import RequestError, parse_body, under_policy
from vllm_server.refusals import REASON_CHARACTERS, REASONS, PlainSampling, Refusals, reason_of


def app(sampling: str = "refuse") -> FastAPI:
    """Our body check on /generate, and vLLM's form of errors on /v1, behind what the server puts
    around its routes."""
    served = FastAPI()
    for middleware in (PlainSampling, AuthMiddleware, Refusals):
        served.add_middleware(middleware)
    served.state.atropos_sampling_policy = sampling
    served.state.atropos_access = Access(
        "secret", allowed_hosts("127.0.0.1"), GenerationHold(held=False), open=True
    )

    @served.post("/generate")
    async def generate(request: Request) -> Any:
        try:
            body, left_out = under_policy(
                parse_body(await request.body()), served.state.atropos_sampling_policy
            )
        except RequestError as error:
            return error_response(400, str(error))
        if left_out:
            refusals.note_adjusted(request.scope, left_out)
        await asyncio.sleep((body.seed or 0) / 1000)
        return {"text": []}

    @served.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        words = (await request.json())["say"]
        return JSONResponse(
            {"error": {"message": words, "type": "BadRequestError", "code": 400}}, status_code=400
        )

    return served


@asynccontextmanager
async def client(served: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport: Any = httpx.ASGITransport(app=served)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as http:
        yield http


async def end(served: FastAPI) -> None:
    """Do what uvicorn does at the end."""
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, str]:
        return {"type": next(messages)}

    async def send(message: Any) -> None: ...

    await served({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    rows = [record for record in caplog.records if record.name == "vllm_server.refusals"]
    assert all(record.levelno == logging.WARNING for record in rows)
    return [record.getMessage() for record in rows]


def rollout(**options: Any) -> dict[str, Any]:
    return {"prompt": [3], "max_tokens": 4, **options}


async def test_a_refusal_is_said_at_once_then_counted_and_counted_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "FIRST_GAP_S", 1.0)
    served = app()
    async with client(served) as http:
        assert (await http.post("/generate", json=rollout())).status_code == 200
        for number in range(20):
            refused = await http.post("/generate", json=rollout(top_p=0.95 - number / 1000))
            assert refused.status_code == 400 and "Send top_p=1, or" in refused.json()["error"]
        (first,) = said(caplog)
        assert first.startswith(
            "refused 1 request to /generate (400): top_p=0.95: changes the distribution"
        )
        assert "Send top_p=1, or" in first and "[of 1 since " in first, (
            "what was answered before does not count"
        )
        await asyncio.sleep(1.1)
        assert [line.partition(":")[0] for line in said(caplog)[1:]] == [
            "refused 20 requests to /generate (400)"
        ]
        for _ in range(30):
            await http.post("/generate", json=rollout(top_p=0.95))
        await http.post("/generate", json=rollout())
        await asyncio.sleep(1.1)
        assert len(said(caplog)) == 2, "the time between lines grows"
        await end(served)
    assert said(caplog)[2].startswith("refused 50 requests to /generate (400): top_p=0.95: ")
    assert "[of 51 since " in said(caplog)[2]
    assert said(caplog)[2].endswith("] (last 1 s ago)")


async def test_options_that_are_left_out_are_said_once_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = app("plain")
    async with client(served) as http:
        for number in range(7):
            assert (
                await http.post("/generate", json=rollout(top_p=0.9 + number / 100))
            ).status_code == 200
        assert (await http.post("/generate", json=rollout())).status_code == 200
        await end(served)
    first, last = said(caplog)
    assert first.startswith(
        "adjusted 1 request to /generate: top_p=0.9 left out: changes the distribution"
    )
    assert 'sampling = "as_asked"' in first
    assert (
        last.startswith("adjusted 7 requests to /generate: top_p=0.9 left out")
        and "[of 8 since " in last
    )


async def test_requests_under_way_count_as_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """So that five long prompts among sixty-four do not look like an engine that refuses
    everything."""
    served = app()
    async with client(served) as http:
        good = [
            asyncio.create_task(http.post("/generate", json=rollout(seed=300))) for _ in range(6)
        ]
        await asyncio.sleep(0.1)
        await http.post("/generate", json=rollout(top_k=5))
        await asyncio.gather(*good)
    assert "[of 7 since " in said(caplog)[0]


async def test_every_generating_route_and_whoever_refuses(caplog: pytest.LogCaptureFixture) -> None:
    served = app()
    async with client(served) as http:
        await http.post("/v1/completions", json={"logprobs": 0, "top_k": 5})
        await http.post("/v1/chat/completions", json={"say": "The model `x` does not exist."})
        await http.post("/generate", json=rollout(), headers={"Host": "elsewhere"})
        await http.post("/generate", content=b"{")
        await http.post("/v1/nothing", json={})
        await http.post("/bridge/pause", json={})  # a control route
        await http.get("/generate")
    told = said(caplog)
    assert [line.partition(": ")[0] for line in told] == [
        "refused 1 request to /v1/completions (400)",
        "refused 1 request to /v1/chat/completions (400)",
        "refused 1 request to /generate (403)",
        "refused 1 request to /generate (400)",
        "refused 1 request to /v1/nothing (404)",
    ]
    words_of = ("ratio. Send top_k=-1, or", "`x` does not", "'elsewhere'", "JSON", "Not Found")
    for line, words in zip(told, words_of, strict=True):
        assert words in line


async def test_other_users_can_neither_fill_the_log_nor_forge_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = app()
    async with client(served) as http:
        for number in range(500):
            word = "".join(chr(97 + int(digit)) for digit in str(number))
            words = f"{word}\nERROR \x1b[2Jforged \u202e {'x' * 9000}"
            await http.post("/v1/chat/completions", json={"say": words})
            await http.post(f"/v1/{word}%0Aforged")
        (layer,) = [layer for layer in _layers(served) if isinstance(layer, Refusals)]
        assert len(layer.log._reasons) == REASONS + 1
    told = said(caplog)
    assert len(told) == REASONS + 1
    for line in told:
        assert line.isprintable() and len(line) < REASON_CHARACTERS + 120
    assert r"\x1b[2Jforged \u202e" in told[0] and " ... " in told[0]


async def test_another_user_makes_no_line_that_a_diagnosis_would_blame_on_an_environment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = app()
    transport: Any = httpx.ASGITransport(app=over(served, own=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as http:
        assert (
            await http.post("/v1/chat/completions", json={"say": "no such model"})
        ).status_code == 400
    assert said(caplog) == []


def _layers(served: FastAPI) -> list[Any]:
    found, layer = [], served.middleware_stack
    while layer is not None:
        found.append(layer)
        layer = getattr(layer, "app", None)
    return found


async def test_a_reason_that_comes_back_after_a_long_time_is_a_new_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "FORGET_S", 0.05)
    served = app()
    async with client(served) as http:
        for _ in range(2):
            await http.post("/generate", json=rollout(min_p=0.5))
            await http.post("/generate", json=rollout())
            await asyncio.sleep(0.1)
    assert [line.rpartition("[")[2][:4] for line in said(caplog)] == ["of 1", "of 1"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": "ours"}', "ours"),
        (b'{"error": {"message": "of vLLM", "code": 400}}', "of vLLM"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b"plain \xff", "plain \N{REPLACEMENT CHARACTER}"),
        (b"[" * 5000, "[" * 5000),
        (b"", "no reason was given"),
    ],
)
def test_the_words_of_an_answer(body: bytes, reason: str) -> None:
    assert reason_of(body) == reason


async def test_answers_cost_nothing_to_speak_of(caplog: pytest.LogCaptureFixture) -> None:
    """A rollout takes milliseconds at least; the watching around its answer is a few microseconds
    of it."""

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await Response(b"x" * 4096)(scope, receive, send)

    async def send(message: Any) -> None: ...

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}

    async def seconds(served: Any, times: int = 2000) -> float:
        began = time.process_time()
        for _ in range(times):
            await served(scope, receive, send)
        return (time.process_time() - began) / times

    bare = min([await seconds(answers) for _ in range(5)])
    watched = min([await seconds(Refusals(answers)) for _ in range(5)])
    print(json.dumps({"bare_us": bare * 1e6, "watched_us": watched * 1e6}))
    assert watched - bare < 50e-6
    assert said(caplog) == []
