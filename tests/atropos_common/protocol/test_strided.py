"""Boxes of a tensor stored elsewhere: one view where they are evenly spaced, none where not."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atropos_common.protocol.manifest import Box, PartPlace, contiguous, joined, joined_part


def box(whole: torch.Tensor, part: torch.Tensor, there: torch.Tensor) -> Box:
    """`part` is a view of `whole`; the same elements are `there`, in some other storage."""
    return Box(
        tuple(part.shape),
        part.stride(),
        part.storage_offset() - whole.storage_offset(),
        there.stride(),
        there.storage_offset(),
    )


def test_rows_copied_in_three_parts_are_one_view() -> None:
    """As Phi-3's qkv: fused in the checkpoint already, copied q, k and v apart."""
    whole, server = torch.zeros(8, 3), torch.zeros(10, 3)
    parts = [
        box(whole, whole[rows], server[1:9][rows])
        for rows in (slice(0, 4), slice(4, 6), slice(6, 8))
    ]
    assert joined((8, 3), parts) == (3, (3, 1))
    assert joined((8, 3), parts[:2]) is None, "a part is missing"
    assert joined((8, 3), [*parts, *parts]) == (3, (3, 1)), "the same copy twice is one"
    other = box(whole, whole[4:6], server[8:10])
    assert joined((8, 3), [parts[0], other, parts[2]]) is None, "in another order"


def test_a_part_is_told_with_where_it_begins() -> None:
    """As tensor-parallel workers load: rows, columns, the rows of a fused parameter; and what is no
    part."""
    whole, server = torch.zeros(8, 6), torch.zeros(9, 6)
    assert joined_part((8, 6), [box(whole, whole[4:7], server[2:5])]) == PartPlace(
        (4, 0), (3, 6), 12, (6, 1)
    )
    columns = torch.zeros(8, 3)
    assert joined_part((8, 6), [box(whole, whole[:, 3:], columns)]) == PartPlace(
        (0, 3), (8, 3), 0, (3, 1)
    )
    assert joined((8, 6), [box(whole, whole[:, 3:], columns)]) is None
    apart = [
        box(whole, whole[rows], server[to])
        for rows, to in ((slice(0, 2), slice(0, 2)), (slice(4, 6), slice(2, 4)))
    ]
    assert joined_part((8, 6), apart) is None, (
        "q and k of a checkpoint that fuses them: half of each is no part"
    )


EXPERTS, WIDTH, HIDDEN = 4, 3, 5


def test_experts_held_singly_are_one_view_of_gates_before_ups() -> None:
    stacked = torch.arange(EXPERTS * 2 * WIDTH * HIDDEN).view(EXPERTS, 2 * WIDTH, HIDDEN)
    server = torch.zeros(EXPERTS, 2 * WIDTH + 1, HIDDEN + 2)  # padded in two ways
    parts = []
    for expert, half in itertools.product(range(EXPERTS), (0, WIDTH)):
        rows = slice(half, half + WIDTH)
        parts.append(box(stacked, stacked[expert, rows], server[expert, rows, :HIDDEN]))
    found = joined(stacked.shape, parts)
    assert found is not None
    server.as_strided(stacked.shape, found[1], found[0]).copy_(stacked)
    assert torch.equal(server[:, : 2 * WIDTH, :HIDDEN].long(), stacked)
    swapped = [parts[i ^ 1] for i in range(len(parts))]
    exchanged = [
        Box(a.shape, a.stride, a.offset, b.stride_there, b.offset_there)
        for a, b in zip(parts, swapped, strict=True)
    ]
    assert joined(stacked.shape, exchanged) is None, "ups before gates run backwards"
    assert (
        joined(
            stacked.shape,
            [Box(each.shape, each.stride, each.offset, each.stride_there, 0) for each in parts],
        )
        is None
    )


def test_a_transposed_copy_is_a_view_and_a_reshaped_one_is_not() -> None:
    whole, server = torch.zeros(4, 6), torch.zeros(6, 4)
    assert joined((4, 6), [box(whole, whole.t(), server)]) == (0, (1, 4))
    assert (
        joined((4, 6), [box(whole, whole.view(2, 2, 6).transpose(0, 1), torch.zeros(2, 2, 6))])
        is None
    )


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    pad=st.integers(0, 2),
    order=st.randoms(use_true_random=False),
)
def test_every_grid_of_boxes_is_found_again(
    shape: list[int], cuts: list[int], pad: int, order: object
) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    assert whole.stride() == contiguous(shape)
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    server = torch.full([shape[dim] + pad for dim in dims], -1)
    inner = server[tuple(slice(0, shape[dim]) for dim in dims)].permute(
        [dims.index(dim) for dim in range(len(shape))]
    )
    edges = [
        [(at, min(at + cut, size)) for at in range(0, size, cut)]
        for size, cut in zip(shape, cuts, strict=False)
    ]
    parts = []
    for cell in itertools.product(*edges):
        place = tuple(slice(a, b) for a, b in cell)
        parts.append(box(whole, whole[place], inner[place]))
    found = joined(shape, parts)
    assert found is not None
    server.as_strided(shape, found[1], found[0]).copy_(whole)
    assert torch.equal(inner, whole)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 4, 1)])
def test_nothing_makes_no_view(shape: tuple[int, ...]) -> None:
    assert joined(shape, []) is None
