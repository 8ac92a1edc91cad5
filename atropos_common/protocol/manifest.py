"""The tensor manifest `vllm_bridge_config.json`: the trainer maps the server's weights by it.

Plain JSON, mode 0600, never pickle. It has an entry per tensor-parallel rank. The server's own
loader decides the places of checkpoint tensors, so neither side has a list of architectures or of
fused names.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from atropos_common.system.files import write_private

# Raised with every change of the format; both sides refuse another version.
MANIFEST_VERSION = 3


class ManifestError(ValueError):
    pass


class CudaIpc(BaseModel):
    """Arguments of `torch.UntypedStorage._new_shared_cuda`, bytes in base64."""

    model_config = ConfigDict(extra="forbid")
    device: int
    handle: str
    storage_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: str
    ref_counter_offset: int
    event_handle: str
    event_sync_required: bool


class TensorEntry(BaseModel):
    """Parameter of the server, under vLLM's name."""

    model_config = ConfigDict(extra="forbid")
    shape: list[int]
    stride: list[int]
    """In elements."""
    dtype: str
    """torch's name, such as "bfloat16"."""
    offset: int = 0
    """First element in its storage, in elements."""
    ipc_handle: CudaIpc | None = None
    """None for the shared file."""


class TensorView(BaseModel):
    """Place of a checkpoint tensor in a parameter, in elements."""

    model_config = ConfigDict(extra="forbid")
    parameter: str
    offset: int = Field(ge=0)
    shape: list[int]
    """This rank's part."""
    stride: list[int]
    begin: list[int] | None = None
    """First element of the part; None if this rank has all."""
    whole: list[int] | None = None
    """Whole shape, given with `begin`."""


class Shard(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["shm", "cuda_ipc"]
    gpu: str | None = None
    """UUID; None on a CPU."""
    # For a CPU: the shared file that holds all tensors of this rank.
    shm_path: str | None = None
    shm_bytes: int = 0
    param_mappings: dict[str, TensorEntry]
    aliases: dict[str, str] = Field(default_factory=dict)
    """Further names, such as a tied `lm_head`."""
    views: dict[str, TensorView]
    """Checkpoint name -> place."""

    @model_validator(mode="after")
    def _views_lie_in_parameters(self) -> Shard:
        # The trainer writes to these places, so a wrong one would corrupt the engine's memory.
        for name, view in self.views.items():
            whole = self.param_mappings.get(view.parameter)
            if whole is None:
                raise ValueError(f"{name} lies in {view.parameter}, which is no parameter")
            # A rank may have no element of a divided tensor.
            least = 1 if view.whole is None else 0
            if (
                len(view.shape) != len(view.stride)
                or min([1, *view.shape]) < least
                or min([0, *view.stride]) < 0
            ):
                raise ValueError(f"{name} has shape {view.shape} and stride {view.stride}")
            if (view.begin is None) != (view.whole is None) or not _inside(view):
                raise ValueError(
                    f"{name} begins at {view.begin} with shape {view.shape} of {view.whole}"
                )
            if view.offset + extent(view.shape, view.stride) > extent(whole.shape, whole.stride):
                raise ValueError(f"{name} reaches beyond {view.parameter}")
        return self


def _inside(view: TensorView) -> bool:
    if view.begin is None or view.whole is None:
        return True
    if not len(view.begin) == len(view.shape) == len(view.whole):
        return False
    return all(
        0 <= at <= at + n <= end
        for at, n, end in zip(view.begin, view.shape, view.whole, strict=True)
    )


def left_out(ranks: Mapping[int, Shard]) -> list[str]:
    """Checkpoint tensors that the ranks do not cover, or on which they disagree."""
    names = {name for shard in ranks.values() for name in shard.views}
    return sorted(
        name for name in names if not _is_whole([shard.views.get(name) for shard in ranks.values()])
    )


def _is_whole(views: Sequence[TensorView | None]) -> bool:
    # Every rank must have a part of the same whole; equal parts (replicated tensors) count once.
    held = [view for view in views if view is not None]
    wholes = {tuple(view.whole or view.shape) for view in held}
    if len(held) < len(views) or len(wholes) > 1:
        return False
    parts = {(tuple(view.begin or [0] * len(view.shape)), tuple(view.shape)) for view in held}
    return sum(math.prod(shape) for _, shape in parts) == math.prod(wholes.pop())


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int = MANIFEST_VERSION
    model: str
    architecture: str
    config: dict[str, object]
    """The model's `config.json`, compared with the trainer's."""
    instance_id: str
    """New at every start, as in `/bridge/info`."""
    server_pid: int
    server_create_time: float
    base_url: str
    vllm_version: str
    tensor_parallel_size: int = 1
    ranks: dict[int, Shard]

    @field_validator("ranks")
    @classmethod
    def _has_rank_0(cls, ranks: dict[int, Shard]) -> dict[int, Shard]:
        if 0 not in ranks:
            raise ValueError("rank 0 is missing")
        return ranks


class _Versioned(BaseModel):
    version: int


def write_manifest(manifest: Manifest, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, manifest.model_dump_json(indent=1), durable=True)


def read_manifest(path: Path) -> Manifest:
    """Read and check `path`.

    Raises:
        ManifestError: missing, unsafe owner or mode, or another format.
    """
    try:
        info = path.lstat()
    except FileNotFoundError:
        raise ManifestError(
            f"{path}: no manifest. Start the server with VLLM_ENABLE_SHARED_WEIGHTS=1 and "
            f"LOGDIR={path.parent}"
        ) from None
    # `lstat`: a link could lead to a file of another user.
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ManifestError(
            f"{path}: must be a regular file of this user with mode 0600; delete it and "
            f"restart vLLM"
        )
    raw = path.read_bytes()
    try:
        # The version first: fields of another version would give misleading errors.
        version = _Versioned.model_validate_json(raw).version
        if version != MANIFEST_VERSION:
            raise ManifestError(
                f"{path}: manifest version {version}, this trainer reads {MANIFEST_VERSION}; "
                "server and trainer must be of the same release of atropos-tui"
            )
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ManifestError(
            f"{path}: not a manifest ({where}: {first['msg']}); restart vLLM, which writes a "
            f"new one"
        ) from None


# vLLM keeps q, k and v as rows of one parameter and all experts of a layer in one. Checkpoints hold
# them singly, and transformers stacks experts in its own order. Each side maps boxes of a tensor to
# boxes of another tensor. A tensor whose elements are evenly spaced in the other one is a strided
# view of it and needs no copy.
class PartPlace(NamedTuple):
    """Place of an even part of a tensor in another tensor, in elements."""

    begin: tuple[int, ...]
    """First element of the part, as an index of the tensor."""
    shape: tuple[int, ...]
    offset: int
    """Offset of that element in the other tensor."""
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Part of a contiguous tensor, and the place (`_there`) of its elements in another tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    stride_there: tuple[int, ...]
    offset_there: int


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one; 0 for an empty tensor."""
    return math.prod(shape) and 1 + sum(
        (size - 1) * step for size, step in zip(shape, stride, strict=True)
    )


def joined(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[int, tuple[int, ...]] | None:
    """Return offset and strides, in the other tensor, of the contiguous tensor of the boxes.

    Returns:
        None if they leave gaps, overlap, or are not evenly spaced there.
    """
    place = joined_part(shape, boxes)
    return None if place is None or place.shape != tuple(shape) else (place.offset, place.stride)


def joined_part(shape: Sequence[int], boxes: Iterable[Box]) -> PartPlace | None:
    """Like `joined`, but the boxes may form only a rectangular part of the tensor."""
    parts = list(dict.fromkeys(boxes))
    own = contiguous(shape)
    # Dimension -> stride in the other tensor, for the dimensions that a box has shown.
    steps: dict[int, int] = {}
    corners, ends = [], []
    for box in parts:
        corner = _index(box.offset, own)
        end = [index + 1 for index in corner]
        for size, step, there in zip(box.shape, box.stride, box.stride_there, strict=True):
            if size == 1:
                continue
            # Find the dimension of the whole tensor that this dimension of the box runs along.
            dim = next(
                (dim for dim, mine in enumerate(own) if mine == step and shape[dim] >= size > 1),
                None,
            )
            if dim is None or steps.setdefault(dim, there) != there:
                return None
            end[dim] = corner[dim] + size
        corners.append((corner, box.offset_there))
        ends.append(end)
    if not parts:
        return None
    # Bounding box of all parts.
    begin = tuple(map(min, zip(*(corner for corner, _ in corners), strict=True)))
    size_of = tuple(
        max(each) - low for each, low in zip(zip(*ends, strict=True), begin, strict=True)
    )
    places = {corner for corner, _ in corners}
    if sum(math.prod(box.shape) for box in parts) != math.prod(size_of) or len(places) < len(parts):
        return None
    first, start = min(corners)
    for corner, there in sorted(corners):
        new = [dim for dim in range(len(shape)) if corner[dim] != first[dim] and dim not in steps]
        if len(new) == 1:  # sorted corners add at most one dimension at a time
            rest = there - start - _reach(corner, first, steps)
            steps[new[0]], odd = divmod(rest, corner[new[0]] - first[new[0]])
            if odd:
                return None
        if new[1:] or there - start != _reach(corner, first, steps):
            return None
    # Stride 0 would map two elements to one place; negative ones are never needed.
    if any(step < 1 for step in steps.values()):
        return None
    return PartPlace(
        begin, size_of, start, tuple(steps.get(dim, own[dim]) for dim in range(len(shape)))
    )


def _index(offset: int, stride: Sequence[int]) -> tuple[int, ...]:
    found = []
    for step in stride:
        index, offset = divmod(offset, step)
        found.append(index)
    return tuple(found)


def _reach(corner: Sequence[int], first: Sequence[int], steps: dict[int, int]) -> int:
    return sum((corner[dim] - first[dim]) * step for dim, step in steps.items())
