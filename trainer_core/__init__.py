"""GRPO trainer of the stack; importable alone. README.md has an example that runs.

    python -m trainer_core --model-name DIR --weight-bridge-mode shared_vllm --training-steps 60
    from trainer_core import TrainingConfig, train, grpo_loss

Exports are lazy: importing this package imports neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers and editors only; at run time `__getattr__` imports these.
if TYPE_CHECKING:
    from trainer_core.config import TrainingConfig
    from trainer_core.errors import (
        ApiError,
        CallbackError,
        EngineError,
        EngineGone,
        LossError,
        MemoryFullError,
        MismatchError,
        MissingLogprobs,
        NonFiniteError,
        NoUpdateError,
        RolloutsEnd,
        Stopped,
        TooMuchLeftOut,
        TrainerError,
        UsageError,
    )
    from trainer_core.loop import train
    from trainer_core.objective.loss import (
        Bounds,
        Correction,
        LossSums,
        Sequences,
        cispo_loss,
        correct,
        grpo_loss,
        gspo_loss,
    )
    from trainer_core.objective.registry import Objective
    from trainer_core.optimization.optimizers import Stepper
    from trainer_core.optimization.step import StepOutcome, accumulate
    from trainer_core.policy.load import load_model
    from trainer_core.policy.logprobs import row_logprobs
    from trainer_core.report import Callback, TrainResult
    from trainer_core.rollouts.batch import Batch, Rollout, group_advantages, read_batch
    from trainer_core.rollouts.client import RolloutSource
    from trainer_core.rollouts.packing import PackedRow, pack
    from trainer_core.rollouts.recorded import RecordedRollouts, Recorder

# Module -> its exported names. A new export goes here, into `__all__` and into the imports above.
_MODULES = {
    "config": "TrainingConfig",
    "errors": "ApiError CallbackError EngineError EngineGone LossError MemoryFullError "
    "MismatchError MissingLogprobs "
    "NonFiniteError NoUpdateError RolloutsEnd Stopped TooMuchLeftOut TrainerError UsageError",
    "loop": "train",
    "objective.loss": "Bounds Correction LossSums Sequences cispo_loss correct grpo_loss gspo_loss",
    "objective.registry": "Objective",
    "optimization.optimizers": "Stepper",
    "policy.load": "load_model",
    "policy.logprobs": "row_logprobs",
    "report": "Callback TrainResult",
    "rollouts.batch": "Batch Rollout group_advantages read_batch",
    "rollouts.client": "RolloutSource",
    "rollouts.packing": "PackedRow pack",
    "rollouts.recorded": "RecordedRollouts Recorder",
    "optimization.step": "StepOutcome accumulate",
}
_EXPORTS = {
    name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()
}

__all__ = [
    "ApiError",
    "Batch",
    "Bounds",
    "Callback",
    "CallbackError",
    "Correction",
    "EngineError",
    "EngineGone",
    "LossError",
    "LossSums",
    "MemoryFullError",
    "MismatchError",
    "MissingLogprobs",
    "NoUpdateError",
    "NonFiniteError",
    "Objective",
    "PackedRow",
    "RecordedRollouts",
    "Recorder",
    "Rollout",
    "RolloutSource",
    "RolloutsEnd",
    "Sequences",
    "StepOutcome",
    "Stepper",
    "Stopped",
    "TooMuchLeftOut",
    "TrainResult",
    "TrainerError",
    "TrainingConfig",
    "UsageError",
    "accumulate",
    "cispo_loss",
    "correct",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "load_model",
    "pack",
    "read_batch",
    "row_logprobs",
    "train",
]


# PEP 562: Python calls this for a name that the module does not have yet.
def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
