"""The auth middleware: Host header, token, hold. Requests go through a real Starlette app."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_common.net.connections import SCOPE_KEY, Connection, ConnectionLimits
from atropos_common.net.http import allowed_hosts, host_name, run_key, run_keys
from atropos_common.protocol.bridge import INSTANCE_HEADER, TOKEN_HEADER
from atropos_tui.profile.ports import free_port
from tests.support.other_user import needs_another_user, other_user
from vllm_server import auth
from vllm_server.auth import ENDING, ENGINE_DIED, Access, AuthMiddleware, GenerationHold, path_kind

TOKEN = "0123456789abcdef"


def over(app: ASGIApp, *, own: bool) -> ASGIApp:
    """`app` as requests reach it over a connection of this user, or of another one."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(
            ConnectionLimits(), "127.0.0.1", os.geteuid() if own else 65534, lambda: None, own=own
        )
        await app({**scope, "state": {SCOPE_KEY: connection}}, receive, send)
        connection.end()

    return served


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"path": request.url.path, "body": (await request.body()).decode()})


def guarded_app(
    gate: GenerationHold | None = None, host: str = "127.0.0.1", hold_timeout_s: float = 5.0
) -> Starlette:
    app = Starlette(
        routes=[Route("/{rest:path}", echo, methods=["GET", "POST"])],
        middleware=[Middleware(AuthMiddleware)],
    )
    gate = gate or GenerationHold(held=False)
    app.state.atropos_access = Access(TOKEN, allowed_hosts(host), gate, hold_timeout_s)
    return app


def client(
    *, held: bool = False, hold_timeout_s: float = 5.0, host: str = "127.0.0.1"
) -> tuple[httpx.AsyncClient, GenerationHold]:
    gate = GenerationHold(held=held)
    app = guarded_app(gate, host, hold_timeout_s)
    transport = httpx.ASGITransport(app=over(app, own=True))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001"), gate


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/health", "open"),
        ("/metrics/", "open"),
        ("/v1/models", "open"),
        ("/generate", "generation"),
        ("/generate/", "generation"),
        ("/v1/chat/completions", "generation"),
        ("/v1/completions", "generation"),
        ("/v1/load_lora_adapter", "control"),
        ("/v1/unload_lora_adapter", "control"),
        ("/v1/LoRA", "control"),
        ("/bridge/info", "control"),
        ("/lora/status", "control"),
        ("/pause", "control"),
        ("/collective_rpc", "control"),
        ("/update_weights", "control"),
        ("/adapters", "control"),
        ("//bridge/info", "control"),
        ("/something/a/later/vllm/adds", "control"),
    ],
)
def test_a_path_is_control_until_known_to_be_harmless(path: str, kind: str) -> None:
    assert path_kind(path) == kind


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:9001", "localhost"),
        ("LOCALHOST", "localhost"),
        ("[::1]:80", "::1"),
        ("::1", "::1"),
        ("a.b", "a.b"),
    ],
)
def test_host_names(header: str, name: str) -> None:
    assert host_name(header) == name


def test_a_wildcard_binding_allows_no_further_host() -> None:
    assert allowed_hosts("0.0.0.0") == allowed_hosts(None) == {"localhost", "127.0.0.1", "::1"}
    assert "10.0.0.7" in allowed_hosts("10.0.0.7")
    assert "node7" in allowed_hosts("0.0.0.0", ["node7"])


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:9001"])
async def test_a_foreign_host_is_refused(host: str) -> None:
    http, _ = client()
    answer = await http.get("/health", headers={"Host": host})
    assert answer.status_code == 403
    assert "Host" in answer.json()["error"]


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1]])
async def test_control_needs_the_exact_token(token: str | None) -> None:
    http, _ = client()
    headers = {} if token is None else {"X-Atropos-Token": token}
    answer = await http.post("/bridge/pause", headers=headers)
    assert answer.status_code == 403
    assert "X-Atropos-Token" in answer.json()["error"]
    assert TOKEN not in answer.text


async def test_the_token_opens_control_and_open_routes_need_none() -> None:
    http, _ = client()
    assert (await http.post("/bridge/pause", headers={"X-Atropos-Token": TOKEN})).status_code == 200
    assert (await http.get("/health")).status_code == 200
    assert (await http.post("/generate", content="abc")).json()["body"] == "abc"


async def test_held_generation_waits_for_the_release_with_its_body() -> None:
    http, gate = client(held=True)
    waiting = asyncio.create_task(http.post("/generate", content="x" * 100_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    passed = await http.post(
        "/v1/completions", content="trusted", headers={"X-Atropos-Token": TOKEN}
    )
    assert passed.json()["body"] == "trusted"
    assert (await http.get("/health")).status_code == 200
    assert not waiting.done()
    gate.release()
    assert len((await waiting).json()["body"]) == 100_000
    assert not gate.held


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost.evil.example:9001"]
)
async def test_a_web_page_of_another_site_cannot_generate(origin: str) -> None:
    """A `text/plain` POST needs no preflight: the page cannot read the answer, but the GPU works
    for it."""
    http, _ = client()
    answer = await http.post(
        "/generate", content="{}", headers={"Origin": origin, "Content-Type": "text/plain"}
    )
    assert answer.status_code == 403 and "another site" in answer.json()["error"]
    assert (
        await http.post("/generate", headers={"Origin": "http://localhost:9001"})
    ).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_tag_of_another_page_cannot_generate(site: str) -> None:
    """`<img src=...>` sends no Origin; each request was a real generation."""
    http, _ = client()
    answer = await http.get("/health_generate", headers={"Sec-Fetch-Site": site})
    assert answer.status_code == 403 and "another site" in answer.json()["error"]
    for own in ("none", "same-origin"):
        assert (await http.get("/docs", headers={"Sec-Fetch-Site": own})).status_code == 200


GENERATING = [
    "/generate",
    "/v1/completions",
    "/invocations",
    "/inference/v1/generate",
    "/tokenize",
    "/health_generate",
]


@pytest.mark.parametrize("path", GENERATING)
async def test_another_user_needs_the_key_for_what_takes_the_engines_time(path: str) -> None:
    app = guarded_app()
    access = app.state.atropos_access
    access.keys = run_keys(TOKEN)
    transport = httpx.ASGITransport(app=over(app, own=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as http:
        refused = await http.post(path)
        assert refused.status_code == 401 and "[vllm] open = true" in refused.json()["error"]
        assert (await http.post(path, headers={"Authorization": "Bearer x"})).status_code == 401
        assert (
            await http.post(path, headers={"Authorization": f"Bearer {run_key(TOKEN)}"})
        ).status_code == 200
        for free in ("/health", "/metrics", "/v1/models"):
            assert (await http.get(free)).status_code == 200
        access.open = True
        assert (await http.post(path)).status_code == 200


async def test_a_body_has_a_limit_counted_where_it_does_not_say_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auth, "MAX_BODY", 1000)
    http, _ = client()
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 100
            yield b" " * 100

    for path in ("/generate", "/v1/chat/completions"):
        assert (await http.post(path, content=b" " * 1000)).status_code == 200
        refused = await http.post(path, content=b" " * 1001)
        assert refused.status_code == 413 and refused.headers["Connection"] == "close"
    assert (await http.post("/generate", content=endless())).status_code == 413
    assert sent < 2000


async def test_what_is_held_has_a_limit_over_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_HELD", 2500)
    http, gate = client(held=True)
    waiting = [asyncio.create_task(http.post("/generate", content=b"x" * 1000)) for _ in range(2)]
    await asyncio.sleep(0.05)
    full = await http.post("/generate", content=b"x" * 1000)
    assert (
        full.status_code == 503
        and "wait for it" in full.json()["error"]
        and full.headers["Retry-After"]
    )
    gate.release()
    assert [len((await task).json()["body"]) for task in waiting] == [1000, 1000]


SERVE = """
import uvicorn
from atropos_common.net.connections import ConnectionLimits
from tests.vllm_server.test_auth import guarded_app
app = guarded_app()
app.state.atropos_access.open = True
uvicorn.run(app, port={port}, log_level="error", http=ConnectionLimits().protocol())
"""


@needs_another_user
def test_large_bodies_of_another_user_leave_the_runs_own_their_room() -> None:
    """Twenty bodies of 31 MB, each sent but for its last byte, shared one limit with the
    environments' prompts."""
    size, port = 31 * 2**20, free_port()
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"

    def flood() -> int:
        senders = [_connected(port) for _ in range(12)]
        for sender in senders:
            with contextlib.suppress(OSError):  # refused while it sends
                sender.sendall(head.format(size).encode() + b" " * (size - 1))
        os.write(filled, b".")
        time.sleep(60)
        return len(senders)

    waiting, filled = os.pipe()
    with subprocess.Popen([sys.executable, "-c", SERVE.format(port=port)]) as server:
        try:
            _connected(port).close()
            with other_user(flood, keep=filled):
                assert select.select([waiting], [], [], 60)[0]
                own = _connected(port)
                own.sendall(head.format(size).encode() + b"x" * size)
                assert own.recv(100).startswith(b"HTTP/1.1 200")
            assert psutil.Process(server.pid).memory_info().rss < auth.MAX_FOREIGN + 350 * 2**20
        finally:
            server.kill()


def test_half_a_gigabyte_is_refused_at_once_and_never_held() -> None:
    """Over a real socket: 413 before the body has come, by a server that does not grow."""
    body, port = 500 * 2**20, free_port()
    code = SERVE.format(port=port)
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        try:
            peer = _connected(port)
            before = psutil.Process(server.pid).memory_info().rss
            begun = time.monotonic()
            peer.sendall(
                f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                f"{body}\r\n\r\n".encode()
            )
            assert peer.recv(100).startswith(b"HTTP/1.1 413")
            took = time.monotonic() - begun
            assert psutil.Process(server.pid).memory_info().rss - before < 8 * 2**20
        finally:
            server.kill()
    assert took < 0.5, took  # 50 ms on an idle machine


def test_many_bodies_that_never_end_take_no_more_than_their_room() -> None:
    """Each below the limit, and sent but for its last byte; who sends little, or has the token, is
    answered."""
    size, port = 31 * 2**20, free_port()
    code = SERVE.format(port=port)
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n{}\r\n"
    with subprocess.Popen([sys.executable, "-c", code]) as server, contextlib.ExitStack() as peers:
        try:
            senders = [peers.enter_context(_connected(port)) for _ in range(20)]
            for peer in senders:
                with contextlib.suppress(ConnectionError):  # refused while it sends
                    peer.sendall(head.format(size, "").encode() + b" " * (size - 1))
            refused, _, _ = select.select(senders, [], [], 10)
            assert refused
            assert psutil.Process(server.pid).memory_info().rss < auth.MAX_HELD + 250 * 2**20
            for length, token in ((1000, ""), (size, f"{TOKEN_HEADER}: {TOKEN}\r\n")):
                peer = peers.enter_context(_connected(port))
                peer.sendall(head.format(length, token).encode() + b"x" * length)
                assert peer.recv(100).startswith(b"HTTP/1.1 200")
        finally:
            server.kill()


def _connected(port: int) -> socket.socket:
    give_up = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < give_up
            time.sleep(0.05)


async def test_a_hold_that_lasts_too_long_says_so() -> None:
    http, _ = client(held=True, hold_timeout_s=0.05)
    answer = await http.post("/generate", content="x")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "30"
    assert "/bridge/resume" in answer.json()["error"]


async def test_a_client_that_leaves_during_the_hold_never_reaches_the_engine() -> None:
    reached, sent = [], []

    async def inner(scope: object, receive: object, send: object) -> None:
        reached.append(scope)

    messages: list[dict[str, object]] = [
        {"type": "http.request", "body": b"x", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    async def send(message: object) -> None:
        sent.append(message)

    app = Starlette()
    app.state.atropos_access = Access(
        TOKEN, allowed_hosts(None), GenerationHold(held=True), 5.0, open=True
    )
    scope = {
        "type": "http",
        "app": app,
        "path": "/generate",
        "method": "POST",
        "headers": [(b"host", b"localhost")],
    }
    await asyncio.wait_for(AuthMiddleware(inner)(scope, receive, send), timeout=2)  # type: ignore[arg-type]
    assert (reached, sent) == ([], [])


async def test_a_fault_refuses_health_and_generation_with_its_reason() -> None:
    http, gate = client()
    gate.state.fault = "half-written weights"
    for answer in (await http.get("/health"), await http.post("/generate", content="x")):
        assert answer.status_code == 503
        assert answer.json()["error"] == "half-written weights"
    assert (await http.get("/bridge/info", headers={"X-Atropos-Token": TOKEN})).status_code == 200


# ------------------------------------------------------------------------------------------- no
# engine behind the auth middleware


class Failing:
    """An app whose route fails in one of the ways in which vLLM's do once its engine is gone."""

    def __init__(self, how: str, **access: object) -> None:
        self.how = how
        app = Starlette(
            routes=[Route("/{rest:path}", self.route, methods=["POST"])],
            middleware=[Middleware(AuthMiddleware)],
        )
        self.access = app.state.atropos_access = Access(
            TOKEN, allowed_hosts(None), GenerationHold(held=False), instance_id="i-1", **access
        )  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:9001", headers={TOKEN_HEADER: TOKEN}
        )

    async def route(self, request: Request) -> JSONResponse:
        if self.how == "raises":
            raise RuntimeError("cannot schedule new futures after shutdown")
        return JSONResponse({"error": "what vLLM says"}, status_code=int(self.how))


@pytest.mark.parametrize("how", ["400", "500", "503", "raises"])
@pytest.mark.parametrize(
    "path", ["/generate", "/lora/load", "/bridge/transfer/update", "/v1/completions"]
)
async def test_without_an_engine_every_failure_is_503_with_the_reason(how: str, path: str) -> None:
    answer = await Failing(how, engine_died=lambda: True).http.post(path)
    assert (answer.status_code, answer.json()) == (503, {"error": ENGINE_DIED})


@pytest.mark.parametrize(
    ("how", "status"), [("400", 400), ("500", 500), ("raises", 500), ("200", 200)]
)
async def test_with_an_engine_a_route_speaks_for_itself(how: str, status: int) -> None:
    assert (await Failing(how).http.post("/lora/load")).status_code == status


async def test_what_a_dead_engine_had_answered_already_is_delivered() -> None:
    assert (
        await Failing("200", engine_died=lambda: True).http.post("/generate")
    ).status_code == 200


async def test_a_server_that_ends_takes_no_new_work() -> None:
    app = Failing("200", ending=True)
    for path in ("/generate", "/lora/load", "/bridge/load"):
        answer = await app.http.post(path)
        assert (answer.status_code, answer.json()["error"]) == (503, ENDING)
    assert (await app.http.post("/health")).status_code == 200, "probes are told by vLLM itself"


async def test_a_request_for_another_server_is_not_carried_out() -> None:
    app = Failing("200")
    assert (
        await app.http.post("/bridge/resume", headers={INSTANCE_HEADER: "i-1"})
    ).status_code == 200
    answer = await app.http.post("/bridge/resume", headers={INSTANCE_HEADER: "i-0"})
    assert answer.status_code == 503 and "i-0 is gone" in answer.json()["error"]


def test_the_middleware_notes_the_signal_before_its_handlers() -> None:
    seen: list[bool] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(access.ending))
    try:
        access = Access(
            TOKEN, allowed_hosts(None), GenerationHold(held=False), signals=(signal.SIGUSR1,)
        )
        access.watch_signals()
        access.watch_signals()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [True], "who took the signal before is called, once, and later"
    finally:
        signal.signal(signal.SIGUSR1, before)
