"""Load trainer state that another number of ranks wrote: each rank reads only its own rows.

Every rank writes one file. For a tensor laid out like its parameter (moments, master weights) the
files hold consecutive rows. Everything else (counters, tables) is the same in each file and read
from the first. Scales of 8-bit states belong to blocks of elements, and can be split only between
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer_core.errors import UsageError
from trainer_core.policy.sharding import Rows


class SavedTensor:
    """A tensor across the files of a checkpoint."""

    def __init__(self, name: str, files: Sequence[Any]) -> None:
        """Args:
        files: results of `safe_open`, ordered by rank."""
        self._name = name
        # A rank without a row of a parameter has no state for it, so not every file has every name.
        self._files = [file for file in files if name in file.keys()]  # noqa: SIM118
        self.shapes = [tuple(file.get_slice(name).get_shape()) for file in self._files]

    def whole(self) -> torch.Tensor:
        """Return the first rank's tensor."""
        tensor: torch.Tensor = self._files[0].get_tensor(self._name)
        return tensor

    def like(self, rows: Rows) -> torch.Tensor:
        """Return the part for `rows` if the tensor is laid out like the parameter; else `whole`."""
        # A single file holds the whole tensor. A scalar (empty shape) cannot be cut.
        if self.shapes[0] == rows.shape:
            return self._cut(rows.first, rows.count, 1) if rows.shape else self.whole()
        # Only if all files together have exactly the parameter's rows are they row-wise parts of
        # it.
        pieces = [
            shape
            for shape in self.shapes
            if len(shape) == len(rows.shape) and shape[1:] == rows.shape[1:]
        ]
        if len(pieces) < len(self.shapes) or sum(shape[0] for shape in pieces) != rows.shape[0]:
            return self.whole()
        return self._cut(rows.first, rows.count, len(pieces))

    def scales(self, rows: Rows, of: SavedTensor) -> torch.Tensor:
        """Return the part for `rows` of the block scales of `of`.

        Raises:
            UsageError: a block would have to be split.
        """
        # bitsandbytes does not store the block size; it is the power of two that explains both
        # shapes.
        block = 1 << math.ceil(math.log2(math.prod(of.shapes[0]) / self.shapes[0][0]))
        width = math.prod(rows.shape[1:])
        # Elements at which the new ranks and the old files are cut.
        edges = [rows.first * width, *(math.prod(shape) for shape in of.shapes[:-1])]
        if rows.first + rows.count < rows.shape[0]:
            edges.append((rows.first + rows.count) * width)
        if any(edge % block for edge in edges):
            raise UsageError(
                f"the 8-bit optimizer state of a parameter {list(rows.shape)} cannot be "
                f"split for another number of "
                "ranks: use as many ranks as wrote the checkpoint, or --resume never"
            )
        parts = 1 if of.shapes[0] == rows.shape else len(self.shapes)
        return self._cut(rows.first * width // block, -(-rows.count * width // block), parts)

    def _cut(self, first: int, count: int, pieces: int) -> torch.Tensor:
        # `get_slice` reads only the requested rows from the disk.
        found, begin = [], 0
        for file, shape in zip(self._files[:pieces], self.shapes, strict=False):
            low, high = max(first, begin), min(first + count, begin + shape[0])
            if low < high:
                found.append(file.get_slice(self._name)[low - begin : high - begin])
            begin += shape[0]
        # An empty tensor with the right dtype and trailing shape, for a rank without rows.
        return torch.cat(found or [self._files[0].get_slice(self._name)[0:0]])


def cut(stepper: Mapping[str, Any], rows: Sequence[Rows], halves: Sequence[int]) -> dict[str, Any]:
    """Cut the state of a `Stepper` for one rank.

    Args:
        stepper: the saved state, with `SavedTensor` in place of tensors.
        rows: rows of each trained parameter on this rank.
        halves: indices of the parameters that have an entry in "weights", in that order.
    """
    optimizer, weights = stepper["optimizer"], stepper["weights"]
    return dict(stepper) | {
        "optimizer": optimizer
        | {"state": {i: _entry(entry, rows[i]) for i, entry in optimizer["state"].items()}},
        "weights": {
            name: [value.like(rows[i]) for value, i in zip(values, halves, strict=True)]
            if isinstance(values, list)
            else values
            for name, values in weights.items()
        },
    }


def _entry(entry: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found[name] = _entry(value, rows)
        # bitsandbytes: absmax1 holds the scales of state1, and so on.
        elif isinstance(value, SavedTensor) and name.startswith("absmax"):
            found[name] = value.scales(rows, entry[name.replace("absmax", "state")])
        else:
            found[name] = value.like(rows) if isinstance(value, SavedTensor) else value
    return found
