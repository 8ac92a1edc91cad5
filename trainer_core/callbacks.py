"""Callbacks and result of `train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer_core.checkpoints.checkpoint import Saved
from trainer_core.config import TrainingConfig
from trainer_core.errors import CallbackError, Stopped, UsageError
from trainer_core.report import StepReport


@dataclass(frozen=True)
class TrainResult:
    """End of a run. `done`: all steps are trained, a stop condition was met, or recorded rollouts
    ended; else the run was stopped and saved a checkpoint."""

    step: int
    weight_version: int
    done: bool
    path: Path | None
    """final_model/, or the checkpoint written at the stop; None if the stop had nothing to save."""
    reason: str = ""
    """Reason for an end before the last step; empty if there is none."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """For each step of this attempt: the fields of its `step` record (docs/telemetry.md) and
    `step`. Empty without `keep_history`."""


class Callback(Protocol):
    """Base class for callbacks; any object with some of these methods works too. The trainer calls
    them in its own thread, between steps.

    An exception in a method ends the run: the trainer saves the current step, and `train` raises
    `CallbackError` with the exception as its cause. `Stopped` stops the run in the normal way, with
    a checkpoint and a `TrainResult`.
    """

    def on_start(self, config: TrainingConfig, step: int) -> None:
        """Called when the policy is ready; `step` optimizer steps are done."""

    def on_step(self, report: StepReport) -> None:
        """Called after a step is trained, published and recorded. A kept report keeps its batch in
        memory."""

    def on_checkpoint(self, saved: Saved) -> None:
        """Called after step_N/ or final_model/ is written."""

    def on_end(self, result: TrainResult) -> None:
        """Called before `train` returns `result`; not after an error."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """Several callbacks, called in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        """Raises:
        UsageError: a callback is a class, or has none of the methods."""
        self._callbacks = callbacks
        for callback in callbacks:
            if isinstance(callback, type):
                raise UsageError(
                    f"callbacks: {callback.__name__} is a class. fix: pass an instance of it"
                )
            # A misspelled method would be ignored without a word; an object without any is surely a
            # mistake.
            if not any(callable(getattr(callback, method, None)) for method in METHODS):
                raise UsageError(
                    f"callbacks: {type(callback).__qualname__} has none of {', '.join(METHODS)}"
                )

    def tell(self, method: str, *values: Any) -> None:
        """Call `method` of every callback that has it.

        Raises:
            CallbackError: a callback raised.
        """
        for callback in self._callbacks:
            call = getattr(callback, method, None)
            if call is None:
                continue
            try:
                call(*values)
            # The documented way for a callback to stop the run; it must not become an error.
            except Stopped:
                raise
            except Exception as error:
                name = f"{type(callback).__qualname__}.{method}"
                raise CallbackError(
                    f"the callback {name} raised {type(error).__name__}: {error}"
                ) from error
