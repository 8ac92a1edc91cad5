"""Other frameworks' names for settings of `TrainingConfig`; errors suggest ours."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

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
    """Return the end of an error message that suggests a setting for `name`; "" if none is close.

    Args:
        known: every setting.
    """
    if meant := FOREIGN.get(name):
        return f". fix: it is called {meant} here"
    near = get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f". fix: {near[0]} may be meant" if near else ""
