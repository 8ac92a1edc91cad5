"""Endpoint for the train client of verifiers: token ids in, token ids out.

The client sends `POST /inference/v1/generate` to an address in this process. The endpoint asks the
engines through `EngineClient`, which waits for absent engines, and records each turn as sampled.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from atropos_envs.hosting.engine_client import (
    EngineClient,
    EngineRefused,
    EngineUnavailable,
    Generation,
)

SESSION_HEADER = "X-Session-ID"
# Fields of vLLM's sampling parameters that `/generate` sets itself, or that belong to the client.
NOT_SENT = {"logprobs", "n", "skip_special_tokens", "routed_experts_prompt_start", "model"}
# Words by which harnesses recognise a conversation that is too long.
TOO_LONG = "This model's maximum context length is {limit} tokens, and the prompt has {prompt}"
MAX_BODY = 256 * 2**20


@dataclass
class Recorded:
    """Turns of one trace, in the order of their answers."""

    wait: bool = True
    turns: list[Generation] = field(default_factory=list)
    temperatures: set[float] = field(default_factory=set)
    refused: Exception | None = None
    """The newest error of the engine."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Context of the rollout, in which the engine client counts tokens and keeps a group on one
    engine."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version of any turn; None if one is unknown, or there is none."""
        versions = [turn.oldest_version for turn in self.turns]
        return (
            None if None in versions else min((v for v in versions if v is not None), default=None)
        )


class Endpoint:
    """Loopback server of one environment process.

    Args:
        client: of the environment's engines.
        limit: see the attribute.
    """

    def __init__(self, client: EngineClient, limit: int) -> None:
        self._client = client
        self.limit = limit
        """Tokens of a sequence, prompt included."""
        self._recorded: dict[str, Recorded] = {}
        self.key = secrets.token_urlsafe(24)
        """Bearer token of the clients."""
        self.port = 0

    def base_url(self, *, training: bool) -> str:
        """Return the address for rollouts, or for evaluations."""
        return f"http://127.0.0.1:{self.port}/{'train' if training else 'eval'}/v1"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/{split}/v1/models", self._models)
        app.router.add_post("/{split}/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()

    @contextmanager
    def recording(self, trace_id: str, *, wait: bool = True) -> Iterator[Recorded]:
        """Record the turns of a trace until the context ends."""
        recorded = self._recorded[trace_id] = Recorded(wait=wait)
        try:
            yield recorded
        finally:
            self._recorded.pop(trace_id, None)

    async def _models(self, request: web.Request) -> web.Response:
        self._check(request)
        model = {"id": self._client.config.model_name, "object": "model"}
        # A prompt needs place for one new token.
        models = [model | {"max_model_len": self.limit - 1}]
        return web.json_response({"object": "list", "data": models})

    async def _generate(self, request: web.Request) -> web.Response:
        self._check(request)
        body = await request.json()
        recorded = self._recorded.get(request.headers.get(SESSION_HEADER, ""))
        if recorded is None:
            raise web.HTTPGone(text="this rollout is over")
        if body.get("features") or body.get("content_parts"):
            return _refusal("this trainer reads text: images and audio cannot train")
        prompt, sampling = list(body["token_ids"]), dict(body.get("sampling_params") or {})
        left = self.limit - len(prompt)
        if left < 1:
            return _refusal(TOO_LONG.format(limit=self.limit, prompt=len(prompt)))
        sampling["max_tokens"] = min(int(sampling.get("max_tokens") or left), left)
        training = request.match_info["split"] == "train"
        asked = {name: value for name, value in sampling.items() if name not in NOT_SENT}
        asked |= {} if training else {"for_training": False}
        work = self._client.generate(prompt, wait=recorded.wait, **asked)
        try:
            done = await asyncio.create_task(work, context=recorded.context)
        except EngineUnavailable as error:
            recorded.refused = error
            return _refusal(str(error), status=503)
        except EngineRefused as error:
            recorded.refused = error
            return _refusal(str(error))
        recorded.turns.append(done)
        recorded.temperatures.add(float(sampling.get("temperature", 1.0)))
        return web.json_response(_answer(done))

    def _check(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self.key.encode()):
            raise web.HTTPUnauthorized(text="wrong key")


def _answer(done: Generation) -> dict[str, Any]:
    ids, logprobs = done.token_ids[0], done.logprobs[0]
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": done.finish_reasons[0],
    }
    usage = {"prompt_tokens": len(done.prompt_ids), "completion_tokens": len(ids)}
    return {"request_id": secrets.token_hex(8), "choices": [choice], "usage": usage}


def _refusal(message: str, status: int = 400) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": status}
    return web.json_response({"error": error}, status=status)
