"""HTTP clients: no reuse of a connection that was idle, no certificates without TLS."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atropos_common.net.http import LIMITS, certificates
from tests.support.json_server import JsonServer
from trainer_core.rollouts.client import RunApi
from trainer_core.server.client import ServerClient

UVICORN_CLOSES_S = 5.0
IDLE_S = LIMITS.keepalive_expiry or 0.0


@pytest.fixture
def server() -> Iterator[JsonServer]:
    made = JsonServer(lambda path, body, token: (200, {"enabled": False, "batch": None}))
    made.connections = 0
    accept = made.get_request

    def counted() -> Any:
        made.connections += 1
        return accept()

    made.get_request = counted  # type: ignore[method-assign]
    yield made
    made.close()


def _engine(url: str) -> Callable[[], object]:
    return ServerClient(url, "token").adapters


def _run_api(url: str) -> Callable[[], object]:
    api = RunApi(url, {}, threading.Event())
    return lambda: api._http.get("/batch").json()


@pytest.mark.parametrize("client", [_engine, _run_api])
def test_an_idle_connection_is_given_up_before_the_server_does(
    client: Callable[[str], Callable[[], object]], server: JsonServer
) -> None:
    assert UVICORN_CLOSES_S / 2 > IDLE_S > 1
    call = client(server.url)
    call()
    call()
    assert server.connections == 1, "calls in a row share one"
    time.sleep(IDLE_S + 0.2)
    call()
    assert server.connections == 2


def test_certificates_are_read_for_tls_alone_and_never_left_out_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []
    monkeypatch.setattr(
        ssl.SSLContext, "load_verify_locations", lambda *args, **words: read.append(words)
    )
    for url in ("http://127.0.0.1:9001", "HTTP://10.0.0.1:8000"):
        ServerClient(url, "token").close()
        RunApi(url, {}, threading.Event())
    assert not read
    ServerClient("https://engine.example", "token").close()
    assert read and certificates("https://engine.example") is True
    without = certificates("http://127.0.0.1:9001")
    assert isinstance(without, ssl.SSLContext)
    assert without.verify_mode is ssl.CERT_REQUIRED and without.check_hostname, (
        "led to TLS all the same it trusts nobody"
    )
