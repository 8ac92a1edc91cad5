"""Orders from a trainer's rank 0 to the other ranks during a broadcast: join a group, send, leave
it.

Only rank 0 talks to servers, also while the others wait for it, for example for a batch. A thread
of each other rank takes its orders over a socket in a private folder, because orders hold the
group's secrets. Ranks of several nodes have no common private folder: they connect to a port and
prove themselves with a secret of rank 0. A publish is not a collective of the trainer; ranks wait
for each other only in the group with the servers.
"""

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

from atropos_common.broadcast.group import POLL_S, Lifeline, first_line, gpu_of
from atropos_common.broadcast.transfer import TransferInit
from trainer_core.errors import RankGone
from trainer_core.ranks.world import node_address, on_several_nodes
from trainer_core.weight_sync.collectives import BroadcastGroup, connect
from trainer_core.weight_sync.outgoing import Outgoing

MEET_S = 60.0
FIRST_WORD_S = 5.0
"""Seconds that a connection has to send its first message."""
SECRET_BYTES = 32
MOST_WAITING = 512
"""Unauthenticated connections at most; beyond it the oldest is closed."""
RANK_WIDTH = 6
FIRST_WORD = 2 * SECRET_BYTES + 1 + RANK_WIDTH
"""Characters of the first message: secret and rank."""


class Meeting(NamedTuple):
    """Where the other ranks connect for their orders."""

    at: str
    """A folder, or the address of rank 0."""
    port: int
    """0 for a folder."""
    secret: str
    """Their first message."""


class Order(BaseModel):
    """The next action of all other ranks; each answers with an empty string, or with the reason for
    its failure."""

    do: Literal["join", "send", "leave"]
    group: TransferInit | None = None
    """Group to join."""
    version: int = 0
    """Version of the weights to send."""
    number: int = 0
    """Number that answers repeat: an order may be given before the previous one is answered."""


class Orders:
    """Rank 0's end; a no-op with a single rank."""

    def __init__(self, ranks: int) -> None:
        self._others = range(1, ranks)
        self._lines: dict[int, Any] = {}
        self._number = 0
        self._awaited: set[int] = set()
        self._failed: dict[int, str] = {}
        self._ended: set[int] = set()
        self.meeting: Meeting | None = None
        if self._others:
            self.meeting, self._listener = _listen()

    def meet(self) -> None:
        """Wait for all other ranks, then remove the folder: after a SIGKILL nothing else would.

        Raises:
            RankGone: a rank does not connect.
        """
        if self.meeting is None:
            return
        until = time.monotonic() + MEET_S
        with RankDoor(self._listener, self.meeting.secret) as door:
            while len(self._lines) < len(self._others):
                for rank, come in door.come(FIRST_WORD_S):
                    self._lines[rank] = come.makefile("rwb")
                    threading.Thread(
                        target=self._listen, args=(rank, self._lines[rank]), daemon=True
                    ).start()
                    until = time.monotonic() + MEET_S
                if time.monotonic() > until:
                    raise RankGone(
                        f"not every rank of the trainer came for its orders within {MEET_S:.0f} s"
                    )
        self._close_door()

    def give(self, order: Order) -> None:
        """Send the order to every other rank."""
        self._number += 1
        self._awaited, self._failed = set(self._lines), {}
        said = order.model_copy(update={"number": self._number}).model_dump_json().encode()
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # the rank has ended; `done` reports that
                line.write(said + b"\n")
                line.flush()

    def done(self) -> bool:
        """Return True if all others have carried out the last order.

        Raises:
            RuntimeError: a rank failed; its message.
            RankGone: a rank has ended.
        """
        for rank, said in self._failed.items():
            raise RuntimeError(f"rank {rank} of the trainer: {said}")
        self.check()
        return not self._awaited

    def check(self) -> None:
        """Raises:
        RankGone: another rank has ended."""
        if self._ended:
            raise RankGone(f"rank {min(self._ended)} has ended")

    def close(self) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.close()
        self._close_door()

    def _close_door(self) -> None:
        """Accept no more connections."""
        if self.meeting is not None:
            self._listener.close()
            if not self.meeting.port:
                shutil.rmtree(self.meeting.at, ignore_errors=True)

    def _listen(self, rank: int, line: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            for said in line:
                number, _, text = said.decode().rstrip("\n").partition(" ")
                if int(number) == self._number:
                    if text:
                        self._failed[rank] = text
                    self._awaited.discard(rank)
        self._ended.add(rank)


class RankDoor:
    """Accepts the connections of ranks. It reads all of them at once, so a silent foreign process
    delays none."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret = listener, secret
        self._waiting: dict[socket.socket, tuple[float, bytes]] = {}
        """Start time and received bytes of each connection with an incomplete first message, oldest
        first."""

    def __enter__(self) -> RankDoor:
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for stranger in [*self._waiting]:
            self._refuse(stranger)
        self._selector.close()

    def come(self, timeout_s: float) -> Iterator[tuple[int, socket.socket]]:
        """Yield the ranks that have connected, within `timeout_s`."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                with contextlib.suppress(OSError):  # the connection is closed already
                    come, _ = self._listener.accept()
                    come.setblocking(False)
                    self._selector.register(come, selectors.EVENT_READ)
                    self._waiting[come] = time.monotonic(), b""
            elif (
                isinstance(key.fileobj, socket.socket)
                and (rank := self._rank_of(key.fileobj)) is not None
            ):
                yield rank, key.fileobj
        late = time.monotonic() - FIRST_WORD_S
        for stranger in [each for each, (since, _) in self._waiting.items() if since < late]:
            self._refuse(stranger)
        while len(self._waiting) > MOST_WAITING:
            self._refuse(next(iter(self._waiting)))

    def _rank_of(self, come: socket.socket) -> int | None:
        """Rank of a connection; None for a foreign process, and while its first message is
        incomplete."""
        since, said = self._waiting[come]
        try:
            more = come.recv(FIRST_WORD - len(said))
        except OSError:
            more = b""
        said += more
        if more and len(said) < FIRST_WORD:
            self._waiting[come] = since, said
            return None
        secret, rank = said[: 2 * SECRET_BYTES], said[2 * SECRET_BYTES :].strip()
        if not (hmac.compare_digest(secret, self._secret.encode()) and rank.isdigit()):
            self._refuse(come)
            return None
        self._leave(come)
        come.setblocking(True)
        return int(rank)

    def _refuse(self, come: socket.socket) -> None:
        self._leave(come)
        come.close()

    def _leave(self, come: socket.socket) -> None:
        del self._waiting[come]
        self._selector.unregister(come)


class Follower:
    """Another rank's end: a thread that carries out rank 0's orders."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, what: Outgoing) -> None:
        self._rank, self._device, self._what, self._written = rank, device, what, -1
        self._leaving = False
        self._group: BroadcastGroup | None = None
        self._lifeline: Lifeline | None = None
        self._socket = _connect(meeting)
        self._socket.sendall(f"{meeting.secret} {rank:>{RANK_WIDTH}}".encode())
        self._line = self._socket.makefile("rwb")
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
            for said in self._line:
                order = Order.model_validate_json(said)
                self._answer(f"{order.number} {self._carry_out(order)}")

    def _answer(self, text: str) -> None:
        self._line.write(text.encode() + b"\n")
        self._line.flush()

    def _carry_out(self, order: Order) -> str:
        """Carry out an order; return an empty string, or the reason for the failure."""
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
        line = self._lifeline = Lifeline(init, self._rank, gpu_of(self._device))
        line.connecting()
        connecting = Calls({"": lambda: connect(init, line.store, self._rank, self._device)})
        self._until(connecting.over, "connect", f"no connection over {init.backend}")
        connecting.raise_failure()
        self._group = connecting.results()[""]

    def _send(self, version: int) -> None:
        if self._group is None:
            raise RuntimeError("it is in no group")
        self._until(
            lambda: self._written >= version, "transfer", f"it has not come to version {version}"
        )
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
        connected = socket.create_connection((meeting.at, meeting.port), timeout=MEET_S)
        connected.settimeout(None)
        return connected
    connected = socket.socket(socket.AF_UNIX)
    _at(Path(meeting.at), connected.connect)
    return connected


def _at(folder: Path, bind_or_connect: Callable[[str], None]) -> None:
    """Bind or connect the socket in `folder`, whose path may be longer than a socket address."""
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
        """True when every call has returned or failed."""
        return not self.waiting()

    def waiting(self) -> list[str]:
        return [
            name for name in self.names if name not in self._results and name not in self._failures
        ]

    def wait(self, timeout_s: float) -> None:
        """Wait until every call is over, at most `timeout_s`."""
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
