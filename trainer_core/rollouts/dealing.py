"""Packed rows to the ranks of a trainer: which of them each one computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer_core.rollouts.packing import PackedRow, empty_row


def deal(rows: Sequence[PackedRow], ranks: int, learns: Callable[[PackedRow], bool]) -> list[list[int]]:
    """The rows of each rank, by index: equally many on each, of about equal tokens; -1 is an empty one.

    A pass through the model is one of all ranks together. So the n-th rows of all are alike: beside a long one the
    others would wait, and beside one that learns they would pass backward too.
    """
    order = sorted(range(len(rows)), key=lambda i: (not learns(rows[i]), -len(rows[i].tokens)))
    order += [-1] * (-len(order) % ranks)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for at in range(0, len(order), ranks):
        fewest_first = sorted(range(ranks), key=tokens.__getitem__)
        for rank, index in zip(fewest_first, order[at : at + ranks], strict=True):
            hands[rank].append(index)
            tokens[rank] += len(rows[index].tokens) if index >= 0 else 0
    return hands


def hand(rows: Sequence[PackedRow], indices: Sequence[int]) -> list[PackedRow]:
    """The rows that one rank was dealt."""
    return [rows[index] if index >= 0 else empty_row() for index in indices]
