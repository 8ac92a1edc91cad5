"""End of a run: stop conditions, and the verdict on its updates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from trainer_core.config import TrainingConfig
from trainer_core.errors import NonFiniteError, NoUpdateError, TrainerError

# Steps in a row without an update after which a run fails; float16 needs a few for its loss scale.
MOST_SKIPPED = 20
# At least one of the last steps must make an update.
LAST_SKIPPED = 3

NON_FINITE = """loss or gradient was not a finite number in {steps} steps in a row, so no update \
was made. {last}. Ways out:
  lower --lr or --max-grad-norm, and resume from that checkpoint or an earlier one (--resume PATH)
  use --dtype bfloat16 or float32 instead of float16, whose largest number is 65,504
  check the weights of the base model: does the server return NaN, too?"""
NOTHING_TRAINED = "no update was made, so no final model is saved: {why}"
LAST_STEPS = """the last {skipped} of {steps} steps made no update: their loss or gradient was not \
a finite number. No final model is saved. {last}
fix: lower --lr or --max-grad-norm, and resume from a checkpoint before the first of these steps"""


class StopConditions:
    """Time, counted from the first attempt, and reward."""

    def __init__(
        self,
        config: TrainingConfig,
        before: dict[str, Any] | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        before = before or {}
        self._config = config
        self._clock = clock or time.monotonic
        # Back-dated by the time of earlier attempts, so that --max-time covers the whole run.
        self._began = self._clock() - float(before.get("elapsed_s", 0.0))
        self._rewards: deque[float] = deque(before.get("rewards", ()), maxlen=config.stop_window)

    def saw(self, reward_mean: float) -> None:
        self._rewards.append(reward_mean)

    def reason(self) -> str | None:
        """Return the condition that ends the run now; None to go on."""
        limit, wanted = self._config.max_time, self._config.stop_reward
        elapsed = self._clock() - self._began
        if limit is not None and elapsed >= limit:
            return f"--max-time {limit:g} s is reached"
        # The window must be full: one lucky first step must not end the run.
        if wanted is not None and len(self._rewards) == self._config.stop_window:
            mean = sum(self._rewards) / len(self._rewards)
            if mean >= wanted:
                return (
                    f"the mean reward of {len(self._rewards)} steps, {mean:.3f}, is at least "
                    f"--stop-reward {wanted:g}"
                )
        return None

    def state(self) -> dict[str, Any]:
        """State for a later attempt."""
        return {"elapsed_s": self._clock() - self._began, "rewards": list(self._rewards)}


class Updates:
    def __init__(self, step: int, version: int, before: dict[str, Any] | None = None) -> None:
        """Args:
        step: optimizer steps done before this attempt.
        version: weight version at the start; 0: no update yet.
        before: `state` of the resumed checkpoint.
        """
        self._first, self._start = step, version
        # Newest steps in a row without an update.
        self.skipped = int((before or {}).get("skipped", 0))

    def saw(self, *, updated: bool) -> None:
        self.skipped = 0 if updated else self.skipped + 1

    def too_many_skipped(self, version: int, last: str) -> TrainerError | None:
        """Return the error of a run whose last `MOST_SKIPPED` steps made no update.

        Args:
            last: description of the checkpoint that a later attempt resumes.
        """
        if self.skipped < MOST_SKIPPED:
            return None
        # Without any update there is no learned state to rescue: exit code 3 instead of 4.
        kind = NonFiniteError if version else NoUpdateError
        return kind(NON_FINITE.format(steps=self.skipped, last=last))

    def verdict(
        self, step: int, version: int, left_out: str, reason: str, last: str
    ) -> NoUpdateError | None:
        """Return the error of a run that trained nothing, or made no update in its last steps.

        Args:
            left_out: description of the sequences that this attempt left out.
            reason: reason for an end before the last step.
            last: description of the checkpoint that a later attempt resumes.
        """
        # No step in this attempt. A resumed run with updates and nothing left out is fine.
        if step == self._first and (left_out or not version):
            return NoUpdateError(
                NOTHING_TRAINED.format(why=left_out or f"no rollouts came ({reason})")
            )
        if not version:
            steps = f"all {step} steps" if step > 1 else "the only step"
            why = (
                f"loss or gradient was not a finite number in {steps}\nfix: check the loss "
                f"function, --lr and --dtype"
            )
            return NoUpdateError(NOTHING_TRAINED.format(why=why))
        if self.skipped >= LAST_SKIPPED:
            return NoUpdateError(LAST_STEPS.format(skipped=self.skipped, steps=step, last=last))
        return None

    def state(self) -> dict[str, Any]:
        """State for a later attempt."""
        return {"skipped": self.skipped}
