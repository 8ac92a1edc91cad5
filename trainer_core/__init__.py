"""The GRPO trainer of the stack, importable alone.

    python -m trainer_core --model-name DIR --weight-bridge-mode shared_vllm --training-steps 60
    from trainer_core import TrainingConfig, train, grpo_loss

Exports are lazy: importing this package imports neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_core.config import TrainingConfig as TrainingConfig
    from trainer_core.loop import train as train
    from trainer_core.objective.loss import cispo_loss as cispo_loss
    from trainer_core.objective.loss import grpo_loss as grpo_loss
    from trainer_core.objective.loss import gspo_loss as gspo_loss

_EXPORTS = {"TrainingConfig": "trainer_core.config", "train": "trainer_core.loop"}
_EXPORTS |= dict.fromkeys(("grpo_loss", "gspo_loss", "cispo_loss"), "trainer_core.objective.loss")

__all__ = ["TrainingConfig", "cispo_loss", "grpo_loss", "gspo_loss", "train"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
