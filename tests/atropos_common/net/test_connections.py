"""Limits of connections without the run's key: their number, and the time to send a request.

The attacks come from another machine (`two_machines`): without these limits one that has no key
holds every descriptor.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from atropos_common.net import connections
from atropos_common.net.body import BodyError, read_body
from atropos_common.net.connections import ConnectionLimits, connection_of
from atropos_common.net.http import run_key
from atropos_common.system.run_dir import ENV_TOKEN
from tests.support import two_machines
from tests.support.two_machines import OWN

TOKEN = "a-token-of-the-run"
HOLD = """
import select, socket, sys, time
held = []
for _ in range(int(sys.argv[1])):
    try:
        held.append(socket.create_connection(("{host}", 8000), timeout=5))
    except OSError:
        break
print(len(held), flush=True)
sys.stdin.readline()
closed, _, _ = select.select(held, [], [], 0)
print(len(held) - len(closed), flush=True)
"""
ASK = """
import urllib.request
headers = {{"Authorization": "Bearer {key}"}}
request = urllib.request.Request("http://{host}:8000/status", headers=headers)
print(urllib.request.urlopen(request, timeout=10).status)
"""


def attack_run_api() -> dict[str, int]:
    """On the first of two machines: run-api with 400 descriptors, and another machine that opens
    600 connections."""
    env = os.environ | {ENV_TOKEN: TOKEN}
    limited = [
        "bash",
        "-c",
        f"ulimit -n 400; exec {sys.executable} -P -m atropos_api --host {OWN} --port 8000",
    ]
    server = subprocess.Popen(
        limited, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        with socket.socket() as probe:
            while probe.connect_ex((OWN, 8000)):
                assert server.poll() is None
                time.sleep(0.05)
        hold = two_machines.elsewhere(sys.executable, "-c", HOLD.format(host=OWN), "600")
        holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdin and holder.stdout
        opened = int(holder.stdout.readline())
        ask = [sys.executable, "-c", ASK.format(host=OWN, key=run_key(TOKEN))]
        answers = [
            subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
            for words in (ask, two_machines.elsewhere(*ask))
        ]
        holder.stdin.write("\n")
        holder.stdin.flush()
        left = int(holder.stdout.readline())
    finally:
        server.terminate()
        _, log = server.communicate()
    return {
        "opened": opened,
        "left": left,
        "own": int(answers[0]),
        "keyed": int(answers[1]),
        "told": log.count("closed"),
    }


@pytest.mark.skipif(not two_machines.possible(), reason="no network of one's own here")
def test_another_machine_cannot_hold_every_descriptor() -> None:
    command = two_machines.command(
        sys.executable, "-m", "tests.atropos_common.net.test_connections"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["own"] == 200, "this machine's own programs are answered"
    assert seen["keyed"] == 200, "so is a component on the very machine that the attack comes from"
    assert seen["left"] <= connections.PER_PEER
    assert seen["told"] >= 1, "the log names the peer"


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every connection is of an unknown peer, as one of another machine is; deadlines are short."""

    def unknown(client: connections.Address, server: connections.Address) -> int:
        raise connections.UnknownPeerError

    monkeypatch.setattr(connections, "uid_lookup", lambda: unknown)
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    monkeypatch.setattr(connections, "BODY_S", 0.5)
    yield


class Served:
    """A real server with the limits; `/prove` stands for a request with the key."""

    def __init__(self) -> None:
        self.limits = ConnectionLimits()
        app = Starlette(routes=[Route("/{what}", self._answer, methods=["GET", "POST"])])
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = self._socket.getsockname()
        config = uvicorn.Config(app, http=self.limits.protocol(), log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)

    async def _answer(self, request: Request) -> PlainTextResponse:
        connection = connection_of(request.scope)
        assert connection
        with connection.request():
            if request.url.path == "/prove":
                connection.prove()
            try:
                await read_body(
                    request.scope, request.receive, 1000, timeout_s=connection.body_timeout_s
                )
            except BodyError as error:
                return PlainTextResponse(str(error), error.status)
            return PlainTextResponse("own" if connection.own else "foreign")

    async def __aenter__(self) -> Served:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address[:2])


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> str:
    """The body of one answer on a connection that stays open."""
    writer.write(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().splitlines()
        if line.startswith(b"content-length")
    )
    return (await reader.readexactly(length)).decode()


async def closes(reader: asyncio.StreamReader, within_s: float) -> bool:
    """Return True if the server ends the connection in time."""
    try:
        return not await asyncio.wait_for(reader.read(), within_s)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.usefixtures("foreign")
async def test_a_head_that_comes_byte_by_byte_has_a_deadline() -> None:
    """Also the second head of a connection: uvicorn's idle timer ends with the first byte that
    arrives."""
    async with Served() as server:
        fresh, used = await server.connect(), await server.connect()
        assert await answer(*used, "x") == "foreign"
        ended = [asyncio.create_task(closes(reader, 5)) for reader, _ in (fresh, used)]
        for byte in b"GET /x HTTP/1.1\r\nX-Slow: " + b"y" * 20:
            for _, writer in (fresh, used):
                writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
            if all(task.done() for task in ended):
                break
        assert [task.done() and task.result() for task in ended] == [True, True]


@pytest.mark.usefixtures("foreign")
async def test_a_body_that_does_not_come_has_a_deadline() -> None:
    async with Served() as server:
        reader, writer = await server.connect()
        writer.write(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nnine.....")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        assert b"408" in head
        writer.close()


@pytest.mark.usefixtures("foreign")
async def test_a_connection_that_has_shown_the_key_is_the_runs_own() -> None:
    """It has no deadline any more and takes no slot of the others."""
    async with Served() as server:
        proven = await server.connect()
        assert await answer(*proven, "prove") == "own"
        others = [await server.connect() for _ in range(connections.PER_PEER + 5)]
        ended = [asyncio.create_task(closes(reader, 3)) for reader, _ in others]
        await asyncio.sleep(1.0)  # twice the deadline
        assert await answer(*proven, "x") == "own"
        assert all(await asyncio.gather(*ended))
        for _, writer in [proven, *others]:
            writer.close()


@pytest.mark.usefixtures("foreign")
async def test_newcomers_win_over_connections_that_ask_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 60.0)
    async with Served() as server:
        idle = [await server.connect() for _ in range(connections.PER_PEER)]
        newcomer = await server.connect()
        assert await answer(*newcomer, "prove") == "own"
        assert await closes(idle[0][0], 5), "the oldest one gave way"
        assert not await closes(idle[1][0], 0.1)
        for _, writer in [newcomer, *idle]:
            writer.close()


@pytest.mark.usefixtures("foreign")
async def test_requests_of_other_users_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of refused requests would push the run's own lines out of a rotated log."""
    for name in ("uvicorn", "uvicorn.access"):  # a server of another test may have configured them
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        caplog.set_level("INFO", name)
    async with Served() as server:
        reader, writer = await server.connect()
        assert await answer(reader, writer, "torch.OutOfMemoryError") == "foreign"
        broken, sending = await server.connect()
        sending.write(b"no request\r\n\r\n")
        assert b"400" in await asyncio.wait_for(broken.read(), 5)
        assert [line for line in caplog.messages if "HTTP" in line] == []
        assert await answer(reader, writer, "prove") == "own"
        assert any('"GET /prove HTTP/1.1" 200' in line for line in caplog.messages)
        writer.close()


if __name__ == "__main__":
    print(json.dumps(attack_run_api()))
