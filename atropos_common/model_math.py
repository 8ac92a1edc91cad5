"""What a model's config.json says about arithmetic and memory, and whether the trainer takes it: for trainer and
planner alike. Torch-free and pure.

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

LOGITS_AT_ONCE = {True: 1 << 29, False: 1 << 26}
"""Logits that the trainer holds at a time, on a GPU (True) or not. There they are more (1 GB in half precision), since
the head's product wants many rows."""
GRADIENT_BYTES = 4
"""Of one trained parameter: gradients are collected in float32, unless gradient_dtype says otherwise."""
COMPILED = 0.6
"""What compiled layers keep for the backward pass, as a share of what others do; measured on an H200."""
UNFILLED = 0.08
"""Share of a GPU's memory that activations leave: torch's allocator reserves more than the tensors in it."""
PART_PARAMETERS = 1 << 26
"""Parameters that an optimizer steps at a time where no float32 copy of them stays; a larger tensor alone."""
MASTER_BYTES = {"fp32": 4, "kahan": 2, "stochastic": 0}
"""Of one trained parameter in half precision, between two steps: a float32 copy, or what rounding lost, or nothing."""
STATE_BYTES = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0}
"""About, of one trained parameter; exact in `optimizer_bytes`."""
BITS8_SMALLEST, BITS8_BLOCK = 4096, 256
"""bitsandbytes keeps smaller tensors in float32, and one float32 scale for each block and moment."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bfloat16 by part of the device's name, from the makers' data sheets."""
GPU_MEMORY = {
    "B200": 183_359, "H200": 143_771, "H100": 81_559, "H100-80GB": 81_559, "H100-NVL": 95_830, "H20": 97_871,
    "GH200": 97_871, "A100": 81_920, "A100-80GB": 81_920, "A100-40GB": 40_960, "L40S": 46_068, "L40": 46_068,
    "L4": 23_034, "A40": 46_068, "A10": 23_028, "A10G": 23_028, "A6000": 49_140, "V100": 32_768, "V100-32GB": 32_768,
    "V100-16GB": 16_384, "T4": 15_360, "RTX-PRO-6000": 97_887, "RTX-6000-ADA": 49_140, "RTX-5090": 32_607,
    "RTX-4090": 24_564, "RTX-3090": 24_576,
}  # fmt: skip
"""MiB that the driver shows of each device, which is a little less or more than its name says."""
CHANGING_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the longest position that is computed at once: in a packed row that of a
neighbour (logprobs are off by 0.2 and 2.6 nats then), while vLLM fixes them when it starts."""


_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Kinds of layers that look at other tokens by attention alone."""
_STATE = ("mamba_", "ssm_", "state_size", "conv_L_cache", "rwkv_")
"""How fields begin in the configurations of models whose layers carry a state from token to token."""
_UNLIKE = (
    "final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier",
    "attention_chunk_size", "sliding_window", "residual_multiplier",
)  # fmt: skip
"""Fields of config.json that a forward pass of our own can miss."""
OWN_ATTENTION = ("its attention in transformers takes no packed rows", "use another model, such as Llama or Qwen3")
_BIASED = ("its positions are biases of the scores, which packed rows do not have", OWN_ATTENTION[1])
_REFUSED = {
    "llama4": ("its layers attend within chunks", "use another model, such as Qwen3-MoE or Mixtral"),
    **dict.fromkeys(("codegen", "falcon", "gpt_neo", "gptj", "nemotron", "stablelm"), OWN_ATTENTION),
    **dict.fromkeys(("bloom", "mpt"), _BIASED),
}
"""model_type -> why the trainer does not compute this architecture right, and the way out."""


def why_refused(config: Mapping[str, Any], *, frozen: bool = False, shared: bool = False) -> tuple[str, str] | None:
    """Why the trainer does not train the checkpoint of this config.json, and the way out; None where nothing is known
    against it: what nobody has tried is proved when the trainer starts.

    Args:
        frozen: adapters train, and the weights stay as they are.
        shared: the trainer computes with the engine's own memory.
    """
    name = (config.get("architectures") or ["this model"])[0]
    kind = str(config.get("model_type") or "").removesuffix("_text")
    if kind in _REFUSED:
        reason, fix = _REFUSED[kind]
        return f"{name} does not train here: {reason}", fix
    if beside := next((part for part in ("vision", "audio", "encoder") if config.get(f"{part}_config")), None):
        return (
            f"{name} has {beside} layers beside its language model, and the trainer trains models of text alone",
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
"""Ways to quantize a checkpoint of which transformers makes plain weights again."""
_SCALE_BITS = 16


def method_of(config: Mapping[str, Any]) -> str | None:
    """How the checkpoint of this config.json is quantized, as transformers names it; None for plain weights."""
    found = config.get("quantization_config")
    return str(found.get("quant_method") or "unnamed") if isinstance(found, Mapping) else None


def bits_of(config: Mapping[str, Any]) -> float | None:
    """Bits of a quantized weight with its share of the scales, as stored and as served; None for plain weights."""
    method = method_of(config)
    if method is None:
        return None
    given = config["quantization_config"]
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
        weights = groups[0] if groups else {}
        return _with_scales(weights.get("num_bits") or 8, weights.get("group_size"))
    if method == "bitsandbytes":
        return _with_scales(4, 32) if given.get("load_in_4bit") else 8.0
    if method == "mxfp4":
        return 4.25
    return _with_scales(given.get("bits") or given.get("w_bit") or 8, given.get("group_size"))


def _with_scales(bits: float, group: Any) -> float:
    return bits + (_SCALE_BITS / group if isinstance(group, int) and group > 0 else 0)


def _why_not_base(config: Mapping[str, Any], *, frozen: bool, shared: bool) -> tuple[str, str] | None:
    """The part of `why_refused` that is about quantized weights. Adapters train over such a base: the engine serves it
    as it is, and the trainer computes with the plain weights that it stands for, in its own type."""
    method = method_of(config)
    if method is None:
        return None
    other = "use the checkpoint that it was made from"
    if not frozen:
        reason = f"its weights are quantized ({method}), and training them would need each step to quantize them anew"
        return reason, f"{other}, or train adapters over it: mode = lora_only"
    if shared:
        reason = f"its weights are quantized ({method}): the engine holds nothing to compute a gradient with"
        return reason, f"{other}, or set trainer.single_copy = false"
    if method not in _READ:
        return f"its weights are quantized ({method}), which transformers cannot make plain weights of", other
    return None


_REPLAYED = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss")
"""model_type of mixtures of experts whose routers were seen to take the engine's choice; proved anew at every start."""


def why_not_replayed(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why `routing_replay` cannot be with the model of this config.json, and the way out; None where it can."""
    name = (config.get("architectures") or ["this model"])[0]
    if not _experts(config):
        return f"{name} has no experts to choose among", "leave trainer.routing_replay out"
    if str(config.get("model_type") or "").removesuffix("_text") not in _REPLAYED:
        return (
            f"the routers of {name} are not among those that can take the engine's choice: {', '.join(_REPLAYED)}",
            "leave trainer.routing_replay out",
        )
    return None


def carries_state(config: Mapping[str, Any]) -> bool:
    """Whether layers carry a state from token to token (linear attention, Mamba, convolutions), which does not stop at
    the end of a packed sequence: such sequences are computed one by one."""
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return any(kind not in _ATTENTION for kind in kinds)
    return any(name.startswith(_STATE) for name in config)


def why_not_spread(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why the model of this config.json does not train on several ranks that each have a part of it and rows of their
    own, and the way out; None where it does."""
    if carries_state(config):
        return (
            "its layers carry a state from token to token, so sequences are computed one by one, and each rank would "
            "have another number of them",
            "train it on one GPU",
        )
    return None


def why_not_shared(config: Mapping[str, Any], context: int) -> tuple[str, str] | None:
    """Why `context` ranks cannot compute rows of the model of this config.json together, and the way out."""
    heads = _heads(config)
    if heads % context:
        most = max(n for n in range(1, context) if heads % n == 0)
        return (
            f"context_parallel = {context} shares {heads} attention heads among as many ranks: they do not divide",
            f"set trainer.context_parallel to {most}, or to another divisor of {heads}",
        )
    return None


def suspects(config: Mapping[str, Any]) -> list[str]:
    """What in a configuration explains most likely that a forward pass of our own differs from the model's."""
    found = [f"{name} = {config[name]}" for name in _UNLIKE if config.get(name) not in (None, False, 0, 1)]
    kinds = {kind for kind in config.get("layer_types") or () if kind not in _ATTENTION[:2]}
    if carries_state(config):
        kinds = kinds or {"state-space"}
    found += [f"layers of kind {kind}" for kind in sorted(kinds)]
    rotary = _rotary(config)
    return found + ([f"rope_type {rotary}"] if rotary not in (None, "default", "llama3") else [])


def _rotary(config: Mapping[str, Any]) -> str | None:
    """The kind of rotary embeddings; of several, for kinds of layers, one that changes."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer = [value for value in settings.values() if isinstance(value, Mapping)] or [settings]
    kinds = [kind for one in by_layer if (kind := one.get("rope_type") or one.get("type"))]
    return max(kinds, key=lambda kind: kind in CHANGING_ROTARY, default=None)


HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a decoder: attention and MLP in every layer, an embedding and a head; in the sparse layers of a
    mixture of experts a few of many MLPs for each token, and a router that chooses."""

    layers: int
    hidden: int
    inner: int
    """Width inside the MLP of a dense layer."""
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    head_norms: bool = False
    """Queries and keys pass a norm of their own (Qwen3)."""
    experts: int = 0
    """Of each sparse layer; 0 where there are none."""
    experts_per_token: int = 0
    expert_inner: int = 0
    """Width inside one expert."""
    shared_inner: int = 0
    """Width inside what every token of a sparse layer passes beside its own experts."""
    dense_layers: int = 0
    """Layers with an MLP as before, where others have experts."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, head_norms: bool = False) -> Dimensions:
        """The dimensions of a config.json, GPT-2's names included.

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
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def chosen_inner(self) -> int:
        """Width that one token meets inside a sparse layer: of its own experts and of those that all share."""
        return self.experts_per_token * self.expert_inner + self.shared_inner

    @property
    def queries(self) -> int:
        """Width of all queries of a layer."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all keys of a layer, and of all values."""
        return self.kv_heads * self.head_size

    @property
    def layer(self) -> float:
        """Weights of a layer that a token is multiplied with: all its matrices, of experts those of the token alone; a
        mean over layers where some are dense."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        sparse = self.sparse_layers / self.layers
        chosen = self.hidden * (3 * self.chosen_inner + self.experts)
        return attention + (1 - sparse) * 3 * self.hidden * self.inner + sparse * chosen


def _experts(config: Mapping[str, Any]) -> dict[str, int]:
    """The fields of `Dimensions` about experts, by the names that config.json has for them; none for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(config[name]) for name in names if config.get(name)), 0)
    if experts < 2:
        return {}
    inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = config.get("shared_expert_intermediate_size") or inner * (config.get("n_shared_experts") or 0)
    return {
        "experts": experts, "experts_per_token": int(config["num_experts_per_tok"]), "expert_inner": inner,
        "shared_inner": int(shared), "dense_layers": sum(map(partial(_is_dense, config), range(_layers(config)))),
    }  # fmt: skip


def sparse_layers(config: Mapping[str, Any]) -> list[int]:
    """Which layers of a mixture of experts have some."""
    return [layer for layer in range(_layers(config)) if not _is_dense(config, layer)]


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """Whether this layer of a mixture of experts has a plain MLP (Qwen's, GLM's and DeepSeek's ways to say so)."""
    if kinds := config.get("mlp_layer_types"):
        return bool(kinds[layer] == "dense")
    skipped = (layer + 1) % int(config.get("decoder_sparse_step") or 1) != 0
    return (
        skipped or layer in (config.get("mlp_only_layers") or ()) or layer < (config.get("first_k_dense_replace") or 0)
    )


def _heads(config: Mapping[str, Any]) -> int:
    """Models without attention (Mamba) have a number of their own, or none."""
    return int(next((config[name] for name in HEADS if config.get(name)), 1))


def _layers(config: Mapping[str, Any]) -> int:
    return int(next((config[name] for name in LAYERS if config.get(name)), 0) or config["num_hidden_layers"])


@dataclass(frozen=True)
class Adapters:
    """Those of a layer, where they alone are trained: they compute in float32."""

    inputs: int
    """Elements of all their inputs, for a token."""
    widest: int
    """Of the widest input or output."""

    @classmethod
    def of(cls, trained: Mapping[str, Shape], layers: int) -> Adapters | None:
        """By the shapes of the trained tensors, `lora_A` and `lora_B` in their names; None where others are trained."""
        if not trained or not all(".lora_" in name for name in trained):
            return None
        inputs = sum(shape[-1] for name, shape in trained.items() if ".lora_A" in name)
        return cls(inputs // layers, max(max(shape) for shape in trained.values()))


@dataclass(frozen=True)
class Activations:
    """An estimate of what one forward pass keeps for its backward pass, in bytes."""

    tokens: int
    layers: int
    """Layers that keep all that they need."""
    per_token_and_layer: int
    per_token: int
    """Outside of the layers."""
    head: int
    """Logits of one chunk, and the largest gradient while it is made."""
    anew: int = 0
    """Layers below those, that keep their input alone and are computed anew: gradient checkpointing."""
    per_input: int = 0
    """Of a token: such an input."""
    again: int = 0
    """Of a token: what is computed anew, one layer at a time."""
    offloaded: int = 0
    """Bytes that wait in the host's memory."""

    @property
    def total(self) -> int:
        per_token = self.layers * self.per_token_and_layer + self.anew * self.per_input + self.per_token
        return self.tokens * per_token - self.offloaded + max(self.head, self._again)

    @property
    def _again(self) -> int:
        """The head is through before the first layer is computed anew, and so are the layers that kept all."""
        return self.tokens * (self.again - self.layers * self.per_token_and_layer)

    @property
    def formula(self) -> str:
        """The sum in words."""
        counted = ((self.layers, "layers", self.per_token_and_layer), (self.anew, "inputs of layers", self.per_input))
        parts = [f"{count} {what} x {size:,} B" for count, what, size in counted if count]
        kept = f"{self.tokens:,} tokens x ({' + '.join([*parts, f'{self.per_token:,} B'])})"
        return kept + (" + logits + largest gradient" if self.head >= self._again else " + a layer anew")


def activation_bytes(
    model: Dimensions, tokens: int, *, width: int, on_gpu: bool, layers: int | None = None, largest: int | None = None,
    compiled: bool = False, anew: int = 0, offloaded: bool = False, adapters: Adapters | None = None,
) -> Activations:  # fmt: skip
    """What a pass over `tokens` tokens keeps, the logits of one chunk, and the largest gradient while it is made.

    Per token and layer: two norms that keep their input in float32, queries, keys, values and the attention's output
    (keys and values repeated for each query head), four tensors inside the MLP, and four of the hidden size. A sparse
    layer keeps, for each expert of a token, its own copy of the input and of the output as well. Measured on an H200:
    docs/benchmarks.md, "What plan says".

    Args:
        width: bytes of one weight.
        layers: from the lowest trained one up, since those below keep nothing; default: all.
        largest: parameters of the largest trained tensor; default: those of the head.
        compiled: the layers are.
        anew: layers that keep their input alone, and compute the rest anew.
        offloaded: these inputs wait in the host's memory.
        adapters: they alone are trained, and keep their inputs in float32, while the products of the model itself keep
            none.
    """
    sparse = model.sparse_layers / model.layers
    inner = (1 - sparse) * model.inner + sparse * model.chosen_inner
    copies = sparse * 3 * model.experts_per_token * model.hidden
    values = 4 * (model.hidden + model.queries + inner) + copies
    if adapters is not None:
        values -= model.hidden + inner
    per_layer = 8 * model.hidden + width * round(values) + 4 * (adapters.inputs if adapters else 0)
    if model.head_norms:
        per_layer += 2 * (4 + width) * model.queries
    if compiled:
        per_layer = round(COMPILED * per_layer)
    # Logits and their gradient; on a CPU the float32 softmax between them too, which a GPU computes in one kernel.
    logits = min(tokens * model.vocab, LOGITS_AT_ONCE[on_gpu]) * (2 * width + (0 if on_gpu else 12))
    largest = model.vocab * model.hidden if largest is None else largest
    head = logits + largest * (8 if width < 4 else 4)  # the sum in float32, and in half precision what is added to it
    reached = model.layers if layers is None else layers
    anew = min(anew, reached)
    if not anew:
        return Activations(tokens, reached, per_layer, 8 * model.hidden, head)
    per_input = width * model.hidden
    away = tokens * per_input * max(0, anew - 2) if offloaded else 0  # one is used while the next one comes
    # The layer that is computed anew meets its own gradients.
    again = per_layer + width * round(2 * inner + 2 * model.hidden)
    if adapters is not None and adapters.widest >= inner:
        # In the MLP, whose backward pass comes before anything of the layer is gone: the gradient of an adapter's
        # product is float32, and compiled code makes that of its input before it is through with the first.
        again += (8 if compiled else 4) * adapters.widest
    return Activations(tokens, reached - anew, per_layer, 8 * model.hidden, head, anew, per_input, again, away)


def room_for_activations(free: int, total: int) -> int:
    """What a pass may keep on a GPU of so many bytes, of which nothing else will take `free`."""
    return free - round(UNFILLED * total)


def layers_anew(kept: Callable[[int], Activations], layers: int, room: int) -> int:
    """As few of `layers` as gradient checkpointing must compute anew for what a pass keeps to have room; else all."""
    return next((anew for anew in range(layers) if kept(anew).total <= room), layers)


def optimizer_bytes(shapes: Iterable[Shape], optimizer: str) -> int:
    """State of `optimizer` over trained tensors of these shapes, in bytes; float32 but for adamw_8bit."""
    return sum(times * _OPTIMIZER_STATE[optimizer](shape) for shape, times in Counter(map(tuple, shapes)).items())


def _adamw(shape: Shape) -> int:
    """Two float32 moments."""
    return 8 * math.prod(shape)


def _adamw_8bit(shape: Shape) -> int:
    """Two moments of one byte, and their scales."""
    count = math.prod(shape)
    return 2 * (count + 4 * math.ceil(count / BITS8_BLOCK)) if count >= BITS8_SMALLEST else 8 * count


def _adafactor(shape: Shape) -> int:
    """Without momentum: a row and a column of second moments for a matrix, all of them for a vector."""
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])


_OPTIMIZER_STATE = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "adafactor": _adafactor}


def effective_optimizer(optimizer: str, *, chosen: bool, on_gpu: bool) -> str:
    """On a CPU the default 8-bit optimizer becomes adamw; one that was `chosen` stays."""
    return "adamw" if optimizer == "adamw_8bit" and not chosen and not on_gpu else optimizer


def step_flops(
    model: Dimensions, lengths: Sequence[int], predicted: int, *, reached: int | None = None, trained: int | None = None
) -> float:
    """Operations of forward and backward over sequences of these lengths, causal attention at half price.

    MFU is the share of a GPU's peak that these reach (Chowdhery et al. 2022, PaLM, appendix B: six a weight and token).
    A weight costs two of them forward, two where a gradient passes through to what lies below, and two where it has a
    gradient itself. Operations that are done twice, for gradient checkpointing or chunked logits, do not count; nor do
    those that adapters add.

    Args:
        predicted: tokens whose logprob is asked for: the head is multiplied with those alone.
        reached: layers from the lowest trained one up; default: all.
        trained: weights in the matrices of layers that have a gradient, where embedding and head have none; default:
            everything is trained.
    """
    reached = model.layers if reached is None else reached
    weights = (model.layers + reached) * model.layer + (model.layers * model.layer if trained is None else trained)
    attention = sum(2.0 * (model.layers + 2 * reached) * model.queries * n * n for n in lengths)
    head = 2.0 * model.hidden * model.vocab * (2 if trained is not None else 3)
    return 2.0 * weights * sum(lengths) + attention + head * predicted


def step_bytes(masters: str, optimizer: str, *, half: bool, narrow: bool, offloaded: bool, largest: int) -> int:
    """What the optimizer takes beside gradients, masters and states while it steps, in bytes: a part of the parameters
    at a time, when activations are gone.

    Args:
        masters: strategy of the master weights.
        half: the trained weights are in half precision.
        narrow: so are their gradients.
        offloaded: masters and states are streamed from the host's memory: a part comes, one is there, one goes.
        largest: parameters of the largest trained tensor.
    """
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
    """What tensors of these shapes, one of each width (bytes of an element), take of host memory that a GPU can read:
    torch rounds each up to a power of two."""
    sizes = Counter(math.prod(shape) for shape in shapes)
    return sum(times << max(0, size * width - 1).bit_length() for size, times in sizes.items() for width in widths)


def peak_flops(device_name: str) -> float | None:
    """Peak of the device, operations a second; null for one that is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)
