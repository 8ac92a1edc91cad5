"""Errors that a user can act on: each message says what happened and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from atropos_common.system.run_dir import GAVE_UP_CODE, NO_UPDATE_CODE

OUT_OF_MEMORY = """{error}
The trainer does not fit into the GPU's memory. Ways out, the cheapest first:
  --gradient-checkpointing on, or --pack-tokens below {tokens}: fewer activations, the same gradient
  --master-weights kahan or stochastic, --optimizer adamw_8bit or adafactor: less state
  --optimizer-offload true, --activation-offload true: into the host's memory
  --gradient-dtype bfloat16: half the gradients
  a lower --gpu-memory-utilization of the server (vllm.gpu_memory_utilization in a profile)
  --context-parallel 2 on several GPUs: each computes a part of every row
  --train-layer-indices for the upper layers alone, or a shorter --seq-len
  another GPU, or a smaller model"""


class TrainerError(Exception):
    """The run cannot go on; the message holds the fix. No traceback."""

    exit_code = 1


class UsageError(TrainerError):
    """Flags that cannot work, alone or together."""

    exit_code = 2


class ApiError(TrainerError):
    """run-api cannot be reached, or refuses a request."""


class GaveUpError(TrainerError):
    """A restart would end the same way."""

    exit_code = GAVE_UP_CODE


class MissingLogprobs(GaveUpError):
    """No rollout of the first batch has usable logprobs."""


class TooMuchLeftOut(GaveUpError):
    """More than `max_left_out` of the sequences cannot be trained."""


class MemoryFullError(TrainerError):
    """The training does not fit into GPU memory; `tokens` is the most of one pass."""

    def __init__(self, error: BaseException, tokens: int) -> None:
        super().__init__(OUT_OF_MEMORY.format(error=error, tokens=tokens))


class DiskFull(TrainerError):
    """The run was stopped, and the disk has no space for its checkpoint."""


class MismatchError(GaveUpError):
    """Verdict mismatch, with `stop_on_mismatch`."""


class NonFiniteError(GaveUpError):
    """Loss or gradient was not finite for many steps in a row."""


class NoUpdateError(TrainerError):
    """The run made no update, or none in its last steps."""

    exit_code = NO_UPDATE_CODE


class EngineError(TrainerError):
    """The inference server refused the request; a retry does not help."""


class EngineGone(TrainerError):
    """The inference server does not answer, or cannot serve; the trainer waits for it."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered
        """A server sent this answer."""


# `__main__` exits with GONE_CODE for this one, so that `ranks/launch.py` tells the cause from its
# effects.
class RankGone(TrainerError):
    """Another rank of this trainer has ended."""


class LossError(UsageError):
    """The user's loss function cannot be found, or returns a wrong value."""


class CallbackError(TrainerError):
    """A user's callback raised."""


# The last two are signals for the loop, so they are not `TrainerError`s: nobody prints them.
class RolloutsEnd(Exception):
    """All recorded rollouts are trained."""


class Stopped(Exception):
    """The run was stopped."""


# Other frameworks' names for settings of `TrainingConfig`.
FOREIGN = {
    # transformers and TRL
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "beta": "ref_kl_coef",
    "delta": "dual_clip",
    "epsilon": "clip_eps",
    "epsilon_high": "clip_eps_high",
    "learning_rate": "lr",
    "loss_type": "objective",
    "max_completion_length": "max_completion_tokens",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "max_steps": "training_steps",
    "model_name_or_path": "model_name",
    "num_generations": "group_size",
    "num_iterations": "epochs",
    "optim": "optimizer",
    "output_dir": "save_path",
    "per_device_train_batch_size": "batch_size",
    "resume_from_checkpoint": "resume",
    "lr_scheduler_type": "lr_schedule",
    "save_steps": "checkpoint_interval",
    "vllm_importance_sampling_cap": "tis_cap",
    # verl
    "clip_ratio": "clip_eps",
    "clip_ratio_c": "dual_clip",
    "clip_ratio_high": "clip_eps_high",
    "grad_clip": "max_grad_norm",
    "kl_loss_coef": "ref_kl_coef",
    "loss_agg_mode": "loss_denominator",
    "lora_rank": "lora_r",
    "ppo_epochs": "epochs",
    "ppo_mini_batch_size": "minibatches",
    "ppo_micro_batch_size": "batch_size",
    "rollout_n": "group_size",
    "total_training_steps": "training_steps",
    "ulysses_sequence_parallel_size": "context_parallel",
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests a setting for `name`, or ""."""
    if meant := FOREIGN.get(name):
        return f". fix: it is called {meant} here"
    near = get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f". fix: {near[0]} may be meant" if near else ""
