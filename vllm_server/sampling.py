"""Sampling options that make returned logprobs useless for training, and the door that keeps them out.

The trainer computes log softmax(logits / temperature). Options that cut, mask or shift the distribution renormalise
what vLLM returns, so they leak into every importance ratio. Refused are requests that ask for logprobs with such an
option; whatever asks for none (evaluation over `/v1`) samples as it likes, and greedy requests may name filters that do
nothing to them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

WHY = (
    "changes the distribution in a way that the trainer, which knows only the temperature, cannot follow, so the "
    "returned logprobs would leak into the importance ratio"
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "watermarking": (None, False),
    "use_beam_search": (None, False),
}
"""Option -> values with which it does nothing."""
_FILTERS = ("top_p", "top_k", "min_p")
"""Nothing to greedy decoding: they never drop the likeliest token."""
_ROUTES = ("/v1/completions", "/v1/chat/completions")


def leaks(options: Mapping[str, Any]) -> list[str]:
    """The options, as `name=value`, whose effect would be in the returned logprobs."""
    greedy = options.get("temperature") == 0
    return [
        f"{name}={options[name]!r}"
        for name, neutral in _NEUTRAL.items()
        if name in options and options[name] not in neutral and not (greedy and name in _FILTERS)
    ]


def instead(leaking: Iterable[str]) -> str:
    """What to send in the place of such options: `Send top_p=1`, `Leave out logit_bias`."""
    names = [item.partition("=")[0] for item in leaking]
    neutral = {name: value for name in names for value in _NEUTRAL[name] if type(value) is int}
    send = [f"{name}={value}" for name, value in neutral.items()]
    leave = [name for name in names if name not in neutral]
    said = [f"{verb} {', '.join(names)}" for verb, names in (("send", send), ("leave out", leave)) if names]
    return " and ".join(said).capitalize()


def served_defaults(model_config: Any) -> dict[str, Any]:
    """What vLLM's own routes put in where a request names nothing; says so when a model asks for more than it gets."""
    served: dict[str, Any] = model_config.get_diff_sampling_param()
    if model_config.generation_config == "vllm":
        left_out = leaks(model_config.try_get_generation_config())
        if left_out:
            logger.info(
                "the model's generation_config.json asks for %s: not applied, since it %s. Requests may name it "
                "themselves; --generation-config auto makes it the default of /v1 requests without logprobs",
                ", ".join(left_out), WHY,
            )  # fmt: skip
    elif leaking := leaks(served):
        logger.warning(
            "--generation-config %s makes %s the default of /v1: requests for logprobs are refused unless they name "
            "neutral values", model_config.generation_config, ", ".join(leaking),
        )  # fmt: skip
    return served


class PlainSampling:
    """ASGI middleware, named to vLLM by its own `--middleware`: refuses requests for logprobs that would leak.

    The defaults of the served model lie in the app as `app.state.atropos_sampling`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_ROUTES):
            await self.app(scope, receive, send)
            return
        messages = await _whole_body(receive)
        leaking = _leaking(b"".join(message.get("body", b"") for message in messages), _defaults(scope))
        if leaking:
            reason = f"{', '.join(leaking)}: {WHY}. {instead(leaking)}, or ask for no logprobs"
            await JSONResponse({"error": reason}, status_code=400)(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, replay, send)


def _defaults(scope: Scope) -> dict[str, Any]:
    return getattr(scope["app"].state, "atropos_sampling", {})


def _leaking(raw: bytes, defaults: Mapping[str, Any]) -> list[str]:
    """Nothing for a body that is not JSON: vLLM says that better."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return []
    # 0 asks for the sampled token's; only null and false ask for none.
    if not isinstance(body, dict) or body.get("logprobs") is None or body["logprobs"] is False:
        return []
    named = {name: value for name, value in body.items() if value is not None}
    return leaks({**defaults, **named})


async def _whole_body(receive: Receive) -> list[Message]:
    """Every message up to the end of the body, or to the client's leaving."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    return messages
