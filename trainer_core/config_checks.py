"""Settings that are fine alone and wrong together. Torch-free, as `config.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_core.config import TrainingConfig


def combinations(config: TrainingConfig) -> list[str]:
    """Every pair of settings that contradict each other, with the way out."""
    found = []
    if config.single_copy and config.use_shared_memory:
        found.append("--single-copy and --use-shared-memory exclude each other: one copy, or a broadcast to a second")
    if (config.single_copy or config.use_shared_memory) and config.weight_bridge_mode != "shared_vllm":
        flag = "--single-copy" if config.single_copy else "--use-shared-memory"
        found.append(f"{flag} belongs to --weight-bridge-mode shared_vllm, not {config.weight_bridge_mode}")
    if config.group_size and config.sequences_per_step % config.group_size:
        found.append(
            f"--batch-size {config.batch_size} x --gradient-accumulation-steps {config.gradient_accumulation_steps} = "
            f"{config.sequences_per_step} sequences is no multiple of --group-size {config.group_size}: run-api would "
            "never fill a batch"
        )
    found += _objective(config)
    if config.trains_adapters and config.train_layer_indices is not None:
        found.append(
            f"--train-layer-indices is for training the model itself; with --weight-bridge-mode "
            f"{config.weight_bridge_mode} use --lora-layer-indices"
        )
    if config.weight_bridge_mode == "lora_restart" and config.vllm_urls:
        found.append("--vllm-urls does nothing for lora_restart, which restarts the one server at --vllm-port")
    if config.mode == "shared_vllm" and config.vllm_urls:
        found.append("--vllm-urls does nothing in single copy: the server is the one that the manifest names")
    if config.trains_adapters and config.in_flight != "keep":
        found.append(f"--in-flight {config.in_flight} does nothing with adapters, which are swapped without a pause")
    lag, every = config.max_policy_lag, config.vllm_restart_interval
    if lag is not None and lag < every - 1 and config.weight_bridge_mode in ("none", "lora_restart"):
        found.append(
            f"--max-policy-lag {lag} leaves out all rollouts before the server gets new weights: it has them every "
            f"{every} steps; set --vllm-restart-interval {lag + 1} or lower, or --max-policy-lag {every - 1} or more"
        )
    if config.engine_reload == "restart" and config.vllm_urls:
        found.append("--engine-reload restart restarts the one server at --vllm-port: leave out --vllm-urls")
    if config.engine_reload != "in_place" and config.weight_bridge_mode != "none":
        found.append(f"--engine-reload does nothing with --weight-bridge-mode {config.weight_bridge_mode}")
    if config.world_size > 1:
        found.append(f"--world-size {config.world_size}: this version trains in one process; leave it at 1")
    if config.trainer_rank >= config.world_size:
        found.append(f"--trainer-rank {config.trainer_rank} must be below --world-size {config.world_size}")
    if config.alignment_ok and config.alignment_mismatch and config.alignment_ok > config.alignment_mismatch:
        found.append("--alignment-ok must not be above --alignment-mismatch")
    return found


def _objective(config: TrainingConfig) -> list[str]:
    found = []
    if config.ratio_base == "rollout":
        found += [
            f"--{name.replace('_', '-')} belongs to --ratio-base proximal: against the rollout policy the ratio "
            "already corrects for it"
            for name in ("tis_cap", "tis_mask", "tis_mask_low", "tis_mask_high")
            if getattr(config, name) != type(config).model_fields[name].default
        ]
    if config.tis_mask_low > config.tis_mask_high:
        found.append("--tis-mask-low must not be above --tis-mask-high")
    if config.dual_clip is not None and config.objective == "cispo":
        found.append("--dual-clip does nothing with --objective cispo, which clips the weight on both sides anyway")
    if config.max_completion_tokens is None and (config.overlong_buffer or config.overlong_mask):
        flag = "--overlong-mask" if config.overlong_mask else "--overlong-buffer"
        found.append(f"{flag} needs --max-completion-tokens: what is too long?")
    if (
        config.overlong_buffer
        and config.max_completion_tokens
        and config.overlong_buffer > config.max_completion_tokens
    ):
        found.append("--overlong-buffer must not be above --max-completion-tokens")
    if config.lr_min > config.lr:
        found.append(f"--lr-min {config.lr_min} must not be above --lr {config.lr}")
    if config.master_weights == "stochastic" and config.dtype == "float16":
        found.append("--master-weights stochastic needs --dtype bfloat16; for float16 take fp32 or kahan")
    return found
