"""The trainer without a server, on recorded rollouts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer_core.policy.load import dtype_of, load_config
from trainer_core.policy.sharding import load_for
from trainer_core.weight_sync.base import Phases, Start, WeightSync
from trainer_core.weight_sync.lora import LoraSwap


class Offline(WeightSync):
    """Strategy of a run with `rollouts`: every version stays here."""

    def attach(self, start: Start) -> torch.nn.Module:
        """The policy with the weights of `start`, with adapters where the mode trains them."""
        config = self.config
        print("No server: no probe of its logprobs, and policy lag only as far as it was recorded")
        if config.trains_adapters:
            adapted = LoraSwap(config, self.device, self.stop)
            adapted.world = self.world
            return self._spread(adapted.load(start.weights))
        dtype = dtype_of(load_config(config.model_name), config.dtype)
        return self._spread(
            load_for(self.world, start.weights or config.model_name, dtype, self.device)
        )

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        with clock("write"):
            write()
        return False

    def check(self) -> None:
        """No-op: there is no server."""
