"""The trainer's end of a broadcast: where the group meets, and the bytes that each rank sends."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby, pairwise
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

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
from atropos_common.broadcast.transfer import (
    CHUNK_BYTES,
    SLOTS,
    Chunk,
    SentTensor,
    TransferInit,
    chunks,
    meeting_place,
    place,
)
from atropos_common.net.ports import is_wildcard
from atropos_common.protocol.manifest import contiguous, extent
from trainer_core.errors import UsageError
from trainer_core.policy.load import Spot, checkpoint_layout, view_of
from trainer_core.policy.sharding import local, row_bounds

Copied = list[tuple[torch.Tensor, torch.Tensor]]
"""Destinations in the sent bytes, and the tensors to copy there first."""


class Outgoing(Protocol):
    """This rank's part in sending."""

    tensors: list[SentTensor]
    chunks: list[Chunk]
    ready: torch.cuda.Event | None
    """Event after which the data is in place; None on a CPU."""

    def refresh(self) -> None:
        """Mark the parameters as changed."""

    def fill(self, chunk: Chunk, slot: int) -> torch.Tensor:
        """Fill and return the chunk's buffer, uint8; the next chunk in `slot` may reuse it."""


class OnePiece:
    """The whole model, in the memory in which it is trained."""

    # Most parameters are sent as they lie there; the others are copied at each publish.
    def __init__(self, model: torch.nn.Module) -> None:
        self._stream, self.tensors, self._copied = into_one_piece(model)
        self.chunks = chunks(self.tensors, CHUNK_BYTES)
        self.ready: torch.cuda.Event | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        for sent, tensor in self._copied:
            sent.copy_(tensor)
        self.ready = _now(self._stream.device)

    def fill(self, chunk: Chunk, slot: int) -> torch.Tensor:
        return self._stream[chunk.start : chunk.end]


class Shards:
    """One rank's rows of the parameters, copied chunk by chunk from where they are."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, rank: int, size: int) -> None:
        """Use `dtype` for sharded parameters, whatever they are trained in."""
        named, self._rank = dict(model.named_parameters()), rank
        self.tensors: list[SentTensor] = []
        self._own: dict[str, list[tuple[TensorPart, torch.nn.Parameter]]] = {}
        for owner, spots in parts_of(model).items():
            param = named[owner]
            bounds = _bounds(owner, param, size)
            kind = dtype if isinstance(param, DTensor) else param.dtype
            for name, spot in spots:
                found = list(_cut(name, spot, bounds))
                self._own[name] = [(part, param) for part in found if part.rank == rank]
                owners = [(part.rank, math.prod(part.shape) * kind.itemsize) for part in found]
                self.tensors.append(_sent(name, kind, spot, owners))
        self.chunks = chunks(self.tensors, CHUNK_BYTES)
        room = max(chunk.nbytes for chunk in self.chunks)
        device = local(next(iter(named.values()))).device
        self._buffers = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.ready: torch.cuda.Event | None = None

    def refresh(self) -> None:
        self.ready = _now(self._buffers[0].device)

    @torch.no_grad()
    def fill(self, chunk: Chunk, slot: int) -> torch.Tensor:
        # Filled while the previous chunk is sent, so no rank holds more of the model. The copies
        # cast; other ranks' bytes arrive in the same buffer.
        buffer = self._buffers[slot][: chunk.nbytes]
        for placed in chunk.tensors:
            own_bytes = buffer[placed.start - chunk.start :][: placed.tensor.nbytes]
            whole = own_bytes.view(getattr(torch, placed.tensor.dtype))
            for part, param in self._own[placed.tensor.name]:
                here = local(param)
                rows = here.as_strided(part.shape, part.stride, here.storage_offset() + part.offset)
                whole[part.first : part.first + rows.numel()].view(part.shape).copy_(rows)
        return buffer


@dataclass(frozen=True)
class TensorPart:
    """One rank's part of a checkpoint tensor, as a view of its parameter."""

    rank: int
    first: int  # element of the tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def outgoing(
    model: torch.nn.Module, dtype: torch.dtype, rank: int, size: int, *, moves: bool = True
) -> Outgoing:
    """Return the bytes that `rank` of the trainer's `size` sends.

    Args:
        moves: the parameters may move to other memory.
    """
    return OnePiece(model) if size == 1 and moves else Shards(model, dtype, rank, size)


@torch.no_grad()
def into_one_piece(model: torch.nn.Module) -> tuple[torch.Tensor, list[SentTensor], Copied]:
    """Move every parameter into one tensor of bytes, in sending order."""
    named = dict(model.named_parameters())
    parts = parts_of(model)
    spots = ((owner, *part) for owner in named for part in parts[owner])
    tensors = [_sent(name, named[owner].dtype, spot) for owner, name, spot in spots]
    placed, total = place(tensors)
    stream = torch.zeros(total, dtype=torch.uint8, device=next(model.parameters()).device)
    starts = {spot.tensor.name: spot.start for spot in placed}
    copied: Copied = []
    for owner, param in named.items():
        first = starts[parts[owner][0][0]]
        if all(_lies_so(spot, starts[name] - first, param) for name, spot in parts[owner]):
            view = stream[first : first + param.nbytes].view(param.dtype).view(param.shape)
            view.copy_(param)
            param.data = view
            continue
        # It cannot be trained in the sent form, so each publish copies it.
        for name, spot in parts[owner]:
            sent = stream[starts[name] :][: math.prod(spot.shape) * param.element_size()]
            copied.append((sent.view(param.dtype).view(spot.shape), view_of(param.detach(), spot)))
    return stream, tensors, copied


def parts_of(model: torch.nn.Module) -> dict[str, list[tuple[str, Spot]]]:
    """Map each parameter to its checkpoint tensors, in memory order."""
    parts: defaultdict[str, list[tuple[str, Spot]]] = defaultdict(list)
    for name, spot in checkpoint_layout(model).items():
        if spot is None:
            raise UsageError(
                f"mode broadcast cannot send {name}: transformers computes it when it saves. Use "
                "another weight bridge mode (none or lora_only)"
            )
        parts[spot.parameter].append((name, spot))
    owners = (owner for owner, _ in model.named_parameters())
    return {owner: sorted(parts[owner], key=lambda part: part[1].offset) for owner in owners}


def _sent(
    name: str, dtype: torch.dtype, spot: Spot, owners: list[tuple[int, int]] | None = None
) -> SentTensor:
    kind: Any = str(dtype).removeprefix("torch.")
    return SentTensor(name=name, dtype=kind, shape=list(spot.shape), owners=owners or [])


def _lies_so(spot: Spot, start: int, param: torch.Tensor) -> bool:
    # A contiguous `param` would have this part contiguously at byte `start`.
    return spot.stride == contiguous(spot.shape) and start == spot.offset * param.element_size()


def _bounds(name: str, param: torch.Tensor, size: int) -> list[int]:
    """First element of each rank's part of a parameter, and the total."""
    if not isinstance(param, DTensor) or not any(place.is_shard() for place in param.placements):
        # Rank 0 sends all of it. A server's parameter may have gaps, so count up to its last
        # element.
        return [0, *[extent(param.shape, param.stride())] * size]
    # FSDP2 cuts along the first dimension, so a rank's rows of a tensor are contiguous bytes.
    if tuple(param.placements) != (Shard(0),):
        what = "parameters cut along their first dimension"
        raise UsageError(f"mode broadcast sends {what}, and {name} is not")
    return [first * math.prod(param.shape[1:]) for first in row_bounds(param.shape[0], size)]


def _cut(name: str, spot: Spot, bounds: list[int]) -> Iterator[TensorPart]:
    shape, stride = spot.shape, spot.stride
    # A contiguous tensor may be cut anywhere, another one only between its rows.
    if stride == contiguous(shape):
        for rank, (begin, end) in enumerate(pairwise(bounds)):
            low, high = max(begin, spot.offset), min(end, spot.offset + math.prod(shape))
            if low < high:
                yield TensorPart(rank, low - spot.offset, (high - low,), (1,), low - begin)
        return
    reach = sum((length - 1) * step for length, step in zip(shape[1:], stride[1:], strict=True))
    row_of = [spot.offset + index * stride[0] for index in range(shape[0])]
    ranks = [_rank_of(first, first + reach, bounds) for first in row_of]
    if None in ranks:
        raise UsageError(
            f"mode broadcast cannot send {name} from several ranks: each has parts of its rows. "
            "Train on one GPU, or use another weight bridge mode (none or lora_only)"
        )
    for rank, rows in groupby(range(shape[0]), key=lambda row: ranks[row]):
        mine = list(rows)
        assert rank is not None
        first, own_shape = mine[0] * math.prod(shape[1:]), (len(mine), *shape[1:])
        yield TensorPart(rank, first, own_shape, stride, row_of[mine[0]] - bounds[rank])


def _rank_of(first: int, last: int, bounds: list[int]) -> int | None:
    spans = enumerate(pairwise(bounds))
    return next((rank for rank, (begin, end) in spans if begin <= first and last < end), None)


def _now(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def meeting_point(init_method: str, env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return address and port (0: any) of `--init-method`, else of MASTER_ADDR and MASTER_PORT."""
    address, port = meeting_place(init_method, env)
    named = f"--init-method {init_method}"
    if init_method == "env://":
        named = f"MASTER_ADDR={address} MASTER_PORT={port}"
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{named}: a port from 1 to 65535 is needed, or 0 for any free one")
    if is_wildcard(address):
        raise UsageError(
            f"{named}: that is every interface, and the group meets at one address. Name the one "
            "that the servers reach; by default it is 127.0.0.1"
        )
    return address, int(port)


Stage = Literal["here", "connecting"]


class Rendezvous:
    """Key-value store where the ranks of a group report, and learn how to connect."""

    def __init__(
        self, backend: str, address: str, port: int, world_size: int, timeout_s: float
    ) -> None:
        """Listen on `address` alone."""
        self.address, self.world_size = address, world_size
        self.nccl_id = _nccl_id() if backend == "nccl" else b""
        self.key, self.secret = secrets.token_hex(16), secrets.token_bytes(SECRET_BYTES)
        try:
            family = socket.getaddrinfo(address, None)[0][0]
            listener = socket.create_server((address, port), family=family)
        except OSError as error:
            raise UsageError(
                f"the broadcast's group cannot meet at {address}:{port} "
                f"({error.strerror or error}): MASTER_ADDR and MASTER_PORT, or --init-method "
                "tcp://HOST:PORT, must name an address of this machine and a free port"
            ) from None
        self.port = int(listener.getsockname()[1])
        timeout = timedelta(seconds=timeout_s)
        more: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
        # It lives as long as the group, so that ranks can see whether rank 0 is alive. Our own
        # listener, because torch's would listen on every interface.
        self._server: Any = dist.TCPStore(
            address, self.port, is_master=True, master_listen_fd=listener.detach(), **more
        )
        # A separate client, so that a longer-lived store object does not keep the port.
        client = dist.TCPStore(address, self.port, is_master=False, **more)
        # Values without the group's secret are ignored.
        self.store = SealedStore(dist.PrefixStore(self.key, client), self.secret, timeout)

    def missing(self, stage: Stage) -> list[int]:
        """Ranks that have not reached `stage`."""
        ranks = range(1, self.world_size)
        return [rank for rank in ranks if not self.store.check([f"{stage}/{rank}"])]

    def crowded(self, device: torch.device) -> list[list[int]]:
        """Return the ranks that would share one GPU."""
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank in range(self.world_size):
            # Rank 0 computes on `device`; the others have reported their GPU.
            ranks[self.store.get(f"here/{rank}").decode() if rank else gpu_of(device)].append(rank)
        return [several for gpu, several in ranks.items() if gpu and len(several) > 1]

    def go(self) -> None:
        """Tell all ranks to connect now."""
        self.store.set("go", b"1")

    def close(self) -> None:
        """Announce the end of the group, and stop listening."""
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
        self._sending = self._send(what)

    def sent(self) -> bool:
        """Advance the transfer; return True once everything has left.

        Raises:
            RuntimeError: the connection broke.
        """
        return next(self._sending, self._sending) is self._sending

    def _send(self, what: Outgoing) -> Iterator[None]:
        for index, chunk in enumerate(what.chunks):
            slot = index % SLOTS
            yield from self._over(slot)
            parts = cut(chunk, what.fill(chunk, slot))
            self._works[slot] = [self._gloo.broadcast(part, root) for part, root in parts]
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
    """Transfer between GPUs on its own stream."""

    def __init__(self, nccl_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        self._nccl = Nccl(nccl_id, rank, world_size, device)
        self._sending, self._filling = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def send(self, what: Outgoing) -> None:
        # The next chunk is filled on a stream of its own while one is in flight.
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
