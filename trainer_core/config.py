"""Configuration of a training run, as one typed model. Torch-free: `atropos-tui` imports it to
check profiles.

`trainer_core/__main__.py` builds the command line from this class: the field `batch_size` is the
flag `--batch-size`, and a field's docstring is its help text, its description in the JSON schema of
profiles and its documentation. Names and defaults are those of the guides.
"""

from __future__ import annotations

import json
import re
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
from trainer_core.errors import UsageError
from trainer_core.foreign_names import suggestion


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def parse_layer_indices(value: Any) -> Any:
    """Parse `"0-3,28-31"` to a sorted list of indices; pass other types through."""
    if not isinstance(value, str):
        return value
    indices: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{part.strip()!r} is not a layer index; write 20-31 or 0-3,28-31")
        if dash and int(last) < int(first):
            raise ValueError(f"the range {part.strip()} runs backwards")
        indices.update(range(int(first), int(last or first) + 1))
    return sorted(indices)


def _split(value: Any) -> Any:
    """Split `"0.9,0.95"` or `"0.9 0.95"` to a list; pass other types through."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


def parse_duration(value: Any) -> Any:
    """Parse `"90s"`, `"30m"`, `"2h"`, `"1d12h"` to seconds; pass plain seconds and other types
    through."""
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
"""Values of the flag. A new mode is added here."""
Mode = Literal[WeightBridgeMode, "broadcast"]
"""The stack's mode names: `shared_vllm` with `use_shared_memory` is `broadcast`."""
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
    """Model: a directory or a Hugging Face id."""
    weight_bridge_mode: WeightBridgeMode = "none"
    """How weights reach the inference server. shared_vllm trains vLLM's own tensors in place
    (single copy); with use_shared_memory it broadcasts to other GPUs instead."""
    training_steps: int = Field(10, ge=1)
    """Optimizer steps of the whole run, including those before a resume."""
    checkpoint_in_background: bool = False
    """Continue training while a checkpoint is written: a step waits only for the copy into host
    memory. One checkpoint is written at a time. Adapters are small and always saved in the
    foreground."""
    checkpoint_interval: int = Field(3, ge=0)
    """Save a checkpoint every N optimizer steps; 0: save only the final model."""
    batch_size: int = Field(2, ge=1)
    """Micro-batch size in sequences. batch_size x gradient_accumulation_steps sequences make one
    optimizer step; that number is registered with run-api."""
    gradient_accumulation_steps: int = Field(32, ge=1)
    """Micro-batches of one optimizer step."""
    warmup_steps: int = Field(0, ge=0)
    """Linear learning-rate warm-up over the first N optimizer steps; 0: no warm-up."""
    seq_len: int = Field(2048, ge=2)
    """Longest sequence in tokens, prompt included; longer ones are left out and counted."""
    train_layer_indices: LayerIndices | None = None
    """Train only these transformer layers (such as 20-31 or 0-3,28-31); everything else is frozen.
    Default: train all."""
    seed: int = 0
    """Seed of every random generator."""

    # Objective
    objective: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"
    """Loss to minimise. grpo: ratio clipped per token. dr_grpo: no division by the standard
    deviation, constant length as denominator. dapo: higher upper clip bound, groups of equal scores
    left out. gspo: one ratio per sequence. cispo: the importance weight is clipped, so every token
    keeps its gradient."""
    loss: str | None = None
    """Your own function in place of the objective's formula, as package.module:function; the
    trainer's working directory is searched too. It gets (logprobs, rollout logprobs, advantages,
    sequences) and returns the loss of each token. The objective's advantages, denominator and
    filters stay."""
    clip_eps: float = Field(0.2, gt=0)
    """Clip the importance ratio to [1 - clip_eps, 1 + clip_eps]. If not set, dapo uses 0.2 and
    0.28, gspo 3e-4 and 4e-4, cispo 1 and 4 (lower and upper side), as published."""
    clip_eps_high: float | None = Field(None, gt=0)
    """Upper side of the clip range alone. Default: clip_eps, or the objective's published value."""
    dual_clip: float = Field(3.0, ge=0)
    """Upper bound of the loss of a token with a negative advantage, as a multiple of the advantage;
    beyond it the token has no gradient. Without it, one token with a far too low rollout logprob
    can outweigh a whole batch. Must be above 1; 0: no bound. No effect with cispo, or with
    ratio_base proximal and one optimizer step per batch."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the sampled-token KL term (k3) against the rollout policy."""
    ref_kl_coef: float = Field(0.0, ge=0)
    """Weight of a KL term (k3) that pulls the policy back to a frozen reference. The reference
    logprobs are the environment's ref_logprobs if it sends them, else those of the policy before
    the run's first step. With adapters the reference is the model with the adapter of
    lora_adapter_path, or without any; otherwise it is a second, frozen copy of the weights on the
    trainer's device. A token counts at most 10 nats and has no gradient beyond (2.6 nats below the
    reference), as in verl."""
    distill_coef: float = Field(0.0, ge=0)
    """Weight of the reverse KL to a teacher, on the tokens that the environment sends as
    distill_token_ids with distill_logprobs; all other tokens count as one remaining outcome."""
    router_aux_loss_coef: float | None = Field(None, ge=0)
    """Weight of the load-balancing loss of a mixture of experts, computed per packed row. It is
    added to the step's loss, independent of loss_denominator. Default: router_aux_loss_coef of
    config.json if output_router_logits is true there, else none."""
    loss_denominator: Literal["tokens", "sequences", "constant"] | None = None
    """Divisor of an optimizer step's loss. tokens: all trained tokens. sequences: the mean over
    sequences of their token means. constant: sequences x max_completion_tokens. Default: tokens;
    sequences for gspo, constant for dr_grpo."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Longest completion in tokens that the environment requests. It is the constant length of
    dr_grpo (default: seq_len), and the limit for overlong_buffer and overlong_mask."""
    overlong_buffer: int | None = Field(None, ge=0)
    """Lower scores linearly over the last N tokens before max_completion_tokens (DAPO's soft
    overlong punishment); 0: no penalty. Default: a fifth of max_completion_tokens for dapo, else 0.
    """
    overlong_penalty: float = Field(1.0, gt=0)
    """Score that a completion of max_completion_tokens loses."""
    overlong_mask: bool = False
    """Do not train on completions of max_completion_tokens or more, which were cut off."""
    advantage_std: bool | None = None
    """Divide a group's advantages, which have mean 0, by their standard deviation. Default: yes,
    but no for dr_grpo."""
    ratio_base: Literal["rollout", "proximal"] = "rollout"
    """Base of the importance ratio. rollout: the logprobs that came with the rollouts. proximal:
    the trainer's own logprobs at batch start (one more forward pass), with a truncated importance
    weight trainer/rollout as a factor. With proximal and one optimizer step per batch the ratio is
    1, so the clip range has no effect: see minibatches."""
    tis_cap: float = Field(2.0, gt=0)
    """Upper bound of the importance weight; for ratio_base proximal."""
    tis_mask: Literal["none", "token", "sequence"] = "none"
    """Leave out tokens whose trainer/rollout ratio is outside [tis_mask_low, tis_mask_high], or
    sequences by the geometric mean of that ratio; for ratio_base proximal."""
    tis_mask_low: float = Field(0.5, ge=0)
    """Lower bound of the mask."""
    tis_mask_high: float = Field(2.0, gt=0)
    """Upper bound of the mask."""
    missing_logprobs: Literal["recompute", "refuse"] = "recompute"
    """Policy for generated tokens that an environment sends without inference_logprobs. recompute:
    the trainer gets the logprobs from the engine that computed them, else computes its own at the
    current weights (one more forward pass over their rows; the ratio starts at 1). refuse: they are
    not trained, and a first batch without any logprobs ends the run."""
    routing_replay: bool = False
    """Mixture of experts: route each token to the experts that the engine recorded
    (--enable-return-routed-experts), weighted by the trainer's own router. Without it, rounding
    decides between two nearly equal experts, and engine and trainer compute different logprobs."""
    group_of_one: Literal["baseline", "score"] = "baseline"
    """Advantage of a sequence that is alone in its group. baseline: its score minus the running
    mean of about the last 256 such scores of its environment, divided by their standard deviation
    if advantage_std is on. score: the score itself."""
    max_left_out: float = Field(1.0, gt=0, le=1)
    """End the run when more than this share of the last 20 batches' sequences was left out:
    malformed, not of this model, too long or without logprobs. 1: never end it."""
    max_policy_lag: int | None = Field(None, ge=0)
    """Leave out rollouts whose oldest token was generated more than N weight versions ago, and
    count them. Default: twice the environment's own max_batches_offpolicy, if it reports one
    (docs/modes.md, "How old rollouts are")."""
    unknown_lag: Literal["keep", "leave_out"] = "keep"
    """Policy for rollouts whose completion no server knows, if `max_policy_lag` is set."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts that name none in their overrides or generation_params."""
    group_size: int | None = Field(None, ge=1)
    """Completions per prompt, if known: run-api never fills a batch that is no multiple of it.
    Default: unknown, no check."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps of one pass over a batch, each on its share of the sequences (about equal
    tokens, drawn again in every epoch). Settings in steps (training_steps, the learning-rate
    schedule) count batches. A batch makes one weight version; in single copy, where the server sees
    each write, one per optimizer step."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch. From the second optimizer step of a batch on, the ratio differs from
    1 with ratio_base proximal too, so the clip range has an effect."""

    # Optimizer
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw_8bit"
    """adamw (fp32 states), adamw_8bit (bitsandbytes; on a CPU the default falls back to adamw) or
    adafactor."""
    master_weights: Literal["fp32", "kahan", "stochastic"] = "fp32"
    """How half-precision weights keep small updates. fp32: a float32 copy (4 bytes a parameter).
    kahan: the rounding error, in half precision (2 bytes). stochastic: random rounding (0 bytes,
    bfloat16 only)."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype for accumulating gradients of half-precision weights: 4 or 2 bytes a parameter.
    bfloat16 loses small parts of a sum over many packed rows; use it for models that fit in no
    other way."""
    optimizer_offload: bool = False
    """Keep master weights and optimizer state in host memory; the step streams them through the
    GPU."""
    lr: float = Field(1e-5, ge=0)
    """Learning rate."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up; cosine and linear go down to lr_min at training_steps."""
    lr_min: float = Field(0.0, ge=0)
    """Final learning rate of cosine and linear."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of all trained parameters, including norms and biases."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of AdamW's two moments. Its eps is fixed at 1e-8."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the gradient to this norm; 0: no clipping."""
    adafactor_scale_parameter: bool = False
    """Adafactor: scale the learning rate by the parameter's root mean square."""
    adafactor_relative_step: bool = False
    """Adafactor: use its own time-dependent step size instead of lr."""

    # LoRA
    lora_r: int = Field(16, ge=1)
    """LoRA rank."""
    lora_alpha: int = Field(32, ge=1)
    """LoRA scaling factor."""
    lora_dropout: float = Field(0.05, ge=0, lt=1)
    """Accepted but not applied: the importance ratio would compare two different dropout masks."""
    lora_target_modules: Words | None = None
    """Modules that get an adapter (default: q_proj v_proj); all-linear for every linear layer but
    the head."""
    lora_layer_indices: LayerIndices | None = None
    """Layers that get an adapter (such as 20-31); default: all that match."""
    lora_use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_r) instead of lora_alpha / lora_r, so that high ranks learn
    as fast (rsLoRA)."""
    lora_use_dora: bool = False
    """Refused: vLLM does not serve DoRA."""
    lora_modules_to_save: Words | None = None
    """Refused: vLLM does not serve adapters that contain whole layers (embeddings, head)."""
    lora_adapter_path: str | None = None
    """Start from the adapter in this folder, in peft's format, instead of a new one. Rank, alpha,
    scaling, modules and layers come from the adapter."""
    lora_merged_export: bool = False
    """At the end write final_model/ as a whole model, the base with the adapter added, and the
    adapter beside it as final_adapter/. Exact in float32; in half precision each sum is rounded."""

    # vLLM
    vllm_port: int = Field(9001, ge=1, le=65535)
    """Port of the inference server on this machine."""
    vllm_host: str = "127.0.0.1"
    """Host of the inference server; another machine only if a supervisor starts the server
    there."""
    vllm_urls: Words | None = None
    """Inference servers that get the weights, if there are several (broadcast) or one is on another
    machine; default: the one at vllm_port."""
    vllm_config_path: str | None = None
    """Path of the server's vllm_bridge_config.json. Default: found through VLLM_BRIDGE_CONFIG_PATH,
    LOGDIR or the run directory."""
    gpu_memory_utilization: float = Field(0.45, gt=0, le=1)
    """Share of the GPU's memory for a vLLM that the trainer starts."""
    vllm_gpu: int | None = Field(None, ge=0)
    """GPU of a vLLM that the trainer starts; default: the trainer's."""
    max_model_len: int = Field(4096, ge=2)
    """Longest context of the server, in tokens."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Dtype of the weights; auto uses the server's."""
    vllm_restart_interval: int = Field(3, ge=1)
    """Restart or reload the server every N steps (modes none and lora_restart)."""
    engine_reload: Literal["in_place", "restart"] = "in_place"
    """How the server gets new weights in mode none. in_place: it loads them while it runs. restart:
    it restarts with them; also used when in_place is impossible (quantized weights, unknown
    layers)."""
    in_flight: Literal["keep", "wait", "recompute"] = "keep"
    """Policy for completions in flight when new weights arrive. keep: they continue with the new
    weights, and their policy lag counts from the oldest token. wait: they first finish with the old
    weights, for at most in_flight_timeout. recompute: they restart. For modes that pause the server
    (shared_vllm, broadcast, none)."""
    in_flight_timeout: float = Field(30.0, gt=0)
    """Seconds that in_flight wait waits; the remaining completions are kept."""
    engine_timeout: float = Field(600.0, gt=0)
    """Seconds to wait for the inference server and its manifest at the start."""
    single_copy: bool = False
    """One copy of the weights, in the server's memory. shared_vllm always has this. With lora_only
    the frozen base model is shared, and the trainer, on the server's GPU, needs memory only for the
    adapter."""
    use_shared_memory: bool = False
    """Use shared_vllm as a broadcast to a server on other GPUs."""

    # Atropos API
    atropos_url: str = Field("http://localhost:8000", pattern=r"^https?://[^/]+")
    """URL of run-api."""
    api_timeout: float = Field(300.0, gt=0)
    """Seconds that run-api may be unreachable before the trainer gives up."""
    rollouts: str | None = Field(None, min_length=1)
    """Train on the rollouts in this file until it ends, without run-api and without a server (JSON
    lines: batches or groups in run-api's format). The mode then only decides between adapters
    (lora_only) and the whole model."""
    record_rollouts: str | None = Field(None, min_length=1)
    """Append every trained batch to this file, for --rollouts; in a run directory a relative path
    starts there."""

    # Stop conditions
    max_time: Duration | None = None
    """End the run successfully after this training time, restarts included, as 90s, 30m, 2h or
    1d12h."""
    stop_reward: float | None = None
    """End the run successfully once the mean reward of the last stop_window steps is at least
    this."""
    stop_window: int = Field(10, ge=1)
    """Steps over which stop_reward takes the mean."""
    stop_on_mismatch: bool = False
    """Fail when the alignment verdict is mismatch, instead of training on."""

    # Trackers
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str | None = None
    """Project name in Weights & Biases."""
    wandb_group: str | None = None
    """Group name in Weights & Biases."""
    use_tensorboard: bool = False
    """Also write TensorBoard event files."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard files. Default: tensorboard/ beside save_path."""

    # Distributed
    trainer_rank: int = Field(0, ge=0)
    """Rank of this trainer."""
    world_size: int = Field(1, ge=1)
    """Kept for example_trainer; must be 1. `trainer.gpus` or `python -m trainer_core.ranks.launch
    N` starts several ranks."""
    init_method: str = Field("env://", pattern=r"^(env://|tcp://\[?[A-Za-z0-9.:_-]+\]?:\d{1,5})$")
    """Meeting point of the broadcast group: tcp://HOST:PORT of this machine, or env:// for
    MASTER_ADDR and MASTER_PORT; default: loopback and a free port."""
    num_inference_nodes: int = Field(0, ge=0)
    """Inference servers that a broadcast must reach; a different number of vllm_urls is an error.
    0, or NUM_INFERENCE_NODES unset: any number."""
    broadcast_timeout: float = Field(60.0, gt=0)
    """Timeout in seconds of a broadcast, and of forming its group, before the trainer gives up and
    retries."""
    overlap_publish: bool = False
    """Broadcast while the next step is computed, until weights change again; meanwhile servers
    generate with the previous version. For a slow link, large weights or in_flight = wait."""

    # Device and speed
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (cuda if there is one), cpu, cuda or cuda:N."""
    pack_tokens: int | None = Field(None, ge=2)
    """Tokens of one forward pass; sequences are packed up to it. Default: batch_size x seq_len, on
    a CPU at most 2048. Loss and gradient do not depend on it."""
    context_parallel: int = Field(1, ge=1)
    """Number of neighbouring ranks that compute each row together, each a part of its tokens: for
    rows too long for one GPU (more than about 32,000 tokens). Must divide the number of ranks and
    of attention heads."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass (non-reentrant): about a third slower, far less
    memory. auto: on if those of one forward pass do not fit into the free GPU memory; off on a CPU.
    """
    activation_offload: bool = False
    """Keep the tensors saved by gradient checkpointing, a hidden state per layer, in host memory;
    needs a GPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the transformer layers (torch.compile): some seconds at the first step, a fifth less
    in each. auto: on with CUDA for models from 100 million parameters."""
    attention_kernel: AttentionKernel = "auto"
    """auto uses FlashAttention 4 (`pip install flash-attn-4`) if the GPU can run it and a test at
    the start proves it right for the model's heads; else FlashAttention 2, which is part of torch.
    """
    head_dtype: Literal["model", "float32"] = "model"
    """Dtype of the logits. float32: the head's products are not rounded to half precision, which
    costs a little time and memory; the server does the same with --hf-overrides '{"head_dtype":
    "float32"}'."""
    torch_threads: int | None = Field(None, ge=1)
    """CPU threads. On a CPU, a model under 50 million parameters trains that many rows in parallel,
    each on one thread. Default: the number of cores, or OMP_NUM_THREADS."""

    # Checkpoints
    save_path: str = Field("trained_model_checkpoints", min_length=1)
    """Folder for step_N/ (adapters: adapter_step_N/) and final_model/; in a run directory the
    default is its checkpoints/."""
    resume: str = Field("never", min_length=1)
    """never, auto (newest complete checkpoint in save_path) or the path of a checkpoint; in a run
    directory the default is auto."""
    keep_checkpoints: int = Field(0, ge=0)
    """Keep only the newest N step_N/; 0: keep all."""

    # Alignment
    probe_interval: int = Field(1, ge=0)
    """Every N steps the server decodes a few tokens and the trainer compares logprobs at the same
    weights; 0: never."""
    probe_prompts: int = Field(2, ge=1, le=16)
    """Prompts of a probe; each is decoded twice, fresh and on the cached prefix."""
    probe_tokens: int = Field(8, ge=8, le=256)
    """Tokens decoded for each prompt."""
    alignment_ok: float | None = Field(None, gt=0)
    """Verdict ok up to this mean |difference| of logprobs, in nats. Default: in half precision 0.1,
    or twice the first probe's value if that is larger; in float32 1e-3."""
    alignment_mismatch: float | None = Field(None, gt=0)
    """Verdict mismatch from this mean |difference| of logprobs on, in nats; drift in between.
    Default: 0.5 in half precision, 0.05 in float32."""

    # Debug and benchmark
    debug_loading: bool = False
    """Print for every parameter where it is mapped."""
    benchmark: bool = False
    """Print timing with every step and a summary at the end (in a run directory the summary is
    always printed)."""
    rollout_samples: int = Field(8, ge=0, le=64)
    """Completions of each step that are written to the telemetry as text, whole groups first."""
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
    """Additional flags for the same field."""

    def __new__(cls, **values: Any) -> Self:
        """Refuse unknown names with a `UsageError` that suggests the right one. pydantic's own
        validation does not call this."""
        # pydantic's error for an unknown name would not suggest the right one.
        if unknown := values.keys() - cls.model_fields.keys():
            raise UsageError("\n".join(map(no_such_setting, sorted(unknown))))
        return super().__new__(cls)

    @model_validator(mode="before")
    @classmethod
    def _from_adapter(cls, values: Any) -> Any:
        """Fill unset fields from the adapter that the run starts from."""
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
        """Adapters are trained and the model is frozen; checkpoints hold adapters."""
        return self.weight_bridge_mode in ("lora_only", "lora_restart")

    @property
    def shares_memory(self) -> bool:
        """The trainer computes with the server's own memory: the single copy of the model, or of
        the adapters' base."""
        return self.mode == "shared_vllm" or self.single_copy

    @property
    def engine_urls(self) -> list[str]:
        """Base URLs of the servers that get the weights."""
        return [
            url.rstrip("/")
            for url in self.vllm_urls or [f"http://{self.vllm_host}:{self.vllm_port}"]
        ]

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step: the batch size registered with run-api."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_pass(self) -> int:
        """Upper bound of tokens in one forward pass (a longer sequence still passes, alone)."""
        return self.pack_tokens or self.batch_size * self.seq_len

    def in_run_dir(self, run_dir: RunDir | None) -> TrainingConfig:
        """Return a copy with the defaults of a supervised run: its checkpoint folder, and resume =
        auto."""
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
        """Return the command line of this configuration: one flag for every field that was set."""
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
    problems = []
    if config.single_copy and config.use_shared_memory:
        problems.append(
            "--single-copy and --use-shared-memory exclude each other: one copy, or a "
            "broadcast to a second"
        )
    if config.overlap_publish and config.mode != "broadcast":
        problems.append(
            "--overlap-publish is for a broadcast (--use-shared-memory): leave it out in "
            "other modes"
        )
    if config.use_shared_memory and config.weight_bridge_mode != "shared_vllm":
        problems.append(
            f"--use-shared-memory needs --weight-bridge-mode shared_vllm, not "
            f"{config.weight_bridge_mode}"
        )
    if config.single_copy and config.weight_bridge_mode not in ("shared_vllm", "lora_only"):
        why = ", whose server loses its memory at each restart" if config.trains_adapters else ""
        problems.append(
            f"--single-copy needs --weight-bridge-mode shared_vllm or lora_only, not "
            f"{config.weight_bridge_mode}{why}"
        )
    # run-api forms batches of whole groups.
    if config.group_size and config.sequences_per_step % config.group_size:
        problems.append(
            f"--batch-size {config.batch_size} x --gradient-accumulation-steps "
            f"{config.gradient_accumulation_steps} = "
            f"{config.sequences_per_step} sequences is not a multiple of --group-size "
            f"{config.group_size}: run-api "
            "would never fill a batch"
        )
    if config.loss is not None and not re.fullmatch(
        r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", config.loss
    ):
        problems.append(f"--loss {config.loss!r} is not a function: write package.module:function")
    problems += _objective_contradictions(config)
    problems += _adapter_contradictions(config)
    if config.trains_adapters and config.train_layer_indices is not None:
        problems.append(
            f"--train-layer-indices is for training the model itself; with --weight-bridge-mode "
            f"{config.weight_bridge_mode} use --lora-layer-indices"
        )
    if config.weight_bridge_mode == "lora_restart" and config.vllm_urls:
        problems.append(
            "--vllm-urls does nothing for lora_restart, which restarts the one server at "
            "--vllm-port"
        )
    if config.shares_memory and config.vllm_urls:
        problems.append(
            "--vllm-urls does nothing in single copy: the server is the one that the manifest names"
        )
    if config.trains_adapters and config.in_flight != "keep":
        problems.append(
            f"--in-flight {config.in_flight} does nothing with adapters, which are swapped "
            f"without a pause"
        )
    problems += _rollout_contradictions(config)
    if config.engine_reload == "restart" and config.vllm_urls:
        problems.append(
            "--engine-reload restart restarts the one server at --vllm-port: leave out --vllm-urls"
        )
    if config.engine_reload != "in_place" and config.weight_bridge_mode != "none":
        problems.append(
            f"--engine-reload does nothing with --weight-bridge-mode {config.weight_bridge_mode}"
        )
    if config.activation_offload and config.gradient_checkpointing == "off":
        problems.append(
            "--activation-offload needs gradient checkpointing: leave out "
            "--gradient-checkpointing off"
        )
    if config.gradient_dtype == "bfloat16" and config.dtype == "float16":
        problems.append(
            "--gradient-dtype bfloat16 goes with --dtype bfloat16: gradients of float16 are scaled"
        )
    if config.world_size > 1:
        reason = (
            f"--world-size {config.world_size}: torchrun sets the number of ranks, so leave it at 1"
        )
        problems.append(
            f"{reason}; set trainer.gpus in a profile, or start python -m "
            f"trainer_core.ranks.launch N"
        )
    if config.trainer_rank >= config.world_size:
        problems.append(
            f"--trainer-rank {config.trainer_rank} must be below --world-size {config.world_size}"
        )
    if (
        config.alignment_ok
        and config.alignment_mismatch
        and config.alignment_ok > config.alignment_mismatch
    ):
        problems.append("--alignment-ok must not be above --alignment-mismatch")
    return problems


def sharding_contradictions(config: TrainingConfig, ranks: int) -> list[str]:
    """Return the settings that conflict with a model sharded over `ranks` ranks."""
    context = config.context_parallel
    if context > 1 and config.shares_memory:
        return [
            f"--context-parallel {context} shares rows among ranks, and in single copy all "
            f"ranks compute the same rows "
            "already: leave it out, or use mode broadcast"
        ]
    if ranks % context:
        return [
            f"--context-parallel {context} shares each row among that many ranks, and the "
            f"trainer has {ranks}: give it "
            f"a multiple of {context} (trainer.gpus or trainer.processes), or leave it out"
        ]
    if ranks > 1 and config.optimizer == "adafactor" and not config.trains_adapters:
        return [
            f"--optimizer adafactor needs whole matrices for its row and column means, and "
            f"each of {ranks} ranks has "
            "only some rows: use adamw_8bit or adamw, whose state is sharded over the ranks"
        ]
    return []


def _rollout_contradictions(config: TrainingConfig) -> list[str]:
    problems = []
    lag, every = config.max_policy_lag, config.vllm_restart_interval
    # In these modes the server keeps old weights for several steps, so its lag grows to `every` -
    # 1.
    reloads = config.weight_bridge_mode in ("none", "lora_restart") and config.rollouts is None
    if lag is not None and lag < every - 1 and reloads:
        problems.append(
            f"--max-policy-lag {lag} leaves out all rollouts before the server gets new "
            f"weights: it has them every "
            f"{every} steps; set --vllm-restart-interval {lag + 1} or lower, or "
            f"--max-policy-lag {every - 1} or more"
        )
    # In single copy the server sees each optimizer step, so one batch is several versions of lag.
    versions = config.minibatches * config.epochs
    if lag is not None and lag < versions > 1 and config.mode == "shared_vllm":
        problems.append(
            f"--max-policy-lag {lag} leaves out rollouts that started one batch earlier: in "
            f"single copy each of the "
            f"{versions} optimizer steps of a batch is a weight version; set it to "
            f"{versions} or more"
        )
    if config.rollouts is not None and config.weight_bridge_mode in ("shared_vllm", "lora_restart"):
        problems.append(
            f"--rollouts trains without a server, and --weight-bridge-mode "
            f"{config.weight_bridge_mode} needs one: "
            "leave it out, or lora_only to train adapters"
        )
    if config.routing_replay and config.rollouts is not None:
        problems.append(
            "--routing-replay needs the server's expert choices, and --rollouts trains "
            "without a server: leave one of "
            "them out"
        )
    if config.routing_replay and config.weight_bridge_mode == "lora_restart":
        problems.append(
            "--routing-replay needs the server's expert choices, which are lost at the restarts of "
            "--weight-bridge-mode lora_restart: use lora_only"
        )
    if config.routing_replay and config.engine_reload == "restart":
        problems.append(
            "--routing-replay needs the server's expert choices, which are lost at a "
            "restart: leave out "
            "--engine-reload restart"
        )
    if config.rollouts is not None and config.record_rollouts is not None:
        problems.append(
            "--record-rollouts does nothing with --rollouts: they are in a file already"
        )
    return problems


_ADAPTER_FIELDS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "use_rslora": "lora_use_rslora",
    "target_modules": "lora_target_modules",
    "layers_to_transform": "lora_layer_indices",
}
"""Keys of peft's adapter_config.json -> our fields."""
_UNSERVED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole layers (modules_to_save)",
    "lora_bias": "biases of its own",
    "rank_pattern": "several ranks (rank_pattern)",
    "alpha_pattern": "several scales (alpha_pattern)",
    "target_parameters": "matrices of single parameters (target_parameters)",
}
"""Keys of adapter features that vLLM does not serve -> their names in errors."""


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of the adapter in `folder`, as fields of `TrainingConfig`.

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


def _adapter_contradictions(config: TrainingConfig) -> list[str]:
    problems = []
    if not config.trains_adapters:
        return [
            f"{flag(name)} is for adapters: use --weight-bridge-mode lora_only or lora_restart"
            for name in ("lora_adapter_path", "lora_merged_export")
            if getattr(config, name)
        ]
    if config.lora_use_dora:
        problems.append(
            "--lora-use-dora: vLLM does not serve DoRA; leave it out (--lora-use-rslora is served)"
        )
    if config.lora_modules_to_save:
        problems.append(
            f"--lora-modules-to-save {' '.join(config.lora_modules_to_save)}: vLLM does not "
            f"serve adapters with whole "
            "layers; leave it out, or train the whole model (--weight-bridge-mode shared_vllm)"
        )
    if config.lora_adapter_path:
        theirs = adapter_settings(Path(config.lora_adapter_path))
        for name in _ADAPTER_FIELDS.values():
            # An unset field already has the adapter's value, so only an explicit setting can
            # differ.
            ours, wanted = (
                getattr(config, name),
                theirs.get(name, type(config).model_fields[name].default),
            )
            if (sorted(ours) if isinstance(ours, list) else ours) != wanted:
                problems.append(
                    f"{flag(name)} {ours}: the adapter in {config.lora_adapter_path} has "
                    f"{wanted}; leave "
                    "the flag out to continue with that adapter"
                )
    return problems


def _objective_contradictions(config: TrainingConfig) -> list[str]:
    problems = []
    if config.ratio_base == "rollout":
        problems += [
            f"{flag(name)} needs --ratio-base proximal: with --ratio-base rollout the ratio "
            f"itself is the correction"
            for name in ("tis_cap", "tis_mask", "tis_mask_low", "tis_mask_high")
            if getattr(config, name) != type(config).model_fields[name].default
        ]
    if config.minibatches > config.sequences_per_step:
        problems.append(
            f"--minibatches {config.minibatches} is more than the "
            f"{config.sequences_per_step} sequences of a batch "
            "(--batch-size x --gradient-accumulation-steps)"
        )
    if config.tis_mask_low > config.tis_mask_high:
        problems.append("--tis-mask-low must not be above --tis-mask-high")
    if 0 < config.dual_clip <= 1:
        problems.append(
            f"--dual-clip {config.dual_clip:g} must be above 1 (3 is usual), or 0 for no bound"
        )
    # Only an explicit value conflicts: the default is harmless with cispo.
    if "dual_clip" in config.model_fields_set and config.dual_clip and config.objective == "cispo":
        problems.append(
            "--dual-clip does nothing with --objective cispo, which clips the weight on both "
            "sides anyway"
        )
    if config.max_completion_tokens is None and (config.overlong_buffer or config.overlong_mask):
        which = "overlong_mask" if config.overlong_mask else "overlong_buffer"
        problems.append(
            f"{flag(which)} needs --max-completion-tokens, the limit for overlong completions"
        )
    if (
        config.overlong_buffer
        and config.max_completion_tokens
        and config.overlong_buffer > config.max_completion_tokens
    ):
        problems.append("--overlong-buffer must not be above --max-completion-tokens")
    if config.lr_min > config.lr:
        problems.append(f"--lr-min {config.lr_min} must not be above --lr {config.lr}")
    if config.master_weights == "stochastic" and config.dtype == "float16":
        problems.append(
            "--master-weights stochastic needs --dtype bfloat16; for float16 use fp32 or kahan"
        )
    return problems


def validate(values: dict[str, Any]) -> tuple[TrainingConfig | None, list[str]]:
    """Validate `values`; return the configuration, or every problem with fields and
    combinations."""
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
    """Return the error message for an unknown name."""
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
