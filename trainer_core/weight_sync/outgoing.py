"""The bytes of a broadcast: the checkpoint's tensors, read where they are trained.

A single-rank trainer keeps its parameters in one piece of memory, so tensors that are sent as they
are trained need no packing. In a sharded trainer each rank sends its own rows: FSDP2 cuts
parameters along their first dimension, so a rank's rows of a tensor are contiguous bytes. They are
cast into a chunk's buffer while the previous chunk is in flight; no rank ever holds more of the
model than that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Shard

from atropos_common.broadcast.transfer import SLOTS, Chunk, SentTensor, chunks, place
from atropos_common.protocol.strided import contiguous
from trainer_core.errors import UsageError
from trainer_core.policy.load import Spot, checkpoint_layout, view_of
from trainer_core.policy.sharding import local, row_bounds

CHUNK_BYTES = 256 << 20
"""Bytes of one chunk: long enough for the link's full speed, short enough to unpack while the next
one arrives."""

Copied = list[tuple[torch.Tensor, torch.Tensor]]
"""Destinations in the sent bytes, and the tensors to copy there first."""


class Outgoing(Protocol):
    """This rank's part in sending."""

    tensors: list[SentTensor]
    chunks: list[Chunk]
    ready: torch.cuda.Event | None
    """Event after which the data is in place, for a stream that reads it; None on a CPU."""

    def refresh(self) -> None:
        """Mark the parameters as changed."""

    def fill(self, chunk: Chunk, slot: int) -> torch.Tensor:
        """Buffer of the chunk's bytes, uint8, filled with this rank's present ones; other ranks'
        bytes arrive in it. The next chunk with the same `slot` may reuse the buffer."""


class OnePiece:
    """The whole model, in the memory in which it is trained."""

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
    """This rank's rows of a model that is sharded over `size` ranks."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, rank: int, size: int) -> None:
        """Args:
            dtype: dtype of sent sharded parameters, whatever they are trained in.

        Raises:
            UsageError: a checkpoint tensor is not a view of the parameters, or a rank's part of one
                is not contiguous.
        """
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
        room, device = (
            max(chunk.nbytes for chunk in self.chunks),
            local(next(iter(named.values()))).device,
        )
        self._buffers = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.ready: torch.cuda.Event | None = None

    def refresh(self) -> None:
        """No-op: rows are read where they are."""
        self.ready = _now(self._buffers[0].device)

    @torch.no_grad()
    def fill(self, chunk: Chunk, slot: int) -> torch.Tensor:
        buffer = self._buffers[slot][: chunk.nbytes]
        for placed in chunk.tensors:
            whole = _view(
                buffer[placed.start - chunk.start :][: placed.tensor.nbytes], placed.tensor.dtype
            )
            for part, param in self._own[placed.tensor.name]:
                here = local(param)
                rows = here.as_strided(part.shape, part.stride, here.storage_offset() + part.offset)
                whole[part.first : part.first + rows.numel()].view(part.shape).copy_(rows)
        return buffer


@dataclass(frozen=True)
class TensorPart:
    """One rank's part of a checkpoint tensor: elements from `first` on, as a view of its
    parameter."""

    rank: int
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def outgoing(model: torch.nn.Module, dtype: torch.dtype, rank: int, size: int) -> Outgoing:
    """The bytes that `rank` of the trainer's `size` sends.

    Raises:
        UsageError: a checkpoint tensor is not a view of the parameters.
    """
    return OnePiece(model) if size == 1 else Shards(model, dtype, rank, size)


@torch.no_grad()
def into_one_piece(model: torch.nn.Module) -> tuple[torch.Tensor, list[SentTensor], Copied]:
    """Move every parameter into one tensor of bytes, in sending order and under the checkpoint's
    names; a tied one once. Parameters that cannot be trained in the sent form are copied there
    instead.

    Raises:
        UsageError: a checkpoint tensor is not a view of the parameters.
    """
    named = dict(model.named_parameters())
    parts = parts_of(model)
    tensors = [
        _sent(name, named[owner].dtype, spot) for owner in named for name, spot in parts[owner]
    ]
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
        for name, spot in parts[owner]:
            sent = stream[starts[name] :][: math.prod(spot.shape) * param.element_size()]
            copied.append((sent.view(param.dtype).view(spot.shape), view_of(param.detach(), spot)))
    return stream, tensors, copied


def parts_of(model: torch.nn.Module) -> dict[str, list[tuple[str, Spot]]]:
    """Parameter -> its checkpoint tensors, in memory order.

    Raises:
        UsageError: a checkpoint tensor is not a view of the parameters.
    """
    parts: defaultdict[str, list[tuple[str, Spot]]] = defaultdict(list)
    for name, spot in checkpoint_layout(model).items():
        if spot is None:
            raise UsageError(
                f"mode broadcast cannot send {name}: transformers computes it from its "
                "parameters when it saves. Use another weight bridge mode (none or lora_only)"
            )
        parts[spot.parameter].append((name, spot))
    return {
        owner: sorted(parts[owner], key=lambda part: part[1].offset)
        for owner, _ in model.named_parameters()
    }


def _sent(
    name: str, dtype: torch.dtype, spot: Spot, owners: list[tuple[int, int]] | None = None
) -> SentTensor:
    kind: Any = str(dtype).removeprefix("torch.")
    return SentTensor(name=name, dtype=kind, shape=list(spot.shape), owners=owners or [])


def _lies_so(spot: Spot, start: int, param: torch.Tensor) -> bool:
    """Return True if a contiguous `param` has this part contiguously at byte `start`."""
    return spot.stride == contiguous(spot.shape) and start == spot.offset * param.element_size()


def _bounds(name: str, param: torch.Tensor, size: int) -> list[int]:
    """First element of each rank's part of a parameter, and the total; unsharded ones belong to
    rank 0."""
    if not isinstance(param, DTensor) or not any(place.is_shard() for place in param.placements):
        return [0, *[param.numel()] * size]
    if tuple(param.placements) != (Shard(0),):
        raise UsageError(
            f"mode broadcast sends parameters cut along their first dimension, and {name} is not"
        )
    return [first * math.prod(param.shape[1:]) for first in row_bounds(param.shape[0], size)]


def _cut(name: str, spot: Spot, bounds: list[int]) -> Iterator[TensorPart]:
    """Parts of `spot` by rank, in order."""
    shape, stride = spot.shape, spot.stride
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
            f"mode broadcast cannot send {name} from several ranks: each has parts of its "
            f"rows. Train on one GPU, or "
            "use another weight bridge mode (none or lora_only)"
        )
    for rank, rows in groupby(range(shape[0]), key=lambda row: ranks[row]):
        mine = list(rows)
        assert rank is not None
        yield TensorPart(
            rank,
            mine[0] * math.prod(shape[1:]),
            (len(mine), *shape[1:]),
            stride,
            row_of[mine[0]] - bounds[rank],
        )


def _rank_of(first: int, last: int, bounds: list[int]) -> int | None:
    """The rank with elements `first` to `last`; None if several ranks have them."""
    spans = enumerate(pairwise(bounds))
    return next((rank for rank, (begin, end) in spans if begin <= first and last < end), None)


def _now(device: torch.device) -> torch.cuda.Event | None:
    """Event at the end of the work queued on the current stream so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _view(part: torch.Tensor, dtype: str) -> torch.Tensor:
    return part.view(getattr(torch, dtype))
