"""Messages of a weight broadcast, and the layout of its bytes. Torch-free.

    POST /bridge/transfer/init    TransferInit    -> BridgeInfo      the workers join the group
    POST /bridge/transfer/update  TransferUpdate  -> TransferReport  pause, receive, resume

The trainer's ranks come first, and rank 0 leads; a server's workers follow from `first_rank` on.
Both sides derive the same chunks from names, dtypes, shapes and owners, so a broadcast carries only
bytes.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from atropos_common.protocol.bridge import BridgeMessage, InFlight, Version

TransferBackend = Literal["nccl", "gloo"]

ALIGNMENT = 256
"""As an allocator aligns each tensor."""
# Long enough for the link's full speed, short enough to unpack while the next one arrives.
CHUNK_BYTES = 256 << 20
"""Bytes of one chunk."""
SLOTS = 2
"""One buffer fills while the other is emptied."""

# Bytes of an element.
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _from_base64(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


Secret = Annotated[
    bytes,
    BeforeValidator(_from_base64),
    PlainSerializer(lambda value: base64.b64encode(value).decode(), str),
]
"""Base64 in a message."""


class SentTensor(BridgeMessage):
    """Parameter by checkpoint name; a tied one is sent once."""

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: list[int]
    owners: list[tuple[int, int]] = Field(default_factory=list)
    """Rank and bytes of each part; empty: rank 0 has all."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class TransferInit(BridgeMessage):
    """Rendezvous of the group, and its tensors."""

    backend: TransferBackend
    address: str
    port: int = Field(ge=1, le=65535)
    """Port of the trainer's store."""
    key: str
    """Prefix of the group's keys in the store; not secret."""
    secret: Secret = Field(min_length=32, repr=False)
    """Store values without its MAC are ignored."""
    nccl_id: Secret = Field(b"", repr=False)
    """Secret id of the NCCL ranks; empty for gloo."""
    first_rank: int = Field(ge=1)
    world_size: int = Field(ge=2)
    timeout_s: float = Field(gt=0)
    chunk_bytes: int = Field(ge=1)
    tensors: list[SentTensor]


def meeting_place(init_method: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Address and port of a rendezvous: `--init-method`, else MASTER_ADDR and MASTER_PORT."""
    # `[...]` around an IPv6 address.
    found = re.fullmatch(r"tcp://\[?(.+?)\]?:(\d+)", init_method)
    if found:
        return found[1], found[2]
    return env.get("MASTER_ADDR") or "127.0.0.1", env.get("MASTER_PORT") or "0"


class TransferUpdate(BridgeMessage):
    """Receive all tensors as `weight_version`."""

    weight_version: Version
    timeout_s: float = Field(gt=0)
    in_flight: InFlight = "keep"
    wait_s: float = Field(30.0, ge=0)


class TransferReport(BridgeMessage):
    weight_version: int
    phases: dict[str, float]
    """Seconds of pause, receive and resume."""


@dataclass(frozen=True)
class Placed:
    """A tensor and its offset in the stream."""

    tensor: SentTensor
    start: int


@dataclass(frozen=True)
class Piece:
    """Bytes of the stream that rank `root` broadcasts."""

    root: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Whole tensors that are received together."""

    start: int
    end: int
    tensors: tuple[Placed, ...]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Broadcasts that fill the chunk; padding belongs to the piece before."""
        starts: list[tuple[int, int]] = []
        for placed in self.tensors:
            at = placed.start
            for root, nbytes in placed.tensor.owners or [(0, placed.tensor.nbytes)]:
                # Adjacent parts of one rank become one broadcast.
                if not starts or starts[-1][0] != root:
                    starts.append((root, at))
                at += nbytes
        ends = [*(at for _, at in starts[1:]), self.end]
        return [Piece(root, at, end) for (root, at), end in zip(starts, ends, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def place(tensors: Sequence[SentTensor]) -> tuple[list[Placed], int]:
    """Offset of each tensor, and bytes of the stream."""
    placed, end = [], 0
    for tensor in tensors:
        placed.append(Placed(tensor, end))
        # Round up to the alignment.
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return placed, end


def chunks(tensors: Sequence[SentTensor], chunk_bytes: int) -> list[Chunk]:
    """Cut between tensors into at most `chunk_bytes`; a larger tensor is its own chunk."""
    placed, total = place(tensors)
    parts: list[Chunk] = []
    first = 0
    for index in range(1, len(placed) + 1):
        last = index == len(placed)
        end = total if last else placed[index].start
        following = end if last else end + placed[index].tensor.nbytes
        # The next tensor would not fit: close the chunk before it.
        if last or following - placed[first].start > chunk_bytes:
            parts.append(Chunk(placed[first].start, end, tuple(placed[first:index])))
            first = index
    return parts
