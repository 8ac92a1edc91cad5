"""Single copy with one server, and each version for further ones on this GPU and on others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
from trainer_core.weight_sync.base import Phases, Start
from trainer_core.weight_sync.broadcast import Broadcast
from trainer_core.weight_sync.copies import Copies
from trainer_core.weight_sync.mapping import has_ended
from trainer_core.weight_sync.shared_vllm import SingleCopy


class SingleCopyAndOthers(SingleCopy):
    """The first server computes with the policy's memory; the others have weights of their own.

    Those on the trainer's GPU (`copy_config_paths`) get a copy of each version, those elsewhere
    (`vllm_urls`) a broadcast. The trainer ends without the first server or one on its GPU, and goes
    on without the others.
    """

    def __init__(self, config: TrainingConfig, device: torch.device, stop: threading.Event) -> None:
        super().__init__(config, device, stop)
        self._copies = Copies(config, device, stop)
        self._sent = Broadcast(config, device, stop, optional=True) if config.vllm_urls else None
        if self._sent is not None:
            self.left_out = self._sent.left_out

    def attach(self, start: Start) -> torch.nn.Module:
        """Attach to the first server, and bring its weights to the others; errors as of all."""
        if self.world.size > 1:
            flag = "--vllm-urls" if self._sent else "--copy-config-paths"
            raise UsageError(
                f"{flag} in single copy needs the whole model on one GPU, and this trainer "
                f"has {self.world.size} ranks: use one rank with an engine on its GPU, or mode "
                "broadcast with GPUs of the trainer's own"
            )
        model = super().attach(start)
        self._copies.feed(self.tensors, start.version, super().check)
        self.engines += self._copies.engines
        if self._sent is not None:
            self._sent.feed(model, start.version)
            self.engines += self._sent.engines
        return model

    def settle(self) -> None:
        if self._sent is not None:
            self._sent.settle()

    def _publish(self, version: int, write: Callable[[], None], clock: Phases) -> bool:
        # With `overlap_publish` the version before is still read from these weights.
        self.settle()
        pauses = self._copies.pause()
        self._pause_and_write(write, clock)
        updates = self._copies.publish(version, pauses)
        with clock("resume"):
            self._resume(version)
        if updates:
            with clock("copy"):
                for update in updates:
                    update.result()
        if self._sent is not None:
            with clock("broadcast"):
                self._sent.publish(version, lambda: None)
        return True

    def check(self) -> None:
        super().check()
        self._copies.check()
        if self._sent is not None:
            self._sent.check()

    @torch.no_grad()
    def let_go(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> str:
        # The end of a further server leaves the first one's memory valid. Read it only if needed:
        # the process that owned it may have ended seconds before the one that the trainer watches.
        alone = any(each.requires_grad and each not in copies for each in self._model.parameters())
        alive = self._process is not None and not has_ended(self._process)
        if self._lost is None and alone and alive:
            with suppress(RuntimeError):  # no room for a second set of weights
                own = [each.detach().clone() for each in self._model.parameters()]
                for parameter, values in zip(self._model.parameters(), own, strict=True):
                    parameter.data = values
                self._lost = ""
        return super().let_go(copies)

    def close(self) -> None:
        self._copies.close()
        if self._sent is not None:
            self._sent.close()
        super().close()
