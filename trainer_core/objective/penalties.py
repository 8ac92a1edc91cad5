"""Terms that are added to each token's loss, whatever the objective: what pulls the policy towards another model, and
what keeps the load of a mixture of experts balanced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer_core.errors import UsageError
from trainer_core.objective.loss import MAX_LOG_RATIO, bounded_k3

LEAST_TAIL = 1e-6
"""Probability that the tokens which a teacher does not name have at least: log 0 would be an infinite pull, and float32
cannot tell 1 - 1e-8 from 1."""


def reference_kl(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """k3 of KL(policy || reference) at each token, [T], in nats, with gradient; 0 where the reference is NaN.

    exp(d) - 1 - d with d = log pi_reference - log pi (Schulman, "Approximating KL divergence"): DeepSeekMath's eq. 4
    (arXiv:2402.03300), verl's `low_var_kl`, TRL's `beta`. Unbiased for tokens that the policy itself sampled.

    Args:
        logprobs: [T] float32 of the policy, with gradient.
        reference: [T] float32 at the same temperature.
    """
    known = ~reference.isnan()
    gap = (torch.where(known, reference, 0.0) - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(known, bounded_k3(gap), 0.0)


def teacher_kl(logprobs: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Reverse KL(policy || teacher) at each of T positions, [T], in nats, with gradient; 0 where there is no teacher.

    On the K tokens that the teacher names it is exact, sum over v of pi(v) (log pi(v) - log q(v)); all others count as
    one more outcome of both, whose probability is what is left. So it is the divergence of two distributions over K + 1
    outcomes: never negative, 0 where they agree, and at most the divergence over the whole vocabulary (data processing
    inequality). Nothing is renormalized, so probability outside of the K tokens costs what the teacher gives it.
    No gradient goes through which states were visited (GKD, Agarwal et al. 2024, arXiv:2306.13649, with its reverse KL
    on the student's own sequences).

    Args:
        logprobs: [T, K] float32 of the policy for the teacher's tokens, with gradient.
        teacher: [T, K] float32; -Infinity where the teacher names fewer than K.
    """
    named = teacher > -torch.inf
    ours, theirs = torch.where(named, logprobs, -torch.inf), teacher
    inside = torch.where(named, logprobs.exp() * (logprobs - torch.where(named, theirs, 0.0)), 0.0).sum(1)
    tail = (1.0 - ours.exp().sum(1)).clamp(min=LEAST_TAIL)
    left = (1.0 - theirs.exp().sum(1)).clamp(min=LEAST_TAIL)
    return torch.where(named.any(1), inside + tail * (tail.log() - left.log()), 0.0)


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
