"""The trainer's end of a broadcast group: rendezvous, and sending from each rank."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from atropos_common.broadcast.group import (
    SECRET_BYTES,
    Gloo,
    Nccl,
    NcclError,
    SealedStore,
    cut,
    gpu_of,
    own_address,
    unique_id,
)
from atropos_common.broadcast.transfer import SLOTS, TransferInit, is_wildcard, meeting_place
from trainer_core.errors import UsageError
from trainer_core.weight_sync.outgoing import Outgoing


def meeting_point(init_method: str, env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port (0: any free one) from `--init-method`, else from MASTER_ADDR and
    MASTER_PORT.

    Raises:
        UsageError: an invalid port, or an address that means every interface.
    """
    address, port = meeting_place(init_method, env)
    named = (
        f"MASTER_ADDR={address} MASTER_PORT={port}"
        if init_method == "env://"
        else f"--init-method {init_method}"
    )
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{named}: a port from 1 to 65535 is needed, or 0 for any free one")
    if is_wildcard(address):
        raise UsageError(
            f"{named}: that is every interface, and the group meets at one address. Name the "
            f"one that the servers "
            "reach; by default it is 127.0.0.1"
        )
    return address, int(port)


Stage = Literal["here", "connecting"]


class Rendezvous:
    """Key-value store in this process where the ranks of one group report and learn how to connect;
    ignores values without the group's secret.

    It lives as long as the group, so that ranks can see whether the trainer's rank 0 is alive.
    """

    def __init__(
        self, backend: str, address: str, port: int, world_size: int, timeout_s: float
    ) -> None:
        """Listen on `address` alone, not on every interface.

        Raises:
            UsageError: the address is not of this machine, the port is in use, or NCCL is missing.
        """
        self.address, self.world_size = address, world_size
        self.nccl_id = _nccl_id() if backend == "nccl" else b""
        self.key, self.secret = secrets.token_hex(16), secrets.token_bytes(SECRET_BYTES)
        try:
            family = socket.getaddrinfo(address, None)[0][0]
            listener = socket.create_server((address, port), family=family)
        except OSError as error:
            raise UsageError(
                f"the broadcast's group cannot meet at {address}:{port} "
                f"({error.strerror or error}): MASTER_ADDR and "
                "MASTER_PORT, or --init-method tcp://HOST:PORT, must name an address of this "
                "machine and a free port"
            ) from None
        self.port = int(listener.getsockname()[1])
        timeout = timedelta(seconds=timeout_s)
        self._server: Any = dist.TCPStore(
            address,
            self.port,
            None,
            True,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        # A separate client, so that a longer-lived store object does not keep the port.
        client = dist.TCPStore(address, self.port, None, False, timeout, wait_for_workers=False)
        self.store = SealedStore(dist.PrefixStore(self.key, client), self.secret, timeout)

    def missing(self, stage: Stage) -> list[int]:
        """Ranks that have not reported yet, or have not started to connect."""
        return [
            rank for rank in range(1, self.world_size) if not self.store.check([f"{stage}/{rank}"])
        ]

    def crowded(self, device: torch.device) -> list[list[int]]:
        """Ranks that would share one GPU, of those that have reported; rank 0 computes on
        `device`."""
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank in range(self.world_size):
            ranks[self.store.get(f"here/{rank}").decode() if rank else gpu_of(device)].append(rank)
        return [several for gpu, several in ranks.items() if gpu and len(several) > 1]

    def go(self) -> None:
        """Tell all ranks to connect now."""
        self.store.set("go", b"1")

    def close(self) -> None:
        """Announce the end of the group to all waiting ranks, and stop listening."""
        with contextlib.suppress(RuntimeError):
            self.store.set("off", b"1")
        del self.store, self._server


class GlooGroup:
    """Transfer through CPU memory."""

    def __init__(
        self, store: SealedStore, rank: int, world_size: int, address: str, timeout_s: float
    ) -> None:
        self._gloo = Gloo(store, rank, world_size, address, timeout_s)
        self._works: list[list[Any]] = [[] for _ in range(SLOTS)]
        self._sending: Iterator[None] = iter(())

    def send(self, what: Outgoing) -> None:
        """Start to broadcast the chunks in order."""
        self._sending = self._send(what)

    def sent(self) -> bool:
        """Advance the transfer; return True when everything has left. Call it until then.

        Raises:
            RuntimeError: the connection broke.
        """
        return next(self._sending, self._sending) is self._sending

    def _send(self, what: Outgoing) -> Iterator[None]:
        """Generator that yields while there is something to wait for."""
        for index, chunk in enumerate(what.chunks):
            slot = index % SLOTS
            yield from self._over(slot)
            self._works[slot] = [
                self._gloo.broadcast(part, root)
                for part, root in cut(chunk, what.fill(chunk, slot))
            ]
        for slot in range(SLOTS):
            yield from self._over(slot)

    def _over(self, slot: int) -> Iterator[None]:
        while not all(work.is_completed() for work in self._works[slot]):
            yield
        for work in self._works[slot]:
            work.wait()

    def close(self) -> None:
        """Leave, whatever state the others are in."""
        self._gloo.close([work for works in self._works for work in works])


class NcclGroup:
    """Transfer between GPUs, on its own stream: the next chunk is filled while one is in flight."""

    def __init__(self, nccl_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        self._nccl = Nccl(nccl_id, rank, world_size, device)
        self._sending, self._filling = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def send(self, what: Outgoing) -> None:
        if what.ready is not None:
            self._filling.wait_event(what.ready)
        left: list[torch.cuda.Event | None] = [None] * SLOTS
        for index, chunk in enumerate(what.chunks):
            slot = index % SLOTS
            with torch.cuda.stream(self._filling):
                if (event := left[slot]) is not None:
                    self._filling.wait_event(event)
                buffer = what.fill(chunk, slot)
            self._sending.wait_stream(self._filling)
            self._nccl.broadcast(cut(chunk, buffer), self._sending)
            left[slot] = self._sending.record_event()
        self._done.record(self._sending)

    def sent(self) -> bool:
        return self._done.query()

    def close(self) -> None:
        self._nccl.close()


BroadcastGroup = GlooGroup | NcclGroup
"""The connected group of one trainer rank."""


def connect(
    init: TransferInit, store: SealedStore, rank: int, device: torch.device
) -> BroadcastGroup:
    """Connect `rank` of the trainer to all ranks that reported.

    Raises:
        RuntimeError: a rank did not connect, or an unauthenticated process did.
    """
    if init.backend == "gloo":
        return GlooGroup(store, rank, init.world_size, own_address(init.address), init.timeout_s)
    return NcclGroup(init.nccl_id, rank, init.world_size, device)


def _nccl_id() -> bytes:
    try:
        return unique_id()
    except NcclError as error:
        raise UsageError(f"a broadcast between GPUs needs NCCL: {error}") from None
