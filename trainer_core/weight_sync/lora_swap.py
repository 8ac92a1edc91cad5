"""Mode `lora_only`: the trainer keeps the base model and an adapter; every publish is one adapter swapped over HTTP.

The server is never paused: a completion ends on the adapter that it began with. A server that was restarted meanwhile
holds its generation until it has the trainer's present adapter again, which `check` sees to.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from trainer_core.config import TrainingConfig
from trainer_core.contracts.run_dir import RunDir
from trainer_core.engine.client import EngineClient
from trainer_core.errors import EngineGone, UsageError
from trainer_core.policy.load import load_model
from trainer_core.policy.lora import add_adapter, load_adapter, save_adapter
from trainer_core.weight_sync.base import Phases, Start, SyncReport
from trainer_core.weight_sync.own_weights import OwnWeights

KEPT = 4
"""Adapters left on disk: vLLM may read one again while a completion still needs it."""


class LoraSwap(OwnWeights):
    """Strategy of mode `lora_only`."""

    mode = "lora_only"

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        run = RunDir.from_env()
        self._folder = (run.bridge if run else Path(config.save_path)) / "adapters"

    def attach(self, start: Start) -> torch.nn.Module:
        """Load the base model, add the adapter of `start`, and let the server answer with it.

        Raises:
            EngineGone: no server within `engine_timeout`.
            UsageError: the server cannot load adapters of this rank, or has another base model.
        """
        dtype = torch.float32 if self.config.dtype == "float32" else getattr(torch, self.config.dtype)
        self.model = load_model(self.config.model_name, dtype, self.device)
        count = add_adapter(self.model, self.config)
        if start.weights is not None:
            load_adapter(self.model, start.weights)
        print(f"LoRA rank {self.config.lora_r}: {count:,} parameters are trained")
        self.version = start.version
        save_adapter(self.model, self._path(self.version))
        self.connect()
        return self.model

    def publish(self, version: int, write: Callable[[], None]) -> SyncReport:
        """Step the adapter, save it, swap it."""
        clock = Phases()
        with clock("write"):
            write()
        with clock("save"):
            save_adapter(self.model, self._path(version))
        self.version = version
        with clock("swap"):
            for engine in self.engines:
                try:
                    self._give(engine)
                except EngineGone:
                    self._serve_again(engine)
        self._forget(version - KEPT)
        return SyncReport(self.mode, version, sum(clock.seconds.values()), clock.seconds)

    def _give(self, engine: EngineClient) -> None:
        self._require_lora(engine)
        engine.load_adapter(str(self._path(self.version)), self.version)

    def _path(self, version: int) -> Path:
        return (self._folder / f"v{version}").resolve()

    def _forget(self, version: int) -> None:
        if version >= 0:
            shutil.rmtree(self._path(version), ignore_errors=True)

    def _require_lora(self, engine: EngineClient) -> None:
        status = engine.adapters()
        if not status.enabled:
            raise UsageError(f"{engine.base_url} was started without --enable-lora: restart it with that flag")
        if status.max_lora_rank is not None and status.max_lora_rank < self.config.lora_r:
            raise UsageError(
                f"--lora-r {self.config.lora_r} is above the server's --max-lora-rank {status.max_lora_rank}: "
                "lower the one or raise the other"
            )
