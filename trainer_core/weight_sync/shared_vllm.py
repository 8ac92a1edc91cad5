"""Single copy (`shared_vllm`): the trainer's parameters are the server's own tensors.

They share a file in /dev/shm, or GPU memory over CUDA IPC. A publish pauses generation, lets the
optimizer write in place, and resumes. A tensor-parallel server takes a rank for each worker, on the
worker's GPU (`policy/tensor_parallel.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from atropos_common.broadcast.group import first_line
from atropos_common.protocol.bridge import BridgeInfo
from atropos_common.protocol.manifest import Manifest, ManifestError, Shard
from atropos_common.system.run_dir import ENV_LOGDIR, MANIFEST_NAME, RunDir
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineError, EngineGone, UsageError
from trainer_core.policy.load import (
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
from trainer_core.weight_sync.mapping import (
    LEASE_S,
    answering,
    has_ended,
    live_server,
    meet,
    one_dtype,
    open_tensors,
    server_token,
)

PROOF = 64.0
"""Factor, and addend, of the value that the server must follow."""

NOT_PROVED = "Sharing not proved at attach ({}); the probe of each step tells"


class SingleCopy(WeightSync):
    shares_memory = True

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        self.path = manifest_path(config)
        self._process: psutil.Process | None = None
        self._start = Start()
        self.tensors: dict[str, torch.Tensor] = {}
        """The server's parameters by its own names; known from `attach` on."""
        self._lost: str | None = None

    @property
    def engine(self) -> ServerClient:
        return self.engines[0]

    @property
    def spread(self) -> World:
        """Each rank has a part of the policy and computes the same rows with it."""
        return ALONE

    def attach(self, start: Start) -> torch.nn.Module:
        """Wait for the manifest, map the tensors, and write the weights of `start` if needed.

        Raises:
            ManifestError: no usable manifest within `engine_timeout`.
            UsageError: another model or dtype, or tensors that cannot be mapped.
        """
        manifest, info = self.world.share(self._meet)
        self._process = live_server(manifest, self.path)
        began = time.perf_counter()
        self._start = start
        self._model = model = self.world.together(lambda: self.map_model(manifest))
        took = f"{time.perf_counter() - began:.2f} s"
        print(f"Attached to {manifest.base_url} in {took}; no weight memory of its own")
        spoiled = any(self.world.gather(_spoiled(model)))
        clean = info.weight_version in (None, 0) and not info.dirty and not spoiled
        if info.paused:  # paused by a dead or stopped trainer, whose later resume no longer counts
            self._pause(dirty=info.dirty, lease_s=max(LEASE_S, self.config.engine_timeout))
        if info.held and not info.paused and not info.dirty:
            self._prove_sharing(model)
        else:
            print(NOT_PROVED.format("the server serves others, or is paused"))
        self._place(model, start, clean=clean)
        self.world.share(lambda: self.engine.resume(start.version))
        return model

    def _meet(self) -> tuple[Manifest, BridgeInfo]:
        manifest = self._await_server(self.usable_manifest, (ManifestError, EngineGone))
        self.engines = [ServerClient(manifest.base_url, server_token(self.path))]
        info = meet(self.engine, manifest, self.path)
        if why := info.eager_because:
            print(f"[WARNING] the server decodes without CUDA graphs, slower than it could: {why}")
        return manifest, info

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        self._pause_and_write(write, clock)
        with clock("resume"):
            self._resume(version)
        return True

    def _pause_and_write(self, write: Callable[[], None], clock: Phases) -> None:
        wait_s, in_flight = self.config.in_flight_timeout, self.config.in_flight
        with clock("pause"):
            self._pause(dirty=True, lease_s=LEASE_S, in_flight=in_flight, wait_s=wait_s)
        with clock("write"):
            write()
        with clock("device_sync"):
            self._settle(self._model)

    def _resume(self, version: int) -> None:
        self.world.share(lambda: self.engine.resume(version))

    def _pause(self, **how: Any) -> None:
        self.world.share(lambda: self.engine.pause(**how))

    def _settle(self, model: torch.nn.Module) -> None:
        # Copies of a weight on several ranks must be equal before the server computes with them.
        if (parallel := parallel_of(model)) is not None:
            parallel.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.world.agree(None)

    def check(self) -> None:
        if self._process is not None and has_ended(self._process):
            server = f"the inference server (pid {self._process.pid})"
            raise EngineGone(f"{server} has ended, and the weights with it")

    @torch.no_grad()
    def let_go(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> str:
        """Move the policy out of the server's memory."""
        if self._lost is None:
            try:
                lost = self._move_out(self._model, copies)
            # Reading a dead process's memory makes every later use of the GPU fail.
            except RuntimeError as error:
                lost = f"the GPU does not answer any more ({first_line(error)})"
            self._lost = next(filter(None, self.world.gather(lost)), "")
        return self._lost

    def _move_out(self, model: torch.nn.Module, copies: Mapping[torch.Tensor, torch.Tensor]) -> str:
        shared = dict(model.named_parameters())
        # On a CPU the mapped pages outlive the server, and only the trainer writes to them.
        if self.device.type == "cpu":
            for param in shared.values():
                param.data = param.detach().clone()
            return ""
        # On a GPU the float32 copies become the weights, and frozen weights come from disk.
        if gone := sum(p.requires_grad and p not in copies for p in shared.values()):
            where = "lay in its memory alone (--master-weights fp32 keeps a copy)"
            return f"{gone} trained tensors {where}"
        frozen = {}
        if len(copies) < len(shared):
            source = self._start.weights or self.config.model_name
            dtype = next(iter(shared.values())).dtype
            frozen = dict(load_model(source, dtype, torch.device("cpu")).named_parameters())
        for name, param in shared.items():
            found = copies.get(param)
            if found is None:
                found = own_part(model, name, frozen[name].detach())
            param.data = found.to(param.device, param.dtype)
        return ""

    def usable_manifest(self) -> Manifest:
        """Return the manifest of a live server that answers."""
        manifest = answering(self.path)
        self._process = live_server(manifest, self.path)
        port = f":{self.config.vllm_port}"
        if "vllm_port" in self.config.model_fields_set and not manifest.base_url.endswith(port):
            other = f"{self.path} is of the server at {manifest.base_url}"
            raise UsageError(f"{other}, not of --vllm-port {port[1:]}")
        return manifest

    def map_model(self, manifest: Manifest) -> torch.nn.Module:
        """Build the model over the server's memory.

        Raises:
            ManifestError: the manifest is of another model, or its memory cannot be opened.
            UsageError: another dtype, or tensors that do not fit.
        """
        workers = manifest.tensor_parallel_size
        if workers > 1 and self.config.trains_adapters:
            raise UsageError(
                f"the server runs with --tensor-parallel-size {workers}, so it has the base model "
                "in parts, and adapters over the one copy need it whole: leave out --single-copy, "
                "or run the server on one GPU"
            )
        if workers != self.world.size:
            raise UsageError(
                f"the server runs with --tensor-parallel-size {workers} and this trainer with "
                f"{self.world.size} ranks: single copy takes a rank for each worker, on the "
                "worker's GPU. In a profile: trainer.gpus = vllm.gpus (on a CPU "
                f"trainer.processes = {workers}); by hand: torchrun --nproc-per-node {workers}"
            )
        name, adapters = self.config.model_name, self.config.trains_adapters
        config = load_config(name, frozen=adapters, shared=True)
        if odd := differences(config.to_dict(), manifest.config):
            what = f"{self.path} is of another model, {manifest.model}"
            raise ManifestError(f"{what}: {'; '.join(odd)}")
        shards = self._shards(manifest)
        shard = shards[self.world.rank]
        dtype = one_dtype(shard, self.config.dtype)
        self.tensors = open_tensors(shard, self.device)
        model = empty_model(config, dtype)
        attach_views(model, self.tensors, shard, verbose=self.config.debug_loading)
        if len(shards) > 1:
            model.parallel = TensorParallel(model, shards, self.world.rank)  # type: ignore[assignment]
        return model

    def _shards(self, manifest: Manifest) -> dict[int, Shard]:
        places = {shard.gpu: shard for shard in manifest.ranks.values()}
        if self.device.type != "cuda" or None in places:
            return manifest.ranks
        own = str(torch.cuda.get_device_properties(self.device).uuid)
        if own not in places:
            theirs = ", ".join(map(str, places))
            raise ManifestError(
                f"this trainer computes on GPU {own}, the server's weights are on {theirs}: "
                "single copy needs the same ones (trainer.gpus = vllm.gpus)"
            )
        # The worker on the rank's own GPU, whatever its number.
        return {rank: places[uuid] for rank, uuid in enumerate(self.world.gather(own))}

    def _place(self, model: torch.nn.Module, start: Start, *, clean: bool) -> None:
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
        """Change one value while no client can generate, and see the server's logprob follow."""
        # The last norm, because no KV cache depends on it.
        value = _proof_value(model)
        before = value.clone()
        prompt = [min(2, model.config.vocab_size - 1)] * 4
        try:
            value.add_(PROOF * (1.0 + before.abs()))
            self._settle(model)
            answer = self.world.share(lambda: self.engine.generate(prompt, 1))
            changed = sequence_logprobs(model, prompt, answer.token_ids)
        except EngineError as error:
            print(NOT_PROVED.format(error))
            return
        finally:
            value.copy_(before)
            self._settle(model)
        unchanged = sequence_logprobs(model, prompt, answer.token_ids)
        theirs = answer.logprobs[0]
        if abs(changed[0] - theirs) > abs(unchanged[0] - theirs):
            raise EngineError(
                f"the server does not see the trainer's writes: logprob {theirs:.4f} where the "
                f"changed weights give {changed[0]:.4f} and the old ones {unchanged[0]:.4f}. "
                "Restart it with VLLM_ENABLE_SHARED_WEIGHTS=1"
            )
        print("✓ Sharing proved: the server's logprobs follow a value changed here")


def _proof_value(model: torch.nn.Module) -> torch.Tensor:
    params = [param.detach() for param in model.parameters()]
    norms = [param for param in params if param.ndim == 1]
    return (norms or params)[-1].view(-1)[:1]


def _spoiled(model: torch.nn.Module) -> bool:
    # A trainer may have died during the proof and left its change. For weights that are this large
    # anyway, the result is one unnecessary write.
    return bool(_proof_value(model).item() >= PROOF - 1)


def manifest_path(config: TrainingConfig) -> Path:
    """Return the manifest's path: the flag, the environment, the run directory, or here."""
    if config.vllm_config_path:
        return Path(config.vllm_config_path)
    if os.environ.get("VLLM_BRIDGE_CONFIG_PATH"):
        return Path(os.environ["VLLM_BRIDGE_CONFIG_PATH"])
    if os.environ.get(ENV_LOGDIR):
        return Path(os.environ[ENV_LOGDIR]) / MANIFEST_NAME
    run_dir = RunDir.from_env()
    return run_dir.manifest("vllm") if run_dir else Path(MANIFEST_NAME)
