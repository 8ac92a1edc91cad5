"""Attacks by another user on the port of a broadcast group: they can break the group, and nothing
else.

NCCL has no GPU here: in its place stands a library of the same C signatures, called through ctypes,
that moves bytes between threads. Everything before it is real: HTTP, the store, the messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atropos_common.broadcast import group as meeting_group
from atropos_common.broadcast.group import Gloo, SealedStore
from atropos_common.broadcast.transfer import TransferInit
from tests.trainer_core.weight_sync.test_broadcast import (
    Make,
    assert_same_weights,
    base,
    make,
    receivers,
    step,
)
from tests.trainer_core.weight_sync.transfer_stand_in import Receiver
from trainer_core.errors import UsageError
from trainer_core.weight_sync.base import Start
from trainer_core.weight_sync.broadcast import Broadcast
from trainer_core.weight_sync.sending import Rendezvous
from vllm_server.weights import collectives

__all__ = ["base", "make", "receivers"]

LIMIT = timedelta(seconds=20)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


class Attacker:
    """Knows the port, lists the keys, writes under any of them."""

    def __init__(self, port: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False)

    def prefix(self) -> str:
        while not (keys := self.store.list_keys()):
            time.sleep(0.001)
        return str(keys[0].partition("/")[0])

    def plant(self, name: str, value: bytes) -> None:
        self.store.set(f"{self.prefix()}/{name}", value)


def invited(meeting: Rendezvous, **fields: Any) -> TransferInit:
    return TransferInit(
        backend="gloo",
        address=meeting.address,
        port=meeting.port,
        key=meeting.key,
        secret=meeting.secret,
        nccl_id=meeting.nccl_id,
        first_rank=1,
        world_size=meeting.world_size,
        timeout_s=20,
        chunk_bytes=1 << 20,
        tensors=[],
        **fields,
    )


def test_a_forged_go_or_presence_starts_nothing() -> None:
    meeting = Rendezvous("gloo", "127.0.0.1", 0, 3, 20)
    waiting = threading.Thread(target=collectives.Lifeline, args=(invited(meeting), 1))
    waiting.start()
    attacker = Attacker(meeting.port)
    attacker.plant("go", b"1")
    attacker.plant("here/2", b"1")
    waiting.join(1)
    assert waiting.is_alive() and meeting.missing("here") == [2]
    mine = attacker.store.get(f"{attacker.prefix()}/here/1")
    attacker.plant("go", mine)  # a message of one key means nothing under another
    attacker.plant("here/2", mine)
    waiting.join(0.5)
    assert waiting.is_alive() and meeting.missing("here") == [2]
    meeting.go()
    waiting.join(5)
    assert not waiting.is_alive()
    meeting.close()


def test_a_forged_end_ends_nothing(make: Make, receivers: list[Receiver]) -> None:
    sync = make()
    model = sync.attach(Start())
    assert sync._meeting is not None
    Attacker(sync._meeting.port).plant("off", b"1")
    for version in (1, 2):
        receivers[0].lets_end_s = 0.5  # the other one waits, and looks at the store meanwhile
        assert "begun_anew" not in sync.publish(version, lambda: step(model)).phases
    assert [each.joins for each in receivers] == [1, 1] and not receivers[0].errors + receivers[
        1
    ].errors


def test_what_the_group_says_is_read_back_and_a_broken_seal_is_not() -> None:
    raw = dist.HashStore()
    store = SealedStore(raw, b"s" * 32, timedelta(seconds=0.2))
    store.set("a", b"word")
    assert store.get("a") == b"word" and store.check(["a"]) and not store.check(["a", "b"])
    raw.set("a", bytes(raw.get("a"))[:-1] + b"t")
    raw.set("b", b"short")
    assert not store.check(["a"]) and not store.check(["b"])
    with pytest.raises(RuntimeError, match="no member of the group set b"):
        store.get("b")
    other = SealedStore(raw, b"o" * 32, timedelta(seconds=0.2))
    store.set("a", b"word")
    assert not other.check(["a"]), "another group's word"


def connected(store: Any, rank: int, made: dict[int, Any]) -> threading.Thread:
    """Connects to a group of two in a thread; what comes of it lies in `made`."""

    def connect() -> None:
        try:
            made[rank] = Gloo(store(), rank, 2, "127.0.0.1", 1.5)
        except RuntimeError as error:
            made[rank] = error

    thread = threading.Thread(target=connect)
    thread.start()
    return thread


def test_an_attacker_in_the_place_of_a_rank_gets_no_weights() -> None:
    """gloo accepts every connection to a rank's port that sends a small number; half of the time
    that rank listens."""
    secret, got = secrets.token_bytes(32), b""
    for _ in range(20):
        server = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)

        def store(port: int = server.port) -> SealedStore:
            client = dist.TCPStore("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False)
            return SealedStore(dist.PrefixStore("p", client), secret, LIMIT)

        made: dict[int, Any] = {}
        first = connected(store, 0, made)
        with place_of_rank_1(Attacker(server.port)) as attacker:
            second = connected(store, 1, made)
            with contextlib.suppress(TimeoutError):
                got = attacker.recv(4096)
            first.join()
            second.join()
        if got:
            break
        assert isinstance(made[0], Gloo) and isinstance(made[1], Gloo), made
        for each in made.values():
            each.close()
    assert got, "the attacker never took the place: this test shows nothing"
    assert isinstance(made[0], RuntimeError), "rank 0 would have sent him the weights"
    assert isinstance(made[1], RuntimeError)


def place_of_rank_1(attacker: Attacker) -> socket.socket:
    told = bytes(attacker.store.get("p/0/0"))
    address = told.index(b"\x02\x00", 48)  # AF_INET, past the seal and the lengths
    (port,) = struct.unpack_from(">H", told, address + 2)
    made = socket.create_connection(("127.0.0.1", port), timeout=1)
    made.sendall(struct.pack("<q", 1))
    time.sleep(0.1)
    return made


class FakeNccl:
    """The C functions of NCCL over threads of this process: ranks with one id form a group."""

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.comers: dict[bytes, int] = defaultdict(int)
        self.groups: dict[int, tuple[bytes, int, int]] = {}
        self.aborted: list[int] = []
        self.sent: dict[tuple[bytes, int], queue.Queue[bytes]] = defaultdict(queue.Queue)
        self.ncclGetErrorString = lambda result: b"unhandled system error"
        for name, arguments in meeting_group._CALLS.items():
            setattr(
                self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(getattr(self, f"_{name}"))
            )

    def _ncclGetUniqueId(self, made: Any) -> int:
        self.ids.append(secrets.token_bytes(meeting_group.NCCL_ID_BYTES))
        ctypes.memmove(made, self.ids[-1], meeting_group.NCCL_ID_BYTES)
        return 0

    def _ncclCommInitRank(self, handle: Any, world_size: int, group: Any, rank: int) -> int:
        name = bytes(group)
        self.comers[name] += 1
        deadline = time.monotonic() + 10
        while self.comers[name] < world_size:
            if time.monotonic() > deadline:
                return 2
            time.sleep(0.001)
        handle[0] = len(self.groups) + 1
        self.groups[handle[0]] = (name, world_size, rank)
        return 0

    def _ncclBroadcast(
        self, source: int, to: int, size: int, kind: int, root: int, handle: int, stream: Any
    ) -> int:
        name, world_size, rank = self.groups[handle]
        assert root == 0 and source == to
        if rank == root:
            for peer in range(1, world_size):
                self.sent[name, peer].put(ctypes.string_at(source, size))
        else:
            ctypes.memmove(to, self.sent[name, rank].get(timeout=10), size)
        return 0

    def _ncclGroupStart(self) -> int:
        return 0

    _ncclGroupEnd = _ncclGroupStart

    def _ncclCommAbort(self, handle: int) -> int:
        self.aborted.append(handle)
        return 0


class FakeStream:
    cuda_stream, device = 0, None

    def __init__(self, *_: Any) -> None:
        """Everything on it is over at once."""

    def synchronize(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = record = record_event = synchronize

    def query(self) -> bool:
        return True


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    fake = FakeNccl()
    monkeypatch.setattr(meeting_group, "_library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", FakeStream)
    monkeypatch.setattr(Broadcast, "_backend", lambda self, infos: "nccl")
    return fake


def plant_bombs(port: int, marker: Path) -> None:
    """A pickle under every key, that under which vLLM's own groups look for one included, until the
    store closes."""
    attacker = Attacker(port)
    with contextlib.suppress(RuntimeError):
        while True:
            for key in [*attacker.store.list_keys(), f"{attacker.prefix()}/broadcast_from/0/0"]:
                if "/here/" not in key and not key.endswith(
                    "/go"
                ):  # that would only break the group
                    attacker.store.set(key, pickle.dumps(Bomb(marker)))
            time.sleep(0.01)


def test_weights_come_over_nccl_by_an_id_that_no_store_holds(
    make: Make,
    receivers: list[Receiver],
    fake_nccl: FakeNccl,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    bombs: list[threading.Thread] = []
    go = Rendezvous.go

    def late_go(meeting: Rendezvous) -> None:
        bombs.append(
            threading.Thread(target=plant_bombs, args=(meeting.port, tmp_path / "code ran"))
        )
        bombs[0].start()
        time.sleep(0.3)
        go(meeting)

    monkeypatch.setattr(Rendezvous, "go", late_go)
    sync = make()
    model = sync.attach(Start())
    sync.publish(1, lambda: step(model))
    for each in receivers:
        assert each.version == 1
        assert_same_weights(each, model)
    (group,) = fake_nccl.ids
    assert set(fake_nccl.comers) == {group}, "everyone came by the id that the call carried"
    meeting = sync._meeting
    assert meeting is not None
    store = Attacker(meeting.port).store
    said = [bytes(store.get(key)) for key in store.list_keys()]
    assert pickle.dumps(Bomb(tmp_path / "code ran")) in said, "the pickles lie there"
    assert not any(group in value or meeting.secret in value for value in said)
    sync.close()
    bombs[0].join()
    assert not (tmp_path / "code ran").exists()
    assert len(fake_nccl.aborted) == 1, "the trainer has left"


def test_secrets_are_not_shown(fake_nccl: FakeNccl) -> None:
    meeting = Rendezvous("nccl", "127.0.0.1", 0, 2, 5)
    init = invited(meeting)
    assert (
        TransferInit.model_validate_json(init.model_dump_json())
        == init
        == TransferInit(**init.model_dump())
    )
    assert init.nccl_id == fake_nccl.ids[0] and len(init.secret) == 32
    assert "secret" not in repr(init) and "nccl_id" not in repr(init)
    meeting.close()


def test_nccl_that_does_not_load_or_connect_is_said(
    monkeypatch: pytest.MonkeyPatch, fake_nccl: FakeNccl
) -> None:
    with pytest.raises(
        meeting_group.NcclError, match="an id of NCCL has 128 bytes, and this one 5"
    ):
        meeting_group.Communicator(b"short", 2, 0)
    monkeypatch.setattr(fake_nccl, "ncclCommInitRank", lambda *_: 2)
    with pytest.raises(meeting_group.NcclError, match="unhandled system error"):
        meeting_group.Communicator(meeting_group.unique_id(), 2, 0)
    monkeypatch.undo()
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/no/such/library.so")
    with pytest.raises(
        UsageError, match=r"needs NCCL: the NCCL library does not load: see .* VLLM_NCCL_SO_PATH"
    ):
        Rendezvous("nccl", "127.0.0.1", 0, 2, 5)
