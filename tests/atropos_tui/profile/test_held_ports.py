"""A port that is held for one program: no other process gets it at any time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from atropos_common.net import ports
from atropos_tui.profile.ports import free_port, holder, is_free
from tests.support.other_user import as_another_user, needs_another_user, other_user, squat
from vllm_server.__main__ import check_port
from vllm_server.config import ConfigError


@pytest.fixture
def port() -> int:
    return free_port()


@contextlib.contextmanager
def serving(port: int) -> Iterator[socket.socket]:
    """A server of ours on a port that is held for it."""
    with ports.bind("127.0.0.1", port, held=True) as server:
        ports.listen(server)
        yield server


def talk(port: int, server: socket.socket, *, first: bool) -> None:
    """One connection that leaves a trace in the kernel: the server, or the client, closes first."""
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    for end in (accepted, client) if first else (client, accepted):
        end.close()


@needs_another_user
def test_another_user_who_tries_all_the_time_never_gets_it(port: int) -> None:
    with contextlib.closing(ports.hold(port)), other_user(lambda: squat(port, 4.0)) as waiting:
        lives = 0
        while waiting.waits():
            with serving(port) as server:
                talk(port, server, first=lives % 2 == 0)
            lives += 1
        assert waiting.said() == []
    assert lives > 50


@needs_another_user
def test_another_user_who_had_bound_it_before_never_listens(port: int) -> None:
    """SO_REUSEADDR lets him bind a port that is free, and us beside him; he must not come to listen
    later."""

    ours, his = socket.socketpair()

    def bind_first_and_listen_when_he_can() -> bool:
        with socket.socket() as early:
            early.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            early.bind(("127.0.0.1", port))
            his.send(b"bound")
            his.recv(1)
            for _ in range(20_000):
                with contextlib.suppress(OSError):
                    early.listen()
                    return True
            return False

    with ours, his, other_user(bind_first_and_listen_when_he_can, keep=his.fileno()) as early:
        assert ours.recv(5) == b"bound"
        with contextlib.closing(ports.hold(port)):
            ours.send(b"!")
            while early.waits():
                with serving(port) as server:
                    talk(port, server, first=True)
            assert early.said() is False


def test_nobody_of_our_own_gets_it_by_mistake_either(port: int) -> None:
    with contextlib.closing(ports.hold(port)):
        assert not is_free(port) and is_free(port, held=True)
        with pytest.raises(OSError, match="in use"):
            ports.hold(port)
        with serving(port):
            assert squat(port, 0.01) == []
            assert not is_free(port, held=True)
            with pytest.raises(OSError, match="in use"):
                ports.bind("127.0.0.1", port, held=True)
    assert is_free(port)


def test_where_nobody_serves_a_connection_is_refused(port: int) -> None:
    with contextlib.closing(ports.hold(port)):
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            with serving(port) as server:
                talk(port, server, first=True)


def test_what_another_has_cannot_be_held(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match="in use"):
        ports.hold(port)
    with contextlib.closing(ports.hold(port)):
        pass


@needs_another_user
def test_after_the_end_it_is_free_for_everyone(port: int) -> None:
    ports.hold(port).close()
    assert as_another_user(lambda: squat(port, 2.0)) != []


def test_the_server_looks_at_a_port_with_who_holds_it_in_mind(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(ports.hold(port)):
        with pytest.raises(ConfigError, match="cannot be bound"):
            check_port("127.0.0.1", port)
        monkeypatch.setenv("ATROPOS_HELD_PORT", str(port))
        check_port("127.0.0.1", port)
        with serving(port), pytest.raises(ConfigError, match="cannot be bound"):
            check_port("127.0.0.1", port)


def test_a_run_that_holds_a_port_for_a_program_that_still_loads_is_named(port: int) -> None:
    run = {"ATROPOS_HELD_PORT": str(port), "ATROPOS_RUN_ID": "demo-7", "ATROPOS_COMPONENT": "vllm"}
    with contextlib.closing(ports.hold(port)):
        assert holder(port) is None
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], env=os.environ | run, stdin=subprocess.PIPE
        ) as loads:
            try:
                found = holder(port)
                assert found is not None and str(found).startswith("vllm of run demo-7, ")
            finally:
                loads.kill()
