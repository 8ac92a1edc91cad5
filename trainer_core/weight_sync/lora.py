"""Modes `lora_only` and `lora_restart`: the trainer keeps the base model, and an adapter travels.

`lora_only` swaps the adapter without a pause; a completion ends on the adapter that it began with.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from atropos_common.protocol.bridge import LORA_RANKS, BridgeInfo, few_graph_sizes, server_rank
from atropos_common.protocol.manifest import Manifest, ManifestError
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone, UsageError
from trainer_core.policy.lora import add_adapter, base_parameters, load_adapter, write_adapter
from trainer_core.server.client import ServerClient
from trainer_core.server.lifecycle import Lifecycle, make_lifecycle
from trainer_core.weight_sync.base import Phases, T, WrittenWeights
from trainer_core.weight_sync.shared_vllm import SingleCopy

# A request may have chosen one without reaching the engine yet. Older ones stay while a server
# still finishes completions on them.
KEPT = 4
"""Newest adapters that stay on disk."""


class LoraSwap(WrittenWeights):
    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop, "adapters")
        if server_rank(config.lora_r) is None:
            raise UsageError(
                f"--lora-r {config.lora_r}: vLLM serves adapters up to rank {LORA_RANKS[-1]}"
            )
        self._base = SharedBase(config, device, stop) if config.single_copy else None

    def load(self, weights: Path | None) -> torch.nn.Module:
        """Load the base model with the adapter in `weights`, the configured one, or a new one."""
        if self._base and self.world.size > 1:
            what = "the base lies on one GPU, so it takes one rank"
            raise UsageError(f"--single-copy with an adapter: {what}")
        model = self._await_server(self._base.load) if self._base else super().load(None)
        self._dtype = next(model.parameters()).dtype
        count = add_adapter(model, self.config)
        if weights is None and self.config.lora_adapter_path:
            weights = Path(self.config.lora_adapter_path)
            print(f"The adapter in {weights} is trained on")
        if weights is not None:
            load_adapter(model, weights)
        print(f"LoRA rank {self.config.lora_r}: {count:,} parameters are trained")
        return model

    def _deliver(self, clock: Phases) -> bool:
        with clock("save"):
            self._save()
        with clock("swap"):
            self._give_all()
        self._forget()
        return True

    def _give_all(self) -> None:
        for engine in self.engines:
            try:
                self._give(engine)
            except EngineGone:
                self._serve_again(engine)

    def _give(self, engine: ServerClient, info: BridgeInfo | None = None) -> None:
        self._require_lora(engine)
        # A restarted server has other memory for the base.
        if self._base and info:
            self._base.follow(info.instance_id)
        if not self._path(self.version).is_dir():
            self._save()
        engine.load_adapter(str(self._path(self.version)), self.version)

    def _await_server(
        self, ready: Callable[[], T], meanwhile: tuple[type[Exception], ...] = (EngineGone,)
    ) -> T:
        def attempt() -> T:
            # Otherwise an ended server's memory on the GPU would keep the next one from starting.
            if self._base:
                self._base.release_ended()
            return ready()

        return super()._await_server(attempt, meanwhile)

    def _save(self) -> None:
        # The base model's dtype, in which the server computes.
        def write(folder: Path) -> None:
            write_adapter(self.model, folder, self._dtype)

        self._write_present(write, "the adapter", "Make room")

    def _forget(self) -> None:
        # Also those of earlier attempts.
        newest = {self._path(self.version - age) for age in range(KEPT)}
        old = set(self._folder.glob("v*")) - newest
        try:
            known = [engine.adapters() for engine in self.engines] if old else []
        except EngineGone:
            return
        needed = {path for info in known for path in (info.path, *info.retiring_paths)}
        for path in old:
            if str(path) not in needed:
                shutil.rmtree(path, ignore_errors=True)

    def _require_lora(self, engine: ServerClient) -> None:
        status = engine.adapters()
        if not status.enabled:
            what = f"{engine.base_url} was started without --enable-lora"
            raise UsageError(f"{what}: restart it with that flag")
        if status.max_lora_rank is not None and status.max_lora_rank < self.config.lora_r:
            raise UsageError(
                f"--lora-r {self.config.lora_r} is above the server's --max-lora-rank "
                f"{status.max_lora_rank}: lower the one or raise the other"
            )


class LoraRestart(LoraSwap):
    """Mode `lora_restart`: every few versions the server restarts and loads the adapter."""

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        flags = ["--enable-lora", "--max-lora-rank", str(server_rank(config.lora_r))]
        flags += ["--cudagraph-capture-sizes", *map(str, few_graph_sizes())]
        self.lifecycle: Lifecycle = make_lifecycle(config, stop, flags=flags)

    def _deliver(self, clock: Phases) -> bool:
        due = self._restart_is_due()
        if due:
            with clock("save"):
                self._save()
            self._restart(clock)
            self._forget()
        return due

    def _restart(self, clock: Phases) -> None:
        if not self.lifecycle.can_restart:
            with clock("load"):
                self._give_all()
            return
        with clock("restart"):
            try:
                self.lifecycle.restart(f"adapter of version {self.version}")
            except EngineGone as error:
                # A server that comes back gets the adapter from `check`.
                print(f"[WARNING] {error}")
        with clock("load"):
            for engine in self.engines:
                self._serve_again(engine)


class SharedBase:
    """A model whose parameters are the tensors of the current server."""

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        self._memory = SingleCopy(config, device, stop)
        self._port = config.vllm_port
        self._model: torch.nn.Module | None = None
        self._instance: str | None = None  # whose memory it uses

    def load(self) -> torch.nn.Module:
        """Load the base model.

        Raises:
            EngineGone: no server with a manifest yet.
            UsageError: another model, dtype or port than the trainer's.
        """
        manifest = self._manifest()
        if not manifest.base_url.endswith(f":{self._port}"):
            other = f"{self._memory.path} is of the server at {manifest.base_url}"
            raise UsageError(f"{other}, not of --vllm-port {self._port}")
        began = time.perf_counter()
        self._model = model = self._memory.map_model(manifest)
        self._instance = manifest.instance_id
        took = f"{time.perf_counter() - began:.2f} s"
        print(f"Attached to {manifest.base_url} in {took}; no memory for the base model")
        return model

    def follow(self, instance: str) -> None:
        """Move the base to the memory of the server `instance`; adapters stay."""
        if instance == self._instance:
            return
        manifest = self._manifest()
        if manifest.instance_id != instance:
            earlier = f"{self._memory.path} belongs to an earlier server"
            raise EngineGone(f"{earlier} than {manifest.base_url}")
        fresh = dict(self._memory.map_model(manifest).named_parameters())
        for name, parameter in self._base().items():
            parameter.data = fresh[name].detach()
        self._instance = instance
        print(f"✓ The base model lies in the memory of the new server at {manifest.base_url}")

    def release_ended(self) -> None:
        """Release an ended server's memory, which the next one needs."""
        try:
            self._memory.check()
        except EngineGone:
            self._instance = None
            for parameter in self._base().values():
                parameter.data = parameter.data.new_empty(0)

    def _base(self) -> dict[str, torch.nn.Parameter]:
        return base_parameters(self._model) if self._model else {}

    def _manifest(self) -> Manifest:
        try:
            return self._memory.usable_manifest()
        except ManifestError as error:
            raise EngineGone(str(error)) from None
