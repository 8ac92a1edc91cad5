"""The policy as a transformers model whose parameters may be views of another process's tensors.

The model is built without memory. Then every parameter becomes a view of a server tensor, matched
by checkpoint name: the server reports where it loaded each checkpoint tensor, and transformers
reports where each belongs in its parameters. Anything that cannot be mapped is refused with a list.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atropos_common.broadcast.group import first_line
from atropos_common.models.model_math import OWN_ATTENTION, Dimensions, method_of, why_refused
from atropos_common.protocol.manifest import Shard, TensorView
from atropos_common.protocol.strided import Box, joined
from trainer_core.errors import UsageError
from trainer_core.policy.attention import register
from trainer_core.policy.checkpoint_layout import Spot, checkpoint_layout
from trainer_core.policy.tensor_parallel import parallel_of
from trainer_core.ranks.world import ALONE, World

SAME_MODEL = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
)
"""Fields of config.json that must agree on both sides."""

ANOTHER_MODE = (
    "Another weight bridge mode needs no shared tensors: broadcast, lora_only, lora_restart or none"
)
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def load_config(model_name: str, *, frozen: bool = False, shared: bool = False) -> Any:
    """Load the model's configuration through transformers, without its quantization settings:
    quantized weights are dequantized when read.

    Args:
        frozen, shared: as in `why_refused`.

    Raises:
        UsageError: there is no such model, or `why_refused` refuses it.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"--model-name {model_name}: no model there ({first_line(error)})"
        ) from None
    if refused := why_refused(config.to_dict(), frozen=frozen, shared=shared):
        raise UsageError(f"--model-name {model_name}: {refused[0]}; {refused[1]}")
    return _plain(config)


def _plain(config: Any) -> Any:
    """Drop the quantization settings of `config` in place."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def dtype_of(config: Any, wanted: str) -> torch.dtype:
    """Dtype of the weights to load. `auto` is the checkpoint's own dtype, with bfloat16 for a
    float32 checkpoint, as in vLLM."""
    if wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    return torch.bfloat16 if config.dtype in (None, torch.float32) else config.dtype


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Fields of `SAME_MODEL` in which two config.json differ, as text; a field missing on one side
    is ignored."""
    pairs = ((name, ours.get(name), theirs.get(name)) for name in SAME_MODEL)
    return [
        f"{name} {mine} here, {other} on the server"
        for name, mine, other in pairs
        if mine is not None and other is not None and mine != other
    ]


def empty_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the model with packed attention, in evaluation mode (no dropout).

    Parameters have no memory (meta device). Buffers, such as rotary frequencies, have transformers'
    values, on the CPU.
    """
    from transformers import AutoModelForCausalLM

    with _parameters_without_memory(), _packed_attention(config):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register()
        )
    return _windows_as_served(model).eval()


@contextmanager
def _packed_attention(config: Any) -> Iterator[None]:
    """Refuse classes of transformers that choose attention from a table of their own.

    Raises:
        UsageError: the model has such a class.
    """
    try:
        yield
    except KeyError as error:
        if error.args != (register(),):
            raise
        name = (config.architectures or [type(config).__name__])[0]
        raise UsageError(
            f"{name} does not train here: {OWN_ATTENTION[0]}; {OWN_ATTENTION[1]}"
        ) from None


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Create parameters on the meta device while the block runs, in the whole process."""
    # Constructors write initial values after registration, so a parameter gives up its memory
    # untouched.
    register_parameter = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tied parameter must stay the same object
            param = nn.Parameter(param.to("meta"))
        register_parameter(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]


def load_model(model_name: str | Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load the model into its own memory; quantized weights are dequantized.

    Raises:
        UsageError: the package that dequantizes is missing, or it cannot read the weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    if method := method_of(config.to_dict()):
        return _dequantized(model_name, method, config, dtype).to(device)
    with _packed_attention(config):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            model_name,
            config=config,
            dtype=dtype,
            attn_implementation=register(),
            trust_remote_code=False,
        )
    return _windows_as_served(model).to(device).eval()


def _dequantized(model_name: str | Path, method: str, config: Any, dtype: torch.dtype) -> nn.Module:
    import transformers
    from transformers import AutoModelForCausalLM

    kind = {
        "fp8": "FineGrainedFP8Config",
        "mxfp4": "Mxfp4Config",
        "compressed-tensors": "CompressedTensorsConfig",
    }
    how = getattr(transformers, kind[method])(dequantize=True) if method in kind else None
    more = {"quantization_config": how} if how is not None else {}
    try:
        with warnings.catch_warnings(
            action="ignore", category=UserWarning
        ):  # `how` overrides the config
            read = AutoModelForCausalLM.from_pretrained(
                model_name,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                device_map="cpu",
                **more,
            )
        weights = (read if how is not None else read.dequantize(dtype)).state_dict()
    except (ImportError, ValueError, RuntimeError, KeyError) as error:
        raise UsageError(
            f"--model-name {model_name}: its weights are quantized ({method}): {first_line(error)}"
        ) from None
    model = empty_model(_plain(config), dtype)
    wanted = model.state_dict()
    if missing := sorted(wanted.keys() - weights.keys()):
        raise UsageError(
            f"--model-name {model_name}: quantized ({method}), and without {', '.join(missing[:3])}"
        )
    model.load_state_dict({name: weights[name].to(dtype) for name in wanted}, assign=True)
    model.tie_weights()  # type: ignore[operator]
    return model.requires_grad_(True)


def _windows_as_served(model: nn.Module) -> nn.Module:
    """Widen Cohere 2's windows by one token. The model was trained with `sliding_window` tokens
    before the current one, and vLLM serves it so (`models/commandr.py`); transformers counts the
    current token."""
    if model.config.model_type == "cohere2":
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = int(module.sliding_window) + 1  # type: ignore[assignment,arg-type]
    return model


def attach_views(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], shard: Shard, *, verbose: bool = False
) -> int:
    """Make every parameter of `model`, or this rank's part of it, a trainable view of the server's
    `tensors`; return their number.

    Args:
        model: from `empty_model`.
        tensors: the server's parameters by the server's names.
        shard: the server's description of them.
        verbose: print the place of each parameter.

    Raises:
        UsageError: a parameter without a tensor, a tensor without a parameter, or an incompatible
            memory layout; lists all.
    """
    wanted = dict(model.named_parameters())
    parts: defaultdict[str, list[tuple[Spot, TensorView]]] = defaultdict(list)
    problems = []
    for name, spot in checkpoint_layout(model).items():
        view = shard.views.get(name)
        if spot is None:
            problems.append(
                f"{name}: transformers computes it from its parameters, so it cannot be shared"
            )
        elif spot.parameter not in wanted:
            problems.append(f"{name}: it is a buffer, and the server shares only parameters")
        elif view is None:
            problems.append(f"{name}: missing on the server")
        elif tuple(view.whole or view.shape) != spot.shape:
            problems.append(
                f"{name}: {list(spot.shape)} does not fit the server's {view.whole or view.shape}"
            )
        elif view.begin is not None and spot.shape != tuple(wanted[spot.parameter].shape):
            problems.append(
                f"{name}: it is split over ranks, and is only a part of {spot.parameter}"
            )
        else:
            parts[spot.parameter].append((spot, view))
    # Several checkpoint tensors, such as experts or q, k and v, may form one parameter.
    views: dict[str, torch.Tensor] = {}
    for name, pairs in parts.items():
        sources = {view.parameter for _, view in pairs}
        part = pairs[0][1] if pairs[0][1].begin is not None else None
        # `begin` is set if the tensor is split over ranks; then the view has the shape of this
        # rank's part.
        shape = tuple(wanted[name].shape if part is None else part.shape)
        boxes = [Box(s.shape, s.stride, s.offset, tuple(v.stride), v.offset) for s, v in pairs]
        place = joined(shape, boxes) if part is None else (part.offset, tuple(part.stride))
        if len(sources) > 1 or place is None:
            problems.append(
                f"{name}: no view covers its {len(pairs)} parts in the server's "
                f"{', '.join(sources)}"
            )
            continue
        tensor = tensors[sources.pop()]
        views[name] = tensor.as_strided(shape, place[1], tensor.storage_offset() + place[0])
        if verbose:
            print(
                f"  {name} {list(shape)} <- {pairs[0][1].parameter} from element {place[0]}, "
                f"stride {list(place[1])}"
            )
    unused = set(tensors) - {view.parameter for pairs in parts.values() for _, view in pairs}
    problems += [
        f"{name}: a tensor of the server that this model does not have" for name in sorted(unused)
    ]
    print(f"Mapped {len(views)}/{len(wanted)} params")
    if problems:
        raise UsageError(
            "the server's tensors do not fit the model:\n  "
            + "\n  ".join(problems)
            + f"\n{ANOTHER_MODE}"
        )
    _install(model, views)
    return len(views)


def _install(model: nn.Module, views: Mapping[str, torch.Tensor]) -> None:
    for name, view in views.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(view))
    # `setattr` broke the tie between embeddings and head.
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    left = [name for name, param in model.named_parameters() if param.is_meta]
    if left:
        raise UsageError("no server tensor for parameters: " + ", ".join(left))
    model.to(next(iter(views.values())).device)  # moves the buffers only


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's decoder layers, under any attribute name."""
    return next(
        module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)
    )


def train_only(model: nn.Module, layers: list[int] | None) -> None:
    """Freeze everything except the given transformer layers; None trains all.

    Raises:
        UsageError: the model has no layer of that index.
    """
    if layers is None:
        return
    count = model.config.num_hidden_layers
    wrong = [i for i in layers if i >= count]
    if wrong:
        raise UsageError(f"--train-layer-indices {wrong}: the model has layers 0-{count - 1}")
    for name, param in model.named_parameters():
        match = _LAYER.search(name)
        param.requires_grad_(match is not None and int(match[1]) in layers)


@torch.no_grad()
def copy_weights(model: nn.Module, source: str | Path, world: World = ALONE) -> None:
    """Overwrite the model's parameters in place, or this rank's parts, from a directory or hub id,
    which only rank 0 reads. A collective.

    Raises:
        UsageError: the weights belong to another model.
    """
    parallel = parallel_of(model)
    ours = dict(model.named_parameters())
    shapes = {
        name: ours[name].shape if parallel is None else torch.Size(parallel.part(name).whole)
        for name in ours
    }

    def read() -> dict[str, torch.Tensor]:
        loaded = load_model(source, next(iter(ours.values())).dtype, torch.device("cpu"))
        theirs = {name: param.detach() for name, param in loaded.named_parameters()}
        odd = sorted(theirs.keys() ^ ours.keys()) or [
            name for name in ours if theirs[name].shape != shapes[name]
        ]
        if odd:
            raise UsageError(f"{source} holds another model: {', '.join(odd[:5])}")
        return theirs

    wholes = world.first(read)
    if parallel is not None:
        parallel.fill(wholes)
        return
    for name, param in ours.items():
        param.copy_(wholes[name])


def end_tokens(model: nn.Module) -> frozenset[int]:
    """Token ids that end a completion, from the generation settings or the configuration; empty if
    neither has them."""
    settings = getattr(model, "generation_config", None)
    given = getattr(settings, "eos_token_id", None) or model.config.eos_token_id
    return frozenset([given] if isinstance(given, int) else given or [])


def dimensions(model: nn.Module) -> Dimensions:
    """Sizes for estimates of memory and arithmetic."""
    config = model.config.to_dict() | {"num_hidden_layers": len(decoder_layers(model))}
    # `to_dict` has class-specific names; these attributes exist under their common names.
    config |= {name: getattr(model.config, name) for name in ("hidden_size", "vocab_size")}
    return Dimensions.of(
        config, head_norms=any("q_norm" in name for name, _ in model.named_modules())
    )
