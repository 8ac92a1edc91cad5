"""The strategy of a mode. Torch-free until one is made, so that a mode that does not run is refused at once."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING

from trainer_core.config import TrainingConfig
from trainer_core.errors import UsageError
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


def require_supported(config: TrainingConfig) -> None:
    """Refuse a mode that this version does not run yet.

    Raises:
        UsageError: with the modes that it runs.
    """
    if config.mode not in _STRATEGIES:
        raise UsageError(
            f"--weight-bridge-mode {config.weight_bridge_mode}{' --use-shared-memory' * config.use_shared_memory} "
            f"({config.mode}): this version does not run this mode yet; it runs: {', '.join(_STRATEGIES)}"
        )


def make_sync(config: TrainingConfig, device: torch.device, stop: threading.Event) -> WeightSync:
    """The strategy for `config.mode`."""
    require_supported(config)
    module, name = _STRATEGIES[config.mode]
    made: WeightSync = getattr(import_module(module), name)(config, device, stop)
    return made
