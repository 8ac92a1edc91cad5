"""The GRPO objective as pure functions that return sums over tokens, never means.

The one denominator, all trained tokens of an optimizer step, is applied by the caller, so loss and gradient are the
same for every split into micro-batches and packed rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_LOG_RATIO = 20.0
"""exp of more would overflow, and its gradient is meaningless."""


class LossSums(NamedTuple):
    """Sums over T tokens. `loss` carries the gradient, the others do not."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    """Tokens whose ratio lies outside [1 - clip_eps, 1 + clip_eps]."""
    kl_k3: torch.Tensor
    tokens: torch.Tensor


def grpo_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_eps: float = 0.2,
    kl_coef: float = 0.0,
) -> LossSums:
    """Sum over tokens of -min(r A, clip(r, 1 - eps, 1 + eps) A) + kl_coef k3, with r = exp(logprob - rollout logprob).

    The pessimistic bound of PPO (Schulman et al. 2017, eq. 7) on both sides of A, with group-relative advantages
    (DeepSeekMath, Shao et al. 2024, eq. 3). k3 = r - 1 - log r (Schulman, "Approximating KL divergence") is the
    unbiased estimate of KL(rollout || policy) on tokens that the rollout policy sampled.

    Args:
        logprobs: [T] float32 of the policy, with gradient.
        rollout_logprobs: [T] float32 of the policy that sampled the tokens, at the same temperature.
        advantages: [T] float32.
    """
    log_ratio = (logprobs.float() - rollout_logprobs.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high = 1.0 - clip_eps, 1.0 + clip_eps
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    k3 = log_ratio.expm1() - log_ratio
    if kl_coef:
        loss = loss + kl_coef * k3
    outside = (ratio < low) | (ratio > high)
    return LossSums(
        loss=loss.sum(),
        ratio=ratio.detach().sum(),
        clipped=outside.sum(),
        kl_k3=k3.detach().sum(),
        tokens=torch.tensor(float(loss.numel()), device=loss.device),
    )
