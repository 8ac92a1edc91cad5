"""Rank 0's orders to ranks on other nodes: they come to a port, and only ranks are heard."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from atropos_common.run_dir import ENV_NODE_ADDRESS
from trainer_core.ranks import ENV_MEETING
from trainer_core.weight_sync.orders import FIRST_WORD, Follower, Order, Orders
from trainer_core.weight_sync.outgoing import Outgoing


@pytest.mark.parametrize("several", [True, False])
def test_orders_reach_the_other_ranks_and_strangers_are_left_out(
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
        stranger = socket.create_connection((meeting.at, meeting.port))
        stranger.sendall(b"0" * (FIRST_WORD - 2) + b" 1")
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
        assert stranger.recv(1) == b""  # shown the door
    made[0].close()
    orders.close()
