"""The tensors that a server's manifest names, on the server's own memory."""

from __future__ import annotations

import base64
from pathlib import Path

import torch

from trainer_core.contracts.manifest import CudaIpc, ManifestError, Shard, TensorEntry
from trainer_core.errors import UsageError


def one_dtype(shard: Shard, wanted: str) -> torch.dtype:
    """The type of all tensors, which must be the one that the trainer was told (`wanted`; "auto": any).

    Raises:
        UsageError: several types, or another one.
        ManifestError: none that torch has.
    """
    found = {entry.dtype for entry in shard.param_mappings.values()}
    if len(found) != 1:
        raise UsageError(
            f"the server's tensors are of several types ({', '.join(sorted(found))}); start it with --dtype"
        )
    dtype = found.pop()
    if wanted not in ("auto", dtype):
        raise UsageError(f"the server's weights are {dtype}, the trainer was told {wanted}: pass --dtype {dtype}")
    return _dtype(dtype)


def open_tensors(shard: Shard, device: torch.device) -> dict[str, torch.Tensor]:
    """The server's tensors by its own names, on its own memory.

    Raises:
        ManifestError: the memory is gone, or lies on the other kind of device.
    """
    if shard.kind == "shm":
        return _open_shm(shard, device)
    if device.type != "cuda":
        raise ManifestError("the server's weights are on a GPU: train with --device cuda on the same one")
    opened: dict[str, torch.Tensor] = {}
    for name, entry in shard.param_mappings.items():
        if entry.ipc_handle is None:
            raise ManifestError(f"{name}: no CUDA handle in the manifest")
        opened[name] = _view(_open_cuda(entry.ipc_handle, device), entry, name)
    return opened


def _open_shm(shard: Shard, device: torch.device) -> dict[str, torch.Tensor]:
    path = Path(shard.shm_path or "")
    if device.type != "cpu":
        raise ManifestError(f"the server's weights are in {path}, CPU memory: train with --device cpu")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ManifestError(f"{path}: the server's weights are gone ({error.strerror}); restart vLLM") from None
    if size < shard.shm_bytes:
        raise ManifestError(f"{path}: {size} bytes, the manifest says {shard.shm_bytes}; restart vLLM")
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=shard.shm_bytes)
    return {name: _view(storage, entry, name) for name, entry in shard.param_mappings.items()}


def _open_cuda(ipc: CudaIpc, device: torch.device) -> torch.UntypedStorage:
    torch.cuda.init()
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device.index if device.index is not None else torch.cuda.current_device(),
        base64.b64decode(ipc.handle), ipc.storage_bytes, ipc.storage_offset_bytes,
        base64.b64decode(ipc.ref_counter_handle), ipc.ref_counter_offset,
        base64.b64decode(ipc.event_handle), ipc.event_sync_required,
    )  # fmt: skip
    return storage


def _view(storage: torch.UntypedStorage, entry: TensorEntry, name: str) -> torch.Tensor:
    """The tensor of `entry` in `storage`.

    Raises:
        ManifestError: it does not lie in there.
    """
    empty = torch.empty(0, dtype=_dtype(entry.dtype), device=storage.device)
    try:
        end = entry.offset + sum((n - 1) * step for n, step in zip(entry.shape, entry.stride, strict=True)) + 1
        if min([entry.offset, *entry.shape, *entry.stride]) < 0 or end * empty.element_size() > storage.nbytes():
            raise ValueError(f"of {storage.nbytes()} bytes it would take {end * empty.element_size()}")
        return empty.set_(storage, entry.offset, tuple(entry.shape), tuple(entry.stride))
    except (RuntimeError, ValueError) as error:
        raise ManifestError(f"{name}: not a tensor of the server's memory ({error}); restart vLLM") from None


def _dtype(name: str) -> torch.dtype:
    """Raises ManifestError where torch has none of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"the manifest speaks of a type {name}, which this torch does not have")
    return dtype
