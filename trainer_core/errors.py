"""Errors that a user can act on: each says what happened and how to get out. Anything else is a fault of ours."""

from __future__ import annotations

from atropos_common.run_dir import NO_UPDATE_CODE


class TrainerError(Exception):
    """The run cannot go on; the message holds the way out. Exit code 1, no traceback."""

    exit_code = 1


class UsageError(TrainerError):
    """Flags or a combination of them that cannot work. Exit code 2."""

    exit_code = 2


class ApiError(TrainerError):
    """run-api cannot be reached or refuses what it is asked."""


class MissingLogprobs(TrainerError):
    """No rollout of the first batch has logprobs: there are none, or placeholders in their place."""


class TooMuchLeftOut(UsageError):
    """More than `max_left_out` of what the environments send cannot be trained on."""


class MemoryFullError(TrainerError):
    """Model, gradients, optimizer state and activations do not fit."""


class DiskFull(TrainerError):
    """The run was stopped, and there is no room for a checkpoint of its last steps."""


class MismatchError(TrainerError):
    """Trainer and inference server disagree about logprobs, and `stop_on_mismatch` is set."""


class NonFiniteError(TrainerError):
    """Loss or gradient was not a finite number for many steps in a row: nothing is learned any more."""


class NoUpdateError(TrainerError):
    """The run made no update, or none in its last steps. Exit code 3."""

    exit_code = NO_UPDATE_CODE


class EngineError(TrainerError):
    """The inference server that the trainer knows answered, and refuses the request itself: asking again is no use."""


class EngineGone(TrainerError):
    """The inference server does not answer any more, or cannot do what it is asked: it ends, starts, has lost its
    engine, or is another one. It is waited for, found again, and given the weights of now."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered
        """Whether that is what a server said, rather than its silence."""


class RankGone(TrainerError):
    """Another rank of this trainer has ended, so this one cannot go on."""


class LossError(UsageError):
    """The loss function of one's own cannot be found, or does not return what it should."""


class CallbackError(TrainerError):
    """A callback of one's own raised."""


class RolloutsEnd(Exception):
    """The recorded rollouts are all trained; not an error."""


class Stopped(Exception):
    """A stop was asked for while waiting; not an error."""
