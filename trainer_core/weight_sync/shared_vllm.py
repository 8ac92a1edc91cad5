"""Single copy (`shared_vllm`): the trainer's parameters are the server's own tensors.

On a CPU they share one file in /dev/shm, on a GPU memory over CUDA IPC. A publish transfers
nothing: pause generation, let the optimizer write in place, synchronise the device, resume with a
reset prefix cache.

The weights of a tensor-parallel server are split over its workers. The trainer then has as many
ranks, each on one worker's GPU, and splits its policy in the same way
(`policy/tensor_parallel.py`). Rank 0 pauses all workers with one call, each rank writes its part,
and rank 0 resumes them when all are done.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from atropos_common.broadcast.group import first_line
from atropos_common.protocol.bridge import BridgeInfo
from atropos_common.protocol.manifest import (
    CudaIpc,
    Manifest,
    ManifestError,
    Shard,
    TensorEntry,
    read_manifest,
)
from atropos_common.system.run_dir import ENV_TOKEN, MANIFEST_NAME, RunDir
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, UsageError
from trainer_core.policy.load import (
    ANOTHER_MODE,
    attach_views,
    differences,
    empty_model,
    load_config,
    load_model,
)
from trainer_core.policy.logprobs import sequence_logprobs
from trainer_core.policy.sharding import copy_weights
from trainer_core.policy.tensor_parallel import TensorParallel, own_part, parallel_of
from trainer_core.ranks.world import ALONE, World
from trainer_core.server.client import ServerClient
from trainer_core.weight_sync.base import Phases, Start, WeightSync

T = TypeVar("T")

PROOF = 64.0
"""Factor, and addend, by which one value is changed to see the server follow."""

LEASE_S = 120.0
"""Seconds without a resume after which the server acts by itself."""


class SingleCopy(WeightSync):
    """Strategy of mode `shared_vllm`."""

    shares_memory = True

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        self.path = manifest_path(config)
        self._process: psutil.Process | None = None
        self._start = Start()
        self._lost: str | None = None
        """Result of `let_go`."""

    @property
    def engine(self) -> ServerClient:
        """The server whose memory the policy uses."""
        return self.engines[0]

    @property
    def spread(self) -> World:
        """Each rank has a part of the policy and computes the same rows with it."""
        return ALONE

    def attach(self, start: Start) -> torch.nn.Module:
        """Wait for the manifest, check it, map the tensors and make sure that they hold the weights
        of `start`.

        Raises:
            ManifestError: no usable manifest within `engine_timeout`.
            UsageError: another model or dtype, or tensors that cannot be mapped.
        """
        manifest, info = self.world.share(self._meet)
        self._process = _live_server(manifest, self.path)
        began = time.perf_counter()
        self._start = start
        self._model = model = self.world.together(lambda: self.map_model(manifest))
        print(
            f"Attached to {manifest.base_url} in {time.perf_counter() - began:.2f} s; no "
            f"weight memory of its own"
        )
        spoiled = any(self.world.gather(_spoiled(model)))
        clean = info.weight_version in (None, 0) and not info.dirty and not spoiled
        if info.paused:  # paused by a dead or stopped trainer, whose later resume no longer counts
            self._pause(dirty=info.dirty, lease_s=max(LEASE_S, self.config.engine_timeout))
        if info.held and not info.paused and not info.dirty:
            self._prove_sharing(model)
        else:
            print(
                "Sharing not proved at attach (the server serves others, or is paused); the "
                "probe of each step tells"
            )
        self._place(model, start, clean=clean)
        self.world.share(lambda: self.engine.resume(start.version))
        return model

    def _meet(self) -> tuple[Manifest, BridgeInfo]:
        """Manifest and reported state of the server, once it answers."""
        manifest = self._await_server(self.usable_manifest, (ManifestError, EngineGone))
        self.engines = [ServerClient(manifest.base_url, _token(self.path))]
        info = self.engine.meet()
        if info.instance_id != manifest.instance_id:
            raise ManifestError(
                f"{self.path} belongs to server instance {manifest.instance_id}, but "
                f"{manifest.base_url} is "
                f"{info.instance_id}: remove the file and restart vLLM"
            )
        if info.eager_because:
            print(
                f"[WARNING] the server decodes without CUDA graphs, slower than it could: "
                f"{info.eager_because}"
            )
        return manifest, info

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        """Pause, write in place, synchronise the device, resume as `version`."""
        with clock("pause"):
            in_flight = {
                "in_flight": self.config.in_flight,
                "wait_s": self.config.in_flight_timeout,
            }
            self._pause(dirty=True, lease_s=LEASE_S, **in_flight)
        with clock("write"):
            write()
        with clock("device_sync"):
            self._settle(self._model)
        with clock("resume"):
            self.world.share(lambda: self.engine.resume(version))
        return True

    def _pause(self, **how: Any) -> None:
        """Pause the whole server for all ranks."""
        self.world.share(lambda: self.engine.pause(**how))

    def _settle(self, model: torch.nn.Module) -> None:
        """Wait until every rank has written, copies of the same weight are equal, and the devices
        are done."""
        if (parallel := parallel_of(model)) is not None:
            parallel.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.world.agree(None)

    def check(self) -> None:
        """Raise `EngineGone` if the server's process has ended."""
        if self._process is not None and _ended(self._process):
            raise EngineGone(
                f"the inference server (pid {self._process.pid}) has ended, and the weights with it"
            )

    @torch.no_grad()
    def let_go(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> str:
        """Move the policy out of the server's memory.

        On a CPU the mapped pages outlive the server, and only the trainer writes to them. On a GPU
        a dead process's memory is not read again: the float32 copies become the weights, and frozen
        weights come from disk.
        """
        if self._lost is None:
            try:
                lost = self._move_out(self._model, copies)
            except (
                RuntimeError
            ) as error:  # reading a dead process's memory makes every later use of the GPU fail
                lost = f"the GPU does not answer any more ({first_line(error)})"
            self._lost = next(filter(None, self.world.gather(lost)), "")
        return self._lost

    def _move_out(self, model: torch.nn.Module, copies: Mapping[torch.Tensor, torch.Tensor]) -> str:
        shared = dict(model.named_parameters())
        if self.device.type == "cpu":
            for param in shared.values():
                param.data = param.detach().clone()
            return ""
        gone = [
            name for name, param in shared.items() if param.requires_grad and param not in copies
        ]
        if gone:
            return (
                f"{len(gone)} trained tensors lay in its memory alone (--master-weights fp32 "
                f"keeps a copy)"
            )
        frozen = {}
        if len(copies) < len(shared):
            source = self._start.weights or self.config.model_name
            frozen = dict(
                load_model(
                    source, next(iter(shared.values())).dtype, torch.device("cpu")
                ).named_parameters()
            )
        for name, param in shared.items():
            found = (
                copies[param] if param in copies else own_part(model, name, frozen[name].detach())
            )
            param.data = found.to(param.device, param.dtype)
        return ""

    def usable_manifest(self) -> Manifest:
        """The manifest of a live server that answers."""
        manifest = read_manifest(self.path)
        self._process = _live_server(manifest, self.path)
        port = f":{self.config.vllm_port}"
        if "vllm_port" in self.config.model_fields_set and not manifest.base_url.endswith(port):
            raise UsageError(
                f"{self.path} is of the server at {manifest.base_url}, not of --vllm-port "
                f"{port[1:]}"
            )
        with closing(ServerClient(manifest.base_url, _token(self.path), timeout_s=5.0)) as engine:
            engine.info()
        return manifest

    def map_model(self, manifest: Manifest) -> torch.nn.Module:
        """The model over the server's memory.

        Raises:
            ManifestError: the manifest is of another model, or its memory cannot be opened.
            UsageError: another dtype, or tensors that do not fit.
        """
        workers = manifest.tensor_parallel_size
        if workers > 1 and self.config.trains_adapters:
            raise UsageError(
                f"the server runs with --tensor-parallel-size {workers}, so it has the base "
                f"model in parts, and "
                "adapters over the one copy need it whole: leave out --single-copy, or run "
                "the server on one GPU"
            )
        if workers != self.world.size:
            raise UsageError(
                f"the server runs with --tensor-parallel-size {workers} and this trainer "
                f"with {self.world.size} ranks: "
                "single copy takes a rank for each worker, on the worker's GPU. In a "
                "profile: trainer.gpus = vllm.gpus "
                f"(on a CPU trainer.processes = {workers}); by hand: torchrun "
                f"--nproc-per-node {workers}"
            )
        config = load_config(
            self.config.model_name, frozen=self.config.trains_adapters, shared=True
        )
        odd = differences(config.to_dict(), manifest.config)
        if odd:
            raise ManifestError(
                f"{self.path} is of another model, {manifest.model}: {'; '.join(odd)}"
            )
        shards = self._shards(manifest)
        shard = shards[self.world.rank]
        dtype = one_dtype(shard, self.config.dtype)
        tensors = open_tensors(shard, self.device)
        model = empty_model(config, dtype)
        attach_views(model, tensors, shard, verbose=self.config.debug_loading)
        if len(shards) > 1:
            model.parallel = TensorParallel(model, shards, self.world.rank)  # type: ignore[assignment]
        return model

    def _shards(self, manifest: Manifest) -> dict[int, Shard]:
        """Shards by rank of this trainer; on a GPU the shard of the worker on the same device,
        whatever its number.

        Raises:
            ManifestError: there is no worker on a rank's GPU.
        """
        if self.device.type != "cuda" or any(
            shard.gpu is None for shard in manifest.ranks.values()
        ):
            return manifest.ranks
        places = {shard.gpu: shard for shard in manifest.ranks.values()}
        own = str(torch.cuda.get_device_properties(self.device).uuid)
        if own not in places:
            raise ManifestError(
                f"this trainer computes on GPU {own}, the server's weights are on "
                f"{', '.join(map(str, places))}: "
                "single copy needs the same ones (trainer.gpus = vllm.gpus)"
            )
        return {rank: places[uuid] for rank, uuid in enumerate(self.world.gather(own))}

    def _place(self, model: torch.nn.Module, start: Start, *, clean: bool) -> None:
        """Write the weights of `start` into the shared tensors; a fresh server has the base weights
        already."""
        if start.weights is None and clean:
            return
        source = start.weights or self.config.model_name
        print(f"Writing version {start.version} from {source} into the server")
        # Loading from disk may take long; waiting for this server takes that long anyway.
        self._pause(dirty=True, lease_s=max(LEASE_S, self.config.engine_timeout))
        copy_weights(model, source, self.world)
        self._settle(model)

    @torch.no_grad()
    def _prove_sharing(self, model: torch.nn.Module) -> None:
        """Change one value, let the server decode one token, check that its logprob follows, and
        restore the value.

        Only while no other client can generate. It changes the last norm, because no KV cache
        depends on it.

        Raises:
            EngineError: the server computes with other memory than the manifest names.
        """
        value = _proof_value(model)
        before = value.clone()
        prompt = [min(2, model.config.vocab_size - 1)] * 4
        try:
            value.add_(PROOF * (1.0 + before.abs()))
            self._settle(model)
            answer = self.world.share(lambda: self.engine.generate(prompt, 1))
            changed = sequence_logprobs(model, prompt, answer.token_ids)
        except EngineError as error:
            print(f"Sharing not proved at attach ({error}); the probe of each step tells")
            return
        finally:
            value.copy_(before)
            self._settle(model)
        unchanged = sequence_logprobs(model, prompt, answer.token_ids)
        theirs = answer.logprobs[0]
        if abs(changed[0] - theirs) > abs(unchanged[0] - theirs):
            raise EngineError(
                f"the server does not see the trainer's writes: logprob {theirs:.4f} where "
                f"the changed weights give "
                f"{changed[0]:.4f} and the old ones {unchanged[0]:.4f}. Restart it with "
                f"VLLM_ENABLE_SHARED_WEIGHTS=1"
            )
        print("✓ Sharing proved: the server's logprobs follow a value changed here")


def _proof_value(model: torch.nn.Module) -> torch.Tensor:
    """The value that `_prove_sharing` changes, a view of shape (1,), of the last norm or the last
    layer."""
    params = [param.detach() for param in model.parameters()]
    norms = [param for param in params if param.ndim == 1]
    return (norms or params)[-1].view(-1)[:1]


def _spoiled(model: torch.nn.Module) -> bool:
    """Return True if the value is at least `PROOF`: a trainer may have died during the check and
    left its change. For weights that are this large anyway, the result is one unnecessary write."""
    return bool(_proof_value(model).item() >= PROOF - 1)


def manifest_path(config: TrainingConfig) -> Path:
    """Path of the manifest: the flag, VLLM_BRIDGE_CONFIG_PATH, LOGDIR, the run directory, or the
    current folder."""
    if config.vllm_config_path:
        return Path(config.vllm_config_path)
    if os.environ.get("VLLM_BRIDGE_CONFIG_PATH"):
        return Path(os.environ["VLLM_BRIDGE_CONFIG_PATH"])
    if os.environ.get("LOGDIR"):
        return Path(os.environ["LOGDIR"]) / MANIFEST_NAME
    run_dir = RunDir.from_env()
    return run_dir.manifest("vllm") if run_dir else Path(MANIFEST_NAME)


def _token(manifest: Path) -> str:
    """ATROPOS_TOKEN, else the token file that a server started by hand wrote beside its manifest,
    else empty."""
    if os.environ.get(ENV_TOKEN):
        return os.environ[ENV_TOKEN]
    try:
        return (manifest.parent / "token").read_text().strip()
    except OSError:
        return ""


def _ended(process: psutil.Process) -> bool:
    """Return True if the process has ended; a zombie has, and only waits for its parent."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _live_server(manifest: Manifest, path: Path) -> psutil.Process:
    try:
        process = psutil.Process(manifest.server_pid)
        alive = not _ended(process)
        same = abs(process.create_time() - manifest.server_create_time) < 1.0
    except psutil.Error:
        alive = same = False
    if not (alive and same):
        raise ManifestError(
            f"{path}: its server (pid {manifest.server_pid}) is gone; start vLLM again"
        )
    return process


def one_dtype(shard: Shard, wanted: str) -> torch.dtype:
    """The common dtype of all tensors; it has to be `wanted` ("auto": any).

    Raises:
        UsageError: several dtypes, or another one.
        ManifestError: torch has no such dtype.
    """
    dtypes = {entry.dtype: name for name, entry in shard.param_mappings.items()}
    if len(dtypes) != 1:
        named = "; ".join(f"{name} is {dtype}" for dtype, name in sorted(dtypes.items()))
        raise UsageError(
            f"the server's tensors are of several types ({named}). Start it with --dtype; a "
            f"model that still keeps a part of itself in another type cannot be shared. "
            f"{ANOTHER_MODE}"
        )
    (dtype,) = dtypes
    if wanted not in ("auto", dtype):
        raise UsageError(
            f"the server's weights are {dtype}, the trainer has --dtype {wanted}: pass "
            f"--dtype {dtype}"
        )
    return _dtype(dtype)


def open_tensors(shard: Shard, device: torch.device) -> dict[str, torch.Tensor]:
    """The server's tensors by its own names, on its own memory.

    Raises:
        ManifestError: the memory is gone, or on the other kind of device.
    """
    if shard.kind == "shm":
        return _open_shm(shard, device)
    if device.type != "cuda":
        raise ManifestError(
            "the server's weights are on a GPU: train with --device cuda on the same one"
        )
    opened: dict[str, torch.Tensor] = {}
    for name, entry in shard.param_mappings.items():
        if entry.ipc_handle is None:
            raise ManifestError(f"{name}: no CUDA handle in the manifest")
        opened[name] = _view(_open_cuda(entry.ipc_handle, device), entry, name)
    return opened


def _open_shm(shard: Shard, device: torch.device) -> dict[str, torch.Tensor]:
    path = Path(shard.shm_path or "")
    if device.type != "cpu":
        raise ManifestError(
            f"the server's weights are in {path}, CPU memory: train with --device cpu"
        )
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ManifestError(
            f"{path}: the server's weights are gone ({error.strerror}); restart vLLM"
        ) from None
    if size < shard.shm_bytes:
        raise ManifestError(
            f"{path}: {size} bytes, the manifest says {shard.shm_bytes}; restart vLLM"
        )
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=shard.shm_bytes)
    return {name: _view(storage, entry, name) for name, entry in shard.param_mappings.items()}


def _open_cuda(ipc: CudaIpc, device: torch.device) -> torch.UntypedStorage:
    torch.cuda.init()
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device.index if device.index is not None else torch.cuda.current_device(),
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
    """The tensor of `entry` in `storage`.

    Raises:
        ManifestError: it lies outside.
    """
    empty = torch.empty(0, dtype=_dtype(entry.dtype), device=storage.device)
    try:
        end = (
            entry.offset
            + sum((n - 1) * step for n, step in zip(entry.shape, entry.stride, strict=True))
            + 1
        )
        if (
            min([entry.offset, *entry.shape, *entry.stride]) < 0
            or end * empty.element_size() > storage.nbytes()
        ):
            raise ValueError(
                f"of {storage.nbytes()} bytes it would take {end * empty.element_size()}"
            )
        return empty.set_(storage, entry.offset, tuple(entry.shape), tuple(entry.stride))
    except (RuntimeError, ValueError) as error:
        raise ManifestError(
            f"{name}: not a tensor of the server's memory ({error}); restart vLLM"
        ) from None


def _dtype(name: str) -> torch.dtype:
    """Raise ManifestError if torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"the manifest speaks of a type {name}, which this torch does not have")
    return dtype
