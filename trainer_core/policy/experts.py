"""Mixtures of experts: the loss that keeps their load balanced, as a model's configuration asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer_core.errors import UsageError


def balance_coefficient(model: nn.Module, asked: float | None) -> float:
    """Weight of the balance loss: what was asked for, else what config.json wants where it says `output_router_logits`.

    Raises:
        UsageError: there is nothing to balance in this model.
    """
    config = model.config
    own = getattr(config, "router_aux_loss_coef", None) if getattr(config, "output_router_logits", False) else 0.0
    wanted = own or 0.0 if asked is None else asked
    if wanted and "router_logits" not in (getattr(model.base_model, "_can_record_outputs", None) or {}):
        name = type(model).__name__
        raise UsageError(f"--router-aux-loss-coef {wanted:g}: {name} has no experts to balance; leave it out")
    return wanted


def balance_loss(router_logits: Sequence[torch.Tensor], chosen: int) -> torch.Tensor:
    """How unevenly the router loads its experts: experts * sum of (share of tokens * mean probability), [] float32.

    Over all tokens and layers together, as transformers' `load_balancing_loss_func` (Fedus et al. 2021, Switch
    Transformer, equations 4 to 6). Even loads give `chosen`.

    Args:
        router_logits: of each sparse layer, [N, experts].
        chosen: experts per token.
    """
    logits = torch.cat([layer.reshape(-1, layer.shape[-1]) for layer in router_logits])
    shares = logits.float().softmax(-1)
    experts = shares.shape[1]
    loads = torch.bincount(shares.topk(chosen, dim=-1).indices.flatten(), minlength=experts) / len(shares)
    return experts * (loads * shares.mean(0)).sum()
