"""Pack rollouts into rows without padding, and assign rows to ranks.

The shift by one happens only here: position i - 1 predicts token i, so `predict` holds i - 1.
Labels, logprobs, advantages and temperatures belong to token i.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_core.rollouts.batch import Rollout


@dataclass(frozen=True)
class PackedRow:
    """S sequences in one row of N tokens, T of which train."""

    tokens: torch.Tensor  # [N] int64
    positions: torch.Tensor
    """[N] int64, from 0 in every sequence"""
    lengths: tuple[int, ...]
    """Sum is N"""
    predict: torch.Tensor
    """[T] int64, position of the hidden state that predicts each label"""
    labels: torch.Tensor
    """[T] int64, the trained tokens"""
    logprobs: torch.Tensor
    """[T] float32, rollout logprobs of the labels, in nats"""
    advantages: torch.Tensor  # [T] float32
    temperatures: torch.Tensor  # [T] float32
    reference: torch.Tensor | None = None
    """[T] float32 logprobs of a frozen reference, NaN where missing"""
    teacher_ids: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    """[T, K] int64 and float32, as in `fields.Teacher`"""
    base: torch.Tensor | None = None
    """[T] float32 logprobs before the batch's first optimizer step; None: the current ones"""
    experts: torch.Tensor | None = None
    """[N, sparse layers, K] int16 chosen by the engine, -1 if unknown"""
    members: tuple[Rollout, ...] = ()
    """The sequences, in order"""

    @property
    def sequences(self) -> torch.Tensor:
        """[T] int64, index of each label's sequence."""
        ends = torch.tensor(self.lengths).cumsum(0).to(self.predict.device)
        return torch.searchsorted(ends, self.predict, right=True)

    def to(self, device: torch.device) -> PackedRow:
        """Return the row on `device`; copies from pinned memory do not block."""
        if self.tokens.device == device:
            return self
        tensors = {n: value for n, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(self, **moved)


def empty_row() -> PackedRow:
    """Return a row of one token that does not train."""
    none = torch.zeros(0)
    where = torch.zeros(0, dtype=torch.int64)
    first = torch.zeros(1, dtype=torch.int64)
    return PackedRow(first, first, (1,), where, where, none, none, none)


def pack(rollouts: Sequence[Rollout], max_tokens: int, threads: int = 1) -> list[PackedRow]:
    """Pack into rows of at most `max_tokens` tokens, in deterministic order.

    A longer single sequence gets its own row. Sequences without a trained token are left out.

    Args:
        threads: rows computed in parallel; the number of rows becomes a multiple of it.
    """
    rows = []
    # Rows of zero advantages may need no backward pass. Similar lengths in a row bound the padding
    # where attention needs it.
    for _, alike in groupby(packing_order(rollouts), _is_flat):
        needed = [(_needed(r), r) for r in alike]
        lengths = [length for length, _ in needed]
        room = max_tokens if threads == 1 else _equal_room(lengths, max_tokens, threads)
        rows += [_row(needed[a:b]) for a, b in pairwise(_cuts(lengths, room))]
    return rows


def packing_order(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Sort sequences that train: longest first, those without advantage last."""
    trained = (rollout for rollout in rollouts if rollout.trained.any())
    return sorted(trained, key=lambda rollout: (_is_flat(rollout), -_needed(rollout)))


def _is_flat(rollout: Rollout) -> bool:
    return not rollout.advantages[rollout.trained].any()


def _needed(rollout: Rollout) -> int:
    # Tokens to read: the last trained one and those after it predict nothing that trains.
    return int(np.flatnonzero(rollout.trained)[-1])


def _cuts(lengths: Sequence[int], room: int) -> list[int]:
    """Indices where rows of at most `room` tokens start, and the number of sequences."""
    starts, free = [], 0
    for i, length in enumerate(lengths):
        if not i or length > free:
            starts.append(i)
            free = room
        free -= length
    return [*starts, len(lengths)]


def _equal_room(lengths: Sequence[int], max_tokens: int, threads: int) -> int:
    fewest = len(_cuts(lengths, max_tokens)) - 1
    rows = threads * -(-fewest // threads)

    def enough(room: int) -> bool:
        return len(_cuts(lengths, room)) - 1 <= rows

    # The number of rows falls as the size grows, so a binary search finds the smallest size.
    return 1 + bisect_left(range(1, max_tokens), True, key=enough)


def _row(members: list[tuple[int, Rollout]]) -> PackedRow:
    lengths = [length for length, _ in members]
    starts = [0, *accumulate(lengths)][:-1]
    where = [np.flatnonzero(r.trained) for _, r in members]
    pairs = list(zip((r for _, r in members), where, strict=True))
    bases = [r.base[at] for r, at in pairs if r.base is not None]

    def column(values: list[NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values))

    return PackedRow(
        tokens=column([r.tokens[:length] for length, r in members]),
        positions=column([np.arange(length, dtype=np.int64) for length in lengths]),
        lengths=tuple(lengths),
        predict=column([start + at - 1 for start, at in zip(starts, where, strict=True)]),
        # The label may be the token behind the cut, so it comes from the whole sequence.
        labels=column([r.tokens[at] for r, at in pairs]),
        logprobs=column([r.logprobs[at] for r, at in pairs]),
        advantages=column([r.advantages[at] for r, at in pairs]),
        temperatures=column([np.full(len(at), r.temperature, dtype=np.float32) for r, at in pairs]),
        reference=_reference(pairs),
        base=column(bases) if bases else None,
        experts=packed_experts([r.experts for _, r in members], lengths),
        members=tuple(r for _, r in members),
        **_teacher(pairs),
    )


def packed_experts(
    parts: Sequence[NDArray[np.int16] | None], lengths: Sequence[int]
) -> torch.Tensor | None:
    """Return `PackedRow.experts` from the known experts of each sequence's first tokens."""
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    # -1: the router chooses by itself.
    whole = np.full((sum(lengths), *known.shape[1:]), -1, dtype=np.int16)
    for part, length, end in zip(parts, lengths, accumulate(lengths), strict=True):
        if part is not None:
            whole[end - length : end][: len(part)] = part[:length]
    return torch.from_numpy(whole)


Pairs = Sequence[tuple[Rollout, NDArray[np.int64]]]


def _reference(pairs: Pairs) -> torch.Tensor | None:
    if all(r.reference is None for r, _ in pairs):
        return None
    # NaN makes the trainer's own reference fill the gap.
    parts = [
        np.full(len(at), np.nan, dtype=np.float32) if r.reference is None else r.reference[at]
        for r, at in pairs
    ]
    return torch.from_numpy(np.concatenate(parts))


def _teacher(pairs: Pairs) -> dict[str, torch.Tensor]:
    most = max((r.teacher.ids.shape[1] for r, _ in pairs if r.teacher is not None), default=0)
    if not most:
        return {}
    count = sum(len(at) for _, at in pairs)
    ids = np.zeros((count, most), dtype=np.int64)
    # -inf is probability 0: rollouts with fewer or no teacher tokens.
    logprobs = np.full((count, most), -np.inf, dtype=np.float32)
    start = 0
    for r, at in pairs:
        if r.teacher is not None:
            named = r.teacher.ids.shape[1]
            ids[start : start + len(at), :named] = r.teacher.ids[at]
            logprobs[start : start + len(at), :named] = r.teacher.logprobs[at]
        start += len(at)
    return {"teacher_ids": torch.from_numpy(ids), "teacher_logprobs": torch.from_numpy(logprobs)}


def assign_rows(
    rows: Sequence[PackedRow], ranks: int, learns: Callable[[PackedRow], bool]
) -> list[list[int]]:
    """Assign as many rows to each rank, by index, with about equal tokens; -1 is an empty row."""
    # All ranks run a forward pass together, so the n-th rows of all ranks are similar: a long row
    # makes the others wait, and a backward pass of one is a backward pass of all.
    order = sorted(range(len(rows)), key=lambda i: (not learns(rows[i]), -len(rows[i].tokens)))
    # A collective needs every rank, so the last round is filled up with empty rows.
    order += [-1] * (-len(order) % ranks)
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for at in range(0, len(order), ranks):
        # The longest row of this round goes to the rank with the fewest tokens.
        fewest_first = sorted(range(ranks), key=tokens.__getitem__)
        for rank, index in zip(fewest_first, order[at : at + ranks], strict=True):
            assigned[rank].append(index)
            tokens[rank] += len(rows[index].tokens) if index >= 0 else 0
    return assigned


def rows_at(rows: Sequence[PackedRow], indices: Sequence[int]) -> list[PackedRow]:
    return [rows[index] if index >= 0 else empty_row() for index in indices]
