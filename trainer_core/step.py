"""One optimizer step up to the point where weights change: forward, backward, gradient clipping.

The denominator is the number of trained tokens of the whole step, known before the first row, so the split into rows
changes neither loss nor gradient. Sums stay on the device; one transfer at the end brings them to the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainer_core.config import TrainingConfig
from trainer_core.objective.alignment import DiffSums
from trainer_core.objective.loss import grpo_loss
from trainer_core.optimizers import Stepper
from trainer_core.policy.logprobs import row_logprobs
from trainer_core.rollouts.packing import PackedRow


@dataclass(frozen=True)
class StepOutcome:
    """Means over the trained tokens of one optimizer step, made once, here."""

    loss: float
    ratio_mean: float
    clip_fraction: float
    kl_k3: float
    grad_norm: float
    lr: float
    diffs: DiffSums
    """Trainer against rollout logprobs, over the trained tokens."""
    tokens: int

    @property
    def finite(self) -> bool:
        """Whether the update may be applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def accumulate(
    model: torch.nn.Module, stepper: Stepper, rows: list[PackedRow], config: TrainingConfig, step: int
) -> StepOutcome:
    """Gradient of one optimizer step, clipped and ready in `stepper`; no parameter changes.

    Args:
        rows: on any device; at least one trained token in all.
        step: from 1, for the learning rate.
    """
    device = next(model.parameters()).device
    tokens = sum(len(row.labels) for row in rows)
    sums = torch.zeros(8, dtype=torch.float64, device=device)
    largest = torch.zeros((), device=device)
    stepper.zero_grad()
    for row in rows:
        row = row.to(device)
        logprobs = row_logprobs(model, row)
        part = grpo_loss(logprobs, row.logprobs, row.advantages, clip_eps=config.clip_eps, kl_coef=config.kl_coef)
        (part.loss / tokens).backward()
        with torch.no_grad():
            diff = logprobs - row.logprobs
            largest = torch.maximum(largest, diff.abs().max())
            values = [part.loss, part.ratio, part.clipped, part.kl_k3]
            values += [diff.sum(), diff.abs().sum(), logprobs.sum(), row.logprobs.sum()]
            sums += torch.stack([value.detach().double() for value in values])
    lr = stepper.set_lr(step)
    norm = stepper.clip()
    loss, ratio, clipped, k3, diff_sum, diff_abs, train, inference = sums.tolist()
    return StepOutcome(
        loss=loss / tokens,
        ratio_mean=ratio / tokens,
        clip_fraction=clipped / tokens,
        kl_k3=k3 / tokens,
        grad_norm=float(norm),
        lr=lr,
        diffs=DiffSums(tokens, diff_sum, diff_abs, float(largest), train, inference),
        tokens=tokens,
    )
