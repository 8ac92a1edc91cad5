"""The policy as a transformers model whose parameters may be views into another process's tensors.

The model is built without memory, then every parameter becomes a view of the server's tensor: q, k, v are rows of qkv,
gate and up rows of gate_up, a tied head is the embedding. What cannot be mapped is refused with the list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atropos_common.model_math import Dimensions, why_refused
from trainer_core.errors import UsageError
from trainer_core.policy.attention import register

SAME_MODEL = (
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "rms_norm_eps",
)  # fmt: skip
"""Fields of config.json that must agree on both sides."""

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_FUSED = dict.fromkeys(_QKV, ("qkv_proj", _QKV)) | dict.fromkeys(_GATE_UP, ("gate_up_proj", _GATE_UP))
"""Module of transformers -> the server's fused module and the order of its rows."""
_PADDED = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors whose rows the server pads up to a round vocabulary size."""
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def load_config(model_name: str) -> Any:
    """The model's configuration by transformers.

    Raises:
        UsageError: no such model, or one that `why_refused` refuses.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"--model-name {model_name}: no model there ({first})") from None
    if refused := why_refused(config.to_dict()):
        raise UsageError(f"--model-name {model_name}: {refused[0]}; {refused[1]}")
    return config


def dtype_of(config: Any, wanted: str) -> torch.dtype:
    """Of weights that are loaded; `auto` is the checkpoint's own type, and half precision for one in float32, as in
    vLLM."""
    if wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    return torch.bfloat16 if config.dtype in (None, torch.float32) else config.dtype


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Fields of `SAME_MODEL` in which two config.json differ, as text; one that a side leaves out does not count."""
    pairs = ((name, ours.get(name), theirs.get(name)) for name in SAME_MODEL)
    return [
        f"{name} {mine} here, {other} on the server"
        for name, mine, other in pairs
        if mine is not None and other is not None and mine != other
    ]


def empty_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model without memory (meta device), with packed attention, in evaluation mode: no dropout."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=register())
    return model.eval()


def load_model(model_name: str | Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with memory of its own, weights from disk."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_name, dtype=dtype, attn_implementation=register(), trust_remote_code=False
    )
    return model.to(device).eval()


def attach_views(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], *, verbose: bool = False
) -> int:
    """Make every parameter of `model` a trainable view of the server's `tensors`; returns how many.

    Args:
        model: from `empty_model`.
        tensors: the server's parameters by the server's names.
        aliases: names that share a tensor already listed.
        verbose: print where each parameter lies.

    Raises:
        UsageError: a parameter without a tensor, a tensor without a parameter, or shapes that do not fit; all listed.
    """
    wanted = dict(model.named_parameters())
    sizes = {name: tuple(param.shape) for name, param in wanted.items()}
    views: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    problems = []
    for name, shape in sizes.items():
        source, start, whole = _locate(name, sizes)
        tensor = tensors.get(source, tensors.get(aliases.get(source, "")))
        if tensor is None:
            problems.append(f"{name}: the server has no {source}")
            continue
        view = tensor[start : start + shape[0]] if tensor.ndim else tensor
        fits = tensor.shape[0] == whole or (source in _PADDED and tensor.shape[0] > whole)
        if tuple(view.shape) != shape or not fits:
            problems.append(f"{name}: {list(shape)} does not fit the server's {source} {list(tensor.shape)}")
            continue
        used |= {source, aliases.get(source, source)}
        views[name] = view
        if verbose:
            print(f"  {name} {list(shape)} <- {source}[{start}:{start + shape[0]}]")
    unused = set(tensors) - used
    if model.config.tie_word_embeddings:
        unused.discard("lm_head.weight")
    problems += [f"{name}: a tensor of the server that this model does not have" for name in sorted(unused)]
    print(f"Mapped {len(views)}/{len(wanted)} params")
    if problems:
        raise UsageError("the server's tensors do not fit the model:\n  " + "\n  ".join(problems))
    _install(model, views)
    return len(views)


def _locate(name: str, sizes: Mapping[str, tuple[int, ...]]) -> tuple[str, int, int]:
    """The server's tensor for a parameter of transformers, its first row there, and the rows of the whole tensor."""
    parent, _, leaf = name.rpartition(".")
    stem, _, module = parent.rpartition(".")
    if module not in _FUSED:
        return name, 0, sizes[name][0]
    fused, order = _FUSED[module]
    rows = [sizes[f"{stem}.{part}.{leaf}"][0] for part in order]
    return f"{stem}.{fused}.{leaf}", sum(rows[: order.index(module)]), sum(rows)


def _install(model: nn.Module, views: Mapping[str, torch.Tensor]) -> None:
    for name, view in views.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(view))
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    device = next(iter(views.values())).device
    # Buffers (rotary frequencies) are built by the module's own class, so theta and scaling are transformers' own.
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, type(module)(config=model.config).to(device))
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise UsageError("no memory for: " + ", ".join(left))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's layers, whatever its class calls them."""
    return next(module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))


def train_only(model: nn.Module, layers: list[int] | None) -> None:
    """Freeze everything but the given transformer layers; null trains all.

    Raises:
        UsageError: an index that the model does not have.
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
def copy_weights(model: nn.Module, source: str | Path) -> None:
    """Overwrite the model's parameters, wherever they lie, with those of a directory or hub id.

    Raises:
        UsageError: the weights are of another model.
    """
    loaded = dict(load_model(source, next(model.parameters()).dtype, torch.device("cpu")).named_parameters())
    ours = dict(model.named_parameters())
    odd = sorted(loaded.keys() ^ ours.keys()) or [n for n in ours if ours[n].shape != loaded[n].shape]
    if odd:
        raise UsageError(f"{source} holds another model: {', '.join(odd[:5])}")
    for name, param in ours.items():
        param.copy_(loaded[name])


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter on the CPU, unfused and contiguous, a tied head once."""
    return {name: p.detach().to("cpu", copy=True).contiguous() for name, p in model.named_parameters()}


def end_tokens(model: nn.Module) -> frozenset[int]:
    """Tokens with which a completion ends, by the generation settings or the configuration; none where neither says."""
    settings = getattr(model, "generation_config", None)
    given = getattr(settings, "eos_token_id", None) or model.config.eos_token_id
    return frozenset([given] if isinstance(given, int) else given or [])


def dimensions(model: nn.Module) -> Dimensions:
    """The sizes that memory and arithmetic are estimated from."""
    return Dimensions.of(model.config.to_dict(), head_norms=any("q_norm" in name for name, _ in model.named_modules()))
