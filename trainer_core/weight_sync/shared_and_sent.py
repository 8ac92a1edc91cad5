"""Single copy with one server, and a broadcast of each version to servers on other GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.weight_sync.base import Phases, Start
from trainer_core.weight_sync.broadcast import Broadcast
from trainer_core.weight_sync.shared_vllm import SingleCopy


class SingleCopyAndBroadcast(SingleCopy):
    """The first server computes with the policy's memory; the others have copies of their own.

    Without the first server the trainer ends, as in single copy. Without the others it goes on.
    """

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        self._others = Broadcast(config, device, stop, optional=True)
        self.left_out = self._others.left_out

    def attach(self, start: Start) -> torch.nn.Module:
        """Attach to the first server, and bring its weights to the others; errors as of both."""
        if self.world.size > 1:
            raise UsageError(
                f"--vllm-urls in single copy needs the whole model on one GPU, and this trainer "
                f"has {self.world.size} ranks: use one rank with an engine on its GPU, or mode "
                "broadcast with GPUs of the trainer's own"
            )
        model = super().attach(start)
        self._others.feed(model, start.version)
        self.engines += self._others.engines
        return model

    def settle(self) -> None:
        self._others.settle()

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        # With `overlap_publish` the version before is still read from these weights.
        self.settle()
        moved = super()._publish(version, write, clock)
        with clock("broadcast"):
            self._others.publish(version, lambda: None)
        return moved

    def check(self) -> None:
        super().check()
        self._others.check()

    def close(self) -> None:
        self._others.close()
        super().close()
