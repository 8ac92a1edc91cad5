"""Context parallelism (Ulysses): neighbouring ranks share a row, each computing some of its tokens.

Only attention needs other tokens. An all-to-all gives each rank all tokens of its share of the
heads, and a second one returns the results. Scores are gathered, so each rank computes the loss of
the whole row; FSDP adds the gradients of its own tokens.
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
    """One rank's n tokens of a row, padded after the last token."""

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    """Sequence lengths of the whole row; padding counts as one more."""
    predict: torch.Tensor
    """Predicting tokens, from the first token of this part."""
    labels: slice
    """The row's labels that this rank predicts."""
    experts: torch.Tensor | None = None
    """[n, sparse layers, K]; -1 for padding."""


@dataclass(frozen=True)
class Context:
    """The ranks that share rows with this one."""

    group: Any
    rank: int
    size: int

    def part(self, row: PackedRow) -> RowPart:
        """Return this rank's part of `row`, which all ranks of the group have."""
        count = len(row.tokens)
        each = -(-count // self.size)  # rounded up
        # Every rank needs the same number of tokens, so the row is padded at its end.
        beyond = each * self.size - count
        lengths = (*row.lengths, beyond) if beyond else row.lengths
        own = slice(self.rank * each, (self.rank + 1) * each)
        padding = torch.arange(beyond, device=row.tokens.device)
        bounds = torch.arange(self.size + 1, device=row.predict.device) * each
        # Labels are in token order, so each rank's labels are one contiguous slice.
        starts = torch.searchsorted(row.predict, bounds).tolist()
        labels = list(map(slice, starts, starts[1:]))[self.rank]
        tokens = torch.cat([row.tokens, torch.zeros_like(padding)])[own]
        positions = torch.cat([row.positions, padding])[own]
        predict = row.predict[labels] - self.rank * each
        experts = row.experts
        if experts is not None:
            experts = F.pad(experts, (0, 0, 0, 0, 0, beyond), value=-1)[own]
        return RowPart(tokens, positions, lengths, predict, labels, experts)

    def tokens_of(self, count: int) -> slice:
        """Return which of `count` tokens this rank has."""
        each = -(-count // self.size)
        return slice(min(self.rank * each, count), min((self.rank + 1) * each, count))

    def whole(self, own: torch.Tensor, where: slice, count: int) -> torch.Tensor:
        """Assemble the row, [count, ...], from `own` at `where` on each rank."""
        found: torch.Tensor = _Whole.apply(own, where, count, self.group)
        return found

    def heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Exchange all heads of this rank's tokens for its share of the heads of all tokens.

        Each is [1, heads, tokens, head_dim].
        """
        if query.shape[1] % self.size:
            raise ValueError(
                f"context_parallel = {self.size} does not divide {query.shape[1]} attention heads"
            )
        # Each rank needs whole key heads; repeating one gives the same attention.
        repeat = self.size // math.gcd(key.shape[1], self.size)
        if repeat > 1:
            key, value = (each.repeat_interleave(repeat, dim=1) for each in (key, value))
        if sinks is not None:
            # Sinks are one value per head: [heads] -> this rank's share.
            sinks = sinks.chunk(self.size)[self.rank]
        query, key, value = (self._to_heads(each) for each in (query, key, value))
        return query, key, value, sinks

    def tokens(self, result: torch.Tensor) -> torch.Tensor:
        """Exchange back to all heads of this rank's tokens; [1, tokens, heads, head_dim]."""
        # [1, T, H/P, D] -> P parts [T/P, H/P, D] -> [1, T/P, H, D], for P ranks.
        _, count, heads, width = result.shape
        parts = self._exchange(result.reshape(self.size, count // self.size, heads, width))
        return parts.transpose(0, 1).reshape(1, count // self.size, self.size * heads, width)

    def _to_heads(self, each: torch.Tensor) -> torch.Tensor:
        # [1, H, t, D] -> P parts [H/P, t, D] -> [1, H/P, P * t, D], for P ranks.
        _, heads, count, width = each.shape
        parts = self._exchange(each.reshape(self.size, heads // self.size, count, width))
        return parts.transpose(0, 1).reshape(1, heads // self.size, self.size * count, width)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        # Part n goes to rank n; the received parts are ordered by rank.
        sizes = [1] * self.size
        return collectives.all_to_all_single_autograd(parts.contiguous(), sizes, sizes, self.group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, where: slice, count: int, group: Any) -> torch.Tensor:
        ctx.where = where
        # Each rank fills its slice and leaves 0 elsewhere, so a sum assembles the row.
        whole = own.new_zeros(count, *own.shape[1:])
        whole[where] = own
        return collectives.wait_tensor(collectives.all_reduce(whole, "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # No sum over ranks: each computes the same loss of the whole row, so it counts only once.
        return grads[0][ctx.where], None, None, None


def context_of(model: nn.Module) -> Context | None:
    """Return the ranks with which `model` shares rows, if any."""
    found: Context | None = getattr(model, "context", None)
    return found
