"""What leaks into returned logprobs is refused where they are asked for, and left alone where they are not."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from vllm_server.generate import RequestError, parse_body
from vllm_server.refusals import PlainSampling, instead, leaks, served_defaults

LEAKING: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.05},
    {"min_tokens": 2},
    {"logit_bias": {"5": 1.0}},
    {"allowed_token_ids": [3, 4]},
    {"bad_words": ["no"]},
]


@pytest.mark.parametrize("option", LEAKING, ids=lambda option: next(iter(option)))
def test_generate_refuses_it_with_the_reason_and_the_way_out(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(RequestError, match=f"{name}=.*importance ratio.*for_training"):
        parse_body(json.dumps({"prompt": [3], **option}).encode())
    assert parse_body(json.dumps({"prompt": [3], "for_training": False, **option}).encode()).for_training is False


def test_what_to_send_instead_can_be_sent() -> None:
    """Whatever is named is a value that is let in."""
    for option in LEAKING:
        (name,) = option
        said = instead(leaks(option))
        if said != f"Leave out {name}":
            neutral = json.loads(said.removeprefix(f"Send {name}="))
            assert parse_body(json.dumps({"prompt": [3], name: neutral}).encode())
    assert instead(["top_p=0.9", "logit_bias={'5': 1.0}"]) == "Send top_p=1 and leave out logit_bias"


def test_what_atroposlib_sends_and_greedy_evaluation_pass() -> None:
    rollout = {"prompt": {"prompt_token_ids": [3]}, "logprobs": 0, "n": 8, "max_tokens": 4, "temperature": 1.0}
    scoring = {"prompt": [3], "prompt_logprobs": 1, "n": 1, "temperature": 0.0, "top_p": 1.0, "max_tokens": 1}
    for asked in (rollout, scoring, {"prompt": [3], "temperature": 0.0, "top_p": 0.5, "top_k": 1}):
        parse_body(json.dumps(asked).encode())
    assert leaks({"temperature": 0.0, "repetition_penalty": 1.2}) == ["repetition_penalty=1.2"]


def _model(source: str, **asked: Any) -> Any:
    return SimpleNamespace(
        generation_config=source,
        try_get_generation_config=lambda: asked,
        get_diff_sampling_param=lambda: {} if source == "vllm" else asked,
    )


def test_a_model_s_own_defaults_are_not_applied_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert served_defaults(_model("vllm", temperature=0.6, top_p=0.8, top_k=20)) == {}
        assert "asks for top_p=0.8, top_k=20: not applied" in caplog.text
        caplog.clear()
        assert served_defaults(_model("vllm", eos_token_id=[1, 2])) == {}
        assert not caplog.text
        assert served_defaults(_model("auto", top_p=0.8)) == {"top_p": 0.8}
        assert "refused" in caplog.text


async def _asked(path: str, body: bytes, defaults: dict[str, Any] | None = None) -> httpx.Response:
    app = FastAPI()
    app.add_middleware(PlainSampling)
    app.state.atropos_sampling = defaults or {}

    @app.post(path)
    async def route(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    transport: Any = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post(path, content=body)


@pytest.mark.parametrize(
    ("body", "defaults", "status"),
    [
        ({"logprobs": 0, "top_p": 0.9}, {}, 400),
        ({"logprobs": True, "top_k": 5}, {}, 400),
        ({"logprobs": 0}, {"top_p": 0.8}, 400),
        ({"logprobs": 0, "top_p": 1.0}, {"top_p": 0.8}, 200),
        ({"logprobs": 0, "top_p": None}, {"top_p": 0.8}, 400),
        ({"top_p": 0.9}, {}, 200),
        ({"logprobs": False, "top_p": 0.9}, {"top_k": 20}, 200),
        ({"logprobs": 0, "temperature": 0.0, "top_p": 0.9}, {}, 200),
        ({"logprobs": 1, "response_format": {"type": "json_object"}}, {}, 400),
        ({"logprobs": 1, "response_format": {"type": "text"}}, {}, 200),
    ],
)
async def test_vllm_s_own_routes(body: dict[str, Any], defaults: dict[str, Any], status: int) -> None:
    raw = json.dumps({"prompt": "x" * 70_000, **body}).encode()
    answer = await _asked("/v1/completions", raw, defaults)
    assert answer.status_code == status, answer.text
    if status == 200:
        assert answer.json() == {"bytes": len(raw)}, "the body reaches the route whole"
    else:
        assert "importance ratio" in answer.json()["error"]


async def test_it_leaves_the_rest_alone() -> None:
    assert (await _asked("/v1/completions", b"{broken")).json() == {"bytes": 7}
    assert (await _asked("/v1/embeddings", b'{"logprobs": 0, "top_p": 0.9}')).status_code == 200
