"""The strategy of a mode; only that one is imported."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING

from trainer_core.config import TrainingConfig
from trainer_core.weight_sync.base import WeightSync

if TYPE_CHECKING:
    import torch

_STRATEGIES = {
    "shared_vllm": ("trainer_core.weight_sync.single_copy", "SingleCopy"),
    "broadcast": ("trainer_core.weight_sync.broadcast", "Broadcast"),
    "none": ("trainer_core.weight_sync.reload", "Reload"),
    "lora_only": ("trainer_core.weight_sync.lora_swap", "LoraSwap"),
    "lora_restart": ("trainer_core.weight_sync.lora_restart", "LoraRestart"),
}


def make_sync(config: TrainingConfig, device: torch.device, stop: threading.Event) -> WeightSync:
    """The strategy for `config.mode`."""
    module, name = _STRATEGIES[config.mode]
    made: WeightSync = getattr(import_module(module), name)(config, device, stop)
    return made
