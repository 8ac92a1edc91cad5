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
    from trainer_core.config import TrainingConfig as TrainingConfig
    from trainer_core.errors import ApiError as ApiError
    from trainer_core.errors import CallbackError as CallbackError
    from trainer_core.errors import EngineError as EngineError
    from trainer_core.errors import EngineGone as EngineGone
    from trainer_core.errors import GaveUpError as GaveUpError
    from trainer_core.errors import LossError as LossError
    from trainer_core.errors import MemoryFullError as MemoryFullError
    from trainer_core.errors import MismatchError as MismatchError
    from trainer_core.errors import MissingLogprobs as MissingLogprobs
    from trainer_core.errors import NonFiniteError as NonFiniteError
    from trainer_core.errors import NoUpdateError as NoUpdateError
    from trainer_core.errors import RolloutsEnd as RolloutsEnd
    from trainer_core.errors import Stopped as Stopped
    from trainer_core.errors import TooMuchLeftOut as TooMuchLeftOut
    from trainer_core.errors import TrainerError as TrainerError
    from trainer_core.errors import UsageError as UsageError
    from trainer_core.loop import train as train
    from trainer_core.objective.loss import Bounds as Bounds
    from trainer_core.objective.loss import Correction as Correction
    from trainer_core.objective.loss import LossSums as LossSums
    from trainer_core.objective.loss import Sequences as Sequences
    from trainer_core.objective.loss import cispo_loss as cispo_loss
    from trainer_core.objective.loss import correct as correct
    from trainer_core.objective.loss import grpo_loss as grpo_loss
    from trainer_core.objective.loss import gspo_loss as gspo_loss
    from trainer_core.objective.registry import Objective as Objective
    from trainer_core.optimization.optimizers import Stepper as Stepper
    from trainer_core.optimization.step import StepOutcome as StepOutcome
    from trainer_core.optimization.step import accumulate as accumulate
    from trainer_core.policy.load import load_model as load_model
    from trainer_core.policy.logprobs import row_logprobs as row_logprobs
    from trainer_core.report import Callback as Callback
    from trainer_core.report import TrainResult as TrainResult
    from trainer_core.rollouts.batch import Batch as Batch
    from trainer_core.rollouts.batch import Rollout as Rollout
    from trainer_core.rollouts.batch import group_advantages as group_advantages
    from trainer_core.rollouts.batch import read_batch as read_batch
    from trainer_core.rollouts.client import RolloutSource as RolloutSource
    from trainer_core.rollouts.packing import PackedRow as PackedRow
    from trainer_core.rollouts.packing import pack as pack
    from trainer_core.rollouts.recorded import RecordedRollouts as RecordedRollouts
    from trainer_core.rollouts.recorded import Recorder as Recorder

# Module -> its exported names. A new export goes here and into the imports above.
_MODULES = {
    "config": "TrainingConfig",
    "errors": "ApiError CallbackError EngineError EngineGone GaveUpError LossError "
    "MemoryFullError "
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

__all__ = list(_EXPORTS)


# PEP 562: Python calls this for a name that the module does not have yet.
def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
