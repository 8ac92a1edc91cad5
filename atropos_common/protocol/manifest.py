"""The tensor manifest `vllm_bridge_config.json`, by which a trainer maps the server's weights.

Plain JSON, never pickle; written atomically with mode 0600. The trainer refuses a file that another
user can write, one of another model, and one whose server is gone. The places of checkpoint tensors
are what the server's own loader did.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from atropos_common.protocol.strided import extent
from atropos_common.system.files import write_private

# Raised with every change of the format; both sides refuse another version.
MANIFEST_VERSION = 3


class ManifestError(ValueError):
    pass


class CudaIpc(BaseModel):
    """A CUDA IPC handle: the arguments of `torch.UntypedStorage._new_shared_cuda`, bytes in
    base64."""

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
    """One parameter of the server, under vLLM's own name."""

    model_config = ConfigDict(extra="forbid")
    shape: list[int]
    stride: list[int]
    """Strides in elements."""
    dtype: str
    """torch's dtype name without the prefix."""
    offset: int = 0
    """First element in its storage, in elements of `dtype`."""
    ipc_handle: CudaIpc | None = None
    """None for the shared file."""


class TensorView(BaseModel):
    """Place of one checkpoint tensor in a parameter, in elements from the parameter's first."""

    model_config = ConfigDict(extra="forbid")
    parameter: str
    offset: int = Field(ge=0)
    shape: list[int]
    """Shape of this rank's part."""
    stride: list[int]
    begin: list[int] | None = None
    """Index of the part's first element in the whole tensor; None if this rank has all of it."""
    whole: list[int] | None = None
    """Shape of the whole tensor, given with `begin`."""


class Shard(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["shm", "cuda_ipc"]
    gpu: str | None = None
    """UUID of the GPU; None on a CPU."""
    # For a CPU: the shared file that holds all tensors of this rank.
    shm_path: str | None = None
    shm_bytes: int = 0
    param_mappings: dict[str, TensorEntry]
    aliases: dict[str, str] = Field(default_factory=dict)
    """Further names of listed tensors, such as a tied `lm_head`."""
    views: dict[str, TensorView]
    """Checkpoint tensor -> place."""

    @model_validator(mode="after")
    def _views_lie_in_parameters(self) -> Shard:
        # The trainer writes to these places, so a wrong one would corrupt the engine's memory.
        for name, view in self.views.items():
            whole = self.param_mappings.get(view.parameter)
            if whole is None:
                raise ValueError(f"{name} lies in {view.parameter}, which is no parameter")
            # A rank may have nothing of a tensor that is divided.
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
    """The part lies within its tensor."""
    if view.begin is None or view.whole is None:
        return True
    if not len(view.begin) == len(view.shape) == len(view.whole):
        return False
    return all(
        0 <= at <= at + n <= end
        for at, n, end in zip(view.begin, view.shape, view.whole, strict=True)
    )


def left_out(ranks: Mapping[int, Shard]) -> list[str]:
    """Checkpoint tensors that the ranks together do not cover, or on which they disagree."""
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
    """The model's `config.json`, for the trainer to compare."""
    instance_id: str
    """New at every server start; `/bridge/info` returns the same."""
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
    """Raises:
    ManifestError: missing, unsafe owner or mode, or not a manifest of this version.
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
                f"server and trainer must "
                "be of the same release of atropos-tui"
            )
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ManifestError(
            f"{path}: not a manifest ({where}: {first['msg']}); restart vLLM, which writes a "
            f"new one"
        ) from None
