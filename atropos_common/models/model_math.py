"""Arithmetic and memory of a model from its config.json, and the architectures that the trainer
refuses. Torch-free and pure.

model = Dimensions.of(config, head_norms=True)
step_flops(model, [512, 480], predicted=700)      # operations of forward and backward
activation_bytes(model, 16384, width=2, on_gpu=True).total
optimizer_bytes([(2048, 2048), (2048,)], "adamw_8bit")
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Shape = Sequence[int]

LARGE_MODEL = 100_000_000
"""Parameters from which the trainer compiles a model on a GPU."""
LOGITS_AT_ONCE = {True: 1 << 29, False: 1 << 26}
"""Logits that the trainer holds at a time, by whether it runs on a GPU, where a fast head product
needs more rows."""
# A gradient is float32 unless gradient_dtype changes it.
GRADIENT_BYTES = 4
COMPILED = 0.6
"""Activation memory of compiled layers over that of eager ones, on an H200."""
UNFILLED = 0.08
"""Share of a GPU that activations leave to torch's allocator."""
# An optimizer steps this many parameters at a time when no float32 copy stays; a larger tensor
# counts alone.
PART_PARAMETERS = 1 << 26
MASTER_BYTES = {"fp32": 4, "kahan": 2, "stochastic": 0}
"""Bytes per half-precision parameter: a float32 copy, the rounding error, or nothing."""
STATE_BYTES = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0}
"""Approximate bytes per parameter; `optimizer_bytes` is exact."""
# bitsandbytes keeps smaller tensors in float32; one float32 scale per block and moment.
BITS8_SMALLEST, BITS8_BLOCK = 4096, 256
# NVIDIA's data sheets, "BFLOAT16 Tensor Core". For cards of 2022 and later they print the figure
# with sparsity, which is twice this one. A name without PCIe or NVL is the SXM card.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Part of the device name -> dense bfloat16 FLOP/s."""
# Measured on an H200.
REACHED_FLOPS = 790e12
"""Bfloat16 FLOP/s that large matrix products reach on the cards of `PEAK_FLOPS["H100"]`."""
GPU_MEMORY = {
    "B200": 183_359,
    "H200": 143_771,
    "H100": 81_559,
    "H100-80GB": 81_559,
    "H100-NVL": 95_830,
    "H20": 97_871,
    "GH200": 97_871,
    "A100": 81_920,
    "A100-80GB": 81_920,
    "A100-40GB": 40_960,
    "L40S": 46_068,
    "L40": 46_068,
    "L4": 23_034,
    "A40": 46_068,
    "A10": 23_028,
    "A10G": 23_028,
    "A6000": 49_140,
    "V100": 32_768,
    "V100-32GB": 32_768,
    "V100-16GB": 16_384,
    "T4": 15_360,
    "RTX-PRO-6000": 97_887,
    "RTX-6000-ADA": 49_140,
    "RTX-5090": 32_607,
    "RTX-4090": 24_564,
    "RTX-3090": 24_576,
}
"""MiB as the driver reports it."""
# Frequencies that depend on the longest position of a pass, in a packed row a neighbour's: logprobs
# are off by up to 2.6 nats. vLLM fixes them at its start.
CHANGING_ROTARY = ("dynamic", "longrope")


_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_STATE = ("mamba_", "ssm_", "state_size", "conv_L_cache", "rwkv_")
"""Prefixes of config fields of models whose layers carry a state from token to token."""
_UNLIKE = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "attention_chunk_size",
    "sliding_window",
    "residual_multiplier",
)
"""Fields of config.json that our forward pass may not implement."""
OWN_ATTENTION = (
    "its attention in transformers takes no packed rows",
    "use another model, such as Llama or Qwen3",
)
_BIASED = (
    "its positions are biases of the scores, which packed rows do not have",
    OWN_ATTENTION[1],
)
_REFUSED = {
    "llama4": (
        "its layers attend within chunks",
        "use another model, such as Qwen3-MoE or Mixtral",
    ),
    **dict.fromkeys(
        ("codegen", "falcon", "gpt_neo", "gptj", "nemotron", "stablelm"), OWN_ATTENTION
    ),
    **dict.fromkeys(("bloom", "mpt"), _BIASED),
}
"""model_type -> reason and fix."""


def why_refused(
    config: Mapping[str, Any], *, frozen: bool = False, shared: bool = False
) -> tuple[str, str] | None:
    """Reason and fix if the trainer refuses a model. Untested architectures are verified when the
    trainer starts.

    Args:
        frozen: adapters train over fixed weights.
        shared: the trainer uses the engine's memory.
    """
    name = (config.get("architectures") or ["this model"])[0]
    # Multimodal families name their language model `..._text`.
    kind = str(config.get("model_type") or "").removesuffix("_text")
    if kind in _REFUSED:
        reason, fix = _REFUSED[kind]
        return f"{name} does not train here: {reason}", fix
    if beside := next(
        (part for part in ("vision", "audio", "encoder") if config.get(f"{part}_config")), None
    ):
        return (
            f"{name} has {beside} layers beside its language model, and the trainer trains "
            f"models of text alone",
            "use a model of text alone, or the language model saved by itself",
        )
    if config.get("is_encoder_decoder"):
        return f"{name} is an encoder and a decoder", "use a model that only decodes"
    if (rotary := _rotary(config)) in CHANGING_ROTARY:
        return (
            f"its rotary embeddings ({rotary}) change with the longest sequence of a packed row",
            "use a model with another rope_type, such as llama3, yarn or linear",
        )
    return _why_not_base(config, frozen=frozen, shared=shared)


_READ = ("fp8", "mxfp4", "compressed-tensors", "bitsandbytes")
"""Methods that transformers converts back to plain weights."""
_SCALE_BITS = 16


def method_of(config: Mapping[str, Any]) -> str | None:
    """Quantization method; None for plain weights."""
    found = config.get("quantization_config")
    return str(found.get("quant_method") or "unnamed") if isinstance(found, Mapping) else None


def bits_of(config: Mapping[str, Any]) -> float | None:
    """Bits per quantized weight, scales included."""
    method = method_of(config)
    if method is None:
        return None
    given = config["quantization_config"]
    if method == "compressed-tensors":
        groups = [
            group.get("weights") or {} for group in (given.get("config_groups") or {}).values()
        ]
        weights = groups[0] if groups else {}
        return _with_scales(weights.get("num_bits") or 8, weights.get("group_size"))
    if method == "bitsandbytes":
        return _with_scales(4, 32) if given.get("load_in_4bit") else 8.0
    if method == "mxfp4":
        return 4.25
    return _with_scales(given.get("bits") or given.get("w_bit") or 8, given.get("group_size"))


def _with_scales(bits: float, group: Any) -> float:
    return bits + (_SCALE_BITS / group if isinstance(group, int) and group > 0 else 0)


def _why_not_base(
    config: Mapping[str, Any], *, frozen: bool, shared: bool
) -> tuple[str, str] | None:
    # Adapters train over a quantized base: the engine serves it as it is, and the trainer uses
    # dequantized weights.
    method = method_of(config)
    if method is None:
        return None
    other = "use the checkpoint that it was made from"
    if not frozen:
        reason = (
            f"its weights are quantized ({method}), and training them would need each step to "
            f"quantize them again"
        )
        return reason, f"{other}, or train adapters over it: mode = lora_only"
    if shared:
        reason = (
            f"its weights are quantized ({method}): the engine holds nothing to compute a "
            f"gradient with"
        )
        return reason, f"{other}, or set trainer.single_copy = false"
    if method not in _READ:
        return (
            f"its weights are quantized ({method}), which transformers cannot make plain "
            f"weights of",
            other,
        )
    return None


# Routers that accept the engine's choice; verified at every start.
_REPLAYED = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss")


def why_not_replayed(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Reason and fix if `routing_replay` does not work."""
    name = (config.get("architectures") or ["this model"])[0]
    if not _experts(config):
        return f"{name} has no experts to choose among", "leave trainer.routing_replay out"
    if str(config.get("model_type") or "").removesuffix("_text") not in _REPLAYED:
        return (
            f"the routers of {name} are not among those that can take the engine's choice: "
            f"{', '.join(_REPLAYED)}",
            "leave trainer.routing_replay out",
        )
    return None


def carries_state(config: Mapping[str, Any]) -> bool:
    """True if layers carry a state from token to token. It would cross the end of a packed
    sequence, so sequences are computed one by one."""
    # Newer configs list the kind of each layer; older ones have fields of the state.
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return any(kind not in _ATTENTION for kind in kinds)
    return any(name.startswith(_STATE) for name in config)


def why_not_spread(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Reason and fix if the model does not train on several ranks."""
    if carries_state(config):
        return (
            "its layers carry a state from token to token, so sequences are computed one by one, "
            "and each rank would have another number of them",
            "train it on one GPU",
        )
    return None


def why_not_shared(config: Mapping[str, Any], context: int) -> tuple[str, str] | None:
    """Reason and fix if `context` ranks cannot share a row."""
    heads = _heads(config)
    if heads % context:
        most = max(n for n in range(1, context) if heads % n == 0)
        return (
            f"context_parallel = {context} shares {heads} attention heads among as many "
            f"ranks: they do not divide",
            f"set trainer.context_parallel to {most}, or to another divisor of {heads}",
        )
    return None


def suspects(config: Mapping[str, Any]) -> list[str]:
    """Likely causes of a difference between our forward pass and the model's."""
    found = [
        f"{name} = {config[name]}"
        for name in _UNLIKE
        if config.get(name) not in (None, False, 0, 1)
    ]
    kinds = {kind for kind in config.get("layer_types") or () if kind not in _ATTENTION[:2]}
    if carries_state(config):
        kinds = kinds or {"state-space"}
    found += [f"layers of kind {kind}" for kind in sorted(kinds)]
    rotary = _rotary(config)
    return found + ([f"rope_type {rotary}"] if rotary not in (None, "default", "llama3") else [])


def _rotary(config: Mapping[str, Any]) -> str | None:
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer = [value for value in settings.values() if isinstance(value, Mapping)] or [settings]
    kinds = [kind for one in by_layer if (kind := one.get("rope_type") or one.get("type"))]
    # Some models have two types, such as Gemma 3 for local and global layers.
    return max(kinds, key=lambda kind: kind in CHANGING_ROTARY, default=None)


HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a decoder. A sparse layer has many MLPs (experts), few per token."""

    layers: int
    hidden: int
    inner: int
    """MLP width of a dense layer."""
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    head_norms: bool = False
    """Queries and keys have a norm (Qwen3)."""
    experts: int = 0
    """In a sparse layer; 0: dense model."""
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    """Width of the expert that all tokens share."""
    dense_layers: int = 0
    """Dense layers in a mixture of experts."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, head_norms: bool = False) -> Dimensions:
        """Read config.json; GPT-2's names are accepted.

        Raises:
            KeyError: a field is missing.
        """
        hidden = int(config.get("hidden_size") or config["n_embd"])
        heads = _heads(config)
        return cls(
            layers=_layers(config),
            hidden=hidden,
            inner=int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            head_norms=head_norms,
            **_experts(config),
        )

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def chosen_inner(self) -> int:
        return self.experts_per_token * self.expert_inner + self.shared_inner

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of keys, and of values."""
        return self.kv_heads * self.head_size

    @property
    def layer(self) -> float:
        """Weights per token and layer, of experts only its own: a mean over layers."""
        # Projections of queries and output, of keys and values.
        attention = 2 * self.hidden * (self.queries + self.keys)
        sparse = self.sparse_layers / self.layers
        # Gate, up and down matrix of each chosen expert, and the router.
        chosen = self.hidden * (3 * self.chosen_inner + self.experts)
        return attention + (1 - sparse) * 3 * self.hidden * self.inner + sparse * chosen


def _experts(config: Mapping[str, Any]) -> dict[str, int]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(config[name]) for name in names if config.get(name)), 0)
    # A mixture with one expert computes like a dense model.
    if experts < 2:
        return {}
    inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = config.get("shared_expert_intermediate_size") or inner * (
        config.get("n_shared_experts") or 0
    )
    return {
        "experts": experts,
        "experts_per_token": int(config["num_experts_per_tok"]),
        "expert_inner": inner,
        "shared_inner": int(shared),
        "dense_layers": sum(map(partial(_is_dense, config), range(_layers(config)))),
    }


def sparse_layers(config: Mapping[str, Any]) -> list[int]:
    return [layer for layer in range(_layers(config)) if not _is_dense(config, layer)]


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    # Qwen's, GLM's and DeepSeek's fields.
    if kinds := config.get("mlp_layer_types"):
        return bool(kinds[layer] == "dense")
    # Qwen's rule: every `decoder_sparse_step`-th layer has experts.
    skipped = (layer + 1) % int(config.get("decoder_sparse_step") or 1) != 0
    return (
        skipped
        or layer in (config.get("mlp_only_layers") or ())
        or layer < (config.get("first_k_dense_replace") or 0)
    )


def _heads(config: Mapping[str, Any]) -> int:
    # Models without attention (Mamba) have their own heads, or none.
    return int(next((config[name] for name in HEADS if config.get(name)), 1))


def _layers(config: Mapping[str, Any]) -> int:
    return int(
        next((config[name] for name in LAYERS if config.get(name)), 0)
        or config["num_hidden_layers"]
    )


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters of a layer, in float32."""

    inputs: int
    """Elements of all inputs for a token."""
    widest: int
    """Widest input or output."""

    @classmethod
    def of(cls, trained: Mapping[str, Shape], layers: int) -> Adapters | None:
        """None if other tensors than `lora_A` and `lora_B` train."""
        if not trained or not all(".lora_" in name for name in trained):
            return None
        inputs = sum(shape[-1] for name, shape in trained.items() if ".lora_A" in name)
        return cls(inputs // layers, max(max(shape) for shape in trained.values()))


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward pass keeps for its backward pass."""

    tokens: int
    layers: int
    per_token_and_layer: int
    per_token: int
    """Outside of the layers."""
    head: int
    """One chunk's logits, and the largest gradient."""
    recomputed: int = 0
    """Layers that keep only their input."""
    per_input: int = 0
    again: int = 0
    """Bytes per token of a recomputed layer."""
    offloaded: int = 0

    @property
    def total(self) -> int:
        per_token = (
            self.layers * self.per_token_and_layer
            + self.recomputed * self.per_input
            + self.per_token
        )
        return self.tokens * per_token - self.offloaded + max(self.head, self._again)

    @property
    def _again(self) -> int:
        # Recomputation starts after the head and the layers that kept everything.
        return self.tokens * (self.again - self.layers * self.per_token_and_layer)

    @property
    def formula(self) -> str:
        counted = (
            (self.layers, "layers", self.per_token_and_layer),
            (self.recomputed, "inputs of layers", self.per_input),
        )
        parts = [f"{count} {what} x {size:,} B" for count, what, size in counted if count]
        kept = f"{self.tokens:,} tokens x ({' + '.join([*parts, f'{self.per_token:,} B'])})"
        return kept + (
            " + logits + largest gradient" if self.head >= self._again else " + a layer recomputed"
        )


def activation_bytes(
    model: Dimensions,
    tokens: int,
    *,
    width: int,
    on_gpu: bool,
    layers: int | None = None,
    largest: int | None = None,
    compiled: bool = False,
    recomputed: int = 0,
    offloaded: bool = False,
    adapters: Adapters | None = None,
) -> Activations:
    """Estimate the activations of a pass, with the logits of one chunk and the largest gradient.

    Measured on an H200: docs/benchmarks.md, "What plan says".

    Args:
        width: bytes of one weight.
        layers: layers from the lowest trained one up; default: all.
        largest: parameters of the largest trained tensor; default: the head's.
        recomputed: layers with gradient checkpointing.
        offloaded: their inputs go to host memory.
        adapters: only adapters train, whose inputs stay in float32.
    """
    sparse = model.sparse_layers / model.layers
    inner = (1 - sparse) * model.inner + sparse * model.chosen_inner
    copies = sparse * 3 * model.experts_per_token * model.hidden
    # Elements in the weights' dtype, kept per token and layer.
    values = 4 * (model.hidden + model.queries + inner) + copies
    if adapters is not None:
        values -= model.hidden + inner
    # Two norm inputs in float32, the values, the adapters' float32 inputs.
    per_layer = 8 * model.hidden + width * round(values) + 4 * (adapters.inputs if adapters else 0)
    # Float32 input and output of the norms of queries and keys.
    if model.head_norms:
        per_layer += 2 * (4 + width) * model.queries
    if compiled:
        per_layer = round(COMPILED * per_layer)
    # Logits and their gradient; on a CPU the float32 softmax between them too, which a GPU computes
    # in one kernel.
    logits = min(tokens * model.vocab, LOGITS_AT_ONCE[on_gpu]) * (2 * width + (0 if on_gpu else 12))
    largest = model.vocab * model.hidden if largest is None else largest
    # The float32 sum, and for half precision the addend.
    head = logits + largest * (8 if width < 4 else 4)
    reached = model.layers if layers is None else layers
    recomputed = min(recomputed, reached)
    if not recomputed:
        return Activations(tokens, reached, per_layer, 8 * model.hidden, head)
    per_input = width * model.hidden
    # Two inputs stay on the GPU: one in use, one arriving.
    away = tokens * per_input * max(0, recomputed - 2) if offloaded else 0
    # A recomputed layer coexists with its own gradients.
    again = per_layer + width * round(2 * inner + 2 * model.hidden)
    if adapters is not None and adapters.widest >= inner:
        # The backward pass of the MLP comes first, when nothing of the layer is freed: the gradient
        # of an adapter's product is float32, and compiled code makes the gradient of its input
        # before it frees the first.
        again += (8 if compiled else 4) * adapters.widest
    return Activations(
        tokens,
        reached - recomputed,
        per_layer,
        8 * model.hidden,
        head,
        recomputed,
        per_input,
        again,
        away,
    )


def room_for_activations(free: int, total: int) -> int:
    """Bytes of `free` that activations may use."""
    return free - round(UNFILLED * total)


def layers_recomputed(kept: Callable[[int], Activations], layers: int, room: int) -> int:
    """Fewest checkpointed layers whose pass fits into `room`."""
    return next(
        (recomputed for recomputed in range(layers) if kept(recomputed).total <= room), layers
    )


def optimizer_bytes(shapes: Iterable[Shape], optimizer: str) -> int:
    """Float32 except for adamw_8bit."""
    return sum(
        times * _OPTIMIZER_STATE[optimizer](shape)
        for shape, times in Counter(map(tuple, shapes)).items()
    )


def _adamw(shape: Shape) -> int:
    return 8 * math.prod(shape)


def _adamw_8bit(shape: Shape) -> int:
    count = math.prod(shape)
    return (
        2 * (count + 4 * math.ceil(count / BITS8_BLOCK)) if count >= BITS8_SMALLEST else 8 * count
    )


def _adafactor(shape: Shape) -> int:
    # No momentum: a row and a column of second moments for a matrix, all of them for a vector.
    # Adafactor factors the second moments of matrices only.
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])


_OPTIMIZER_STATE = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "adafactor": _adafactor}


def effective_optimizer(optimizer: str, *, chosen: bool, on_gpu: bool) -> str:
    """On a CPU the 8-bit default becomes adamw."""
    return "adamw" if optimizer == "adamw_8bit" and not chosen and not on_gpu else optimizer


def step_flops(
    model: Dimensions,
    lengths: Sequence[int],
    predicted: int,
    *,
    reached: int | None = None,
    trained: int | None = None,
) -> float:
    """Operations of forward and backward; causal attention counts half.

    MFU is these operations over a GPU's peak (Chowdhery et al. 2022, PaLM, appendix B). A weight
    costs two forward, two where a gradient passes through, two where it has one itself.
    Recomputation and adapters do not count.

    Args:
        predicted: tokens with a logprob, which pass the head.
        reached: layers from the lowest trained one up; default: all.
        trained: layer weights with a gradient, if embedding and head have none.
    """
    reached = model.layers if reached is None else reached
    # Forward in all layers, gradients of activations in the reached ones, of weights in the trained
    # ones.
    weights = (model.layers + reached) * model.layer + (
        model.layers * model.layer if trained is None else trained
    )
    attention = sum(2.0 * (model.layers + 2 * reached) * model.queries * n * n for n in lengths)
    head = 2.0 * model.hidden * model.vocab * (2 if trained is not None else 3)
    return 2.0 * weights * sum(lengths) + attention + head * predicted


def step_bytes(
    masters: str, optimizer: str, *, half: bool, narrow: bool, offloaded: bool, largest: int
) -> int:
    """Bytes of an optimizer step beside gradients, masters and states.

    Args:
        half: the trained weights are in half precision.
        narrow: so are their gradients.
        offloaded: masters and states stream from host memory.
        largest: parameters of the largest trained tensor.
    """
    # A tensor is never split, so the largest one sets the least size of a part.
    part = max(PART_PARAMETERS, largest)
    size = 8 * largest if optimizer == "adafactor" else 0  # squares and updates of one tensor
    if half:
        size += 4 * part * (narrow + (masters != "fp32"))
        size += 12 * PART_PARAMETERS if masters == "stochastic" else 0
    if offloaded:
        each = STATE_BYTES[optimizer] + (MASTER_BYTES[masters] if half else 0)
        size += each * (part + 2 * PART_PARAMETERS) + (2 * part if half else 0)
    return size


def pinned_bytes(shapes: Iterable[Shape], widths: Sequence[int]) -> int:
    """Pinned host memory, one tensor per width in bytes; torch rounds up to powers of two."""
    sizes = Counter(math.prod(shape) for shape in shapes)
    # Next power of two.
    return sum(
        times << max(0, size * width - 1).bit_length()
        for size, times in sizes.items()
        for width in widths
    )


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of the data sheet; None for an unknown device."""
    # The longest name first: "H200" contains "H20".
    names = sorted(PEAK_FLOPS, key=len, reverse=True)
    return next((PEAK_FLOPS[name] for name in names if name in device_name), None)


def reached_flops(device_name: str) -> float | None:
    """Return the FLOP/s that matrix products reach; None on cards where this is not measured."""
    return REACHED_FLOPS if peak_flops(device_name) == PEAK_FLOPS["H100"] else None
