"""Sampling parameters that change returned logprobs: dropped, accepted or refused in rollouts, left
alone elsewhere."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Request

from atropos_common.protocol.bridge import SAMPLING_HEADER, SPLIT_HEADER
from vllm_server.generate import RequestError, parse_body, under_policy
from vllm_server.plugin import scale_raw_logprobs
from vllm_server.refusals import PlainSampling, instead, leaks, names_of, served_defaults, without

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
def test_each_policy_on_generate(option: dict[str, Any]) -> None:
    (name,) = option
    asked = parse_body(json.dumps({"prompt": [3], **option}).encode())
    plain, left_out = under_policy(asked, "plain")
    assert left_out == leaks(option) and names_of(left_out) == [name]
    assert plain == parse_body(b'{"prompt": [3]}'), "nothing else changes"
    assert under_policy(asked, "as_asked") == (asked, [])
    with pytest.raises(RequestError, match=f"{name}=.*importance ratio.*for_training"):
        under_policy(asked, "refuse")
    free = parse_body(json.dumps({"prompt": [3], "for_training": False, **option}).encode())
    assert under_policy(free, "refuse") == (free, [])


def test_what_to_send_instead_can_be_sent() -> None:
    """Whatever is named is a value that is let in."""
    for option in LEAKING:
        (name,) = option
        said = instead(leaks(option))
        if said != f"Leave out {name}":
            neutral = json.loads(said.removeprefix(f"Send {name}="))
            assert under_policy(
                parse_body(json.dumps({"prompt": [3], name: neutral}).encode()), "refuse"
            )
    assert (
        instead(["top_p=0.9", "logit_bias={'5': 1.0}"]) == "Send top_p=1 and leave out logit_bias"
    )


def test_what_atroposlib_sends_and_greedy_evaluation_pass() -> None:
    rollout = {
        "prompt": {"prompt_token_ids": [3]},
        "logprobs": 0,
        "n": 8,
        "max_tokens": 4,
        "temperature": 1.0,
    }
    scoring = {
        "prompt": [3],
        "prompt_logprobs": 1,
        "n": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 1,
    }
    for asked in (rollout, scoring, {"prompt": [3], "temperature": 0.0, "top_p": 0.5, "top_k": 1}):
        under_policy(parse_body(json.dumps(asked).encode()), "refuse")
    assert leaks({"temperature": 0.0, "repetition_penalty": 1.2}) == ["repetition_penalty=1.2"]


def _model(source: str, **asked: Any) -> Any:
    return SimpleNamespace(
        generation_config=source,
        try_get_generation_config=lambda: asked,
        get_diff_sampling_param=lambda: {} if source == "vllm" else asked,
    )


def test_a_model_s_own_defaults_are_not_applied_and_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert served_defaults(_model("vllm", temperature=0.6, top_p=0.8, top_k=20)) == {}
        assert "asks for top_p=0.8, top_k=20: not applied" in caplog.text
        caplog.clear()
        assert served_defaults(_model("vllm", eos_token_id=[1, 2])) == {}
        assert not caplog.text
        assert served_defaults(_model("auto", top_p=0.8)) == {"top_p": 0.8}
        assert "refused" in caplog.text


async def _asked(
    path: str,
    body: bytes,
    defaults: dict[str, Any] | None = None,
    policy: str = "refuse",
    split: str = "",
) -> httpx.Response:
    app = FastAPI()
    app.add_middleware(PlainSampling)
    app.state.atropos_sampling = defaults or {}
    app.state.atropos_sampling_policy = policy

    @app.post(path)
    async def route(request: Request) -> dict[str, Any]:
        raw = await request.body()
        seen = json.loads(raw) if raw.endswith(b"}") and b"prompt" in raw else {}
        return {
            "bytes": len(raw),
            "options": {name: value for name, value in seen.items() if name != "prompt"},
        }

    transport: Any = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post(path, content=body, headers={SPLIT_HEADER: split} if split else {})


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
        ({"logprobs": True, "tool_choice": "required"}, {}, 400),
        (
            {"logprobs": True, "tool_choice": {"type": "function", "function": {"name": "look"}}},
            {},
            400,
        ),
        ({"logprobs": True, "tool_choice": "auto"}, {}, 200),
        ({"logprobs": True, "thinking_token_budget": 0}, {}, 400),
    ],
)
async def test_vllm_s_own_routes(
    body: dict[str, Any], defaults: dict[str, Any], status: int
) -> None:
    raw = json.dumps({"prompt": "x" * 70_000, **body}).encode()
    answer = await _asked("/v1/completions", raw, defaults)
    assert answer.status_code == status, answer.text
    if status == 200:
        assert answer.json()["bytes"] == len(raw), "the body reaches the route whole"
    else:
        assert "importance ratio" in answer.json()["error"]


async def test_it_leaves_the_rest_alone() -> None:
    assert (await _asked("/v1/completions", b"{broken")).json()["bytes"] == 7
    assert (await _asked("/v1/embeddings", b'{"logprobs": 0, "top_p": 0.9}')).status_code == 200


@pytest.mark.parametrize(
    ("asked", "defaults", "split", "reaches", "left_out"),
    [
        ({"logprobs": 0, "top_p": 0.9}, {}, "", {"logprobs": 0, "top_p": 1}, "top_p"),
        ({"top_p": 0.9, "top_k": 20}, {}, "train", {"top_p": 1, "top_k": 0}, "top_p, top_k"),
        ({"top_p": 0.9}, {}, "eval", {"top_p": 0.9}, None),
        ({"top_p": 0.9}, {}, "", {"top_p": 0.9}, None),
        ({}, {"top_p": 0.8}, "train", {"top_p": 1}, "top_p"),
        (
            {"repetition_penalty": 1.1, "logit_bias": {"5": 1.0}},
            {},
            "train",
            {"repetition_penalty": 1, "logit_bias": None},
            "repetition_penalty, logit_bias",
        ),
        ({"temperature": 0.0, "top_p": 0.5}, {}, "train", {"temperature": 0.0, "top_p": 0.5}, None),
        ({"tool_choice": "required"}, {}, "train", {"tool_choice": None}, "tool_choice"),
    ],
)
async def test_rollouts_over_v1_sample_plainly(
    asked: dict[str, Any],
    defaults: dict[str, Any],
    split: str,
    reaches: dict[str, Any],
    left_out: str | None,
) -> None:
    """An environment that asks for text alone says by its header what it is for."""
    raw = json.dumps({"prompt": "x", **asked}).encode()
    answer = await _asked("/v1/chat/completions", raw, defaults, "plain", split)
    assert answer.json()["options"] == reaches
    assert answer.headers.get(SAMPLING_HEADER) == left_out
    free = await _asked("/v1/chat/completions", raw, defaults, "as_asked", split)
    assert free.json()["options"] == asked and SAMPLING_HEADER not in free.headers
    refused = await _asked("/v1/chat/completions", raw, defaults, "refuse", split)
    assert refused.status_code == (200 if left_out is None else 400)


class Sampler(torch.nn.Module):
    """vLLM's, as far as raw logprobs go."""

    compute_logprobs: Any = None

    def forward(self, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        found: torch.Tensor = self.compute_logprobs(logits)
        return found


def test_raw_logprobs_are_those_of_each_request_s_temperature() -> None:
    sampler, logits = Sampler(), torch.randn(2, 5)
    scale_raw_logprobs(sampler)
    wanted = torch.stack([(logits[0] / 0.5).log_softmax(-1), logits[1].log_softmax(-1)])
    mixed, greedy = (
        SimpleNamespace(temperature=torch.tensor([0.5, 0.0])),
        SimpleNamespace(temperature=None),
    )
    torch.testing.assert_close(sampler(logits, sampling_metadata=mixed), wanted)
    torch.testing.assert_close(sampler(logits, greedy), logits.log_softmax(-1))


def test_the_second_model_runner_returns_logits_at_each_request_s_temperature() -> None:
    """Its sampler has no hooks; vLLM takes the logprobs of the logits that `sample` returns."""
    logits, requests = torch.randn(2, 5), torch.tensor([3, 1])
    temperatures = SimpleNamespace(gpu=torch.tensor([9.0, 0.0, 9.0, 0.5]))
    sampler = SimpleNamespace(
        sample=lambda logits, *_, **__: ("sampled", "cut to the top ones"),
        sampling_states=SimpleNamespace(temperature=temperatures),
        logprobs_mode="raw_logprobs",
    )
    scale_raw_logprobs(sampler)
    sampled, returned = sampler.sample(logits, requests, return_logprobs=True)
    assert sampled == "sampled" and sampler.logprobs_mode == "processed_logprobs"
    torch.testing.assert_close(returned, torch.stack([logits[0] / 0.5, logits[1]]))


def test_a_thinking_budget_is_taken_away_and_never_replaced() -> None:
    """-1, which does nothing today, has meant no thinking at all in other releases."""
    assert without(["thinking_token_budget", "top_k"]) == {
        "thinking_token_budget": None,
        "top_k": 0,
    }
    assert instead(leaks({"thinking_token_budget": 5})) == "Leave out thinking_token_budget"
    assert not leaks({"thinking_token_budget": -1})
