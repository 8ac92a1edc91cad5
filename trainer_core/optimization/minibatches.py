"""Several optimizer steps on one batch: minibatches, in one or several epochs.

A batch makes `minibatches` x `epochs` steps (PPO, Schulman et al. 2017, algorithm 1). The base of
the ratio stays fixed, so from the second step on the ratio leaves 1 and the clip range has an
effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.optimization.step import METRICS, StepOutcome
from trainer_core.policy.logprobs import row_logprobs
from trainer_core.policy.reference import Reference
from trainer_core.policy.speed import in_threads
from trainer_core.ranks.world import ALONE, World
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import PackedRow, assign_rows, pack, packing_order, rows_at


class Minibatches:
    def __init__(
        self,
        config: TrainingConfig,
        model: torch.nn.Module,
        objective: Objective,
        *,
        threads: int = 1,
        reference: Reference | None = None,
        world: World = ALONE,
    ) -> None:
        self._config, self._model, self._objective = config, model, objective
        self._world = world
        self._threads, self._reference = threads, reference
        self._several = config.minibatches * config.epochs > 1

    def rows(
        self, rollouts: Sequence[Rollout], step: int, *, proximal: bool
    ) -> Iterator[list[PackedRow]]:
        """Yield this rank's packed rows for each optimizer step on the batch of `step`.

        Take the first item before weights change: it computes the base of every ratio.

        Args:
            proximal: that base is the trainer's own logprobs.
        """
        if not self._several:
            yield self._pack(rollouts)
            return
        # A sequence without trained tokens would make a minibatch without a loss.
        trained = [r for r in rollouts if r.trained.any()]
        rollouts = self._with_fixed_logprobs(trained, proximal=proximal)
        for epoch in range(self._config.epochs):
            # Seeded by step and epoch: every rank, and a resumed run, draws the same minibatches.
            shuffle = np.random.default_rng([self._config.seed, step, epoch])
            for part in split(rollouts, self._config.minibatches, shuffle):
                yield self._pack(part)

    def _pack(self, rollouts: Sequence[Rollout]) -> list[PackedRow]:
        rows, hands = self._dealt(rollouts)
        return rows_at(rows, hands[self._world.rank])

    def _dealt(self, rollouts: Sequence[Rollout]) -> tuple[list[PackedRow], list[list[int]]]:
        """Pack the rows of all ranks; also return each rank's row indices."""
        rows = pack(rollouts, self._config.tokens_per_pass, self._threads * self._world.size)
        return rows, assign_rows(
            rows, self._world.size, lambda row: self._objective.teaches(row.advantages)
        )

    @torch.no_grad()
    def _with_fixed_logprobs(self, rollouts: list[Rollout], *, proximal: bool) -> list[Rollout]:
        # The reference's logprobs and the ratio's base are computed once, not in each optimizer
        # step.
        device = next(self._model.parameters()).device
        rows, hands = self._dealt(rollouts)
        mine = rows_at(rows, hands[self._world.rank])

        def of_all(found: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
            # Each rank computed its own rows; gather them into the order of all rows.
            parts = self._world.gather(
                [None if value is None else value.float().cpu() for value in found]
            )
            whose = {
                at: value
                for at, value in zip(chain(*hands), chain(*parts), strict=True)
                if value is not None
            }
            return [whose[at] for at in range(len(rows))]

        if self._reference is not None:
            filled = self._reference.fill(mine, self._threads, self._world)
            rollouts = _unpacked(rollouts, "reference", of_all([row.reference for row in filled]))
        # Needed as the base of `ratio_base = proximal`, or in place of missing rollout logprobs.
        if proximal or not all(r.complete for r in rollouts):
            found = in_threads(
                lambda row, _: row_logprobs(self._model, row.to(device)), mine, self._threads
            )
            rollouts = _unpacked(rollouts, "base", of_all(found))
        return rollouts


def _unpacked(
    rollouts: Sequence[Rollout], name: str, values: Sequence[torch.Tensor]
) -> list[Rollout]:
    """Set field `name` of each rollout to its part of `values`, which are per packed row."""
    # One value per trained token, [T] over all rows, in the order in which `pack` placed the
    # rollouts.
    column = torch.cat(list(values)).numpy()
    start, known = 0, list(rollouts)
    # By identity: comparing rollouts would compare their arrays.
    places = {id(rollout): place for place, rollout in enumerate(rollouts)}
    for rollout in packing_order(rollouts):
        whole, count = (
            np.full(len(rollout.tokens), np.nan, dtype=np.float32),
            int(rollout.trained.sum()),
        )
        whole[rollout.trained] = column[start : start + count]
        start += count
        known[places[id(rollout)]] = replace(rollout, **{name: whole})  # type: ignore[arg-type]
    return known


def split(
    rollouts: Sequence[Rollout], parts: int, shuffle: np.random.Generator
) -> list[list[Rollout]]:
    """Split into at most `parts` sets of about equal tokens."""
    sets: list[list[Rollout]] = [[] for _ in range(min(parts, len(rollouts)))]
    tokens = [0] * len(sets)
    for index in shuffle.permutation(len(rollouts)):
        # Greedy: each rollout, in random order, joins the set with the fewest tokens.
        smallest = tokens.index(min(tokens))
        sets[smallest].append(rollouts[index])
        tokens[smallest] += len(rollouts[index].tokens)
    return sets


def merged(outcomes: Sequence[StepOutcome], epochs: int = 1) -> StepOutcome:
    """Combine the outcomes of a batch's optimizer steps: means, and maxima of maxima.

    Args:
        epochs: number of times that each token was trained.
    """
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    metrics: dict[str, float] = {}
    for name, metric in METRICS.items():
        if known := [each.metrics[name] for each in outcomes if name in each.metrics]:
            metrics[name] = max(known) if metric.max_of else math.fsum(known) / len(known)
    tokens = sum(outcome.tokens for outcome in outcomes) // epochs
    # The differences of the first step: no update has changed the weights yet.
    return StepOutcome(metrics, first.diffs, tokens, len(outcomes))
