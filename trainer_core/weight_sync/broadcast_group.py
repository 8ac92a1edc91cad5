"""The trainer's end of the group in which weights are broadcast: where it meets, and how bytes leave.

The only file of the trainer that may import vLLM, and only for a broadcast between GPUs: NCCL by vLLM's communicator,
the one that its workers use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainer_core.contracts.transfer import Chunk
from trainer_core.errors import UsageError

ABORT_S = 5.0
"""An abort may itself wait for the device; longer than this it is left to its thread."""


def meeting_point(init_method: str, env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port (0: any free one) from `--init-method`, else from MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: a port that is none.
    """
    found = re.fullmatch(r"tcp://\[?(.+?)\]?:(\d+)", init_method)
    address, port = found.groups() if found else (env.get("MASTER_ADDR") or "127.0.0.1", env.get("MASTER_PORT") or "0")
    if not port.isdecimal() or int(port) > 65535:
        where = f"--init-method {init_method}" if found else f"MASTER_PORT={port}"
        raise UsageError(f"{where}: a port from 1 to 65535 is needed, or 0 for any free one")
    return address, int(port)


class Meeting:
    """A key-value store in which the workers of one group report and learn how to connect, and later whether the
    trainer still lives: it stays for as long as the group."""

    def __init__(self, address: str, port: int, world_size: int, timeout_s: float) -> None:
        """Listen on `address` alone, not on every interface.

        Raises:
            UsageError: the address is not this machine's, or the port is taken.
        """
        self.address, self.world_size = address, world_size
        self.key = secrets.token_hex(16)
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
        self.store: Any = dist.PrefixStore(self.key, client)

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


class Group(Protocol):
    """The connected group; the trainer is rank 0."""

    def send(self, stream: torch.Tensor, parts: Sequence[Chunk]) -> None:
        """Begin to broadcast `parts` of the bytes in `stream`, in order."""
        ...

    def sent(self) -> bool:
        """Whether all of it has left.

        Raises:
            RuntimeError: the connection broke.
        """
        ...

    def close(self) -> None:
        """Leave, whatever state the others are in."""
        ...


def connect(backend: str, meeting: Meeting, device: torch.device, timeout_s: float) -> Group:
    """Connect to everyone who reported.

    Raises:
        RuntimeError: somebody did not.
    """
    return GlooGroup(meeting, timeout_s) if backend == "gloo" else NcclGroup(meeting, device)


class GlooGroup:
    """Through CPU memory."""

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.address)]
        self._group = dist.ProcessGroupGloo(meeting.store, 0, meeting.world_size, options)
        self._works: list[Any] = []

    def send(self, stream: torch.Tensor, parts: Sequence[Chunk]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._works = [self._group.broadcast([stream[part.start : part.end]], options) for part in parts]

    def sent(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:
            work.wait()
        return True

    def close(self) -> None:
        # The group's end waits for what is under way, up to its timeout; nobody here does. Only the interpreter: it
        # aborts (SIGABRT) when it ends while a daemon thread is in there.
        last = [self._works, self._group]
        del self._works, self._group
        threading.Thread(target=last.clear).start()


class NcclGroup:
    """Between GPUs, on a stream of its own."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self._communicator = _communicator(meeting, device)
        if self._communicator.disabled:
            raise RuntimeError("the NCCL library does not load: see NCCL_DEBUG=INFO and VLLM_NCCL_SO_PATH")
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def send(self, stream: torch.Tensor, parts: Sequence[Chunk]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(stream.device))
        for part in parts:
            self._communicator.broadcast(stream[part.start : part.end], src=0, stream=self._stream)
        self._done.record(self._stream)

    def sent(self) -> bool:
        return self._done.query()

    def close(self) -> None:
        """Abort: destroying would wait for peers that may be gone."""
        if self._communicator.disabled:
            return
        self._communicator.disabled, self._communicator.available = True, False
        abort = threading.Thread(
            target=self._communicator.nccl.lib.ncclCommAbort, args=(self._communicator.comm,), daemon=True
        )
        abort.start()
        abort.join(ABORT_S)


def _communicator(meeting: Meeting, device: torch.device) -> Any:
    try:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
    except ImportError as error:
        raise UsageError(
            f"a broadcast between GPUs needs vLLM in the trainer's environment too ({error}): "
            "pip install 'atropos-tui[gpu]'"
        ) from None
    named = {field.name for field in dataclasses.fields(StatelessProcessGroup)}
    extra = {"socket": None} if "socket" in named else {}  # releases that keep the listening socket there
    group = StatelessProcessGroup(rank=0, world_size=meeting.world_size, store=meeting.store, **extra)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return PyNcclCommunicator(group, device=torch.device("cuda", index))
