"""Rollout routing replay (arXiv:2510.11370): routers use the experts that the engine recorded.

Rounding decides between nearly equal experts, so two programs choose differently. A router weighs
the recorded experts by its own probabilities; without a record (-1) it keeps its own choice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from atropos_common.models.model_math import sparse_layers, why_not_replayed
from trainer_core.errors import UsageError
from trainer_core.policy.load import decoder_layers
from trainer_core.policy.logprobs import EXPERTS, predicting_states, whole_row
from trainer_core.rollouts.asking import RouterShape
from trainer_core.rollouts.packing import PackedRow

# Test tokens that distinguish the formulas.
_SHOWN = 64

Weigh = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""Map (router, logits [N, experts], experts [N, K]) to weights [N, K]."""


def _share(_: nn.Module, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1, dtype=torch.float32).gather(1, experts)


def _share_of_chosen(
    router: nn.Module, logits: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
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
    """DeepSeek-V3 and GLM-4-MoE with norm_topk_prob."""
    values = logits.sigmoid().gather(1, experts)
    return values / (values.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


_FORMULAS = (_share, _share_of_chosen, _softmax_of_chosen, _sigmoid, _sigmoid_of_chosen)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


# Thread-local, because several threads run rows through one model.
class _Here(threading.local):
    """Recorded experts of the layer that this thread computes."""

    experts: torch.Tensor | None = None


_here = _Here()


def replay_in(model: nn.Module) -> RouterShape:
    """Make the routers use a row's recorded experts from now on; a collective."""
    config = model.config.to_dict()
    if refused := why_not_replayed(config):
        raise UsageError(f"--routing-replay: {': '.join(refused)}")
    routers = _routers(model)
    if sorted(routers) != sparse_layers(config):
        raise UsageError(_refusal(model, f"it has routers only in layers {sorted(routers)}"))
    tokens = torch.randint(
        model.config.vocab_size, (_SHOWN,), generator=torch.Generator().manual_seed(0)
    )
    returned = _returned(model, routers, whole_row([tokens]))
    for place, (layer, router) in enumerate(routers.items()):
        decoder_layer = decoder_layers(model)[layer]
        # The hooks run inside gradient checkpointing, so the recomputation sees the same experts.
        decoder_layer.register_forward_pre_hook(_enter, with_kwargs=True)
        decoder_layer.register_forward_hook(_leave, always_call=True)
        # A tensor, because a number would give torch.compile a different graph for every layer.
        which = torch.tensor([place], device=next(model.parameters()).device)
        formula = _formula(model, router, returned[place])
        router.register_forward_hook(partial(_choose, which, formula))
    experts = next(config[name] for name in _COUNTS if config.get(name))
    layers, chosen = len(decoder_layers(model)), config["num_experts_per_tok"]
    return RouterShape(layers, tuple(sorted(routers)), chosen, experts)


def _routers(model: nn.Module) -> dict[int, nn.Module]:
    # The modules whose logits transformers records for the balance loss.
    recorded = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    if not isinstance(kind, type):
        raise UsageError(_refusal(model, "transformers does not record their logits"))
    layers = enumerate(decoder_layers(model))
    return {
        i: module for i, layer in layers for module in layer.modules() if isinstance(module, kind)
    }


def _enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    _here.experts = kwargs.get(EXPERTS)


def _leave(*_: Any) -> None:
    _here.experts = None


def _choose(place: torch.Tensor, weigh: Weigh, router: nn.Module, _: Any, output: Any) -> Any:
    # A forward hook, whose result replaces the router's output.
    if _here.experts is None:
        return None
    logits, weights, own = output
    # [N, sparse layers, K] -> [N, K] of this router.
    wanted = _here.experts.index_select(1, place).squeeze(1).to(own.dtype)
    experts = torch.where(wanted >= 0, wanted, own)
    return logits, weigh(router, logits, experts.long()).to(weights.dtype), experts


@torch.no_grad()
def _returned(model: nn.Module, routers: dict[int, nn.Module], row: PackedRow) -> list[Any]:
    returned: list[Any] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        returned.append(output)

    # Prepended, so it sees the output before `_choose` replaces it.
    hooks = [router.register_forward_hook(note, prepend=True) for router in routers.values()]
    try:
        predicting_states(model, row.to(next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return returned


def _formula(model: nn.Module, router: nn.Module, output: Any) -> Weigh:
    # Transformers has no field for it, so find the formula that reproduces the router's own
    # weights for the test tokens, bit for bit.
    if isinstance(output, tuple) and len(output) == 3 and output[0].ndim == 2:
        logits, weights, own = output
        for weigh in _FORMULAS:
            try:
                again = weigh(router, logits, own.long()).to(weights.dtype)
            # The router lacks an attribute of this formula, or its shapes differ.
            except (AttributeError, RuntimeError):
                continue
            if torch.equal(again, weights):
                return weigh
    unknown = f"{type(router).__name__} weighs experts by an unknown formula"
    raise UsageError(_refusal(model, unknown))


def _refusal(model: nn.Module, why: str) -> str:
    routers = f"the routers of {type(model).__name__}"
    return (
        f"--routing-replay: {routers} cannot replay the engine's choice: {why}. fix: drop the flag"
    )


def own_experts(model: nn.Module, row: PackedRow) -> torch.Tensor:
    """Return the experts that the routers choose for `row`, [N, sparse layers, K] int16."""
    # If the row has recorded experts, higher layers see the states that those produce.
    outputs = _returned(model, _routers(model), row)
    return torch.stack([output[2].to(torch.int16) for output in outputs], dim=1)
