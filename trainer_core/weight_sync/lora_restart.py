"""Mode `lora_restart`: adapters as in `lora_only`, but the server gets one by being restarted, every N steps.

In between it answers with the adapter of the last restart, so rollouts lag up to `vllm_restart_interval` versions. The
supervisor restarts it; without one the server is this trainer's child. A new server holds generation until it has the
adapter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

from trainer_core.config import TrainingConfig
from trainer_core.contracts.bridge import few_graph_sizes, server_rank
from trainer_core.engine.client import EngineClient
from trainer_core.engine.lifecycle import make_lifecycle
from trainer_core.errors import EngineGone, Stopped
from trainer_core.weight_sync.base import Phases, SyncReport
from trainer_core.weight_sync.lora_swap import LoraSwap


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

    def _serve_again(self, engine: EngineClient) -> None:
        self.lifecycle.ensure()
        super()._serve_again(engine)
