"""Orders from the trainer's rank 0, which talks to servers, to the other ranks of a broadcast."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel

from atropos_common.broadcast.group import POLL_S, SECRET_BYTES, Lifeline, first_line, gpu_of
from atropos_common.broadcast.transfer import TransferInit
from trainer_core.errors import RankGone
from trainer_core.ranks.world import node_address, on_several_nodes
from trainer_core.weight_sync.sending import BroadcastGroup, Outgoing, connect

ARRIVAL_S = 60.0
FIRST_MESSAGE_S = 5.0
"""Seconds for a connection's first message."""
MOST_WAITING = 512
"""Limit of unauthenticated connections; beyond it the oldest is closed."""
RANK_WIDTH = 6
FIRST_MESSAGE = 2 * SECRET_BYTES + 1 + RANK_WIDTH
"""Characters of the first message: secret and rank."""


class Meeting(NamedTuple):
    """Where the other ranks connect: a folder, or address and port of rank 0."""

    at: str
    port: int  # 0 for a folder
    secret: str


class Order(BaseModel):
    """The next action of all other ranks; they answer with a reason if it fails."""

    do: Literal["join", "send", "leave"]
    group: TransferInit | None = None
    version: int = 0
    number: int = 0
    """Answers repeat it, because orders may overlap."""


class Orders:
    """Rank 0's end; a no-op with a single rank."""

    def __init__(self, ranks: int) -> None:
        self._others = range(1, ranks)
        self._channels: dict[int, Any] = {}
        self._number = 0
        self._awaited: set[int] = set()
        # Set by the threads that read answers.
        self._failed: dict[int, str] = {}
        self._ended: set[int] = set()
        self.meeting: Meeting | None = None
        if self._others:
            self.meeting, self._listener = _listen()

    def meet(self) -> None:
        """Wait for all other ranks, then remove the folder.

        Raises:
            RankGone: a rank does not connect.
        """
        if self.meeting is None:
            return
        until = time.monotonic() + ARRIVAL_S
        with RankListener(self._listener, self.meeting.secret) as listener:
            while len(self._channels) < len(self._others):
                for rank, connection in listener.arrivals(FIRST_MESSAGE_S):
                    self._channels[rank] = connection.makefile("rwb")
                    threading.Thread(target=self._listen, args=(rank,), daemon=True).start()
                    until = time.monotonic() + ARRIVAL_S
                if time.monotonic() > until:
                    late = "not every rank of the trainer connected to rank 0"
                    raise RankGone(f"{late} within {ARRIVAL_S:.0f} s")
        # Removes the folder: after a SIGKILL nothing else would.
        self._stop_listening()

    def give(self, order: Order) -> None:
        self._number += 1
        self._awaited, self._failed = set(self._channels), {}
        message = order.model_copy(update={"number": self._number}).model_dump_json().encode()
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # the rank has ended; `done` reports that
                channel.write(message + b"\n")
                channel.flush()

    def done(self) -> bool:
        """Return True if all others have carried out the last order.

        Raises:
            RuntimeError: a rank failed; its message.
            RankGone: a rank has ended.
        """
        for rank, reason in self._failed.items():
            raise RuntimeError(f"rank {rank} of the trainer: {reason}")
        self.check()
        return not self._awaited

    def check(self) -> None:
        """Raise `RankGone` if another rank has ended."""
        if self._ended:
            raise RankGone(f"rank {min(self._ended)} has ended")

    def close(self) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.close()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self.meeting is not None:
            self._listener.close()
            if not self.meeting.port:
                shutil.rmtree(self.meeting.at, ignore_errors=True)

    def _listen(self, rank: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            for answer in self._channels[rank]:
                number, _, text = answer.decode().rstrip("\n").partition(" ")
                # A late answer to an earlier order says nothing of the present one.
                if int(number) == self._number:
                    if text:
                        self._failed[rank] = text
                    self._awaited.discard(rank)
        self._ended.add(rank)


class RankListener:
    """Accept ranks without waiting for the first message of any one connection."""

    # Other users can connect to a port, and stay silent.
    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret = listener, secret
        self._waiting: dict[socket.socket, tuple[float, bytes]] = {}
        """Start time and received bytes of each incomplete connection, oldest first."""

    def __enter__(self) -> RankListener:
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [*self._waiting]:
            self._refuse(connection)
        self._selector.close()

    def arrivals(self, timeout_s: float) -> Iterator[tuple[int, socket.socket]]:
        """Yield the ranks that have connected, within `timeout_s`."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                with contextlib.suppress(OSError):  # it is closed already
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    self._selector.register(connection, selectors.EVENT_READ)
                    self._waiting[connection] = time.monotonic(), b""
                continue
            assert isinstance(key.fileobj, socket.socket)
            if (rank := self._rank_of(key.fileobj)) is not None:
                yield rank, key.fileobj
        late = time.monotonic() - FIRST_MESSAGE_S
        for connection in [each for each, (since, _) in self._waiting.items() if since < late]:
            self._refuse(connection)
        while len(self._waiting) > MOST_WAITING:
            self._refuse(next(iter(self._waiting)))

    def _rank_of(self, connection: socket.socket) -> int | None:
        since, message = self._waiting[connection]
        try:
            more = connection.recv(FIRST_MESSAGE - len(message))
        except OSError:
            more = b""
        message += more
        if more and len(message) < FIRST_MESSAGE:
            self._waiting[connection] = since, message
            return None
        secret, rank = message[: 2 * SECRET_BYTES], message[2 * SECRET_BYTES :].strip()
        if not (hmac.compare_digest(secret, self._secret.encode()) and rank.isdigit()):
            self._refuse(connection)
            return None
        self._release(connection)
        connection.setblocking(True)
        return int(rank)

    def _refuse(self, connection: socket.socket) -> None:
        self._release(connection)
        connection.close()

    def _release(self, connection: socket.socket) -> None:
        del self._waiting[connection]
        self._selector.unregister(connection)


class Follower:
    """Another rank's end: a thread that carries out rank 0's orders."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, what: Outgoing) -> None:
        self._rank, self._device, self._what, self._written = rank, device, what, -1
        self._leaving = False
        self._group: BroadcastGroup | None = None
        self._lifeline: Lifeline | None = None
        self._socket = _connect(meeting)
        self._socket.sendall(f"{meeting.secret} {rank:>{RANK_WIDTH}}".encode())
        self._channel = self._socket.makefile("rwb")
        self._thread = threading.Thread(target=self._follow, name="orders")
        self._thread.start()

    def wrote(self, version: int) -> None:
        """Record that this rank's parameters are now those of `version`."""
        self._written = version

    def close(self) -> None:
        """Take no more orders."""
        self._leaving = True
        with contextlib.suppress(OSError):  # rank 0 is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._leave()
        self._socket.close()

    def _follow(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with contextlib.suppress(OSError):  # rank 0 is gone, or this one leaves
            for message in self._channel:
                order = Order.model_validate_json(message)
                answer = f"{order.number} {self._carry_out(order)}\n"
                self._channel.write(answer.encode())
                self._channel.flush()

    def _carry_out(self, order: Order) -> str:
        try:
            if order.do == "send":
                self._send(order.version)
            else:
                self._leave()
                if order.group is not None:
                    self._join(order.group)
        except RuntimeError as error:
            self._leave()
            return first_line(error)
        return ""

    def _join(self, init: TransferInit) -> None:
        lifeline = self._lifeline = Lifeline(init, self._rank, gpu_of(self._device))
        lifeline.connecting()
        # In a thread, because a connection that waits for a dead rank cannot be interrupted.
        connecting = Calls({"": lambda: connect(init, lifeline.store, self._rank, self._device)})
        self._until(connecting.over, "connect", f"no connection over {init.backend}")
        connecting.raise_failure()
        self._group = connecting.results()[""]

    def _send(self, version: int) -> None:
        if self._group is None:
            raise RuntimeError("it is in no group")

        def written() -> bool:
            return self._written >= version

        self._until(written, "transfer", f"it has not reached version {version}")
        self._group.send(self._what)
        self._until(self._group.sent, "transfer", "the others did not take its rows")

    def _until(self, done: Callable[[], bool], phase: str, otherwise: str) -> None:
        def there() -> bool:
            if self._leaving:
                raise RuntimeError("it leaves")
            return done()

        assert self._lifeline is not None
        self._lifeline.until(there, phase, otherwise)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _listen() -> tuple[Meeting, socket.socket]:
    secret = secrets.token_hex(SECRET_BYTES)
    # On one node a socket in a private folder; several nodes have none in common, so their ranks
    # come to a port and prove themselves by the secret.
    if on_several_nodes():
        address = node_address()
        family = socket.getaddrinfo(address, None)[0][0]
        listener = socket.create_server((address, 0), family=family)
        return Meeting(address, listener.getsockname()[1], secret), listener
    folder = tempfile.mkdtemp(prefix="atropos-orders-")
    listener = socket.socket(socket.AF_UNIX)
    _at(Path(folder), listener.bind)
    listener.listen()
    return Meeting(folder, 0, secret), listener


def _connect(meeting: Meeting) -> socket.socket:
    if meeting.port:
        connected = socket.create_connection((meeting.at, meeting.port), timeout=ARRIVAL_S)
        connected.settimeout(None)
        return connected
    connected = socket.socket(socket.AF_UNIX)
    _at(Path(meeting.at), connected.connect)
    return connected


def _at(folder: Path, bind_or_connect: Callable[[str], None]) -> None:
    # The folder's path may be longer than a socket address.
    descriptor = os.open(folder, os.O_PATH)
    try:
        bind_or_connect(f"/proc/self/fd/{descriptor}/orders")
    finally:
        os.close(descriptor)


T = TypeVar("T")


class Calls(Generic[T]):
    """One concurrent call for each name, in threads that can be abandoned."""

    def __init__(self, calls: Mapping[str, Callable[[], T]]) -> None:
        self.names = list(calls)
        self._results: dict[str, T] = {}
        self._failures: dict[str, Exception] = {}
        for name, call in calls.items():
            threading.Thread(target=self._run, args=(name, call), daemon=True).start()

    def over(self) -> bool:
        return not self.waiting()

    def waiting(self) -> list[str]:
        ended = self._results.keys() | self._failures.keys()
        return [name for name in self.names if name not in ended]

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.over() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def failures(self) -> dict[str, Exception]:
        return {name: self._failures[name] for name in self.names if name in self._failures}

    def raise_failure(self) -> None:
        for error in self.failures().values():
            raise error

    def results(self) -> dict[str, T]:
        """Results of the calls that have returned."""
        return dict(self._results)

    def _run(self, name: str, call: Callable[[], T]) -> None:
        try:
            self._results[name] = call()
        except Exception as error:
            self._failures[name] = error
