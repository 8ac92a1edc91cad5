"""Rollouts of a step that are written as text: whole groups, in turn, flat ones last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.samples import sampled


def rollouts(*groups: Sequence[float]) -> list[Rollout]:
    """A rollout for each score; those of a group share their prompt."""
    made = []
    for prompt, scores in enumerate(groups):
        for score in scores:
            tokens, trained = np.array([prompt, prompt, 7]), np.array([False, False, True])
            values = np.zeros(3, np.float32)
            made.append(Rollout(tokens, trained, values, values, 1.0, score, "e", ()))
    return made


def test_a_whole_group_is_written_and_another_one_at_the_next_step() -> None:
    batch = rollouts([0, 1, 0], [1, 0, 1])
    assert sampled(batch, 3, step=0) == [(0, 3), (1, 3), (2, 3)]
    assert sampled(batch, 3, step=1) == [(3, 3), (4, 3), (5, 3)]


def test_groups_that_teach_nothing_come_last() -> None:
    assert sampled(rollouts([1, 1], [0, 1]), 2, step=0) == [(2, 2), (3, 2)]
    assert sampled(rollouts([1, 1], [0, 1]), 4, step=0) == [(2, 2), (3, 2), (0, 2), (1, 2)]


def test_of_a_group_that_does_not_fit_the_best_and_the_worst_are_among_those_written() -> None:
    scores = [0.5, 0.1, 0.9, 0.3, 0.7, 0.2]
    found = sampled(rollouts(scores), 3, step=5)
    assert [size for _, size in found] == [6, 6, 6]
    assert {2, 1} < {index for index, _ in found} and len(found) == 3


def test_none_are_written_where_none_are_wanted_and_all_where_there_are_few() -> None:
    assert sampled(rollouts([0, 1]), 0, step=1) == []
    assert len(sampled(rollouts([0, 1]), 64, step=1)) == 2
