"""Rank 0's orders to ranks on other nodes: sent to a port, accepted from ranks only."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest
import torch

from atropos_common.system.run_dir import ENV_NODE_ADDRESS
from trainer_core.ranks.world import ENV_MEETING
from trainer_core.weight_sync.orders import (
    FIRST_MESSAGE,
    SECRET_BYTES,
    Follower,
    Meeting,
    Order,
    Orders,
)
from trainer_core.weight_sync.sending import Outgoing


def test_silent_connections_hold_up_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, each had `FIRST_MESSAGE_S`; half a minute of them, and the ranks came too
    late."""
    monkeypatch.setenv(ENV_MEETING, "/shared/ranks")
    monkeypatch.setenv(ENV_NODE_ADDRESS, "127.0.0.2")
    monkeypatch.setattr("trainer_core.weight_sync.orders.FIRST_MESSAGE_S", 600.0)
    monkeypatch.setattr("trainer_core.weight_sync.orders.MOST_WAITING", 4, raising=False)
    orders = Orders(2)
    meeting = orders.meeting
    assert meeting is not None
    foreign = [socket.create_connection((meeting.at, meeting.port)) for _ in range(20)]
    for client in foreign[::2]:
        client.sendall(b"0")
    made: list[Follower] = []
    thread = threading.Thread(
        target=lambda: made.append(
            Follower(meeting, 1, torch.device("cpu"), Outgoing.__new__(Outgoing))
        )
    )
    thread.start()
    meeting_all = threading.Thread(target=orders.meet, daemon=True)
    meeting_all.start()
    meeting_all.join(60)
    assert not meeting_all.is_alive(), "the rank waits for foreign connections"
    thread.join()
    for client in foreign:
        client.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b"", "still listened to"
    made[0].close()
    orders.close()


@pytest.mark.parametrize("several", [True, False])
def test_orders_reach_the_other_ranks_and_foreign_connections_are_refused(
    several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several:
        monkeypatch.setenv(ENV_MEETING, "/shared/ranks")
        monkeypatch.setenv(ENV_NODE_ADDRESS, "127.0.0.2")
    orders = Orders(2)
    meeting = orders.meeting
    assert meeting is not None
    assert (meeting.at == "127.0.0.2", bool(meeting.port)) == (several, several)
    if several:
        client = socket.create_connection((meeting.at, meeting.port))
        client.sendall(b"0" * (FIRST_MESSAGE - 2) + b" 1")
    made: list[Follower] = []

    def follow() -> None:
        made.append(Follower(meeting, 1, torch.device("cpu"), Outgoing.__new__(Outgoing)))

    thread = threading.Thread(target=follow)
    thread.start()
    orders.meet()
    thread.join()
    orders.give(Order(do="leave"))
    until = time.monotonic() + 5
    while not orders.done() and time.monotonic() < until:
        time.sleep(0.01)
    assert orders.done()
    if several:
        assert client.recv(1) == b""
    made[0].close()
    orders.close()


def test_a_rank_leaves_in_order_when_rank_0_has_been_killed() -> None:
    """A connection that was reset cannot be shut down any more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = Meeting("127.0.0.1", listener.getsockname()[1], "0" * (2 * SECRET_BYTES))
        follower = Follower(meeting, 1, torch.device("cpu"), Outgoing.__new__(Outgoing))
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    follower._thread.join(30)
    follower.close()
