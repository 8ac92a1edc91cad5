"""Proof that the trainer computes this model right: its own path against the model's own forward pass, at the start.

Two short sequences are packed into one row and go the trainer's way: packed attention, experts as they train, head in
chunks. The same two go through the model as transformers wrote it, one by one, with eager attention and full logits.
All of it in float32 on the weights as they are, whatever their type: what belongs to one layer is made wide while that
layer computes, so the most that this takes beside the model is one layer in float32. Windows are made shorter than the
sequences meanwhile, so that they matter. On a GPU in half precision the row goes through the kernel as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from atropos_common.group import first_line
from atropos_common.model_math import suspects
from trainer_core.errors import UsageError
from trainer_core.policy.logprobs import row_logprobs, whole_row
from trainer_core.policy.sharding import scatter

BOUND = 2e-3
"""Nats, at any position, in float32; right models stay below 1e-4, and the seven known wrongs begin at 0.05."""
COARSE = 0.3
"""Nats in the mean over positions, where numbers are of half precision or quantized."""
_HALF = (torch.bfloat16, torch.float16)
_LENGTHS = (29, 24)
_WINDOW = 8


def prove(model: nn.Module) -> float:
    """Compare the two ways; returns the largest difference in nats.

    Args:
        model: before its optimizer exists, with its weights, no layer compiled.

    Raises:
        UsageError: they differ, or this model does not go the trainer's way at all; with the likely cause.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(model.config.vocab_size, (n,), generator=generator).to(device) for n in _LENGTHS]
    row = whole_row(sequences)
    try:
        with torch.no_grad(), _short_windows(model), _in_float32(model):
            plain = torch.cat([_plain(model, tokens) for tokens in sequences])
            differences = (row_logprobs(model, row, head_dtype=torch.float32) - plain).abs()
        with torch.no_grad(), _short_windows(model):
            coarse = (row_logprobs(model, row) - plain).abs().mean().item()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a class of transformers that nobody tried here raises
        what = f"it cannot compute it ({type(error).__name__}: {first_line(error)})"
        raise UsageError(_refusal(model, what)) from error
    largest = differences.max().item()
    exact = all(parameter.dtype in _HALF or parameter.element_size() >= 4 for parameter in model.parameters())
    if not largest <= (BOUND if exact else COARSE) or not coarse <= COARSE:  # a NaN is no proof
        found = f"{largest:.2g} nats from its own forward pass ({coarse:.2g} as it trains)"
        raise UsageError(_refusal(model, f"packed sequences are off by up to {found}"))
    return largest


def _refusal(model: nn.Module, what: str) -> str:
    likely = suspects(model.config.to_dict())
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        likely.append("attention sinks (s_aux)")
    cause = f"; likely because of {', '.join(likely)}" if likely else ""
    return (
        f"the trainer does not compute {type(model).__name__} right: {what}{cause}. Training on it would be wrong. "
        "docs/models.md has the architectures that train; please report this one with its config.json"
    )


def _plain(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logprobs of tokens[1:], [N - 1] float32, by the model's own code alone."""
    with _eager(model.config):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    scatter(model)
    return logits.float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


@contextmanager
def _eager(config: Any) -> Iterator[None]:
    """Attention and experts as the model's own file computes them."""
    with ExitStack() as changed:
        for name in ("_attn_implementation", "_experts_implementation"):
            changed.enter_context(_changed(config, name, "eager"))
        yield


@contextmanager
def _changed(thing: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


@contextmanager
def _short_windows(model: nn.Module) -> Iterator[None]:
    """Every sliding window so short that these sequences reach past it, wherever a model keeps its length."""
    with ExitStack() as changed:
        for holder in (model.config, *model.modules()):
            if isinstance(getattr(holder, "sliding_window", None), int):
                changed.enter_context(_changed(holder, "sliding_window", _WINDOW))
        yield


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Each part of the model computes in float32: its parameters are replaced while it does, and then back again."""
    kept: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}

    def widen(part: nn.Module, *_: Any) -> None:
        kept[part] = [
            (module, name, parameter)
            for module in part.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.dtype in _HALF
        ]
        for module, name, parameter in kept[part]:
            module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)

    def restore(part: nn.Module, *_: Any) -> None:
        for module, name, parameter in kept.pop(part, []):
            module._parameters[name] = parameter

    with ExitStack() as hooks:
        for part in _parts(model):
            hooks.callback(part.register_forward_pre_hook(widen).remove)
            # Before FSDP's own hook, which takes its parameters back from the modules.
            hooks.callback(part.register_forward_hook(restore, prepend=True).remove)
        try:
            yield
        finally:
            for part in list(kept):
                restore(part)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Layers, and what is beside them and has parameters of its own: embeddings, norms, the head."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside:
            continue
        if isinstance(module, nn.ModuleList):
            for layer in module:
                inside |= set(layer.modules())
                yield layer
        elif any(True for _ in module.parameters(recurse=False)):
            yield module
