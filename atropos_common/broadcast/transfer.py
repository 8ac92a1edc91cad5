"""Messages of a weight broadcast, and the layout of the sent bytes. Torch-free.

    POST /bridge/transfer/init    TransferInit -> BridgeInfo: every worker joins the trainer's group
    POST /bridge/transfer/update  TransferUpdate -> TransferReport: pause, receive, resume

The trainer's ranks come first in the group. Both sides derive the same chunks and senders from
names, dtypes, shapes and owners, so a broadcast carries only bytes.
"""

from __future__ import annotations

import base64
import ipaddress
import math
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from atropos_common.protocol.bridge import BridgeMessage, InFlight, Version

TransferBackend = Literal["nccl", "gloo"]
"""NCCL between GPUs, gloo for weights in CPU memory."""

ALIGNMENT = 256
"""Alignment of every tensor's start, in bytes."""
SLOTS = 2
"""Receive buffers of a worker: one fills while the other is emptied."""

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
    """One parameter under its checkpoint name; a tied one is sent once."""

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: list[int]
    owners: list[tuple[int, int]] = Field(default_factory=list)
    """Rank and bytes of each part, in order; empty: rank 0 has all of it."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class TransferInit(BridgeMessage):
    """Rendezvous of a server's workers, and what the group will send."""

    backend: TransferBackend
    address: str
    port: int = Field(ge=1, le=65535)
    """Port of the trainer's key-value store."""
    key: str
    """Prefix of the group's keys, new for each group. Not secret."""
    secret: Secret = Field(min_length=32, repr=False)
    """Values without its MAC are ignored."""
    nccl_id: Secret = Field(b"", repr=False)
    """Id by which NCCL ranks verify each other, also secret; empty for gloo."""
    first_rank: int = Field(ge=1)
    world_size: int = Field(ge=2)
    timeout_s: float = Field(gt=0)
    chunk_bytes: int = Field(ge=1)
    tensors: list[SentTensor]


def meeting_place(init_method: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Address and port of a broadcast's rendezvous: `--init-method`, else MASTER_ADDR and
    MASTER_PORT, else the loopback and any free port."""
    # `[...]` around an IPv6 address.
    found = re.fullmatch(r"tcp://\[?(.+?)\]?:(\d+)", init_method)
    if found:
        return found[1], found[2]
    return env.get("MASTER_ADDR") or "127.0.0.1", env.get("MASTER_PORT") or "0"


def is_loopback(address: str) -> bool:
    """Only this machine reaches `address`. Nothing is resolved."""
    return address.lower() == "localhost" or any(each.is_loopback for each in _numbers(address))


def is_wildcard(address: str) -> bool:
    return any(each.is_unspecified for each in _numbers(address))


def _numbers(address: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        # AI_NUMERICHOST accepts every notation of a number (0x7f.1) but never asks DNS.
        (found, *_) = socket.getaddrinfo(address, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    made = ipaddress.ip_address(str(found[4][0]).partition("%")[0])
    # `::ffff:127.0.0.1` is the loopback too.
    return [getattr(made, "ipv4_mapped", None) or made]


class TransferUpdate(BridgeMessage):
    """Receive all tensors, then answer with them as `weight_version`."""

    weight_version: Version
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
    tensor: SentTensor
    start: int


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `end` of the stream, which rank `root` broadcasts."""

    root: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Bytes of the stream that are received together: whole tensors."""

    start: int
    end: int
    tensors: tuple[Placed, ...]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Broadcasts that fill the chunk; padding belongs to the preceding piece."""
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
    """Start of each tensor in the stream, and the stream's size in bytes."""
    placed, end = [], 0
    for tensor in tensors:
        placed.append(Placed(tensor, end))
        # Round up to the alignment.
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return placed, end


def chunks(tensors: Sequence[SentTensor], chunk_bytes: int) -> list[Chunk]:
    """The stream, cut between tensors into at most `chunk_bytes`; a larger tensor is its own
    chunk."""
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
