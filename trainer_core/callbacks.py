"""What a caller of `train` is told while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer_core.checkpoint import Saved
from trainer_core.config import TrainingConfig
from trainer_core.errors import CallbackError, Stopped, UsageError
from trainer_core.report import StepReport


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: `done` when all steps are trained, a stop condition held or recorded rollouts came to their end,
    else it was stopped and a checkpoint saved."""

    step: int
    weight_version: int
    done: bool
    path: Path | None
    """final_model/, or the checkpoint written at the stop."""
    reason: str = ""
    """What ended the run before its last step."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The fields of the `step` record of each step of this attempt, as in docs/telemetry.md, and `step`; empty without
    `keep_history`."""


class Callback(Protocol):
    """Derive from it and override what you want, or pass any object that has some of these methods. They are called in
    the trainer's thread, between steps.

    What a method raises ends the run: the present step is saved, and `train` raises `CallbackError`, with what was
    raised as its cause. `Stopped` ends it as a stop does, with a checkpoint and a `TrainResult`.
    """

    def on_start(self, config: TrainingConfig, step: int) -> None:
        """The policy is ready; `step` optimizer steps are done."""

    def on_step(self, report: StepReport) -> None:
        """A step is trained, published and reported. Its batch lives as long as you hold the report."""

    def on_checkpoint(self, saved: Saved) -> None:
        """step_N/ or final_model/ is written."""

    def on_end(self, result: TrainResult) -> None:
        """The run is over and its result about to be returned; not called when an error ends it."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """Calls all of them, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        """Raises: UsageError: one is a class, or has none of the methods."""
        self._callbacks = callbacks
        for callback in callbacks:
            if isinstance(callback, type):
                raise UsageError(f"callbacks: {callback.__name__} is a class. fix: pass an instance of it")
            if not any(callable(getattr(callback, method, None)) for method in METHODS):
                raise UsageError(f"callbacks: {type(callback).__qualname__} has none of {', '.join(METHODS)}")

    def tell(self, method: str, *values: Any) -> None:
        """Raises: CallbackError: one failed; in its words."""
        for callback in self._callbacks:
            call = getattr(callback, method, None)
            if call is None:
                continue
            try:
                call(*values)
            except Stopped:
                raise
            except Exception as error:
                name = f"{type(callback).__qualname__}.{method}"
                raise CallbackError(f"the callback {name} raised {type(error).__name__}: {error}") from error
