"""Made-up rollouts, and their logprobs by plain transformers: one sequence at a time, full
logits."""

from __future__ import annotations

import numpy as np
import torch

from trainer_core.objective.registry import Counts
from trainer_core.ranks.world import World
from trainer_core.rollouts.batch import Rollout


def rollouts_of(
    count: int = 12, *, seed: int = 0, longest: int = 20, spread: float = 3.0
) -> list[Rollout]:
    """Rollouts of 3 to `longest` tokens below 14, with logprobs down to -`spread` and one advantage
    each."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        length = int(rng.integers(3, longest))
        trained = np.arange(length) >= rng.integers(1, length)
        made.append(
            Rollout(
                rng.integers(0, 14, length),
                trained,
                rng.uniform(-spread, 0, length).astype(np.float32),
                np.full(length, rng.normal(), dtype=np.float32),
                1.0 if i % 2 else 0.7,
                0.0,
                "",
                (),
            )
        )
    return made


def plain_logprobs(model: torch.nn.Module, rollout: Rollout) -> torch.Tensor:
    """Logprobs of the trained tokens, [T], at the rollout's temperature, with gradient."""
    model.set_attn_implementation("eager")
    tokens = torch.from_numpy(rollout.tokens)
    logits = model(tokens[None]).logits[0, :-1] / rollout.temperature
    where = torch.from_numpy(np.flatnonzero(rollout.trained)) - 1
    return logits.log_softmax(-1)[where, tokens[where + 1]]


class Beside(World):
    """One rank of a step in which the others train `counts` more; its sums stay its own."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = [counts.tokens, counts.sequences]

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self._counts.pop(0) if self._counts else tensor
