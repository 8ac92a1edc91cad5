"""The address of one rollout: an OpenAI-compatible server in the environment's process.

It names the rollout to the engine, waits while no engine answers, and counts what a program did.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from atropos_common.protocol.bridge import ROLLOUT_HEADER, SPLIT_HEADER
from atropos_envs.hosting.engine_client import EngineClient, Server, join_group, present_group

HOST = "127.0.0.1"
# Open connections of one rollout; more are closed at once.
MOST_CONNECTIONS = 64
# Seconds that open connections get at the rollout's end.
CLOSE_S = 0.05
# Bytes of a request body, as the engine has it.
MAX_BODY = 32 * 1024 * 1024
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
"""Names of a limit of the answer's tokens; each route has its own."""
NEARLY_GREEDY = 0.01
"""Temperature of several greedy answers, for which vLLM refuses 0; it raises lower ones to this."""
# vLLM's routes that generate, and sample as the request asks.
ROUTES = frozenset({"chat/completions", "completions", "responses", "messages"})
# Status of an engine that starts, is held, or is gone.
AWAY_STATUS = 503
JSON_TYPE = "application/json"


@dataclass
class Counts:
    """Actions of one rollout's program."""

    requests: int = 0
    """Requests for completions."""
    answered: int = 0
    """Completions that it got in full."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that got an error, by reason."""
    other_models: Counter[str] = field(default_factory=Counter)
    """Requests for another model, by its name; the served model answered."""
    surplus_connections: int = 0
    """Connections closed because too many were open."""
    cut: int = 0
    """Streams that ended with the engine's connection."""


class _Handler(RequestHandler):
    """aiohttp's connection, counted."""

    proxy: RolloutProxy
    counted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.proxy.connections >= MOST_CONNECTIONS:
            self.proxy.counts.surplus_connections += 1
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
            return
        self.counted = True
        self.proxy.connections += 1

    def connection_lost(self, exc: BaseException | None) -> None:
        self.proxy.connections -= self.counted
        self.counted = False
        super().connection_lost(exc)


class RolloutProxy:
    """Server of one rollout.

    Args:
        options: fields that replace those of each request, such as the temperature.
    """

    def __init__(self, client: EngineClient, options: Mapping[str, Any]) -> None:
        self.name, self.key = secrets.token_hex(12), f"sk-{secrets.token_hex(16)}"
        self.counts = Counts()
        self.connections = 0
        self.servers: dict[Server, None] = {}
        """Servers that answered a request, in this order."""
        self.asked: set[Server] = set()
        """Servers to which a request was sent."""
        self._client, self._options = client, dict(options)
        self._group = present_group()
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        assert self._listener is not None, "the server listens"
        port = self._listener.sockets[0].getsockname()[1]
        return f"http://{HOST}:{port}/rollout/{self.name}/v1"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        handler = type("RolloutHandler", (_Handler,), {"proxy": self})
        server = self._server

        def connect() -> asyncio.Protocol:
            return handler(server, loop=loop, access_log=None)  # type: ignore[no-any-return]

        self._listener = await loop.create_server(connect, HOST, 0)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._server is not None:
            # aiohttp takes 0 for no limit.
            await self._server.shutdown(timeout=CLOSE_S)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        prefix = f"/rollout/{self.name}/v1/"
        if not request.path.startswith(prefix):
            return self._refuse(404, f"no such path; the base URL is {self.base_url}")
        if not self._has_key(request.headers):
            return self._refuse(401, "wrong key; send OPENAI_API_KEY as `Authorization: Bearer`")
        path = request.path.removeprefix(prefix).rstrip("/")
        if request.method == "GET" and path.partition("/")[0] == "models":
            return web.json_response(self._models(path))
        if request.method != "POST" or path not in ROUTES:
            known = ", ".join(sorted(ROUTES))
            return self._refuse(404, f"{request.method} {path} is not offered; POST {known}")
        self.counts.requests += 1
        try:
            body = json.loads(await _read(request))
        except (ValueError, RecursionError) as error:
            return self._refuse(400, f"the request cannot be read: {error}")
        if not isinstance(body, dict):
            return self._refuse(400, "the body is not a JSON object")
        join_group(self._group)
        return await self._client.forward(body, self._deliver(request, path, self._changed(body)))

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        given = headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(
            (given or headers.get("x-api-key", "")).encode(), self.key.encode()
        )

    def _refuse(self, status: int, reason: str) -> web.Response:
        self.counts.refused[reason] += 1
        error = {"message": reason, "type": "invalid_request_error", "code": status}
        return web.json_response({"error": error}, status=status)

    def _models(self, path: str) -> dict[str, Any]:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "atropos"}
        return model if "/" in path else {"object": "list", "data": [model]}

    @property
    def model(self) -> str:
        return str(self._client.config.model_name)

    def _changed(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("model") != self.model:
            self.counts.other_models[str(body.get("model"))] += 1
        options = dict(self._options)
        # A program's own smaller limit stays, by whichever name it asked.
        asked = [body[name] for name in LIMITS if type(body.get(name)) is int and body[name] > 0]
        for name in LIMITS & options.keys():
            options[name] = min([options[name], *asked])
        if options.get("temperature") == 0 and (body.get("n") or 1) != 1:
            options["temperature"] = NEARLY_GREEDY
        return body | options | {"model": self.model}

    def _deliver(self, request: web.BaseRequest, path: str, body: dict[str, Any]) -> Any:
        async def deliver(server: Server, http: aiohttp.ClientSession) -> web.StreamResponse:
            headers = {ROLLOUT_HEADER: self.name, SPLIT_HEADER: "train"}
            url = f"{server.root}/v1/{path}"
            self.asked.add(server)
            async with http.post(url, json=body, headers=headers) as response:
                if response.status == AWAY_STATUS:
                    response.raise_for_status()
                self.servers[server] = None
                self._client.count_adjusted(response.headers)
                if not response.content_type.startswith("text/event-stream"):
                    return self._whole(response.status, await response.read())
                return await self._stream(request, response, body)

        return deliver

    def _whole(self, status: int, raw: bytes) -> web.Response:
        if status < 400:
            self.counts.answered += _choices(raw)
        else:
            self.counts.refused[_reason(raw)] += 1
        return web.Response(body=raw, status=status, content_type=JSON_TYPE)

    async def _stream(
        self, request: web.BaseRequest, source: aiohttp.ClientResponse, body: dict[str, Any]
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        try:
            async for chunk in source.content.iter_any():
                await stream.write(chunk)
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError):
            # Parts of the answer are out, so no other server can continue it.
            self.counts.cut += 1
            if request.transport is not None:
                request.transport.abort()
            return stream
        self.counts.answered += int(body.get("n") or 1)
        await stream.write_eof()
        return stream


async def _read(request: web.BaseRequest) -> bytes:
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY:
            raise ValueError(f"it has more than {MAX_BODY} bytes")
    return bytes(body)


def _choices(raw: bytes) -> int:
    choices = json.loads(raw).get("choices")
    return len(choices) if isinstance(choices, list) else 1


def _reason(raw: bytes) -> str:
    """Return the first line of an error answer's message."""
    text = raw.decode(errors="replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        pass
    return str(text).strip().partition("\n")[0][:200]
