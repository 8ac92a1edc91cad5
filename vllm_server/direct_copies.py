"""Which bytes of a receive buffer a model's own loader copies to which place of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_core.contracts.transfer import Chunk

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Destinations in the model's parameters, and their sources in a receive buffer."""

_CONSTANT = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""What pads a vocabulary: the same at every update."""


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """While it is entered, notes every copy from a view of `buffers` to a view of a parameter."""

    def __init__(self, buffers: Sequence[torch.Tensor], model: torch.nn.Module) -> None:
        super().__init__()
        self._named = dict(model.named_parameters())
        self._buffers = {_storage(buffer) for buffer in buffers}
        self._names = {_storage(parameter): name for name, parameter in self._named.items()}
        self._written: defaultdict[str, int] = defaultdict(int)
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self.whole = True
        """Repeating the copies does all that the loader did."""

    def take(self) -> Copies:
        """The copies since the last call."""
        copies = self._targets, self._sources
        self._targets, self._sources = [], []
        return copies

    def gaps(self) -> list[str]:
        """Parameters of which another number of elements was written than they have."""
        return [
            f"{name} ({self._written[name]:,} of {parameter.numel():,} elements)"
            for name, parameter in self._named.items()
            if self._written[name] != parameter.numel()
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if isinstance(target, torch.Tensor) and func._schema.is_mutable and _storage(target) in self._names:
            self._written[self._names[_storage(target)]] += target.numel()
            if func is torch.ops.aten.copy_.default and _storage(args[1]) in self._buffers:
                self._targets.append(target)
                self._sources.append(args[1])
            elif func not in _CONSTANT:
                self.whole = False
        return func(*args, **(kwargs or {}))


def addresses(parameters: Iterable[torch.nn.Parameter]) -> list[int]:
    """Where the parameters lie; copies noted before another place was taken lead nowhere."""
    return [parameter.data_ptr() for parameter in parameters]


def named_views(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a received chunk by name, as views of `buffer` (uint8, at least the chunk's bytes)."""
    found = []
    for placed in chunk.tensors:
        tensor, start = placed.tensor, placed.start - chunk.start
        flat = buffer[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype))
        found.append((tensor.name, flat.view(tensor.shape)))
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
