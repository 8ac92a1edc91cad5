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
from itertools import chain
from typing import Any

import numpy as np
import torch

from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.policy.logprobs import row_logprobs
from trainer_core.policy.reference import Reference
from trainer_core.policy.speed import in_threads
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import PackedRow, deal, hand, pack, packing_order
from trainer_core.step import StepOutcome
from trainer_core.world import ALONE, World


class Minibatches:
    """Cuts batches for one policy."""

    def __init__(
        self, config: TrainingConfig, model: torch.nn.Module, objective: Objective, *, threads: int = 1,
        reference: Reference | None = None, world: World = ALONE,
    ) -> None:  # fmt: skip
        self._config, self._model, self._objective = config, model, objective
        self._world = world
        self._threads, self._reference = threads, reference
        self._several = config.minibatches * config.epochs > 1

    def rows(self, rollouts: Sequence[Rollout], step: int) -> Iterator[list[PackedRow]]:
        """This rank's packed rows of each optimizer step on the batch of `step`, as many as there are sequences for.

        To be asked for the first one before weights change: what every ratio is against is computed then.
        """
        if not self._several:
            yield self._pack(rollouts)
            return
        rollouts = self._known_before([r for r in rollouts if r.trained.any()])
        for epoch in range(self._config.epochs):
            shuffle = np.random.default_rng([self._config.seed, step, epoch])
            for part in split(rollouts, self._config.minibatches, shuffle):
                yield self._pack(part)

    def _pack(self, rollouts: Sequence[Rollout]) -> list[PackedRow]:
        rows, hands = self._dealt(rollouts)
        return hand(rows, hands[self._world.rank])

    def _dealt(self, rollouts: Sequence[Rollout]) -> tuple[list[PackedRow], list[list[int]]]:
        """The rows of all ranks, and which are whose."""
        rows = pack(rollouts, self._config.tokens_per_pass, self._threads * self._world.size)
        return rows, deal(rows, self._world.size, lambda row: self._objective.teaches(row.advantages))

    @torch.no_grad()
    def _known_before(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts with all that each optimizer step would compute anew: the reference's
        logprobs, and the policy's present ones, where they are needed."""
        device = next(self._model.parameters()).device
        rows, hands = self._dealt(rollouts)
        mine = hand(rows, hands[self._world.rank])

        def of_all(found: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
            """What each rank found for its rows, in the order of all rows."""
            parts = self._world.gather([None if value is None else value.float().cpu() for value in found])
            whose = {at: value for at, value in zip(chain(*hands), chain(*parts), strict=True) if value is not None}
            return [whose[at] for at in range(len(rows))]

        if self._reference is not None:
            filled = self._reference.fill(mine, self._threads, self._world)
            rollouts = _unpacked(rollouts, "reference", of_all([row.reference for row in filled]))
        if self._objective.bounds is not None or not all(r.complete for r in rollouts):
            found = in_threads(lambda row, _: row_logprobs(self._model, row.to(device)), mine, self._threads)
            rollouts = _unpacked(rollouts, "base", of_all(found))
        return rollouts


def _unpacked(rollouts: Sequence[Rollout], name: str, values: Sequence[torch.Tensor]) -> list[Rollout]:
    """The rollouts with their own part of `values`, which belong to the rows that they make up, as field `name`."""
    column = torch.cat(list(values)).numpy()
    start, known = 0, list(rollouts)
    places = {id(rollout): place for place, rollout in enumerate(rollouts)}
    for rollout in packing_order(rollouts):
        whole, count = np.full(len(rollout.tokens), np.nan, dtype=np.float32), int(rollout.trained.sum())
        whole[rollout.trained] = column[start : start + count]
        start += count
        known[places[id(rollout)]] = replace(rollout, **{name: whole})  # type: ignore[arg-type]
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
