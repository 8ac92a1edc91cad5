"""Attacks on a plan's run-api by another user, by a web page, and with bodies that are too large.

Each attack is tried on the very command that a stack starts, and succeeds on a run-api without its
auth middleware.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import select
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.types import Message, Scope

from atropos_api.auth import Settings
from atropos_common.net import connections
from atropos_common.net.body import BodyError, Gunzip, read_body
from atropos_common.protocol.bridge import TOKEN_HEADER
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.ports import free_port
from atropos_tui.profile.profile import parse_profile
from atropos_tui.profile.site import make_site
from tests.support.other_user import as_another_user, call, needs_another_user, other_user

TOKEN = "a-token-of-the-run"
MIB = 1024 * 1024
GROUP = {"tokens": [[1, 2]] * 8, "masks": [[-100, 2]] * 8, "scores": [1.0, 0.0] * 4}
REGISTRATION = {
    "wandb_group": "",
    "wandb_project": "",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 1,
    "starting_step": 0,
    "num_steps": 10,
}


def planned(port: int) -> list[str]:
    """How a stack starts its run-api."""
    data = {"name": "p", "model": "/models/m", "env": {"module": "json"}, "api": {"port": port}}
    found = stack_of(
        make_site(parse_profile(data, "p.toml"), Path("/runs/r"), run_id="r")
    ).component("api")
    assert found is not None
    return found.command


@contextmanager
def serving(folder: Path, **env: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Port and process of a run-api that answers."""
    port = free_port()
    own = {key: value for key, value in os.environ.items() if not key.startswith("ATROPOS_")} | env
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen(planned(port), env=own, cwd=folder, stdout=log, stderr=log)
    try:
        give_up = time.monotonic() + 60
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < give_up and process.poll() is None, (
                    folder / "api.log"
                ).read_text()
                time.sleep(0.05)
        yield port, process
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with serving(
        tmp_path_factory.mktemp("api"), ATROPOS_TOKEN=TOKEN, ATROPOS_API_MAX_BODY_MIB="16"
    ) as found:
        yield found


@pytest.fixture
def port(api: tuple[int, subprocess.Popen[bytes]]) -> int:
    return api[0]


def peak_mb(process: subprocess.Popen[bytes]) -> float:
    """The largest memory that a process has had, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


def bomb(unpacked_mib: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    zeros = bytes(MIB)
    return b"".join(packer.compress(zeros) for _ in range(unpacked_mib)) + packer.flush()


@needs_another_user
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/info", b""),
        ("POST", "/scored_data", json.dumps(GROUP).encode()),
        ("GET", "/batch", b""),
        ("GET", "/latest_example", b""),
        ("GET", "/reset_data", b""),
        ("POST", "/register", json.dumps(REGISTRATION).encode()),
    ],
)
def test_another_user_gets_nothing_and_changes_nothing(
    port: int, method: str, path: str, body: bytes
) -> None:
    before = call(port, "GET", "/status")[1], call(port, "GET", "/info")[1]
    status, text, _ = as_another_user(lambda: call(port, method, path, body))
    assert status == 403 and "65534" in json.loads(text)["error"]
    assert (call(port, "GET", "/status")[1], call(port, "GET", "/info")[1]) == before


@needs_another_user
def test_no_header_makes_another_user_one_of_ours(port: int) -> None:
    forged = {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1", TOKEN_HEADER: TOKEN}
    assert as_another_user(lambda: call(port, "GET", "/info", headers=forged))[0] == 403


@needs_another_user
def test_another_user_who_hangs_up_is_not_taken_for_root(port: int) -> None:
    """A closed socket belongs to nobody, and some kernels show nobody's as root's."""
    before = json.loads(call(port, "GET", "/status")[1])["queue_size"]

    def post_and_leave() -> bool:
        body = json.dumps(GROUP).encode()
        head = f"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        return True

    assert as_another_user(post_and_leave)
    assert json.loads(call(port, "GET", "/status")[1])["queue_size"] == before


@needs_another_user
def test_users_who_share_on_purpose_are_let_in(tmp_path: Path) -> None:
    with serving(tmp_path, ATROPOS_API_UIDS="65534") as (port, _):
        assert as_another_user(lambda: call(port, "GET", "/info"))[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000"]
)
def test_a_name_that_was_made_to_lead_here_is_refused(port: int, host: str) -> None:
    assert call(port, "GET", "/info", headers={"Host": host})[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_names_of_the_loopback_are_right(port: int, host: str) -> None:
    assert call(port, "GET", "/info", headers={"Host": f"{host}:{port}"})[0] == 200


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("OPTIONS", {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}),
        ("POST", {"Origin": "http://evil.example", "Content-Type": "text/plain"}),
        ("POST", {"Origin": "null"}),
        ("GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
    ],
)
def test_a_web_page_is_refused_and_told_nothing(
    port: int, method: str, headers: dict[str, str]
) -> None:
    path = "/info" if method == "GET" else "/scored_data"
    status, _, answered = call(
        port, method, path, json.dumps(GROUP).encode() if method == "POST" else b"", headers
    )
    assert status == 403
    assert not [name for name in answered if name.startswith("access-control-")]


def test_forgetting_everything_takes_the_runs_token(port: int) -> None:
    assert call(port, "POST", "/register", json.dumps(REGISTRATION).encode())[0] == 200
    for path in ("/reset_data", "/reset%5fdata", "/reset_data/", "//reset_data"):
        assert call(port, "GET", path)[0] in (403, 404)
        assert call(port, "GET", path, headers={TOKEN_HEADER: "another"})[0] in (403, 404)
    assert json.loads(call(port, "GET", "/info")[1])["batch_size"] == 8
    assert call(port, "GET", "/reset_data", headers={TOKEN_HEADER: TOKEN})[0] == 200
    assert json.loads(call(port, "GET", "/info")[1])["batch_size"] == -1


def test_without_a_token_nobody_makes_it_forget(tmp_path: Path) -> None:
    with serving(tmp_path) as (port, _):
        assert call(port, "GET", "/reset_data", headers={TOKEN_HEADER: ""})[0] == 403


def test_a_gzip_bomb_is_not_unpacked(api: tuple[int, subprocess.Popen[bytes]]) -> None:
    port, process = api
    packed = bomb(600)
    assert len(packed) < MIB
    before = peak_mb(process)
    status, text, _ = call(port, "POST", "/disconnect-env", packed, {"Content-Encoding": "gzip"})
    assert status == 413 and "ATROPOS_API_MAX_BODY_MIB" in json.loads(text)["error"]
    assert peak_mb(process) - before < 60
    assert call(port, "GET", "/info")[0] == 200


def test_a_body_that_is_too_large_is_refused_unread(
    api: tuple[int, subprocess.Popen[bytes]],
) -> None:
    port, process = api
    before = peak_mb(process)
    assert call(port, "POST", "/disconnect-env", bytes(40 * MIB))[0] == 413

    assert peak_mb(process) - before < 60


def test_a_body_that_does_not_tell_its_length_is_refused_after_little_of_it() -> None:
    """Without a length the body would have to be read up to the limit of all others."""
    sent = 0

    async def receive() -> Message:
        nonlocal sent
        sent += 65536
        return {"type": "http.request", "body": bytes(65536), "more_body": sent < 500_000_000}

    scope: Scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}
    with pytest.raises(BodyError, match="send a Content-Length") as caught:
        asyncio.run(read_body(scope, receive, 400 * MIB))
    assert caught.value.status == 413 and sent <= 4 * MIB + 65536


def test_by_default_half_a_gigabyte_is_too_much_and_the_largest_real_body_is_not() -> None:
    """16 groups of 16 completions of 32,768 tokens have 285 MB as JSON."""
    assert 285_000_000 < Settings.from_env({}, "127.0.0.1").max_body < 500_000_000


def test_real_bodies_arrive_as_they_were_sent(port: int) -> None:
    """Plain, packed as atroposlib packs a large one, and in several packed parts."""
    plain = json.dumps(GROUP | {"messages": None}).encode()
    halves = gzip.compress(plain[:100]) + gzip.compress(plain[100:])
    for body, headers in (
        (plain, {}),
        (gzip.compress(plain), {"Content-Encoding": "gzip"}),
        (halves, {"Content-Encoding": "gzip"}),
    ):
        assert json.loads(call(port, "POST", "/scored_data", body, headers)[1]) == {
            "status": "received"
        }
        assert json.loads(call(port, "GET", "/latest_example")[1])["tokens"] == GROUP["tokens"]
    assert call(port, "POST", "/scored_data", b"{")[0] == 422
    for broken in (gzip.compress(plain)[:30], b"no gzip"):
        assert call(port, "POST", "/scored_data", broken, {"Content-Encoding": "gzip"})[0] == 400


def test_the_kernel_and_its_list_tell_the_same_owner() -> None:
    asked = connections.uid_lookup()
    assert asked != connections.uid_in_proc, "sock_diag works here"
    for listening, called in (
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("127.0.0.1", "::ffff:127.0.0.1"),
    ):
        family, own = (
            socket.AF_INET6 if ":" in host else socket.AF_INET for host in (listening, called)
        )
        with (
            socket.create_server((listening, 0), family=family) as server,
            socket.socket(own) as client,
        ):
            client.connect((called, server.getsockname()[1]))
            accepted, address = server.accept()
            with accepted:
                ends = address[:2], accepted.getsockname()[:2]
                assert asked(*ends) == connections.uid_in_proc(*ends) == os.geteuid()
                client.close()
                for look in (asked, connections.uid_in_proc):
                    with pytest.raises(connections.UnknownPeerError):
                        look(*ends)


def test_a_listener_is_nobody_s_other_end() -> None:
    """A caller that has left, and a server of ours on the port that it called from."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        for look in (connections.uid_lookup(), connections.uid_in_proc):
            with pytest.raises(connections.UnknownPeerError):
                look(other.getsockname(), server.getsockname())


def test_unpacking_stops_at_the_limit() -> None:
    taken = 0
    with pytest.raises(BodyError, match="unpacked") as caught:
        for piece in Gunzip(2 * MIB).feed(bomb(64)):
            taken += len(piece)
    assert caught.value.status == 413 and taken <= 2 * MIB


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"ATROPOS_API_UIDS": "bob"}, "ATROPOS_API_UIDS='bob': give user numbers"),
        ({"ATROPOS_API_MAX_BODY_MIB": "0"}, "ATROPOS_API_MAX_BODY_MIB='0': give a number of MiB"),
    ],
)
def test_settings_that_cannot_be_meant(env: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Settings.from_env(env, "127.0.0.1")
    command = [sys.executable, "-P", "-m", "atropos_api", "--port", "0"]
    done = subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        command = planned(other.getsockname()[1])
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "cannot be bound (Address already in use)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@needs_another_user
def test_another_user_cannot_hold_every_connection(
    api: tuple[int, subprocess.Popen[bytes]],
) -> None:
    """A thousand that ask for nothing took every descriptor: the run's own programs were turned
    away."""
    port, _ = api

    def hold() -> int:
        held = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(400)]
        give_up = time.monotonic() + 10
        while len(held) > connections.PER_PEER and time.monotonic() < give_up:
            closed, _, _ = select.select(held, [], [], 0.1)
            held = [each for each in held if each not in closed]
        return len(held)

    with other_user(hold) as there:
        while there.waits():
            assert call(port, "GET", "/info")[0] == 200
        assert 1 <= there.said() <= connections.PER_PEER
