"""The server's process and parameters, as its manifest names them, mapped into this process."""

from __future__ import annotations

import base64
import os
from contextlib import closing
from pathlib import Path

import psutil
import torch

from atropos_common.protocol.bridge import BridgeInfo
from atropos_common.protocol.manifest import (
    CudaIpc,
    Manifest,
    ManifestError,
    Shard,
    TensorEntry,
    read_manifest,
)
from atropos_common.system.run_dir import ENV_TOKEN
from trainer_core.errors import UsageError
from trainer_core.policy.load import ANOTHER_MODE
from trainer_core.server.client import ServerClient

LEASE_S = 120.0
"""Seconds without a resume after which the server acts by itself."""


def server_token(manifest: Path) -> str:
    """Return the token of the server whose manifest this is; empty: it has none."""
    if os.environ.get(ENV_TOKEN):
        return os.environ[ENV_TOKEN]
    # A server started by hand writes its token beside its manifest.
    try:
        return (manifest.parent / "token").read_text().strip()
    except OSError:
        return ""


def has_ended(process: psutil.Process) -> bool:
    """Return True if the process is gone, or only waits for its parent."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def answering(path: Path) -> Manifest:
    """Return the manifest of a live server that answers.

    Raises:
        ManifestError: there is none.
        EngineGone: it does not answer.
    """
    manifest = read_manifest(path)
    live_server(manifest, path)
    with closing(ServerClient(manifest.base_url, server_token(path), timeout_s=5.0)) as engine:
        engine.info()
    return manifest


def meet(engine: ServerClient, manifest: Manifest, path: Path) -> BridgeInfo:
    """Bind `engine` to the server that wrote `manifest`.

    Raises:
        ManifestError: another one answers.
    """
    info = engine.meet()
    if info.instance_id != manifest.instance_id:
        raise ManifestError(
            f"{path} belongs to server instance {manifest.instance_id}, but "
            f"{manifest.base_url} is {info.instance_id}: remove the file and restart vLLM"
        )
    return info


def live_server(manifest: Manifest, path: Path) -> psutil.Process:
    """Return the server's process.

    Raises:
        ManifestError: it has ended.
    """
    try:
        process = psutil.Process(manifest.server_pid)
        alive = not has_ended(process)
        same = abs(process.create_time() - manifest.server_create_time) < 1.0
    except psutil.Error:
        alive = same = False
    # A pid may belong to a later process, which began at another time.
    if not (alive and same):
        gone = f"its server (pid {manifest.server_pid}) is gone"
        raise ManifestError(f"{path}: {gone}; start vLLM again")
    return process


def one_dtype(shard: Shard, wanted: str) -> torch.dtype:
    """Return the one dtype of all tensors, which `wanted` allows ("auto": any).

    Raises:
        UsageError: several dtypes, or another one.
        ManifestError: torch has no such dtype.
    """
    dtypes = {entry.dtype: name for name, entry in shard.param_mappings.items()}
    if len(dtypes) != 1:
        named = "; ".join(f"{name} is {dtype}" for dtype, name in sorted(dtypes.items()))
        raise UsageError(
            f"the server's tensors are of several types ({named}). Start it with --dtype; a model "
            f"that keeps a part of itself in another type cannot be shared. {ANOTHER_MODE}"
        )
    (dtype,) = dtypes
    if wanted not in ("auto", dtype):
        theirs = f"the server's weights are {dtype}"
        raise UsageError(f"{theirs}, the trainer's --dtype is {wanted}: pass --dtype {dtype}")
    return _dtype(dtype)


def open_tensors(shard: Shard, device: torch.device) -> dict[str, torch.Tensor]:
    """Open the server's tensors by its own names, in its memory.

    Raises:
        ManifestError: the memory is gone, or on the other kind of device.
    """
    if shard.kind == "shm":
        return _open_shm(shard, device)
    if device.type != "cuda":
        where = "the server's weights are on a GPU"
        raise ManifestError(f"{where}: train with --device cuda on the same one")
    opened: dict[str, torch.Tensor] = {}
    for name, entry in shard.param_mappings.items():
        if entry.ipc_handle is None:
            raise ManifestError(f"{name}: no CUDA handle in the manifest")
        opened[name] = _view(_open_cuda(entry.ipc_handle, device), entry, name)
    return opened


def _open_shm(shard: Shard, device: torch.device) -> dict[str, torch.Tensor]:
    path = Path(shard.shm_path or "")
    if device.type != "cpu":
        where = f"the server's weights are in {path}, CPU memory"
        raise ManifestError(f"{where}: train with --device cpu")
    try:
        size = path.stat().st_size
    except OSError as error:
        gone = f"the server's weights are gone ({error.strerror})"
        raise ManifestError(f"{path}: {gone}; restart vLLM") from None
    # Reading mapped pages behind the end of a file kills the process.
    if size < shard.shm_bytes:
        wrong = f"{size} bytes, the manifest says {shard.shm_bytes}"
        raise ManifestError(f"{path}: {wrong}; restart vLLM")
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=shard.shm_bytes)
    return {name: _view(storage, entry, name) for name, entry in shard.param_mappings.items()}


def _open_cuda(ipc: CudaIpc, device: torch.device) -> torch.UntypedStorage:
    torch.cuda.init()
    index = device.index if device.index is not None else torch.cuda.current_device()
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        index,
        base64.b64decode(ipc.handle),
        ipc.storage_bytes,
        ipc.storage_offset_bytes,
        base64.b64decode(ipc.ref_counter_handle),
        ipc.ref_counter_offset,
        base64.b64decode(ipc.event_handle),
        ipc.event_sync_required,
    )
    return storage


def _view(storage: torch.UntypedStorage, entry: TensorEntry, name: str) -> torch.Tensor:
    empty = torch.empty(0, dtype=_dtype(entry.dtype), device=storage.device)
    try:
        steps = zip(entry.shape, entry.stride, strict=True)
        end = (entry.offset + sum((n - 1) * step for n, step in steps) + 1) * empty.element_size()
        if min([entry.offset, *entry.shape, *entry.stride]) < 0 or end > storage.nbytes():
            raise ValueError(f"of {storage.nbytes()} bytes it would take {end}")
        return empty.set_(storage, entry.offset, tuple(entry.shape), tuple(entry.stride))
    except (RuntimeError, ValueError) as error:
        what = f"{name}: not a tensor of the server's memory ({error})"
        raise ManifestError(f"{what}; restart vLLM") from None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"the manifest names a type {name}, which this torch does not have")
    return dtype
