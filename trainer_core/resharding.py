"""Trainer state that so many ranks wrote, for another number of ranks: each reads the rows that are its own.

Every rank writes a file of its own. Of a tensor that lies as its parameter does, moments and master weights, the files
hold the rows in order; anything else, counters and tables, is the same in each, and the first one's is taken. Scales of
8-bit states stand for blocks of the parameter's elements, and can be cut only between blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer_core.errors import UsageError
from trainer_core.policy.sharding import Rows


class SavedTensor:
    """A tensor in the files of a checkpoint."""

    def __init__(self, name: str, files: Sequence[Any]) -> None:
        """Args:
        files: what `safe_open` gives, by rank.
        """
        self._name = name
        self._files = [file for file in files if name in file.keys()]  # noqa: SIM118
        """A rank without a row has no state of it."""
        self.shapes = [tuple(file.get_slice(name).get_shape()) for file in self._files]

    def whole(self) -> torch.Tensor:
        """As the first rank wrote it."""
        tensor: torch.Tensor = self._files[0].get_tensor(self._name)
        return tensor

    def like(self, rows: Rows) -> torch.Tensor:
        """The part for `rows`, where it lies as the parameter does; else `whole`."""
        if self.shapes[0] == rows.shape:
            return self._cut(rows.first, rows.count, 1) if rows.shape else self.whole()
        pieces = [shape for shape in self.shapes if len(shape) == len(rows.shape) and shape[1:] == rows.shape[1:]]
        if len(pieces) < len(self.shapes) or sum(shape[0] for shape in pieces) != rows.shape[0]:
            return self.whole()
        return self._cut(rows.first, rows.count, len(pieces))

    def scales(self, rows: Rows, of: SavedTensor) -> torch.Tensor:
        """The part for `rows` of the scales of blocks of `of`.

        Raises:
            UsageError: a block would have to be cut.
        """
        block = 1 << math.ceil(math.log2(math.prod(of.shapes[0]) / self.shapes[0][0]))
        width = math.prod(rows.shape[1:])
        edges = [rows.first * width, *(math.prod(shape) for shape in of.shapes[:-1])]
        if rows.first + rows.count < rows.shape[0]:
            edges.append((rows.first + rows.count) * width)
        if any(edge % block for edge in edges):
            raise UsageError(
                f"the 8-bit optimizer state of a parameter {list(rows.shape)} cannot be cut for another number of "
                "ranks: go on with as many as wrote the checkpoint, or --resume never"
            )
        parts = 1 if of.shapes[0] == rows.shape else len(self.shapes)
        return self._cut(rows.first * width // block, -(-rows.count * width // block), parts)

    def _cut(self, first: int, count: int, pieces: int) -> torch.Tensor:
        found, begin = [], 0
        for file, shape in zip(self._files[:pieces], self.shapes, strict=False):
            low, high = max(first, begin), min(first + count, begin + shape[0])
            if low < high:
                found.append(file.get_slice(self._name)[low - begin : high - begin])
            begin += shape[0]
        return torch.cat(found or [self._files[0].get_slice(self._name)[0:0]])


def cut(stepper: Mapping[str, Any], rows: Sequence[Rows], halves: Sequence[int]) -> dict[str, Any]:
    """The state of a `Stepper` for one rank.

    Args:
        stepper: as it was written, with `SavedTensor` in the place of tensors.
        rows: of each trained parameter.
        halves: which of them have something in "weights", in that order.
    """
    optimizer, weights = stepper["optimizer"], stepper["weights"]
    return dict(stepper) | {
        "optimizer": optimizer | {"state": {i: _entry(entry, rows[i]) for i, entry in optimizer["state"].items()}},
        "weights": {
            name: [value.like(rows[i]) for value, i in zip(values, halves, strict=True)]
            if isinstance(values, list)
            else values
            for name, values in weights.items()
        },
    }


def _entry(entry: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """One parameter's state in an optimizer."""
    found: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found[name] = _entry(value, rows)
        elif isinstance(value, SavedTensor) and name.startswith("absmax"):
            found[name] = value.scales(rows, entry[name.replace("absmax", "state")])
        else:
            found[name] = value.like(rows) if isinstance(value, SavedTensor) else value
    return found
