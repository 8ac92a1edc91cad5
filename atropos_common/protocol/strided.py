"""One view out of many boxes: the place of a tensor inside another one that holds it in parts,
possibly fused with others.

vLLM keeps q, k and v as rows of one parameter and all experts of a layer in one; checkpoints hold
them singly, and transformers stacks experts in its own order. Each side knows which box of a tensor
is which box elsewhere. A tensor that is evenly spaced there needs no copy. All figures are in
elements. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class PartPlace(NamedTuple):
    """Place of an even part of a tensor in another tensor."""

    begin: tuple[int, ...]
    """Index of the part's first element in the tensor."""
    shape: tuple[int, ...]
    offset: int
    """Offset of that element in the other tensor."""
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a contiguous tensor and the same elements elsewhere: sizes, strides and first
    element of both."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    stride_there: tuple[int, ...]
    offset_there: int


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from a tensor's first to its last one; 0 for an empty tensor."""
    return math.prod(shape) and 1 + sum(
        (size - 1) * step for size, step in zip(shape, stride, strict=True)
    )


def joined(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[int, tuple[int, ...]] | None:
    """First element and strides, elsewhere, of the contiguous tensor that the boxes form.

    Returns:
        None if they leave gaps, overlap, or are not evenly spaced there.
    """
    place = joined_part(shape, boxes)
    return None if place is None or place.shape != tuple(shape) else (place.offset, place.stride)


def joined_part(shape: Sequence[int], boxes: Iterable[Box]) -> PartPlace | None:
    """Place elsewhere of the boxes that form a contiguous tensor, or a part between two of its
    corners.

    Returns:
        None if they leave gaps within it, overlap, or are not evenly spaced there.
    """
    parts = list(dict.fromkeys(boxes))
    own = contiguous(shape)
    # Dimension -> stride elsewhere, as far as the boxes have shown it.
    steps: dict[int, int] = {}
    corners, ends = [], []
    for box in parts:
        corner = _index(box.offset, own)
        end = [index + 1 for index in corner]
        for size, step, there in zip(box.shape, box.stride, box.stride_there, strict=True):
            if size == 1:
                continue
            # Find the dimension of the whole tensor that this dimension of the box runs along.
            dim = next(
                (dim for dim, mine in enumerate(own) if mine == step and shape[dim] >= size > 1),
                None,
            )
            if dim is None or steps.setdefault(dim, there) != there:
                return None
            end[dim] = corner[dim] + size
        corners.append((corner, box.offset_there))
        ends.append(end)
    if not parts:
        return None
    # Bounding box of all parts.
    begin = tuple(map(min, zip(*(corner for corner, _ in corners), strict=True)))
    size_of = tuple(
        max(each) - low for each, low in zip(zip(*ends, strict=True), begin, strict=True)
    )
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
    # Stride 0 would map two elements to one place; negative ones are never needed.
    if any(step < 1 for step in steps.values()):
        return None
    return PartPlace(
        begin, size_of, start, tuple(steps.get(dim, own[dim]) for dim in range(len(shape)))
    )


def _index(offset: int, stride: Sequence[int]) -> tuple[int, ...]:
    """Index of the element at `offset` in a contiguous tensor."""
    found = []
    for step in stride:
        index, offset = divmod(offset, step)
        found.append(index)
    return tuple(found)


def _reach(corner: Sequence[int], first: Sequence[int], steps: dict[int, int]) -> int:
    return sum((corner[dim] - first[dim]) * step for dim, step in steps.items())
