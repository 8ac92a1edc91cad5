"""Messages of a broadcast of weights, and how the tensors lie in what is sent.

    POST /bridge/transfer/init     TransferInit    -> BridgeInfo       (every worker joins the trainer's group)
    POST /bridge/transfer/update   TransferUpdate  -> TransferReport   (pause, receive, reset the prefix cache, resume)

The trainer is rank 0 of the group; a server's workers follow from `first_rank` on. Both sides derive the same chunks
from the tensors' names, types and shapes, so a broadcast carries bytes alone. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from trainer_core.contracts.bridge import BridgeMessage, InFlight

TransferBackend = Literal["nccl", "gloo"]
"""NCCL between GPUs, gloo where the weights lie in CPU memory."""

ALIGNMENT = 256
"""Bytes; every tensor starts at a multiple of it, as one from an allocator would."""
SLOTS = 2
"""Receive buffers of a worker: one is filled while the other is emptied."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class SentTensor(BridgeMessage):
    """One parameter under its name in the checkpoint; a tied one is sent once."""

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class TransferInit(BridgeMessage):
    """How a server's workers find the group, and what will be sent in it."""

    backend: TransferBackend
    address: str
    port: int = Field(ge=1, le=65535)
    """Of the trainer's key-value store, where the group meets."""
    key: str
    """Prefix in that store: known to those only who know the run's token, and new for each group."""
    first_rank: int = Field(ge=1)
    world_size: int = Field(ge=2)
    timeout_s: float = Field(gt=0)
    chunk_bytes: int = Field(ge=1)
    tensors: list[SentTensor]


class TransferUpdate(BridgeMessage):
    """Receive all tensors, then answer with them as `weight_version`."""

    weight_version: int = Field(ge=0)
    timeout_s: float = Field(gt=0)
    in_flight: InFlight = "keep"
    wait_s: float = Field(30.0, ge=0)
    """Both as in `PauseRequest`."""


class TransferReport(BridgeMessage):
    weight_version: int
    phases: dict[str, float]
    """Seconds: pause, receive (device synchronised), resume (prefix cache reset)."""


@dataclass(frozen=True)
class Placed:
    """A tensor and its first byte in the stream of all."""

    tensor: SentTensor
    start: int


@dataclass(frozen=True)
class Chunk:
    """What one broadcast carries: bytes `start` to `end` of the stream, whole tensors."""

    start: int
    end: int
    tensors: tuple[Placed, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def place(tensors: Sequence[SentTensor]) -> tuple[list[Placed], int]:
    """Where each tensor starts, one after the other, and the bytes of all."""
    placed, end = [], 0
    for tensor in tensors:
        placed.append(Placed(tensor, end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return placed, end


def chunks(tensors: Sequence[SentTensor], chunk_bytes: int) -> list[Chunk]:
    """The stream cut between tensors into parts of at most `chunk_bytes`, or of one tensor where that is larger."""
    return list(_cut(*place(tensors), chunk_bytes))


def _cut(placed: list[Placed], total: int, chunk_bytes: int) -> Iterator[Chunk]:
    first = 0
    for index in range(1, len(placed) + 1):
        last = index == len(placed)
        end = total if last else placed[index].start
        following = end if last else end + placed[index].tensor.nbytes
        if last or following - placed[first].start > chunk_bytes:
            yield Chunk(placed[first].start, end, tuple(placed[first:index]))
            first = index
