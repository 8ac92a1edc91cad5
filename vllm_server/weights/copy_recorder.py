"""Records which bytes of given tensors a model's own loader copies to which parameters."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atropos_common.broadcast.transfer import Chunk
from atropos_common.protocol.manifest import Box, TensorView, joined_part

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Destinations in the model's parameters, and their sources in the given tensors."""

Named = tuple[str, torch.Tensor]

TIED_HEAD = "lm_head.weight"
# Suffix in old checkpoints of values that every model computes itself.
NO_WEIGHT = "rotary_emb.inv_freq"
# vLLM's class for layers on another pipeline rank, whose tensors are rightly skipped here.
OTHER_RANKS_LAYER = "PPMissingLayer"
# Operations that pad a vocabulary; their result is the same at every update.
_CONSTANT = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class CopyRecorder(TorchDispatchMode):  # type: ignore[misc]
    """While active, records copies from views of given tensors to views of parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._named = dict(model.named_parameters())
        self._given: list[tuple[int, int, str]] = []
        self._unread: set[str] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Given tensor -> parameter -> copied parts.
        self._boxes: dict[str, defaultdict[str, list[Box]]] = {}
        self._places = self._named | dict(model.named_buffers())
        filled = {name: tensor for name, tensor in self._places.items() if tensor.numel()}
        # By storage: a loader writes to views of a parameter.
        self._names = {_storage(tensor): name for name, tensor in filled.items()}
        self._computed: set[str] = set()
        self._written: defaultdict[str, int] = defaultdict(int)
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self.whole = True
        """Repeating the copies reproduces all that the loader did."""

    def give(self, tensors: Iterable[Named]) -> list[Named]:
        """Set the tensors that the loader reads from now on, and return them."""
        given = list(tensors)
        # Spans of addresses, sorted for the search in `_giver`.
        spans = [(each.data_ptr(), each.data_ptr() + each.nbytes, name) for name, each in given]
        self._given = sorted(spans)
        self._unread.update(name for name, _ in given)
        self._shapes.update((name, tuple(each.shape)) for name, each in given)
        return given

    def one_by_one(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """Yield each tensor on demand, and drop the previous one."""
        for tensor in tensors:
            given = self.give([tensor])
            del tensor
            yield given.pop()
            self.take()

    def take(self) -> Copies:
        """Return the copies since the last call."""
        copies = self._targets, self._sources
        self._targets, self._sources = [], []
        return copies

    def gaps(self) -> list[str]:
        """Return the parameters that did not receive as many elements as they have."""
        return [
            f"{name} ({self._written[name]:,} of {parameter.numel():,} elements)"
            for name, parameter in self._named.items()
            if self._written[name] != parameter.numel()
        ]

    def untouched(self) -> list[str]:
        """Return the parameters that received nothing."""
        return [
            name
            for name, parameter in self._named.items()
            if parameter.numel() and not self._written[name]
        ]

    def passed_over(self) -> list[str]:
        """Return the given tensors that were not copied, as far as known."""
        classes = {type(module).__name__ for module in self.model.modules()}
        known = self.whole and OTHER_RANKS_LAYER not in classes
        return sorted(self._unread - self._no_weights()) if known else []

    def views(self) -> tuple[dict[str, TensorView], dict[str, str]]:
        """Return each given tensor's place in a parameter; for others the reason."""
        views, without = {}, {}
        for name in self._shapes.keys() - self._no_weights():
            found = self._view(name)
            if isinstance(found, TensorView):
                views[name] = found
            else:
                without[name] = found
        return dict(sorted(views.items())), dict(sorted(without.items()))

    def _view(self, name: str) -> TensorView | str:
        shape, boxes = self._shapes[name], self._boxes.get(name)
        if not boxes:
            return "is not copied into the model as it is"
        if len(boxes) > 1:
            return f"goes into several parameters ({', '.join(boxes)})"
        ((parameter, parts),) = boxes.items()
        if parameter not in self._named:
            return f"is a buffer of the model, {parameter}"
        if parameter in self._computed:
            return f"is computed with while it is loaded into {parameter}"
        filled = [box for box in parts if math.prod(box.shape)]
        # The tensor is too small for this rank to have a part.
        if not filled:
            nothing, stride = list(parts[0].shape), [1] * len(shape)
            view = TensorView(parameter=parameter, offset=0, shape=nothing, stride=stride)
            view.begin, view.whole = [0] * len(shape), list(shape)
            return view
        if (place := joined_part(shape, filled)) is None:
            return f"does not lie evenly in {parameter}"
        part, stride = list(place.shape), list(place.stride)
        view = TensorView(parameter=parameter, offset=place.offset, shape=part, stride=stride)
        if place.shape != shape:
            view.begin, view.whole = list(place.begin), list(shape)
        return view

    def _no_weights(self) -> set[str]:
        tied = getattr(getattr(self.model, "config", None), "tie_word_embeddings", False)
        return {
            name
            for name in self._unread
            if name.endswith(NO_WEIGHT) or (tied and name == TIED_HEAD)
        }

    def without_place(self) -> str | None:
        """Return the message about `passed_over`; None if every tensor found its place."""
        if not (names := self.passed_over()):
            return None
        return (
            f"vLLM's {type(self.model).__name__} has no place for {len(names)} of the tensors, "
            f"such as {', '.join(names[:3])}, and would answer without them. Is it the same model "
            "on both sides? If it is, this release of vLLM does not serve it whole"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this for every operation of the loader, before it runs.
        target = args[0] if args else None
        if isinstance(target, torch.Tensor) and func._schema.is_mutable:
            place = self._names.get(_storage(target))
            if place is not None:
                self._note_write(func, place, target, args)
        return func(*args, **(kwargs or {}))

    def _note_write(self, func: Any, place: str, target: torch.Tensor, args: Any) -> None:
        self._written[place] += target.numel()
        copies = func is torch.ops.aten.copy_.default
        if copies and (giver := self._giver(args[1])) is not None:
            (name, offset), source = giver, args[1]
            self._unread.discard(name)
            self._targets.append(target)
            self._sources.append(source)
            if target.shape == source.shape:  # a broadcast copy has no view
                there = target.storage_offset() - self._places[place].storage_offset()
                box = Box(tuple(target.shape), source.stride(), offset, target.stride(), there)
                self._boxes.setdefault(name, defaultdict(list))[place].append(box)
        elif func not in _CONSTANT:
            # The loader computes, so repeating its copies would not reproduce the load.
            self.whole = False
            self._computed.add(place)

    # The given tensor that `source` views, and the view's offset in elements.
    def _giver(self, source: torch.Tensor) -> tuple[str, int] | None:
        start = _storage(source) + source.storage_offset() * source.element_size()
        find = bisect_right if source.numel() else bisect_left  # an empty share lies at a boundary
        index = find(self._given, start, key=lambda span: span[0]) - 1
        if index < 0:
            return None
        begin, end, name = self._given[index]
        if start >= end and source.numel():
            return None
        return name, (start - begin) // source.element_size()


def named_views(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return tensors of a received chunk by name, as views of `buffer` (uint8)."""
    found = []
    for placed in chunk.tensors:
        tensor, start = placed.tensor, placed.start - chunk.start
        flat = buffer[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype))
        found.append((tensor.name, flat.view(tensor.shape)))
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
