"""Rows too long for one GPU (Ulysses): neighbouring ranks have the same row, and each computes a part of its tokens.

All that a layer does beside attention is done token by token, so a part needs no other. For attention each rank hands
its tokens' heads to the ranks that compute those, and gets whole rows of its own heads; what comes out goes back the
same way. Heads for keys are repeated where there are fewer of them than ranks. A label belongs to the rank that has the
token before it; scores are put together afterwards, so whatever is made of a row (the loss of a sequence, its sums) is
made of all of it on each of these ranks, as if it were alone. Each rank's gradient is that of its own tokens, and FSDP
adds them up as it does those of other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives

from trainer_core.rollouts.packing import PackedRow


class RowPart(NamedTuple):
    """What one rank has of a row of N tokens; n on each rank, with padding behind the last token."""

    tokens: torch.Tensor
    positions: torch.Tensor
    """Both [n] int64."""
    lengths: tuple[int, ...]
    """Of all sequences of the row, padding being one more."""
    predict: torch.Tensor
    """As in the row, counted from the first token of this part."""
    labels: slice
    """Which of the row's labels are predicted here."""
    experts: torch.Tensor | None = None
    """[n, sparse layers, K], as in the row; -1 for padding."""


@dataclass(frozen=True)
class Context:
    """The ranks that share rows with this one."""

    group: Any
    """torch's."""
    rank: int
    size: int

    def part(self, row: PackedRow) -> RowPart:
        """This rank's part of `row`, which the others have as well."""
        count = len(row.tokens)
        each = -(-count // self.size)
        beyond = each * self.size - count
        lengths = (*row.lengths, beyond) if beyond else row.lengths
        own = slice(self.rank * each, (self.rank + 1) * each)
        padding = torch.arange(beyond, device=row.tokens.device)
        bounds = torch.arange(self.size + 1, device=row.predict.device) * each
        starts = torch.searchsorted(row.predict, bounds).tolist()  # labels stand in the order of tokens
        labels = list(map(slice, starts, starts[1:]))[self.rank]
        return RowPart(
            torch.cat([row.tokens, torch.zeros_like(padding)])[own], torch.cat([row.positions, padding])[own], lengths,
            row.predict[labels] - self.rank * each, labels,
            None if row.experts is None else F.pad(row.experts, (0, 0, 0, 0, 0, beyond), value=-1)[own],
        )  # fmt: skip

    def tokens_of(self, count: int) -> slice:
        """Which of `count` tokens are here."""
        each = -(-count // self.size)
        return slice(min(self.rank * each, count), min((self.rank + 1) * each, count))

    def whole(self, own: torch.Tensor, where: slice, count: int) -> torch.Tensor:
        """[count, ...] of the row, from what each rank has of it; `own` is this rank's, at `where`. The gradient of
        what all ranks compute from it alike comes back to each one's own."""
        found: torch.Tensor = _Whole.apply(own, where, count, self.group)
        return found

    def heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This rank's heads of all tokens, from all heads of its own; each [1, heads, tokens, head_dim].

        Raises:
            ValueError: they cannot be shared out evenly.
        """
        if query.shape[1] % self.size:
            raise ValueError(f"context_parallel = {self.size} does not divide {query.shape[1]} attention heads")
        repeat = self.size // math.gcd(key.shape[1], self.size)
        if repeat > 1:
            key, value = (each.repeat_interleave(repeat, dim=1) for each in (key, value))
        if sinks is not None:
            sinks = sinks.chunk(self.size)[self.rank]
        query, key, value = (self._to_heads(each) for each in (query, key, value))
        return query, key, value, sinks

    def tokens(self, result: torch.Tensor) -> torch.Tensor:
        """All heads of this rank's tokens, from its own heads of all tokens; [1, tokens, heads, head_dim]."""
        _, count, heads, width = result.shape
        parts = self._exchange(result.reshape(self.size, count // self.size, heads, width))
        return parts.transpose(0, 1).reshape(1, count // self.size, self.size * heads, width)

    def _to_heads(self, each: torch.Tensor) -> torch.Tensor:
        _, heads, count, width = each.shape
        parts = self._exchange(each.reshape(self.size, heads // self.size, count, width))
        return parts.transpose(0, 1).reshape(1, heads // self.size, self.size * count, width)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """The n-th goes to rank n; what comes is in the order of ranks."""
        sizes = [1] * self.size
        return collectives.all_to_all_single_autograd(parts.contiguous(), sizes, sizes, self.group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, where: slice, count: int, group: Any) -> torch.Tensor:
        ctx.where = where
        whole = own.new_zeros(count, *own.shape[1:])
        whole[where] = own
        return collectives.wait_tensor(collectives.all_reduce(whole, "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0][ctx.where], None, None, None


def context_of(model: nn.Module) -> Context | None:
    """With whom `model` shares rows; null where nobody has its own."""
    found: Context | None = getattr(model, "context", None)
    return found
