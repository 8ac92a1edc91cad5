"""Experts as the engine chose them: routers take a recorded choice in the place of their own (rollout routing replay,
arXiv:2510.11370).

Two programs that compute the same model round differently, and where two experts are nearly equal to a router that
decides which of them a token meets. With `replay_in` each router of a sparse layer takes the experts that come with a
row, and weighs them by its own probabilities, through which it learns as before. Where the engine's choice is not known
(-1) the router's own stands, to the bit.

How a router weighs what it has chosen is not looked up by its class: at the start every one is shown tokens, and the
formula that gives its own weights again, bit for bit, is the one it is replayed with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from atropos_common.model_math import sparse_layers, why_not_replayed
from trainer_core.errors import UsageError
from trainer_core.policy.load import decoder_layers
from trainer_core.policy.logprobs import EXPERTS, predicting_states, whole_row
from trainer_core.rollouts.asking import RouterShape
from trainer_core.rollouts.packing import PackedRow

_SHOWN = 64
"""Tokens by which formulas are told apart."""

Weigh = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""A router, its logits, [N, experts], and experts, [N, K] -> their weights, [N, K]."""


def _share(_: nn.Module, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1, dtype=torch.float32).gather(1, experts)


def _share_of_chosen(router: nn.Module, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Qwen3-MoE with norm_topk_prob, Mixtral."""
    values = _share(router, logits, experts)
    return values / values.sum(-1, keepdim=True)


def _softmax_of_chosen(_: nn.Module, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """GPT-OSS."""
    return logits.gather(1, experts).softmax(-1)


def _sigmoid(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3, GLM-4-MoE."""
    return logits.sigmoid().gather(1, experts) * router.routed_scaling_factor


def _sigmoid_of_chosen(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The same with norm_topk_prob."""
    values = logits.sigmoid().gather(1, experts)
    return values / (values.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


_FORMULAS: tuple[Weigh, ...] = (_share, _share_of_chosen, _softmax_of_chosen, _sigmoid, _sigmoid_of_chosen)


class _Here(threading.local):
    """What the layer that this thread computes now is to take; rows pass through one model in several threads."""

    experts: torch.Tensor | None = None


_here = _Here()


def replay_in(model: nn.Module) -> RouterShape:
    """Let the routers of `model` take the experts of a row that has some, from now on. All ranks do it together.

    Raises:
        UsageError: its routers are of another kind.
    """
    config = model.config.to_dict()
    if refused := why_not_replayed(config):
        raise UsageError(f"--routing-replay: {': '.join(refused)}")
    routers = _routers(model)
    if sorted(routers) != sparse_layers(config):
        raise UsageError(_refusal(model, f"it has routers in layers {sorted(routers)} alone"))
    tokens = torch.randint(model.config.vocab_size, (_SHOWN,), generator=torch.Generator().manual_seed(0))
    returned = _returned(model, routers, whole_row([tokens]))
    for place, (layer, router) in enumerate(routers.items()):
        around = decoder_layers(model)[layer]
        # Inside of what gradient checkpointing runs again: the second pass sees the same row.
        around.register_forward_pre_hook(_enter, with_kwargs=True)
        around.register_forward_hook(_leave, always_call=True)
        # A tensor, not a number: layers have to look alike to torch.compile, which has one graph for all of them.
        which = torch.tensor([place], device=next(model.parameters()).device)
        router.register_forward_hook(partial(_choose, which, _formula(model, router, returned[place])))
    said = config["num_experts_per_tok"], next(config[n] for n in _COUNTS if config.get(n))
    return RouterShape(len(decoder_layers(model)), tuple(sorted(routers)), *said)


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _routers(model: nn.Module) -> dict[int, nn.Module]:
    """By layer: the modules whose logits transformers records for the balance loss."""
    recorded = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    if not isinstance(kind, type):
        raise UsageError(_refusal(model, "transformers does not say which they are"))
    layers = enumerate(decoder_layers(model))
    return {i: module for i, layer in layers for module in layer.modules() if isinstance(module, kind)}


def _enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    _here.experts = kwargs.get(EXPERTS)


def _leave(*_: Any) -> None:
    _here.experts = None


def _choose(place: torch.Tensor, weigh: Weigh, router: nn.Module, _: Any, output: Any) -> Any:
    """After router number `place`: what it returns, with the experts that the row brings."""
    if _here.experts is None:
        return None
    logits, weights, own = output
    wanted = _here.experts.index_select(1, place).squeeze(1).to(own.dtype)
    experts = torch.where(wanted >= 0, wanted, own)
    return logits, weigh(router, logits, experts.long()).to(weights.dtype), experts


@torch.no_grad()
def _returned(model: nn.Module, routers: dict[int, nn.Module], row: PackedRow) -> list[Any]:
    """What every router returns for `row`, before it takes another's choice."""
    returned: list[Any] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        returned.append(output)

    hooks = [router.register_forward_hook(note, prepend=True) for router in routers.values()]
    try:
        predicting_states(model, row.to(next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return returned


def _formula(model: nn.Module, router: nn.Module, output: Any) -> Weigh:
    """The one that gives the router's own weights again.

    Raises:
        UsageError: none does.
    """
    if isinstance(output, tuple) and len(output) == 3 and output[0].ndim == 2:
        logits, weights, own = output
        for weigh in _FORMULAS:
            try:
                again = weigh(router, logits, own.long()).to(weights.dtype)
            except (AttributeError, RuntimeError):
                continue
            if torch.equal(again, weights):
                return weigh
    raise UsageError(_refusal(model, f"how {type(router).__name__} weighs experts is not known here"))


def _refusal(model: nn.Module, why: str) -> str:
    return (
        f"--routing-replay: the routers of {type(model).__name__} cannot take the engine's choice: {why}; leave it out"
    )


def own_experts(model: nn.Module, row: PackedRow) -> torch.Tensor:
    """The experts that the routers of `replay_in` would take for `row`, [N, sparse layers, K] int16; where the row
    brings some, layers above see what came of those."""
    return torch.stack([output[2].to(torch.int16) for output in _returned(model, _routers(model), row)], dim=1)
