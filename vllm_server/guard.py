"""The door of the server, before any route: Host header, token on control routes, and the hold on generation.

Closed by default: a path not known to be harmless needs the token, so a route that a later vLLM adds is a control route
until someone here says otherwise.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer_core.contracts.bridge import TOKEN_HEADER
from trainer_core.contracts.hosts import host_refusal

Kind = Literal["open", "generation", "control"]

_OPEN = frozenset(
    {
        "/health", "/health_generate", "/ping", "/version", "/load", "/metrics", "/v1/models", "/tokenize",
        "/detokenize", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json",
    }
)  # fmt: skip
_GENERATION = frozenset(
    {
        "/generate", "/invocations", "/inference/v1/generate", "/generative_scoring", "/pooling", "/classify", "/score",
        "/rerank",
    }
)  # fmt: skip


def path_kind(path: str) -> Kind:
    """What a request to `path` is: harmless, generation, or control.

    `/v1/*` is vLLM's OpenAI surface: generation, except adapter loading (control) and the model list (open).
    """
    path = path.rstrip("/") or "/"
    if path in _OPEN or path.startswith(("/metrics/", "/static/")):
        return "open"
    if path in _GENERATION:
        return "generation"
    if path.startswith(("/v1/", "/v2/")):
        return "control" if "lora" in path.lower() else "generation"
    return "control"


class Gate:
    """Whether generation may go on: open, held, or refused with a reason."""

    def __init__(self, *, held: bool) -> None:
        self._open = asyncio.Event()
        self.refusal: str | None = None
        """Why generation and `/health` answer 503; None when all is well."""
        if not held:
            self._open.set()

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    def release(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        await self._open.wait()


@dataclass(frozen=True)
class Door:
    """What the guard asks for; the app carries it as `app.state.atropos_door`."""

    token: str
    hosts: frozenset[str]
    gate: Gate
    hold_timeout_s: float = 600.0


class Guard:
    """ASGI middleware, named to vLLM by its own `--middleware`; it finds its `Door` in the app that serves."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        door: Door = scope["app"].state.atropos_door
        headers = Headers(scope=scope)
        path = _route_path(scope)
        misnamed = host_refusal(headers.get("host"), door.hosts)
        refusal = _error(*misnamed) if misnamed else None
        kind = path_kind(path)
        trusted = _has_token(headers, door.token)
        if refusal is None and kind == "control" and not trusted:
            refusal = _error(
                403, f"{path} is a control route (or unknown): send the run's token in the header {TOKEN_HEADER}"
            )
        if refusal is None and door.gate.refusal and (path == "/health" or (kind == "generation" and not trusted)):
            refusal = _error(503, door.gate.refusal)
        if refusal is None and kind == "generation" and door.gate.held and not trusted:
            await self._hold(door, scope, receive, send)
        elif refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refusal(scope, receive, send)

    async def _hold(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the release, keeping the request's body; give up when the client does or the time is over."""
        body: list[Message] = []
        release = asyncio.ensure_future(door.gate.wait())
        listen = asyncio.ensure_future(_collect(receive, body))
        try:
            await asyncio.wait({release, listen}, timeout=door.hold_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            released = release.done()
            gone = listen.done() and not released
        finally:
            release.cancel()
            listen.cancel()
            await asyncio.gather(listen, release, return_exceptions=True)
        if gone:
            return
        if not released:
            response = _error(503, "generation is held until the trainer has named a weight version (/bridge/resume)")
            response.headers["Retry-After"] = "30"
            await response(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)


def _has_token(headers: Headers, token: str) -> bool:
    given = headers.get(TOKEN_HEADER)
    return given is not None and hmac.compare_digest(given.encode("latin-1", "replace"), token.encode())


async def _collect(receive: Receive, into: list[Message]) -> None:
    """Gather messages until the client leaves."""
    while True:
        message = await receive()
        into.append(message)
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            return


def _replay(messages: list[Message], receive: Receive) -> Receive:
    pending = list(messages)

    async def next_message() -> Message:
        return pending.pop(0) if pending else await receive()

    return next_message


def _route_path(scope: Scope) -> str:
    """The path that routes see: without the root path of a proxy."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root):] or "/" if root and path.startswith(root + "/") else path  # fmt: skip


def _error(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=status)
