"""The policy as a transformers model, in memory of its own or as views of a server's tensors."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from atropos_common.broadcast.group import first_line
from atropos_common.models.model_math import OWN_ATTENTION, Dimensions, method_of, why_refused
from atropos_common.protocol.manifest import Box, Shard, TensorView, joined
from trainer_core.errors import UsageError
from trainer_core.policy.attention import register

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
    """Load the model's configuration, without its quantization settings."""
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
    # Weights are dequantized when they are read.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def dtype_of(config: Any, wanted: str) -> torch.dtype:
    """Return the dtype to load; `auto` is the checkpoint's, but bfloat16 for float32, as in
    vLLM."""
    if wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    return torch.bfloat16 if config.dtype in (None, torch.float32) else config.dtype


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Describe the fields of `SAME_MODEL` that differ; a field missing on one side is ignored."""
    pairs = ((name, ours.get(name), theirs.get(name)) for name in SAME_MODEL)
    return [
        f"{name} {mine} here, {other} on the server"
        for name, mine, other in pairs
        if mine is not None and other is not None and mine != other
    ]


def empty_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the model on the meta device, with packed attention and without dropout.

    Buffers, such as rotary frequencies, have transformers' values, on the CPU.
    """
    from transformers import AutoModelForCausalLM

    with _parameters_without_memory(), _packed_attention(config):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register()
        )
    return _windows_as_served(model).eval()


@contextmanager
def _packed_attention(config: Any) -> Iterator[None]:
    # Classes that choose attention from a table of their own do not find ours in it.
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
        UsageError: the quantized weights cannot be read.
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
    more: dict[str, Any] = {} if how is None else {"quantization_config": how}
    more |= {"dtype": dtype, "trust_remote_code": False, "device_map": "cpu"}
    try:
        # transformers warns that `how` overrides the configuration.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            read = AutoModelForCausalLM.from_pretrained(model_name, config=config, **more)
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
    # Cohere 2 was trained with `sliding_window` tokens before the current one, and vLLM serves it
    # so (models/commandr.py). transformers counts the current token.
    if model.config.model_type == "cohere2":
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = int(module.sliding_window) + 1  # type: ignore[assignment,arg-type]
    return model


def attach_views(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], shard: Shard, *, verbose: bool = False
) -> int:
    """Make each parameter, or this rank's part, a trainable view of `tensors`; return their number.

    Args:
        model: from `empty_model`.
        tensors: the server's, by its own names.
        shard: the server's description of them.
    """
    wanted = dict(model.named_parameters())
    # The server reports where it loaded each checkpoint tensor, transformers where each belongs.
    parts: defaultdict[str, list[tuple[Spot, TensorView]]] = defaultdict(list)
    problems = []
    for name, spot in checkpoint_layout(model).items():
        view = shard.views.get(name)
        if problem := _misfit(spot, view, wanted):
            problems.append(f"{name}: {problem}")
        else:
            assert spot is not None and view is not None
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
            where = ", ".join(sources)
            problems.append(
                f"{name}: no view covers its {len(pairs)} parts in the server's {where}"
            )
            continue
        tensor = tensors[sources.pop()]
        views[name] = tensor.as_strided(shape, place[1], tensor.storage_offset() + place[0])
        if verbose:
            begin = f"{pairs[0][1].parameter} from element {place[0]}"
            print(f"  {name} {list(shape)} <- {begin}, stride {list(place[1])}")
    unused = set(tensors) - {view.parameter for pairs in parts.values() for _, view in pairs}
    problems += [
        f"{name}: a tensor of the server that this model does not have" for name in sorted(unused)
    ]
    print(f"Mapped {len(views)}/{len(wanted)} params")
    if problems:
        listed = "\n  ".join(problems)
        raise UsageError(f"the server's tensors do not fit the model:\n  {listed}\n{ANOTHER_MODE}")
    _install(model, views)
    return len(views)


def _misfit(spot: Spot | None, view: TensorView | None, wanted: Mapping[str, nn.Parameter]) -> str:
    if spot is None:
        return "transformers computes it from its parameters, so it cannot be shared"
    if spot.parameter not in wanted:
        return "it is a buffer, and the server shares only parameters"
    if view is None:
        return "missing on the server"
    if tuple(view.whole or view.shape) != spot.shape:
        return f"{list(spot.shape)} does not fit the server's {view.whole or view.shape}"
    if view.begin is not None and spot.shape != tuple(wanted[spot.parameter].shape):
        return f"it is split over ranks, and is only a part of {spot.parameter}"
    return ""


def _install(model: nn.Module, views: Mapping[str, torch.Tensor]) -> None:
    for name, view in views.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(view))
    # `setattr` broke the tie between embeddings and head.
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    if left := [name for name, param in model.named_parameters() if param.is_meta]:
        raise UsageError("no server tensor for parameters: " + ", ".join(left))
    model.to(next(iter(views.values())).device)  # moves the buffers only


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    return next(
        module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)
    )


def train_only(model: nn.Module, layers: list[int] | None) -> None:
    """Freeze everything except the given layers; None trains all."""
    if layers is None:
        return
    count = model.config.num_hidden_layers
    if wrong := [i for i in layers if i >= count]:
        raise UsageError(f"--train-layer-indices {wrong}: the model has layers 0-{count - 1}")
    for name, param in model.named_parameters():
        match = _LAYER.search(name)
        param.requires_grad_(match is not None and int(match[1]) in layers)


def end_tokens(model: nn.Module) -> frozenset[int]:
    """Return the token ids that end a completion; empty if the model names none."""
    settings = getattr(model, "generation_config", None)
    given = getattr(settings, "eos_token_id", None) or model.config.eos_token_id
    return frozenset([given] if isinstance(given, int) else given or [])


def dimensions(model: nn.Module) -> Dimensions:
    config = model.config.to_dict() | {"num_hidden_layers": len(decoder_layers(model))}
    # `to_dict` has class-specific names; these attributes exist under their common names.
    config |= {name: getattr(model.config, name) for name in ("hidden_size", "vocab_size")}
    return Dimensions.of(
        config, head_norms=any("q_norm" in name for name, _ in model.named_modules())
    )


@dataclass(frozen=True)
class Spot:
    """View of a parameter; offset and stride in elements."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _StillViews(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A clone would lose the link to its parameter; return a view instead.
        if func is torch.ops.aten.clone.default:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def checkpoint_layout(model: torch.nn.Module) -> dict[str, Spot | None]:
    """Map each checkpoint name to its place in the parameters and persistent buffers.

    A tied tensor appears once. None: transformers computes the tensor when it saves.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # transformers renames some tensors and stacks experts into one parameter. Its own reverse
    # conversion, run on meta tensors, returns views of the parameters.
    empty = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for name, tensor in _tensors(model).items()
    }
    # A view shares the storage of its parameter, so the storage's address identifies the parameter.
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    with _StillViews():
        converted = revert_weight_conversion(model, dict(empty))

    def spot_of(tensor: torch.Tensor) -> Spot | None:
        owner = owners.get(tensor.untyped_storage()._cdata)
        shape = tuple(tensor.shape)
        return Spot(owner, tensor.storage_offset(), shape, tensor.stride()) if owner else None

    return {name: spot_of(tensor) for name, tensor in converted.items()}


def checkpoint_tensors(
    model: torch.nn.Module, parameters: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint: views, except those that transformers computes.

    `parameters` replace the model's own.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tensors = _tensors(model) | (parameters or {})
    layout = checkpoint_layout(model)
    if not all(layout.values()):
        # Some tensor is computed on saving, so let transformers convert real values.
        return dict(revert_weight_conversion(model, tensors))
    return {name: view_of(tensors[spot.parameter], spot) for name, spot in layout.items() if spot}


def view_of(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    """Return the view `spot` of a parameter that is contiguous, unless `spot` covers it all."""
    if spot.shape == tensor.shape:
        return tensor
    return tensor.as_strided(spot.shape, spot.stride, tensor.storage_offset() + spot.offset)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # A state dict leaves out non-persistent buffers, such as rotary frequencies.
    kept = model.state_dict()
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in kept}
