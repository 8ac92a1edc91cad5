"""The trainer's end of the group in which weights are broadcast: where it meets, and how bytes leave."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atropos_common.group import SECRET_BYTES, Gloo, Nccl, NcclError, SealedStore, unique_id
from atropos_common.transfer import Chunk, is_wildcard, meeting_place
from trainer_core.errors import UsageError


def meeting_point(init_method: str, env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port (0: any free one) from `--init-method`, else from MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: a port that is none, or an address that is every interface.
    """
    address, port = meeting_place(init_method, env)
    named = f"MASTER_ADDR={address} MASTER_PORT={port}" if init_method == "env://" else f"--init-method {init_method}"
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{named}: a port from 1 to 65535 is needed, or 0 for any free one")
    if is_wildcard(address):
        raise UsageError(
            f"{named}: that is every interface, and the group meets at one address. Name the one that the servers "
            "reach; by default it is 127.0.0.1"
        )
    return address, int(port)


class Rendezvous:
    """A key-value store in which the workers of one group report and learn how to connect, and later whether the
    trainer still lives: it stays for as long as the group."""

    def __init__(self, backend: str, address: str, port: int, world_size: int, timeout_s: float) -> None:
        """Listen on `address` alone, not on every interface.

        Raises:
            UsageError: the address is not this machine's, the port is taken, or there is no NCCL.
        """
        self.backend, self.address, self.world_size = backend, address, world_size
        self.key, self.secret = secrets.token_hex(16), secrets.token_bytes(SECRET_BYTES)
        self.nccl_id = _nccl_id() if backend == "nccl" else b""
        try:
            family = socket.getaddrinfo(address, None)[0][0]
            listener = socket.create_server((address, port), family=family)
        except OSError as error:
            raise UsageError(
                f"the broadcast's group cannot meet at {address}:{port} ({error.strerror or error}): MASTER_ADDR and "
                "MASTER_PORT, or --init-method tcp://HOST:PORT, must name an address of this machine and a free port"
            ) from None
        self.port = int(listener.getsockname()[1])
        timeout = timedelta(seconds=timeout_s)
        self._server: Any = dist.TCPStore(
            address, self.port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        # A client of its own, so that who keeps the store for longer does not keep the port.
        client = dist.TCPStore(address, self.port, None, False, timeout, wait_for_workers=False)
        self.store = SealedStore(dist.PrefixStore(self.key, client), self.secret, timeout)

    def missing(self) -> list[int]:
        """Ranks that have not reported yet."""
        return [rank for rank in range(1, self.world_size) if not self.store.check([f"here/{rank}"])]

    def go(self) -> None:
        """Everyone is there: connect now."""
        self.store.set("go", b"1")

    def close(self) -> None:
        """Tell everyone that the group is over, and stop listening. Whoever waits looks here and learns it."""
        with contextlib.suppress(RuntimeError):
            self.store.set("off", b"1")
        del self.store, self._server


class GlooGroup:
    """Through CPU memory."""

    def __init__(self, meeting: Rendezvous, timeout_s: float) -> None:
        self._gloo = Gloo(meeting.store, 0, meeting.world_size, meeting.address, timeout_s)
        self._works: list[Any] = []

    def send(self, stream: torch.Tensor, parts: Sequence[Chunk]) -> None:
        """Begin to broadcast `parts` of the bytes in `stream`, in order."""
        self._works = [self._gloo.broadcast(stream[part.start : part.end]) for part in parts]

    def sent(self) -> bool:
        """Whether all of it has left.

        Raises:
            RuntimeError: the connection broke.
        """
        if not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:
            work.wait()
        return True

    def close(self) -> None:
        """Leave, whatever state the others are in."""
        self._gloo.close(self._works)


class NcclGroup:
    """Between GPUs, on a stream of its own."""

    def __init__(self, meeting: Rendezvous, device: torch.device) -> None:
        self._nccl = Nccl(meeting.nccl_id, 0, meeting.world_size, device)
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def send(self, stream: torch.Tensor, parts: Sequence[Chunk]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(stream.device))
        for part in parts:
            self._nccl.broadcast(stream[part.start : part.end], self._stream)
        self._done.record(self._stream)

    def sent(self) -> bool:
        return self._done.query()

    def close(self) -> None:
        self._nccl.close()


BroadcastGroup = GlooGroup | NcclGroup
"""The connected group; the trainer is rank 0."""


def connect(meeting: Rendezvous, device: torch.device, timeout_s: float) -> BroadcastGroup:
    """Connect to everyone who reported.

    Raises:
        RuntimeError: somebody did not, or a stranger did.
    """
    return GlooGroup(meeting, timeout_s) if meeting.backend == "gloo" else NcclGroup(meeting, device)


def _nccl_id() -> bytes:
    try:
        return unique_id()
    except NcclError as error:
        raise UsageError(f"a broadcast between GPUs needs NCCL: {error}") from None
