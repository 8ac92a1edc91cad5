"""Configuration of a training run. Torch-free: `atropos-tui` imports it to check profiles.

The field `batch_size` is the flag `--batch-size`. A field's docstring is its help, its description
in the JSON schema of profiles and its documentation. Names and defaults are those of the guides.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from atropos_common.protocol.bridge import ADAPTER_CONFIG
from atropos_common.system.run_dir import RunDir
from trainer_core.errors import UsageError, suggestion


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_layer_indices(value: Any) -> Any:
    """Parse `"0-3,28-31"` to sorted indices; pass other types through."""
    if not isinstance(value, str):
        return value
    indices: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{part.strip()!r} is not a layer index; write 20-31 or 0-3,28-31")
        if dash and int(last) < int(first):
            raise ValueError(f"the range {part.strip()} ends before it begins")
        indices.update(range(int(first), int(last or first) + 1))
    return sorted(indices)


def _split(value: Any) -> Any:
    return value.replace(",", " ").split() if isinstance(value, str) else value


def parse_duration(value: Any) -> Any:
    """Parse `"90s"`, `"30m"`, `"1d12h"` to seconds; pass other values through."""
    # A plain number is left to pydantic, which knows the field's bounds.
    if not isinstance(value, str) or re.fullmatch(r"[\d.]+", value.strip()):
        return value
    parts = re.findall(r"([\d.]+)\s*([dhms])", value)
    if not parts or re.sub(r"[\d.]+\s*[dhms]", "", value).strip():
        raise ValueError("write a duration as 90s, 30m, 2h or 1d12h")
    return sum(
        float(number) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts
    )


# `BeforeValidator`s turn words of a command line into lists before pydantic checks the types.
LayerIndices = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(parse_layer_indices)]
Words = Annotated[list[str], BeforeValidator(_split)]
Betas = Annotated[tuple[float, float], BeforeValidator(_split)]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0),
    WithJsonSchema({"type": ["number", "string"]}),
]


WeightBridgeMode = Literal["none", "shared_vllm", "lora_only", "lora_restart"]
Mode = Literal[WeightBridgeMode, "broadcast"]
"""Modes of a stack: `shared_vllm` with `use_shared_memory` is `broadcast`."""
AttentionKernel = Literal["auto", "flash_attention_2", "flash_attention_4"]


class TrainingConfig(BaseModel):
    """Settings of a GRPO run. Unknown keys are refused."""

    model_config = ConfigDict(
        # Attribute docstrings become descriptions; validate_default also checks combinations of
        # defaults.
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )

    # Essential
    model_name: str = Field(min_length=1)
    """A directory or a Hugging Face id."""
    weight_bridge_mode: WeightBridgeMode = "none"
    """How weights reach the inference server. shared_vllm trains vLLM's own tensors (single copy),
    or with use_shared_memory broadcasts to other GPUs."""
    training_steps: int = Field(10, ge=1)
    """Optimizer steps of the whole run, including those before a resume."""
    checkpoint_in_background: bool = True
    """Write checkpoints while training continues: a step waits only for the copy into host memory,
    which a write in the foreground takes too. The copy's memory is kept for the next one. A process
    that is killed meanwhile resumes from the checkpoint before. Adapters are small and always
    written in the foreground."""
    checkpoint_interval: int = Field(3, ge=0)
    """Save a checkpoint every N optimizer steps; 0: only the final model."""
    batch_size: int = Field(2, ge=1)
    """Micro-batch size in sequences. An optimizer step has batch_size x gradient_accumulation_steps
    sequences."""
    gradient_accumulation_steps: int = Field(32, ge=1)
    """Micro-batches of one optimizer step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up; 0: none."""
    seq_len: int = Field(2048, ge=2)
    """Longest sequence in tokens, prompt included; longer ones are left out."""
    train_layer_indices: LayerIndices | None = None
    """Train only these transformer layers (20-31 or 0-3,28-31). Default: train everything."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of every random generator."""

    # Objective
    objective: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"
    """Loss to minimise. grpo: ratio clipped per token. dr_grpo: advantages without standard
    deviation, constant length as denominator. dapo: higher upper clip bound, no groups of equal
    scores. gspo: one ratio per sequence. cispo: clipped importance weight; every token keeps its
    gradient."""
    loss: str | None = None
    """Your own function in place of the objective's formula, as package.module:function, found from
    the working directory too. It maps (logprobs, rollout logprobs, advantages, sequences) to the
    loss of each token."""
    clip_eps: float = Field(0.2, gt=0)
    """Clip the importance ratio to [1 - clip_eps, 1 + clip_eps]. Default for dapo: 0.2 and 0.28;
    gspo: 3e-4 and 4e-4; cispo: 1 and 4 (lower and upper side)."""
    clip_eps_high: float | None = Field(None, gt=0)
    """Upper side of the clip range. Default: clip_eps, or the objective's own."""
    dual_clip: float = Field(3.0, ge=0)
    """Bound on the loss of a token with a negative advantage, as a multiple of the advantage, above
    1; 0: none. Without it one token with a far too low rollout logprob can outweigh a batch. No
    effect with cispo, or with ratio_base proximal and one optimizer step per batch."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term (k3) against the rollout policy."""
    ref_kl_coef: float = Field(0.0, ge=0)
    """Weight of a KL term (k3) towards a frozen reference: the environment's ref_logprobs, else the
    policy before the first step. With adapters that is the model with the adapter of
    lora_adapter_path, or without any; otherwise a second copy of the weights. A token counts at
    most 10 nats, and has no gradient beyond."""
    distill_coef: float = Field(0.0, ge=0)
    """Weight of the reverse KL to a teacher on the tokens in distill_token_ids and
    distill_logprobs; all other tokens count as one outcome."""
    router_aux_loss_coef: float | None = Field(None, ge=0)
    """Weight of the load-balancing loss of a mixture of experts, per packed row, independent of
    loss_denominator. Default: config.json's if output_router_logits is true there, else 0."""
    loss_denominator: Literal["tokens", "sequences", "constant"] | None = None
    """Divisor of an optimizer step's loss. tokens: all trained tokens. sequences: mean over
    sequences of their token means. constant: sequences x max_completion_tokens. Default: tokens;
    sequences for gspo, constant for dr_grpo."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Longest completion in tokens that the environment requests: the constant length of dr_grpo
    (default: seq_len), and the limit of overlong_buffer and overlong_mask."""
    overlong_buffer: int | None = Field(None, ge=0)
    """Lower scores linearly over the last N tokens before max_completion_tokens (DAPO's soft
    punishment). Default: a fifth of max_completion_tokens for dapo, else 0: no penalty."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Score that a completion of max_completion_tokens loses."""
    overlong_mask: bool = False
    """Do not train on completions that max_completion_tokens cut off."""
    advantage_std: bool | None = None
    """Divide a group's advantages by their standard deviation. Default: yes; no for dr_grpo."""
    ratio_base: Literal["rollout", "proximal"] | None = None
    """Base of the importance ratio. rollout: logprobs of the rollouts. proximal: the trainer's own
    at batch start, with a truncated importance weight trainer/rollout. With one optimizer step per
    batch that ratio is 1, so nothing is clipped (see minibatches); with several it takes one more
    forward pass. Default: proximal for a batch with tokens of a policy lag above 1, else rollout;
    rollout with cispo and with a function of your own."""
    tis_cap: float = Field(2.0, gt=0)
    """Upper bound of the importance weight; for batches with ratio_base proximal."""
    tis_mask: Literal["none", "token", "sequence"] = "none"
    """Leave out tokens whose trainer/rollout ratio is outside [tis_mask_low, tis_mask_high], or
    sequences by its geometric mean; for batches with ratio_base proximal."""
    tis_mask_low: float = Field(0.5, ge=0)
    """Lower bound of the mask."""
    tis_mask_high: float = Field(2.0, gt=0)
    """Upper bound of the mask."""
    missing_logprobs: Literal["recompute", "refuse"] = "recompute"
    """Policy for generated tokens without inference_logprobs. recompute: get them from the engine,
    else compute the trainer's own (one more forward pass; the ratio starts at 1). refuse: leave
    those sequences out, and end a run whose first batch has no logprobs."""
    routing_replay: bool = False
    """Mixture of experts: use the experts that the engine recorded
    (--enable-return-routed-experts), weighted by the trainer's router. Without it rounding decides
    between nearly equal experts, and logprobs differ."""
    group_of_one: Literal["baseline", "score"] = "baseline"
    """Advantage of a sequence that is alone in its group. baseline: score minus the running mean of
    about 256 such scores of its environment, divided by their standard deviation with
    advantage_std. score: the score."""
    max_left_out: float = Field(1.0, gt=0, le=1)
    """End the run when a larger share of the last 20 batches was left out: malformed, not of this
    model, too long or without logprobs. 1: never."""
    max_policy_lag: int | None = Field(None, ge=0)
    """Leave out rollouts whose oldest token was generated more than N weight versions ago. Default:
    twice the environment's max_batches_offpolicy, if it reports one (docs/modes.md, "How old
    rollouts are")."""
    unknown_lag: Literal["keep", "leave_out"] = "keep"
    """Policy for rollouts of unknown age if `max_policy_lag` is set."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts that name none (overrides, generation_params)."""
    group_size: int | None = Field(None, ge=1)
    """Completions per prompt, if known: run-api never fills a batch that is no multiple of it."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps of one pass over a batch, each on its share of the sequences. Settings in
    steps count batches. A batch makes one weight version; in single copy one per optimizer step."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch. From the second optimizer step on, the clip range has an effect with
    ratio_base proximal too."""

    # Optimizer
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw_8bit"
    """adamw (fp32 states), adamw_8bit (bitsandbytes; on a CPU the default becomes adamw) or
    adafactor."""
    master_weights: Literal["fp32", "kahan", "stochastic"] = "fp32"
    """How half-precision weights keep small updates. fp32: a float32 copy (4 bytes a parameter).
    kahan: the rounding error (2 bytes). stochastic: random rounding (0 bytes, bfloat16 only)."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype for accumulating gradients of half-precision weights: 4 or 2 bytes a parameter.
    bfloat16 loses small parts of a sum over many rows; use it only to save memory."""
    optimizer_offload: bool = False
    """Keep master weights and optimizer state in host memory; updates stream them through the
    GPU."""
    lr: float = Field(1e-5, ge=0)
    """Learning rate. 0 changes no weights, to measure a stack."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up; cosine and linear fall to lr_min at training_steps."""
    lr_min: float = Field(0.0, ge=0)
    """Final learning rate of cosine and linear."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of all trained parameters, including norms and biases."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of AdamW's moments; eps is 1e-8."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the gradient to this norm; 0: no clipping."""
    adafactor_scale_parameter: bool = False
    """Adafactor: scale the learning rate by the parameter's root mean square."""
    adafactor_relative_step: bool = False
    """Adafactor: use its time-dependent step size instead of lr."""

    # LoRA
    lora_r: int = Field(16, ge=1)
    """LoRA rank."""
    lora_alpha: int = Field(32, ge=1)
    """LoRA scaling factor."""
    lora_dropout: float = Field(0.05, ge=0, lt=1)
    """Accepted but not applied: the ratio would compare two dropout masks."""
    lora_target_modules: Words | None = None
    """Modules that get an adapter (default: q_proj v_proj); all-linear: every linear layer but the
    head."""
    lora_layer_indices: LayerIndices | None = None
    """Layers that get an adapter (20-31); default: all that match."""
    lora_use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_r) instead of lora_alpha / lora_r (rsLoRA): high ranks learn
    as fast."""
    lora_use_dora: bool = False
    """Refused: vLLM does not serve DoRA."""
    lora_modules_to_save: Words | None = None
    """Refused: vLLM does not serve adapters with whole layers (embeddings, head)."""
    lora_adapter_path: str | None = None
    """Start from the adapter in this folder (peft's format), with its rank, alpha, scaling, modules
    and layers."""
    lora_merged_export: bool = False
    """At the end write final_model/ as base plus adapter, and the adapter beside it as
    final_adapter/. In half precision the sums are rounded."""

    # vLLM
    vllm_port: int = Field(9001, ge=1, le=65535)
    """Port of the inference server on this machine."""
    vllm_host: str = "127.0.0.1"
    """Host of the inference server; another machine only if a supervisor starts the server
    there."""
    vllm_urls: Words | None = None
    """Inference servers that get the weights, if several (broadcast) or on another machine;
    default: the one at vllm_port. In shared_vllm: servers on other GPUs, which get each version by
    broadcast."""
    vllm_config_path: str | None = None
    """Path of the server's vllm_bridge_config.json; default: from VLLM_BRIDGE_CONFIG_PATH, LOGDIR
    or the run directory."""
    copy_config_paths: Words | None = None
    """In shared_vllm: vllm_bridge_config.json of further servers on the trainer's GPU. Each has
    weights of its own, into which the trainer copies each version."""
    gpu_memory_utilization: float = Field(0.45, gt=0, le=1)
    """Share of the GPU's memory for a vLLM that the trainer starts."""
    vllm_gpu: int | None = Field(None, ge=0)
    """GPU of a vLLM that the trainer starts; default: the trainer's."""
    max_model_len: int = Field(4096, ge=2)
    """Longest context of the server, in tokens."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Dtype of the weights; auto: the server's."""
    vllm_restart_interval: int = Field(3, ge=1)
    """Restart or reload the server every N steps (modes none and lora_restart)."""
    engine_reload: Literal["in_place", "restart"] = "in_place"
    """How the server gets new weights in mode none. in_place: loads them while it runs. restart:
    restarts with them; also where in_place is impossible (quantized weights, unknown layers)."""
    in_flight: Literal["keep", "reuse", "wait", "recompute"] = "keep"
    """Policy for completions in flight when new weights arrive. keep: continue with the new
    weights; policy lag counts from the oldest token, and the engine computes their keys and values
    again. reuse: the same without that computation. wait: finish first, for at most
    in_flight_timeout. recompute: restart them. For modes that pause the server (shared_vllm,
    broadcast, none)."""
    in_flight_timeout: float = Field(30.0, gt=0)
    """Seconds that in_flight wait waits; the remaining completions are kept."""
    engine_timeout: float = Field(600.0, gt=0)
    """Seconds to wait for the inference server and its manifest at the start."""
    single_copy: bool = False
    """One copy of the weights, in the server's memory. Always so in shared_vllm; with lora_only the
    trainer uses the server's base model, and needs memory only for the adapter."""
    use_shared_memory: bool = False
    """Use shared_vllm as a broadcast to a server on other GPUs."""

    # Atropos API
    atropos_url: str = Field("http://localhost:8000", pattern=r"^https?://[^/]+")
    """URL of run-api."""
    api_timeout: float = Field(300.0, gt=0)
    """Seconds that run-api may be unreachable before the trainer ends."""
    rollouts: str | None = Field(None, min_length=1)
    """Train on the rollouts in this file, without run-api and server (JSON lines: batches or groups
    in run-api's format). The mode only decides between adapters (lora_only) and the whole model."""
    record_rollouts: str | None = Field(None, min_length=1)
    """Append every trained batch to this file, for --rollouts; a relative path starts in the run
    directory."""

    # Stop conditions
    max_time: Duration | None = None
    """End the run successfully after this training time, restarts included: 90s, 30m, 2h or
    1d12h."""
    stop_reward: float | None = None
    """End the run successfully once the mean reward of the last stop_window steps reaches this."""
    stop_window: int = Field(10, ge=1)
    """Steps over which stop_reward takes the mean."""
    stop_on_mismatch: bool = False
    """End with an error when the alignment verdict is mismatch."""

    # Trackers
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str | None = None
    """Project in Weights & Biases."""
    wandb_group: str | None = None
    """Group in Weights & Biases."""
    use_tensorboard: bool = False
    """Also write TensorBoard event files."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard files; default: tensorboard/ beside save_path."""

    # Distributed
    trainer_rank: int = Field(0, ge=0)
    """Rank of this trainer."""
    world_size: int = Field(1, ge=1)
    """Kept for example_trainer; must be 1. trainer.gpus or `python -m trainer_core.ranks.launch N`
    starts several ranks."""
    init_method: str = Field("env://", pattern=r"^(env://|tcp://\[?[A-Za-z0-9.:_-]+\]?:\d{1,5})$")
    """Meeting point of the broadcast group: tcp://HOST:PORT of this machine, or env:// for
    MASTER_ADDR and MASTER_PORT; default: loopback and a free port."""
    num_inference_nodes: int = Field(0, ge=0)
    """Inference servers that a broadcast must reach (a different number of vllm_urls is an error);
    0, or NUM_INFERENCE_NODES unset: any."""
    broadcast_timeout: float = Field(60.0, gt=0)
    """Timeout in seconds of a broadcast, and of forming its group, before a retry."""
    overlap_publish: bool = False
    """Broadcast while the next step is computed; meanwhile servers generate with the previous
    version. For a slow link, large weights or in_flight = wait."""

    # Device and speed
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (cuda if there is one), cpu, cuda or cuda:N."""
    pack_tokens: int | None = Field(None, ge=2)
    """Tokens of one forward pass of packed sequences; loss and gradient do not depend on it.
    Default: batch_size x seq_len, on a CPU at most 2048."""
    context_parallel: int = Field(1, ge=1)
    """Neighbouring ranks that compute each row together, for rows too long for one GPU (about
    32,000 tokens). Must divide the number of ranks and of attention heads."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass: a third slower, far less memory. auto: on if
    those of one forward pass exceed the free GPU memory; off on a CPU."""
    activation_offload: bool = False
    """Keep the tensors saved by gradient checkpointing, a hidden state per layer, in host memory;
    needs a GPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the transformer layers (torch.compile): some seconds at the first step, a fifth less
    in each. auto: on with CUDA for models from 100 million parameters."""
    attention_kernel: AttentionKernel = "auto"
    """auto: FlashAttention 4 (`pip install flash-attn-4`) if the GPU can run it and a test at the
    start proves it right for the model, else FlashAttention 2, which is part of torch."""
    head_dtype: Literal["model", "float32"] = "model"
    """Dtype of the logits. float32 does not round the head's products, for a little time and
    memory; the server does the same with --hf-overrides '{"head_dtype": "float32"}'."""
    torch_threads: int | None = Field(None, ge=1)
    """CPU threads; a model under 50 million parameters trains that many rows in parallel on a CPU.
    Default: OMP_NUM_THREADS, or the number of cores."""

    # Checkpoints
    save_path: str = Field("trained_model_checkpoints", min_length=1)
    """Folder for step_N/ (adapters: adapter_step_N/) and final_model/; default in a run directory:
    its checkpoints/."""
    resume: str = Field("never", min_length=1)
    """never, auto (newest complete checkpoint in save_path) or the path of a checkpoint; default in
    a run directory: auto."""
    keep_checkpoints: int = Field(0, ge=0)
    """Keep only the newest N step_N/; 0: keep all."""

    # Alignment
    probe_interval: int = Field(1, ge=0)
    """Compare logprobs at the same weights every N steps, on a few tokens that the server decodes;
    0: never."""
    probe_prompts: int = Field(2, ge=1, le=16)
    """Prompts of a probe; each is decoded twice, fresh and on the cached prefix."""
    probe_tokens: int = Field(8, ge=8, le=256)
    """Tokens decoded for each prompt."""
    alignment_ok: float | None = Field(None, gt=0)
    """Verdict ok up to this mean |difference| of logprobs, in nats. Default: 0.1 in half precision,
    or twice the first probe's if that is more; 1e-3 in float32."""
    alignment_mismatch: float | None = Field(None, gt=0)
    """Verdict mismatch from this mean |difference| on, in nats; drift in between. Default: 0.5 in
    half precision, 0.05 in float32."""

    # Debug and benchmark
    debug_loading: bool = False
    """Print for every parameter where it is mapped."""
    benchmark: bool = False
    """Print timing with every step and a summary at the end; a run directory always gets the
    summary."""
    rollout_samples: int = Field(8, ge=0, le=64)
    """Completions of each step that telemetry holds as text, whole groups first."""
    dump_last_batch: bool = False
    """Keep the last batch from run-api as temp.json in save_path."""
    log_dir: str = "./logs"
    """Log folder of a vLLM that the trainer starts."""

    SECTIONS: ClassVar[dict[str, str]] = {
        "model_name": "Essential",
        "objective": "Objective",
        "optimizer": "Optimizer",
        "lora_r": "LoRA",
        "vllm_port": "vLLM",
        "atropos_url": "Atropos API",
        "max_time": "Stop conditions",
        "use_wandb": "Trackers",
        "trainer_rank": "Distributed",
        "device": "Device and speed",
        "save_path": "Checkpoints",
        "probe_interval": "Alignment",
        "debug_loading": "Debug and benchmark",
    }
    """First field of each section, for `--help`."""

    ALIASES: ClassVar[dict[str, str]] = {
        "model": "model_name",
        "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    }
    """Additional flags."""

    def __new__(cls, **values: Any) -> Self:
        # pydantic's error for an unknown name would not suggest the right one.
        if unknown := values.keys() - cls.model_fields.keys():
            raise UsageError("\n".join(map(no_such_setting, sorted(unknown))))
        return super().__new__(cls)

    @model_validator(mode="before")
    @classmethod
    def _from_adapter(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("lora_adapter_path"):
            return values
        # Explicit values win here; `_adapter_contradictions` refuses those that differ from the
        # adapter.
        return adapter_settings(Path(str(values["lora_adapter_path"]))) | values

    @model_validator(mode="after")
    def _combinations(self) -> TrainingConfig:
        if problems := contradictions(self):
            raise ValueError("\n".join(problems))
        return self

    @property
    def mode(self) -> Mode:
        return "broadcast" if self.use_shared_memory else self.weight_bridge_mode

    @property
    def trains_adapters(self) -> bool:
        """Adapters are trained, and the model is frozen."""
        return self.weight_bridge_mode in ("lora_only", "lora_restart")

    @property
    def shares_memory(self) -> bool:
        """The trainer computes with the server's memory: whole model, or base of the adapters."""
        return self.mode == "shared_vllm" or self.single_copy

    @property
    def sends_weights(self) -> bool:
        """The trainer broadcasts: to all servers, or in single copy to those after the first."""
        return self.mode == "broadcast" or (self.mode == "shared_vllm" and bool(self.vllm_urls))

    @property
    def engine_urls(self) -> list[str]:
        """Servers that get the weights; in single copy first the one that shares memory."""
        own = [f"http://{self.vllm_host}:{self.vllm_port}"]
        urls = own + (self.vllm_urls or []) if self.shares_memory else self.vllm_urls or own
        return [url.rstrip("/") for url in urls]

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of a forward pass; a longer sequence passes alone."""
        return self.pack_tokens or self.batch_size * self.seq_len

    def in_run_dir(self, run_dir: RunDir | None) -> TrainingConfig:
        """Return a copy with the defaults of a supervised run."""
        if run_dir is None:
            return self
        defaults = {"save_path": str(run_dir.checkpoints), "resume": "auto"}
        update = {k: v for k, v in defaults.items() if k not in self.model_fields_set}
        if self.record_rollouts is not None:
            update["record_rollouts"] = str(run_dir.root / self.record_rollouts)
        # `model_copy` skips validation: these values come from the run directory, not from the
        # user.
        return self.model_copy(update=update)

    def to_args(self) -> list[str]:
        """Return the command line: a flag for every field that was set."""
        args: list[str] = []
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name not in self.model_fields_set or value is None:
                continue
            args.append(flag(name))
            # Flags have lower-case booleans, and `str(True)` is "True".
            if isinstance(value, bool):
                args.append(str(value).lower())
            elif isinstance(value, (list, tuple)):
                args.append(",".join(map(str, value)))
            else:
                args.append(str(value))
        return args


def contradictions(config: TrainingConfig) -> list[str]:
    """Return every conflict between settings, each with a fix."""
    return [
        *_mode_contradictions(config),
        *_batch_contradictions(config),
        *_objective_contradictions(config),
        *_adapter_contradictions(config),
        *_rollout_contradictions(config),
        *_rank_contradictions(config),
    ]


def _mode_contradictions(config: TrainingConfig) -> Iterator[str]:
    mode = config.weight_bridge_mode
    if config.single_copy and config.use_shared_memory:
        yield "--single-copy and --use-shared-memory exclude each other: one copy, or a second one"
    if config.copy_config_paths and mode != "shared_vllm":
        yield f"--copy-config-paths is for --weight-bridge-mode shared_vllm, not {mode}"
    if config.overlap_publish and not config.sends_weights:
        yield "--overlap-publish is for a broadcast (--use-shared-memory): leave it out"
    if config.use_shared_memory and mode != "shared_vllm":
        yield f"--use-shared-memory needs --weight-bridge-mode shared_vllm, not {mode}"
    if config.single_copy and mode not in ("shared_vllm", "lora_only"):
        why = ", whose server loses its memory at each restart" if config.trains_adapters else ""
        yield f"--single-copy needs --weight-bridge-mode shared_vllm or lora_only, not {mode}{why}"
    if config.trains_adapters and config.train_layer_indices is not None:
        yield (
            f"--train-layer-indices is for training the model itself; with --weight-bridge-mode "
            f"{mode} use --lora-layer-indices"
        )
    if mode == "lora_restart" and config.vllm_urls:
        yield "--vllm-urls does nothing for lora_restart, which restarts the server at --vllm-port"
    if config.single_copy and config.trains_adapters and config.vllm_urls:
        yield "--vllm-urls does nothing with adapters in single copy: the manifest names the server"
    if config.trains_adapters and config.in_flight in ("wait", "recompute"):
        yield (
            f"--in-flight {config.in_flight} does nothing with adapters, which are swapped "
            f"without a pause"
        )
    if config.engine_reload == "restart" and config.vllm_urls:
        yield "--engine-reload restart is for the one server at --vllm-port: drop --vllm-urls"
    if config.engine_reload != "in_place" and mode != "none":
        yield f"--engine-reload does nothing with --weight-bridge-mode {mode}"


def never_filled(config: TrainingConfig, group_size: int) -> str:
    """Return why groups of this size never fill a batch; empty if they do."""
    # run-api forms batches of whole groups.
    total, steps = config.sequences_per_step, config.gradient_accumulation_steps
    if total % group_size == 0:
        return ""
    # Name the factors if there are several, since either can be changed.
    factor = f" x --gradient-accumulation-steps {steps} = {total}" if steps > 1 else ""
    return (
        f"--batch-size {config.batch_size}{factor} is not a multiple of the group size "
        f"{group_size}, so run-api would never fill a batch"
    )


def _batch_contradictions(config: TrainingConfig) -> Iterator[str]:
    batch = config.sequences_per_step
    if config.group_size and (reason := never_filled(config, config.group_size)):
        yield reason
    if config.minibatches > batch:
        yield (
            f"--minibatches {config.minibatches} is more than the {batch} sequences of a batch "
            f"(--batch-size x --gradient-accumulation-steps)"
        )
    if config.activation_offload and config.gradient_checkpointing == "off":
        yield (
            "--activation-offload needs gradient checkpointing: "
            "leave out --gradient-checkpointing off"
        )
    if config.gradient_dtype == "bfloat16" and config.dtype == "float16":
        yield "--gradient-dtype bfloat16 needs --dtype bfloat16: gradients of float16 are scaled"
    if config.master_weights == "stochastic" and config.dtype == "float16":
        yield "--master-weights stochastic needs --dtype bfloat16; for float16 use fp32 or kahan"
    if config.lr_min > config.lr:
        yield f"--lr-min {config.lr_min} must not be above --lr {config.lr}"
    if (config.alignment_ok or 0) > (config.alignment_mismatch or math.inf):
        yield "--alignment-ok must not be above --alignment-mismatch"


def _rank_contradictions(config: TrainingConfig) -> Iterator[str]:
    if config.world_size > 1:
        yield (
            f"--world-size {config.world_size}: torchrun sets the number of ranks, so leave it at "
            f"1; set trainer.gpus in a profile, or start python -m trainer_core.ranks.launch N"
        )
    if config.trainer_rank >= config.world_size:
        yield f"--trainer-rank {config.trainer_rank} must be below --world-size {config.world_size}"


def sharding_contradictions(config: TrainingConfig, ranks: int) -> list[str]:
    """Return the conflicts with a model sharded over `ranks` ranks."""
    context = config.context_parallel
    if context > 1 and config.shares_memory:
        return [
            f"--context-parallel {context} shares rows among ranks, and in single copy all ranks "
            f"compute the same rows already: leave it out, or use mode broadcast"
        ]
    if ranks % context:
        return [
            f"--context-parallel {context} shares each row among that many ranks, and the trainer "
            f"has {ranks}: give it a multiple of {context} (trainer.gpus or trainer.processes), or "
            f"leave it out"
        ]
    if ranks > 1 and config.optimizer == "adafactor" and not config.trains_adapters:
        return [
            f"--optimizer adafactor needs whole matrices for its row and column means, and each of "
            f"{ranks} ranks has only some rows: use adamw_8bit or adamw, whose state is sharded"
        ]
    return []


def _rollout_contradictions(config: TrainingConfig) -> Iterator[str]:
    lag, every, mode = (
        config.max_policy_lag,
        config.vllm_restart_interval,
        config.weight_bridge_mode,
    )
    # In these modes the server keeps its weights for several steps: its lag grows to `every` - 1.
    reloads = mode in ("none", "lora_restart") and config.rollouts is None
    if lag is not None and lag < every - 1 and reloads:
        yield (
            f"--max-policy-lag {lag} leaves out all rollouts before the server gets new weights: "
            f"it has them every {every} steps; set --vllm-restart-interval {lag + 1} or lower, or "
            f"--max-policy-lag {every - 1} or more"
        )
    # In single copy the server sees each optimizer step, so one batch is several versions of lag.
    versions = config.minibatches * config.epochs
    if lag is not None and lag < versions > 1 and config.mode == "shared_vllm":
        yield (
            f"--max-policy-lag {lag} leaves out rollouts that started one batch earlier: in single "
            f"copy each of the {versions} optimizer steps of a batch is a weight version; set it "
            f"to {versions} or more"
        )
    if config.rollouts is not None and mode in ("shared_vllm", "lora_restart"):
        yield (
            f"--rollouts trains without a server, and --weight-bridge-mode {mode} needs one: leave "
            f"it out, or lora_only to train adapters"
        )
    if config.routing_replay:
        needs = "--routing-replay needs the server's expert choices"
        if config.rollouts is not None:
            yield f"{needs}, and --rollouts trains without a server: leave one of them out"
        if mode == "lora_restart":
            yield f"{needs}, which are lost at the restarts of lora_restart: use lora_only"
        if config.engine_reload == "restart":
            yield f"{needs}, which are lost at a restart: leave out --engine-reload restart"
    if config.rollouts is not None and config.record_rollouts is not None:
        yield "--record-rollouts does nothing with --rollouts: they are in a file already"


_ADAPTER_FIELDS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "use_rslora": "lora_use_rslora",
    "target_modules": "lora_target_modules",
    "layers_to_transform": "lora_layer_indices",
}
_UNSERVED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole layers (modules_to_save)",
    "lora_bias": "biases of its own",
    "rank_pattern": "several ranks (rank_pattern)",
    "alpha_pattern": "several scales (alpha_pattern)",
    "target_parameters": "matrices of single parameters (target_parameters)",
}


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a peft adapter as fields of `TrainingConfig`.

    Raises:
        ValueError: no LoRA adapter of peft, or one that vLLM does not serve.
    """
    prefix = f"--lora-adapter-path {folder}"
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text())
        kind, targets = found.get("peft_type"), found["target_modules"]
        unserved = [what for key, what in _UNSERVED.items() if found.get(key)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{prefix}: no adapter in peft's format ({type(error).__name__}: {error})"
        ) from None
    if kind != "LORA" or unserved or not isinstance(targets, list):
        what = (
            f"peft's {kind}"
            if kind != "LORA"
            else ", ".join(unserved) or f"modules by a pattern ({targets})"
        )
        raise ValueError(
            f"{prefix}: an adapter with {what} cannot be trained here: vLLM does not serve it"
        )
    # A key that the file lacks keeps the default of `TrainingConfig`.
    settings = {
        field: found[key] for key, field in _ADAPTER_FIELDS.items() if found.get(key) is not None
    }
    # peft writes a single layer as a bare number.
    if isinstance(layers := settings.get("lora_layer_indices"), int):
        settings["lora_layer_indices"] = [layers]
    return settings | {"lora_target_modules": sorted(targets)}


def _adapter_contradictions(config: TrainingConfig) -> Iterator[str]:
    if not config.trains_adapters:
        for name in ("lora_adapter_path", "lora_merged_export"):
            if getattr(config, name):
                yield (
                    f"{flag(name)} is for adapters: use --weight-bridge-mode lora_only or "
                    f"lora_restart"
                )
        return
    if config.lora_use_dora:
        yield "--lora-use-dora: vLLM does not serve DoRA; use --lora-use-rslora or leave it out"
    if config.lora_modules_to_save:
        yield (
            f"--lora-modules-to-save {' '.join(config.lora_modules_to_save)}: vLLM does not serve "
            f"adapters with whole layers; leave it out, or train the whole model "
            f"(--weight-bridge-mode shared_vllm)"
        )
    if config.lora_adapter_path:
        theirs = adapter_settings(Path(config.lora_adapter_path))
        for name in _ADAPTER_FIELDS.values():
            # An unset field has the adapter's value already: only an explicit one can differ.
            ours = getattr(config, name)
            wanted = theirs.get(name, type(config).model_fields[name].default)
            if (sorted(ours) if isinstance(ours, list) else ours) != wanted:
                yield (
                    f"{flag(name)} {ours}: the adapter in {config.lora_adapter_path} has {wanted}; "
                    f"leave the flag out to continue with that adapter"
                )


def _objective_contradictions(config: TrainingConfig) -> Iterator[str]:
    if config.loss is not None and not re.fullmatch(
        r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", config.loss
    ):
        yield f"--loss {config.loss!r} is not a function: write package.module:function"
    if config.ratio_base == "rollout":
        for name in ("tis_cap", "tis_mask", "tis_mask_low", "tis_mask_high"):
            if getattr(config, name) != type(config).model_fields[name].default:
                yield (
                    f"{flag(name)} needs --ratio-base proximal: with --ratio-base rollout the "
                    f"ratio itself is the correction"
                )
    if config.tis_mask_low > config.tis_mask_high:
        yield "--tis-mask-low must not be above --tis-mask-high"
    if 0 < config.dual_clip <= 1:
        yield f"--dual-clip {config.dual_clip:g} must be above 1 (3 is usual), or 0 for no bound"
    # Only an explicit value conflicts: the default is harmless with cispo.
    if "dual_clip" in config.model_fields_set and config.dual_clip and config.objective == "cispo":
        yield "--dual-clip does nothing with --objective cispo, which always clips both sides"
    longest = config.max_completion_tokens
    if longest is None and (config.overlong_buffer or config.overlong_mask):
        which = flag("overlong_mask" if config.overlong_mask else "overlong_buffer")
        yield f"{which} needs --max-completion-tokens, the limit for overlong completions"
    if (config.overlong_buffer or 0) > (longest or math.inf):
        yield "--overlong-buffer must not be above --max-completion-tokens"


def validate(values: dict[str, Any]) -> tuple[TrainingConfig | None, list[str]]:
    """Return the configuration, or every problem with fields and combinations."""
    try:
        return TrainingConfig.model_validate(values), []
    except ValidationError as error:
        problems = [_problem(dict(item)) for item in error.errors()]
        wrong = {item["loc"][0] for item in error.errors() if item["loc"]}
    if wrong:
        # pydantic checks combinations only if every field is valid, so check them without the wrong
        # ones.
        rest = {k: v for k, v in values.items() if k not in wrong}
        # A placeholder, in case the required field itself was missing or wrong.
        rest.setdefault("model_name", str(Path()))
        try:
            TrainingConfig.model_validate(rest)
        except ValidationError as error:
            problems += [_problem(dict(item)) for item in error.errors()]
    return None, [line for text in problems for line in text.splitlines()]


def no_such_setting(name: str) -> str:
    return f"{name}: no such setting{suggestion(name, TrainingConfig.model_fields)}"


def _problem(item: dict[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name = str(item["loc"][0])
    if item["type"] == "missing":
        return f"{flag(name)} is required"
    if item["type"] == "extra_forbidden":
        return no_such_setting(name)
    return f"{flag(name)} {item['input']!r}: {message}"
