"""Errors that a user can act on: each message says what happened and what to do. Any other
exception is an internal error."""

from __future__ import annotations

from atropos_common.system.run_dir import NO_UPDATE_CODE


class TrainerError(Exception):
    """The run cannot go on; the message holds the fix. Exit code 1, no traceback."""

    exit_code = 1


class UsageError(TrainerError):
    """Flags that cannot work, alone or together. Exit code 2."""

    exit_code = 2


class ApiError(TrainerError):
    """run-api cannot be reached, or refuses a request."""


class MissingLogprobs(TrainerError):
    """No rollout of the first batch has logprobs, or all have placeholders."""


class TooMuchLeftOut(UsageError):
    """More than `max_left_out` of the environments' sequences cannot be trained on."""


class MemoryFullError(TrainerError):
    """Model, gradients, optimizer state and activations do not fit into GPU memory."""


class DiskFull(TrainerError):
    """The run was stopped, and the disk has no space for a checkpoint of its last steps."""


class MismatchError(TrainerError):
    """Trainer and inference server disagree about logprobs, and `stop_on_mismatch` is set."""


class NonFiniteError(TrainerError):
    """Loss or gradient was not a finite number for many steps in a row."""


class NoUpdateError(TrainerError):
    """The run made no update, or none in its last steps. Exit code 3."""

    exit_code = NO_UPDATE_CODE


class EngineError(TrainerError):
    """The inference server refused the request itself; a retry does not help."""


class EngineGone(TrainerError):
    """The inference server does not answer, or cannot serve: it is ending, starting, another
    instance, or without its engine. The trainer waits for it, finds it again and sends it the
    current weights."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered
        """A server sent this answer; False: no server answered."""


# `__main__` exits with GONE_CODE for this one, so that `launch.py` tells the cause from its
# effects.
class RankGone(TrainerError):
    """Another rank of this trainer has ended, so this one cannot go on."""


class LossError(UsageError):
    """The user's loss function cannot be found, or returns a wrong value."""


class CallbackError(TrainerError):
    """A user's callback raised."""


# The last two are signals for the loop, so they are not `TrainerError`s: nobody prints them.
class RolloutsEnd(Exception):
    """All recorded rollouts are trained; not an error."""


class Stopped(Exception):
    """The run was stopped while it waited; not an error."""
