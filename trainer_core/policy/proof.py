"""Prove at the start that the trainer computes this model as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from atropos_common.broadcast.group import first_line
from atropos_common.models.model_math import suspects
from trainer_core.errors import UsageError
from trainer_core.policy.logprobs import row_logprobs, whole_row
from trainer_core.policy.sharding import scatter

# Correct models stay below 1e-4; the seven known errors start at 0.05.
BOUND = 2e-3
"""Limit in nats at any position, in float32."""
COARSE = 0.3
"""Limit in nats of the mean, for half precision or quantized weights."""
_HALF = (torch.bfloat16, torch.float16)
# Tokens of the two sequences, and the shortened window.
_LENGTHS = (29, 24)
_WINDOW = 8


def prove(model: nn.Module) -> float:
    """Compare both paths before layers are compiled; return the largest difference in nats.

    Raises:
        UsageError: they differ, or the trainer cannot run this model.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(model.config.vocab_size, (n,), generator=generator).to(device)
        for n in _LENGTHS
    ]
    # The trainer's path is packed attention and a chunked head; transformers runs eager attention
    # with full logits. Both use the actual weights in float32.
    row = whole_row(sequences)
    try:
        with torch.no_grad(), _short_windows(model), _in_float32(model):
            plain = torch.cat([_plain(model, tokens) for tokens in sequences])
            differences = (row_logprobs(model, row, head_dtype=torch.float32) - plain).abs()
        with torch.no_grad(), _short_windows(model):
            # The path of the training, in its own dtype, through the GPU kernel.
            coarse = (row_logprobs(model, row) - plain).abs().mean().item()
    except torch.OutOfMemoryError:
        raise  # too little memory is not evidence against the model
    except Exception as error:  # an untested transformers class may raise anything
        what = f"its forward pass failed ({type(error).__name__}: {first_line(error)})"
        raise UsageError(_refusal(model, what)) from error
    largest = differences.max().item()
    exact = all(p.dtype in _HALF or p.element_size() >= 4 for p in model.parameters())
    if not largest <= (BOUND if exact else COARSE) or not coarse <= COARSE:  # NaN fails, too
        found = f"{largest:.2g} nats from its own forward pass ({coarse:.2g} as it trains)"
        raise UsageError(_refusal(model, f"packed sequences are off by up to {found}"))
    return largest


def _refusal(model: nn.Module, what: str) -> str:
    likely = suspects(model.config.to_dict())
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        likely.append("attention sinks (s_aux)")
    cause = f"; likely because of {', '.join(likely)}" if likely else ""
    return (
        f"the trainer does not compute {type(model).__name__} right: {what}{cause}. Its gradients "
        "would be wrong. docs/models.md lists the supported architectures; please report this one "
        "with its config.json"
    )


def _plain(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logprobs of tokens[1:], [N - 1] float32, by the model's own code."""
    with _eager(model.config):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    # Called without `gathered`, so FSDP's parameters beside the layers have to be freed here.
    scatter(model)
    return logits.float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


@contextmanager
def _eager(config: Any) -> Iterator[None]:
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
    # Windows longer than the test sequences would have no effect on them.
    with ExitStack() as changed:
        for holder in (model.config, *model.modules()):
            if isinstance(getattr(holder, "sliding_window", None), int):
                changed.enter_context(_changed(holder, "sliding_window", _WINDOW))
        yield


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    # One layer at a time, so the extra memory is one float32 layer.
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
            # Restore before FSDP's own hook, which frees the gathered parameters.
            hooks.callback(part.register_forward_hook(restore, prepend=True).remove)
        try:
            yield
        finally:
            for part in list(kept):
                restore(part)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Decoder layers, and the modules outside them that have parameters."""
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
