"""Logprobs of one side beside those of the engine, and how far a difference must shrink to have a
cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from trainer_core.objective.alignment import Cause

# Largest share of a difference that may remain under an accepted cause: lag or noise explains less.
LEFT = 0.3
# Difference in nats between two computations of a logprob that half precision explains.
NOISE = 0.05
NEAREST_TEMPERATURE = 0.04  # smallest relative difference that counts as a cause
FEWEST_TOKENS = 8
# Ratio of two mean differences of different tokens from which on they are not the same one.
CLEARLY = 2.0


class Scored(Protocol):
    """Tokens with our logprobs at any temperature and with the engine's."""

    train: torch.Tensor
    """[T] float32: our logprobs at the assumed temperature."""
    theirs: torch.Tensor
    """[T] float32: the engine's."""
    sequences: torch.Tensor
    """[T] int: index of each token's sequence."""

    def at(self, factor: float) -> torch.Tensor:
        """Return our logprobs with every temperature times `factor`, [T]."""

    def left(self, factor: float) -> float:
        """Return the mean difference that remains with every temperature times `factor`."""

    @property
    def assumed(self) -> float:
        """Temperature that our logprobs assume."""

    def share(self, cause: Callable[[], Cause | None]) -> Cause | None:
        """Return the verdict of the first rank on all ranks."""


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Mean absolute difference in nats; an impossible token counts as 50 nats."""
    return float((ours - theirs).abs().nan_to_num(50.0, 50.0, 50.0).clamp(max=50.0).mean())
