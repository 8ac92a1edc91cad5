"""What a broadcast sends: the checkpoint's tensors, from where they are trained.

A trainer alone keeps its parameters one after the other in a single piece of memory, so that nothing is packed that a
checkpoint holds as it is trained. Of a sharded trainer each rank sends its own rows: FSDP2 cuts parameters along their
first dimension, so a rank's rows of a tensor are some of its bytes in one piece. They are cast into a chunk's buffer
while the chunk before is on its way; no rank ever has more of the model than that.
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

from atropos_common.strided import contiguous
from atropos_common.transfer import SLOTS, Chunk, SentTensor, chunks, place
from trainer_core.errors import UsageError
from trainer_core.policy.checkpoint_layout import Spot, checkpoint_layout, view_of
from trainer_core.policy.sharding import local, row_bounds

CHUNK_BYTES = 256 << 20
"""Of one chunk: long enough to run at the link's speed, short enough to unpack while the next one comes."""

Copied = list[tuple[torch.Tensor, torch.Tensor]]
"""Places in what is sent, and the tensors that are copied there before."""


class Outgoing(Protocol):
    """What this rank takes part in sending."""

    tensors: list[SentTensor]
    chunks: list[Chunk]
    ready: torch.cuda.Event | None
    """When what is sent is in place, for a stream that reads it; null on a CPU."""

    def refresh(self) -> None:
        """The parameters have changed."""

    def fill(self, chunk: Chunk, slot: int) -> torch.Tensor:
        """A buffer of the chunk's bytes, uint8, in which this rank's own are the present ones. Another rank's arrive
        there; the chunk after the next, which has the same `slot`, may get the same buffer."""


class OnePiece:
    """All of the model, from the memory in which it is trained."""

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
            dtype: in which sharded parameters are sent, whatever the rows are trained in.

        Raises:
            UsageError: some of the checkpoint's tensors are not views of the parameters, or a rank has parts of one
                that are not some of its bytes in one piece.
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
        room, device = max(chunk.nbytes for chunk in self.chunks), local(next(iter(named.values()))).device
        self._buffers = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.ready: torch.cuda.Event | None = None

    def refresh(self) -> None:
        """Rows are read where they lie."""
        self.ready = _now(self._buffers[0].device)

    @torch.no_grad()
    def fill(self, chunk: Chunk, slot: int) -> torch.Tensor:
        buffer = self._buffers[slot][: chunk.nbytes]
        for placed in chunk.tensors:
            whole = _view(buffer[placed.start - chunk.start :][: placed.tensor.nbytes], placed.tensor.dtype)
            for part, param in self._own[placed.tensor.name]:
                here = local(param)
                rows = here.as_strided(part.shape, part.stride, here.storage_offset() + part.offset)
                whole[part.first : part.first + rows.numel()].view(part.shape).copy_(rows)
        return buffer


@dataclass(frozen=True)
class TensorPart:
    """What one rank has of a checkpoint's tensor: elements from `first` on, as a view of its part of the parameter."""

    rank: int
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def outgoing(model: torch.nn.Module, dtype: torch.dtype, rank: int, size: int) -> Outgoing:
    """What `rank` of the trainer's `size` sends of the model.

    Raises:
        UsageError: some of the checkpoint's tensors are not views of the parameters.
    """
    return OnePiece(model) if size == 1 else Shards(model, dtype, rank, size)


@torch.no_grad()
def into_one_piece(model: torch.nn.Module) -> tuple[torch.Tensor, list[SentTensor], Copied]:
    """Move every parameter into one tensor of bytes, in the order in which it is sent and under the names of the
    checkpoint; a tied one lies there once. What cannot be trained as it is sent is copied there instead.

    Raises:
        UsageError: some of the checkpoint's tensors are not views of the parameters.
    """
    named = dict(model.named_parameters())
    parts = parts_of(model)
    tensors = [_sent(name, named[owner].dtype, spot) for owner in named for name, spot in parts[owner]]
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
    """Parameter -> what checkpoints hold of it, in the order in which it lies there.

    Raises:
        UsageError: some of the checkpoint's tensors are not views of the parameters.
    """
    parts: defaultdict[str, list[tuple[str, Spot]]] = defaultdict(list)
    for name, spot in checkpoint_layout(model).items():
        if spot is None:
            raise UsageError(
                f"mode broadcast cannot send {name}: transformers makes it anew from its parameters when it saves. Use "
                "another weight bridge mode (none or lora_only)"
            )
        parts[spot.parameter].append((name, spot))
    return {owner: sorted(parts[owner], key=lambda part: part[1].offset) for owner, _ in model.named_parameters()}


def _sent(name: str, dtype: torch.dtype, spot: Spot, owners: list[tuple[int, int]] | None = None) -> SentTensor:
    kind: Any = str(dtype).removeprefix("torch.")
    return SentTensor(name=name, dtype=kind, shape=list(spot.shape), owners=owners or [])


def _lies_so(spot: Spot, start: int, param: torch.Tensor) -> bool:
    """Whether a contiguous `param` has this part `start` bytes after its first one, in one piece."""
    return spot.stride == contiguous(spot.shape) and start == spot.offset * param.element_size()


def _bounds(name: str, param: torch.Tensor, size: int) -> list[int]:
    """Where each rank's elements of a parameter begin, and the number of all; what is not sharded is rank 0's."""
    if not isinstance(param, DTensor) or not any(place.is_shard() for place in param.placements):
        return [0, *[param.numel()] * size]
    if tuple(param.placements) != (Shard(0),):
        raise UsageError(f"mode broadcast sends parameters cut along their first dimension, and {name} is not")
    return [first * math.prod(param.shape[1:]) for first in row_bounds(param.shape[0], size)]


def _cut(name: str, spot: Spot, bounds: list[int]) -> Iterator[TensorPart]:
    """`spot` by the ranks that have it, in order."""
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
            f"mode broadcast cannot send {name} from several ranks: each has parts of its rows. Train on one GPU, or "
            "use another weight bridge mode (none or lora_only)"
        )
    for rank, rows in groupby(range(shape[0]), key=lambda row: ranks[row]):
        mine = list(rows)
        assert rank is not None
        yield TensorPart(
            rank, mine[0] * math.prod(shape[1:]), (len(mine), *shape[1:]), stride, row_of[mine[0]] - bounds[rank]
        )


def _rank_of(first: int, last: int, bounds: list[int]) -> int | None:
    """The rank that has elements `first` to `last`; null when several do."""
    spans = enumerate(pairwise(bounds))
    return next((rank for rank, (begin, end) in spans if begin <= first and last < end), None)


def _now(device: torch.device) -> torch.cuda.Event | None:
    """The end of what the present stream was given so far, not of what it is given later."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _view(part: torch.Tensor, dtype: str) -> torch.Tensor:
    return part.view(getattr(torch, dtype))
