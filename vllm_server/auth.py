"""Auth middleware of the server, in front of every route.

A path that is not known to be harmless needs the token.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_common.net.body import BodyBudget, BodyError, GoneError, read_body, replayed
from atropos_common.net.connections import Connection, connection_of
from atropos_common.net.http import carries_key, has_token, host_refusal, key_refusal, page_refusal
from atropos_common.protocol.bridge import (
    ENV_OPEN_GENERATION,
    GONE_STATUS,
    INSTANCE_HEADER,
    LOAD_PATH,
    METRIC_CAPACITY,
    METRIC_IDLE_S,
    METRIC_RECOMPUTED,
    METRIC_REQUESTS,
    METRIC_SLOTS,
    METRIC_VERSION,
    TAKE_PATH,
    TOKEN_HEADER,
)
from vllm_server.versions import BridgeState

if TYPE_CHECKING:
    from prometheus_client import Metric

# Bytes of a request body; a prompt of a million tokens is 7 MB of JSON.
MAX_BODY = 32 * 1024 * 1024
# Bytes of all bodies that wait for the first weights, and of all that arrive at a time over
# connections of other users and machines.
MAX_HELD = 8 * MAX_BODY
MAX_FOREIGN = 2 * MAX_BODY

Kind = Literal["open", "generation", "control"]

_OPEN = frozenset(
    {
        "/health",
        "/health_generate",
        "/ping",
        "/version",
        "/load",
        LOAD_PATH,
        "/metrics",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
        TAKE_PATH,
    }
)
# The supervisor polls these without a key, because another process may hold the port.
_HEALTH = frozenset({"/health", "/health_generate", "/ping", "/version"})
# Open routes that take the engine's or the API server's time, as generation does, or hand out a
# rollout.
_COSTLY = frozenset({"/health_generate", "/tokenize", "/detokenize", TAKE_PATH})
_GENERATION = frozenset(
    {
        "/generate",
        "/invocations",
        "/inference/v1/generate",
        "/generative_scoring",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
    }
)


def path_kind(path: str) -> Kind:
    """Classify a path: harmless (`open`), generation, or control."""
    path = path.rstrip("/") or "/"
    if path in _OPEN or path.startswith(("/metrics/", "/static/")):
        return "open"
    if path in _GENERATION:
        return "generation"
    # vLLM's OpenAI routes; loading an adapter through them is a control route.
    if path.startswith(("/v1/", "/v2/")):
        return "control" if "lora" in path.lower() else "generation"
    return "control"  # a later vLLM may add routes


class GenerationHold:
    """Gate for generation: open, held until the first weights, or refused."""

    def __init__(self, *, held: bool) -> None:
        self.state = BridgeState(held=held)
        self._open = asyncio.Event()
        if not held:
            self._open.set()

    @property
    def held(self) -> bool:
        return self.state.held

    @property
    def refusal(self) -> str | None:
        return self.state.fault

    def release(self) -> None:
        self.state.held = False
        self._open.set()

    async def wait(self) -> None:
        await self._open.wait()


class ServerLoad:
    """Request counts since the server started; belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.under_way = 0
        self.requests = 0
        """Requests for completions, failed ones included."""
        self._idle_s = 0.0
        self._idle_since = clock()

    @property
    def idle_s(self) -> float:
        """Seconds without a request in flight."""
        return self._idle_s + (0.0 if self.under_way else self._clock() - self._idle_since)

    @contextmanager
    def request(self) -> Iterator[None]:
        self._idle_s = self.idle_s
        self.requests += 1
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way:
                self._idle_since = self._clock()


class LoadMetrics:
    def __init__(
        self,
        load: ServerLoad,
        slots: int,
        version: Callable[[], int | None],
        capacity: Callable[[], float | None],
        recomputed: Callable[[], int | None],
    ) -> None:
        self._load, self._slots, self._version, self._capacity = load, slots, version, capacity
        self._recomputed = recomputed

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        load, version, capacity = self._load, self._version(), self._capacity()
        idle = "Seconds without a request for completions."
        slots = "Sequences that are computed at a time, at most."
        tokens = "Tokens a second that the engine can make, at most."
        yield CounterMetricFamily(METRIC_IDLE_S, idle, load.idle_s)
        yield CounterMetricFamily(METRIC_REQUESTS, "Requests for completions.", load.requests)
        yield GaugeMetricFamily(METRIC_SLOTS, slots, self._slots)
        if (recomputed := self._recomputed()) is not None:
            again = "Tokens of preempted sequences, computed again."
            yield CounterMetricFamily(METRIC_RECOMPUTED, again, recomputed)
        if capacity is not None:
            yield GaugeMetricFamily(METRIC_CAPACITY, tokens, capacity)
        if version is not None:
            yield GaugeMetricFamily(METRIC_VERSION, "Version of the weights that answer.", version)


ENDING = "this server is stopping and takes no new work"
ENGINE_DIED = (
    "the engine of this server has died, and the server ends with it; its log has the cause"
)


@dataclass
class Access:
    """State of `AuthMiddleware`, as `app.state.atropos_access`."""

    token: str
    hosts: frozenset[str]
    gate: GenerationHold
    hold_timeout_s: float = 600.0
    instance_id: str = ""
    engine_died: Callable[[], bool] = lambda: False
    ending: bool = False
    """SIGTERM or SIGINT has arrived."""
    held_bytes: int = 0
    """Bytes of the bodies that wait for the hold."""
    budget: BodyBudget = field(default_factory=lambda: BodyBudget(MAX_HELD))
    foreign_budget: BodyBudget = field(default_factory=lambda: BodyBudget(MAX_FOREIGN))
    """For bodies over connections of others."""
    signals: tuple[signal.Signals, ...] = ()
    """Signals to watch; empty once they are watched."""
    load: ServerLoad = field(default_factory=ServerLoad)
    keys: frozenset[str] = frozenset()
    """Keys that admit requests of other users and machines."""
    public: bool = False
    """Other machines can reach this server."""
    open: bool = False
    for_everyone: bool = False
    """Nobody needs a key."""

    def needs_key(self, kind: Kind, path: str) -> bool:
        """Return True if a connection of others needs a key for `path`."""
        # Other machines may ask for health alone; users of this machine for all that costs little.
        if self.public:
            return path not in _HEALTH
        return (kind == "generation" or path in _COSTLY) and not self.open

    def gone(self) -> str | None:
        """Return why no engine answers any more; None while one does."""
        if self.ending:
            return ENDING
        return ENGINE_DIED if self.engine_died() else None

    def watch_signals(self) -> None:
        """Note SIGTERM and SIGINT before vLLM's handlers act on them."""
        # vLLM admits requests until its engine has drained. vLLM and uvicorn have installed their
        # handlers before this lifespan startup; each of those is still called.
        numbers, self.signals = self.signals, ()
        for number in numbers:
            signal.signal(number, self._also(signal.getsignal(number)))

    def _also(self, before: Any) -> Callable[[int, FrameType | None], Any]:
        def told(number: int, frame: FrameType | None) -> Any:
            self.ending = True
            return before(number, frame) if callable(before) else None

        return told


class AuthMiddleware:
    """ASGI middleware for vLLM's `--middleware`; finds its `Access` in the app."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access: Access = scope["app"].state.atropos_access
        if scope["type"] == "lifespan":
            access.watch_signals()
            await self.app(scope, receive, send)
            return
        connection = connection_of(scope)
        with connection.request() if connection else nullcontext():
            await self._request(access, connection, scope, receive, send)

    async def _request(
        self,
        access: Access,
        connection: Connection | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        headers = Headers(scope=scope)
        kind = path_kind(route_path(scope))
        trusted = has_token(headers, access.token)
        own = trusted or access.for_everyone or (connection is not None and connection.own)
        # The key is compared only on connections that are not the run's own yet.
        own = own or carries_key(headers.get("authorization"), access.keys)
        if connection and own:
            connection.prove()
        refusal = _refusal(access, scope, headers, kind, trusted=trusted, own=own)
        if refusal is None and scope["type"] == "http":
            budget = None if trusted else access.budget if own else access.foreign_budget
            timeout_s = connection.body_timeout_s if connection else None
            try:
                scope, receive = await read_body(scope, receive, MAX_BODY, budget, timeout_s)
            except GoneError:
                return
            except BodyError as error:
                refusal = error_response(error.status, str(error))
        if refusal is None and kind == "generation" and access.gate.held and not trusted:
            await self._hold(access, scope, receive, send)
        elif refusal is None:
            # The trainer's logprob probes carry the token: an engine with only those is idle.
            with access.load.request() if kind == "generation" and not trusted else nullcontext():
                await self._answer(access, scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal.headers["Connection"] = "close"  # the rest of the request is not read
            await refusal(scope, receive, send)

    async def _hold(self, access: Access, scope: Scope, receive: Receive, send: Send) -> None:
        """Keep the request's body until the release, the client's end or the timeout."""
        body: list[Message] = []
        release = asyncio.ensure_future(access.gate.wait())
        listen = asyncio.ensure_future(_collect(receive, body, access))
        try:
            await asyncio.wait(
                {release, listen},
                timeout=access.hold_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            released = release.done()
            gone = listen.done() and not released
            full = gone and not listen.result()
        finally:
            release.cancel()
            listen.cancel()
            await asyncio.gather(listen, release, return_exceptions=True)
            access.held_bytes -= _size(body)
        if gone and not full:
            return
        if not released:
            why = "generation is held until the trainer has named a weight version (/bridge/resume)"
            much = f", and more than {MAX_HELD // 2**20} MiB wait for it" if full else ""
            response = error_response(503, why + much)
            response.headers["Retry-After"] = "30"
            await response(scope, receive, send)
            return
        # Counted only now: a request that waits for the hold is not in flight.
        with access.load.request():
            await self._answer(access, scope, replayed(body, receive), send)

    async def _answer(self, access: Access, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the route's answer; without an engine replace a failure by 503 and the reason."""
        answered: Literal["no", "by the route", "by us"] = "no"

        # vLLM itself would answer 400 or 500.
        async def send_or_replace(message: Message) -> None:
            nonlocal answered
            if answered == "no" and message["type"] == "http.response.start":
                gone = access.gone() if message["status"] >= 400 else None
                answered = "by us" if gone else "by the route"
                if gone:
                    await error_response(GONE_STATUS, gone)(scope, receive, send)
            if answered != "by us":
                await send(message)

        try:
            await self.app(scope, receive, send_or_replace)
        except Exception:
            gone = access.gone()
            if gone is None or answered == "by the route" or scope["type"] != "http":
                raise
            if answered == "no":
                await error_response(GONE_STATUS, gone)(scope, receive, send)


# `trusted`: the request carries the run's token. `own`: its connection is the run's own, or it
# carries a key. The body is not read yet.
def _refusal(
    access: Access, scope: Scope, headers: Headers, kind: Kind, *, trusted: bool, own: bool
) -> JSONResponse | None:
    path = route_path(scope)
    misnamed = host_refusal(headers.get("host"), access.hosts) or page_refusal(
        headers, access.hosts
    )
    if misnamed:
        return error_response(*misnamed)
    if kind == "control" and not trusted:
        fix = f"send the run's token in the header {TOKEN_HEADER}"
        return error_response(403, f"{path} is a control route (or unknown): {fix}")
    if not own and access.needs_key(kind, path):
        return error_response(*(key_refusal("vLLM") if access.public else (401, OTHER_USER)))
    if kind != "open" and (wrong_server := _check_server(headers, access)):
        return wrong_server
    if access.gate.refusal and (path == "/health" or (kind == "generation" and not trusted)):
        return error_response(503, access.gate.refusal)
    return None


OTHER_USER = (
    "this engine answers processes of its own user. Send the run's key as `Authorization: Bearer "
    f"KEY`, or let other users in: [vllm] open = true in the profile, or {ENV_OPEN_GENERATION}=1 "
    "in the server's environment"
)


def _check_server(headers: Headers, access: Access) -> JSONResponse | None:
    meant = headers.get(INSTANCE_HEADER)
    if meant is not None and meant != access.instance_id:
        now = f"{access.instance_id} has replaced it"
        return error_response(GONE_STATUS, f"server {meant} is gone; {now}")
    return error_response(GONE_STATUS, ENDING) if access.ending else None


# Until the client leaves; False if all held bodies together are too large.
async def _collect(receive: Receive, into: list[Message], access: Access) -> bool:
    while access.held_bytes <= MAX_HELD:
        message = await receive()
        into.append(message)
        access.held_bytes += _size([message])
        if message["type"] in ("http.disconnect", "websocket.disconnect"):
            return True
    return False


def _size(messages: list[Message]) -> int:
    return sum(len(message.get("body", b"")) for message in messages)


def route_path(scope: Scope) -> str:
    """Return the path without the root path of a proxy."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] or "/" if root and path.startswith(root + "/") else path


def error_response(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=status)
