"""Mode `lora_only`: the trainer keeps the base model and an adapter; every publish is one adapter swapped over HTTP.

The server is never paused: a completion ends on the adapter that it began with. A server that was restarted meanwhile
holds its generation until it has the trainer's present adapter again, which `check` sees to.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from atropos_common.bridge import LORA_RANKS, BridgeInfo, few_graph_sizes, server_rank
from atropos_common.run_dir import RunDir
from trainer_core.config import TrainingConfig
from trainer_core.errors import EngineGone, Stopped, UsageError
from trainer_core.policy.lora import add_adapter, load_adapter, save_adapter
from trainer_core.server.client import ServerClient
from trainer_core.server.lifecycle import make_lifecycle
from trainer_core.weight_sync.base import Phases, Start, SyncReport
from trainer_core.weight_sync.separate_weights import SeparateWeights

KEPT = 4
"""Newest adapters left on disk: a request may have chosen one, and not have reached the engine yet. Older ones stay
while a server still finishes completions on them."""


class LoraSwap(SeparateWeights):
    """Strategy of mode `lora_only`."""

    mode = "lora_only"

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        if server_rank(config.lora_r) is None:
            raise UsageError(f"--lora-r {config.lora_r}: vLLM serves adapters up to rank {LORA_RANKS[-1]}")
        run = RunDir.from_env()
        self._folder = (run.bridge if run else Path(config.save_path)) / "adapters"
        self._tag = secrets.token_hex(3)
        """Of this attempt: a server may still read an adapter of an earlier one that came as far."""

    def attach(self, start: Start) -> torch.nn.Module:
        """Load the base model, add the adapter of `start`, and let the server answer with it.

        Raises:
            EngineGone: no server within `engine_timeout`.
            UsageError: the server cannot load adapters of this rank.
            EngineError: it refuses the adapter, which is not of its model.
        """
        self.model = self.load(None)
        self._dtype = next(self.model.parameters()).dtype
        count = add_adapter(self.model, self.config)
        if start.weights is not None:
            load_adapter(self.model, start.weights)
        print(f"LoRA rank {self.config.lora_r}: {count:,} parameters are trained")
        self.version = start.version
        self.connect()
        return self.model

    def publish(self, version: int, write: Callable[[], None]) -> SyncReport:
        """Step the adapter, save it, swap it."""
        clock = Phases()
        with clock("write"):
            write()
        self.version = version
        with clock("save"):
            self._save()
        with clock("swap"):
            self._give_all()
        self._forget()
        return SyncReport(self.mode, version, sum(clock.seconds.values()), clock.seconds)

    def _give_all(self) -> None:
        """Every server answers with the present adapter; one that is away is waited for."""
        for engine in self.engines:
            try:
                self._load(engine)
            except EngineGone:
                try:
                    self._serve_again(engine)
                except Stopped:
                    return  # the update is complete, and nobody waits for it any more

    def _give(self, engine: ServerClient, info: BridgeInfo) -> None:
        self._load(engine)

    def _load(self, engine: ServerClient) -> None:
        self._require_lora(engine)
        if not self._path(self.version).is_dir():
            self._save()
        engine.load_adapter(str(self._path(self.version)), self.version)

    def _save(self) -> None:
        """The present adapter for the server, which computes with it in the base model's type."""
        save_adapter(self.model, self._path(self.version), self._dtype)

    def _path(self, version: int) -> Path:
        return (self._folder / f"v{version}-{self._tag}").resolve()

    def _forget(self) -> None:
        """Remove adapters that no server reads again, of earlier attempts too."""
        newest = {self._path(version) for version in range(self.version - KEPT + 1, self.version + 1)}
        old = {path.resolve() for path in self._folder.glob("v*")} - newest
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
            raise UsageError(f"{engine.base_url} was started without --enable-lora: restart it with that flag")
        if status.max_lora_rank is not None and status.max_lora_rank < self.config.lora_r:
            raise UsageError(
                f"--lora-r {self.config.lora_r} is above the server's --max-lora-rank {status.max_lora_rank}: "
                "lower the one or raise the other"
            )


class LoraRestart(LoraSwap):
    """Strategy of mode `lora_restart`."""

    mode = "lora_restart"

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        flags = ["--enable-lora", "--max-lora-rank", str(server_rank(config.lora_r))]
        flags += ["--cudagraph-capture-sizes", *map(str, few_graph_sizes())]
        self.lifecycle = make_lifecycle(config, stop, flags=flags)

    def publish(self, version: int, write: Callable[[], None]) -> SyncReport:
        """Step the adapter; when a restart is due, save it, restart the server, load it."""
        clock = Phases()
        with clock("write"):
            write()
        self.version = version
        moved = False
        if version % self.config.vllm_restart_interval == 0:
            with clock("save"):
                self._save()
            with contextlib.suppress(Stopped):  # the update is complete, and nobody waits for a server any more
                self._restart(clock)
                moved = True
            self._forget()
        self.lifecycle.prepare()
        return SyncReport(self.mode, version, sum(clock.seconds.values()), clock.seconds, moved=moved)

    def connect(self) -> None:
        self.lifecycle.ensure()  # first: an own child brings the token
        super().connect()

    def close(self) -> None:
        super().close()
        self.lifecycle.close()

    def _restart(self, clock: Phases) -> None:
        """A new server with the present adapter; one that cannot be restarted from here gets it as it runs."""
        if not self.lifecycle.can_restart:
            with clock("load"):
                self._give_all()
            return
        with clock("restart"):
            try:
                self.lifecycle.restart(f"adapter of version {self.version}")
            except EngineGone as error:
                print(f"[WARNING] {error}")  # whoever comes back there gets the adapter
        with clock("load"):
            for engine in self.engines:
                self._serve_again(engine)

    def _serve_again(self, engine: ServerClient) -> None:
        self.lifecycle.ensure()
        super()._serve_again(engine)
