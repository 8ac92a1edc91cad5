"""From the sequences of a group's rollouts to groups that run-api takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as Items
from typing import Any

from atropos_envs.recording.sequences import Sequence


class GroupMaker:
    """Makes groups of exactly `group_size` sequences, whose number run-api's batches depend on.

    Each rollout has one sequence in its own group: the one with most trained tokens. Its further
    branches wait until there are enough of them for a group of branches. Those carry the advantage
    of their rollout, so that a rollout with many branches does not shift its group's mean.
    """

    def __init__(self, group_size: int) -> None:
        self._size = group_size
        self._branches: list[tuple[Sequence, float, float]] = []

    @property
    def waiting(self) -> int:
        """Branches that are not in a group yet."""
        return len(self._branches)

    def groups(
        self, rollouts: Items[Items[Sequence]], scores: Items[float]
    ) -> list[dict[str, Any]]:
        """Return the group of these rollouts, then complete groups of branches.

        Args:
            rollouts: the sequences of each; at least one.
        """
        advantages = _advantages(scores)
        heads = []
        for sequences, score, advantage in zip(rollouts, scores, advantages, strict=True):
            head = max(sequences, key=lambda one: one.trained)
            heads.append(head)
            # A branch without advantage teaches nothing.
            if advantage:
                rest = [one for one in sequences if one is not head]
                self._branches += [(one, score, advantage) for one in rest]
        made = [_group(heads, scores)]
        while len(self._branches) >= self._size:
            some, self._branches = self._branches[: self._size], self._branches[self._size :]
            group = _group([one for one, _, _ in some], [score for _, score, _ in some])
            made.append(group | {"advantages": [each for _, _, each in some]})
        return made


def _group(sequences: Items[Sequence], scores: Items[float]) -> dict[str, Any]:
    return {
        "tokens": [one.tokens for one in sequences],
        "masks": [one.masks for one in sequences],
        "inference_logprobs": [one.logprobs for one in sequences],
        "scores": list(scores),
        "overrides": [{"temperature": one.temperature} for one in sequences],
    }


def _advantages(scores: Items[float]) -> list[float]:
    # As the trainer computes them with `advantage_std`, its default.
    if not all(map(math.isfinite, scores)):
        return [0.0] * len(scores)  # the group is left out, and counted by this reason
    mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
    return [(score - mean) / deviation if deviation else 0.0 for score in scores]
