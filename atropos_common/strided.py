"""One view out of many boxes: where a tensor lies in another one that holds it in parts, possibly fused with others.

vLLM keeps q, k and v as rows of one parameter and the experts of a layer as one, checkpoints hold them singly, and
transformers stacks experts in an order of its own. Each side knows which box of a tensor is which box elsewhere; a
tensor that is evenly spaced there needs no copy. All figures are in elements. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class PartPlace(NamedTuple):
    """Where a part of a tensor, evenly cut out of it, lies elsewhere."""

    begin: tuple[int, ...]
    """Index of its first element in the tensor."""
    shape: tuple[int, ...]
    offset: int
    """Of that element there."""
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a contiguous tensor, and the same elements elsewhere: sizes, the strides and first element of both."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    stride_there: tuple[int, ...]
    offset_there: int


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor of this shape whose elements lie one after the other."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """From the first element of a tensor to behind its last one; 0 where it has none."""
    return math.prod(shape) and 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def joined(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[int, tuple[int, ...]] | None:
    """First element and strides, elsewhere, of the contiguous tensor that the boxes make up.

    Returns:
        None when they leave something out, overlap, or do not lie evenly there.
    """
    place = joined_part(shape, boxes)
    return None if place is None or place.shape != tuple(shape) else (place.offset, place.stride)


def joined_part(shape: Sequence[int], boxes: Iterable[Box]) -> PartPlace | None:
    """Where the boxes lie elsewhere that make up all of a contiguous tensor, or a part between two corners of it.

    Returns:
        None when they leave something out between those, overlap, or do not lie evenly there.
    """
    parts = list(dict.fromkeys(boxes))
    own = contiguous(shape)
    steps: dict[int, int] = {}
    corners, ends = [], []
    for box in parts:
        corner = _index(box.offset, own)
        end = [index + 1 for index in corner]
        for size, step, there in zip(box.shape, box.stride, box.stride_there, strict=True):
            if size == 1:
                continue
            dim = next((dim for dim, mine in enumerate(own) if mine == step and shape[dim] >= size > 1), None)
            if dim is None or steps.setdefault(dim, there) != there:
                return None
            end[dim] = corner[dim] + size
        corners.append((corner, box.offset_there))
        ends.append(end)
    if not parts:
        return None
    begin = tuple(map(min, zip(*(corner for corner, _ in corners), strict=True)))
    size_of = tuple(max(each) - low for each, low in zip(zip(*ends, strict=True), begin, strict=True))
    places = {corner for corner, _ in corners}
    if sum(math.prod(box.shape) for box in parts) != math.prod(size_of) or len(places) < len(parts):
        return None
    first, start = min(corners)
    for corner, there in sorted(corners):
        new = [dim for dim in range(len(shape)) if corner[dim] != first[dim] and dim not in steps]
        if len(new) == 1:  # the order of corners brings up dimensions one at a time
            rest = there - start - _reach(corner, first, steps)
            steps[new[0]], odd = divmod(rest, corner[new[0]] - first[new[0]])
            if odd:
                return None
        if new[1:] or there - start != _reach(corner, first, steps):
            return None
    if any(step < 1 for step in steps.values()):
        return None
    return PartPlace(begin, size_of, start, tuple(steps.get(dim, own[dim]) for dim in range(len(shape))))


def _index(offset: int, stride: Sequence[int]) -> tuple[int, ...]:
    """Of the element at `offset` in a contiguous tensor."""
    found = []
    for step in stride:
        index, offset = divmod(offset, step)
        found.append(index)
    return tuple(found)


def _reach(corner: Sequence[int], first: Sequence[int], steps: dict[int, int]) -> int:
    return sum((corner[dim] - first[dim]) * step for dim, step in steps.items())
