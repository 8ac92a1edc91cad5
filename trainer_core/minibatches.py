"""Several optimizer steps on one batch: its sequences in minibatches, once or in several epochs.

`minibatches` x `epochs` steps, as PPO makes them (Schulman et al. 2017, algorithm 1): verl's `train_batch_size` over
`ppo_mini_batch_size`, and `ppo_epochs`; TRL's `steps_per_generation` over `gradient_accumulation_steps`, and
`num_iterations`. Each step has the denominator of its own minibatch. What the ratio is against does not move with them:
the rollouts' logprobs, or, with `ratio_base = proximal`, those of the policy before the batch's first step. So from the
second step on ratios leave 1, and the clip range acts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.policy.logprobs import row_logprobs
from trainer_core.policy.speed import in_threads
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import PackedRow, pack, packing_order
from trainer_core.step import StepOutcome


class Minibatches:
    """Cuts batches for one policy."""

    def __init__(self, config: TrainingConfig, model: torch.nn.Module, objective: Objective, threads: int = 1) -> None:
        self._config, self._model, self._objective, self._threads = config, model, objective, threads
        self._several = config.minibatches * config.epochs > 1

    def rows(self, rollouts: Sequence[Rollout], step: int) -> Iterator[list[PackedRow]]:
        """The packed rows of each optimizer step on the batch of `step`, as many as there are sequences for.

        To be asked for the first one before weights change: what every ratio is against is computed then.
        """
        if not self._several:
            yield self._pack(rollouts)
            return
        moves = self._objective.bounds is not None or not all(r.complete for r in rollouts)
        rollouts = self._with_base(rollouts) if moves else packing_order(rollouts)
        for epoch in range(self._config.epochs):
            shuffle = np.random.default_rng([self._config.seed, step, epoch])
            for part in split(rollouts, self._config.minibatches, shuffle):
                yield self._pack(part)

    def _pack(self, rollouts: Sequence[Rollout]) -> list[PackedRow]:
        return pack(rollouts, self._config.tokens_per_pass, self._threads)

    @torch.no_grad()
    def _with_base(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with the policy's present logprobs."""
        ordered, device = packing_order(rollouts), next(self._model.parameters()).device
        found = in_threads(
            lambda row, _: row_logprobs(self._model, row.to(device)).float().cpu(), self._pack(ordered), self._threads
        )
        values, start, known = torch.cat(found).numpy(), 0, []
        for rollout in ordered:
            base = np.full(len(rollout.tokens), np.nan, dtype=np.float32)
            base[rollout.trained] = values[start : start + int(rollout.trained.sum())]
            start += int(rollout.trained.sum())
            known.append(replace(rollout, base=base))
        return known


def split(rollouts: Sequence[Rollout], parts: int, shuffle: np.random.Generator) -> list[list[Rollout]]:
    """At most `parts` sets of about equal tokens: each rollout, in random order, goes to the set with fewest so far."""
    sets: list[list[Rollout]] = [[] for _ in range(min(parts, len(rollouts)))]
    tokens = [0] * len(sets)
    for index in shuffle.permutation(len(rollouts)):
        smallest = tokens.index(min(tokens))
        sets[smallest].append(rollouts[index])
        tokens[smallest] += len(rollouts[index].tokens)
    return sets


def merged(outcomes: Sequence[StepOutcome], epochs: int = 1) -> StepOutcome:
    """What the optimizer steps of one batch did together: the mean over them of each figure, the largest of maxima, and
    of the differences to the rollouts the first ones, which no update has moved yet.

    Args:
        epochs: in which each token was trained on.
    """
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    means: dict[str, Any] = {}
    for each in fields(StepOutcome):
        known = [value for outcome in outcomes if isinstance(value := getattr(outcome, each.name), float)]
        if known:
            means[each.name] = math.fsum(known) / len(known)
    largest = max(outcome.ratio_max for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes) // epochs
    return replace(first, **means | {"ratio_max": largest, "tokens": tokens, "steps": len(outcomes)})
