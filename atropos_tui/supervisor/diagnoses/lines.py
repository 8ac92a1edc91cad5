"""All log rules, the more telling first: at an exit the first one that recognises its line explains it."""

from __future__ import annotations

from atropos_tui.supervisor.diagnoses import machine, reach, training
from atropos_tui.supervisor.diagnoses.signs import LogRule

LOG_RULES: tuple[LogRule, ...] = (
    machine.PORT_IN_USE,
    machine.KV_CACHE_TOO_SMALL,
    machine.OUT_OF_MEMORY,
    machine.FORKED_CUDA,
    machine.DAEMONIC,
    machine.FLEXIBLE_ARGUMENT_PARSER,
    machine.TRITON_BLACKWELL,
    machine.EAGER_FALLBACK,
    machine.NO_GPU,
    machine.SHM_FULL,
    machine.DISK_FULL,
    machine.TOO_MANY_FILES,
    machine.GLOO_STUCK,
    machine.BROADCAST_BROKE,
    machine.NCCL_FAILED,
    training.NO_LOGPROBS,
    training.GENERATE_404,
    training.LOGPROBS_POSITIVE,
    reach.REGISTRATION_REFUSED,
    reach.LORA_NOT_ENABLED,
    reach.MANIFEST_MISSING,
    reach.MANIFEST_EMPTY,
    reach.MANIFEST_STALE,
    reach.SERVED_IN_PART,
    training.TOKENIZER_MISSING,
    training.DATASET_UNREACHABLE,
    training.WANDB,
    training.LOST_GRADIENTS,
    training.NON_FINITE,
    reach.TRAINER_NOT_REGISTERED,
    reach.API_UNREACHABLE,
    reach.ENGINE_UNREACHABLE,
    reach.ENV_NOT_REGISTERED,
    reach.HEALTH_TIMEOUT,
    reach.API_RELOADED,
    training.WORKER_TIMEOUT,
    training.USE_CACHE,
    training.ALIGNMENT_MISMATCH,
    machine.OUT_OF_HOST_MEMORY,
    reach.ENGINE_DEAD,
)
