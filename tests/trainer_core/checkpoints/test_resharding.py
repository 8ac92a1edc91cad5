"""Trainer state of several ranks, cut for another number of ranks: moments, 8-bit scales, few
rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from trainer_core.checkpoints.state import SavedTensor, cut
from trainer_core.errors import UsageError
from trainer_core.policy.sharding import Rows


def rows_of(shape: tuple[int, ...], rank: int, ranks: int) -> Rows:
    each = -(-shape[0] // ranks)
    first = min(rank * each, shape[0])
    return Rows(shape, first, min(each, shape[0] - first))


def state_of(rows: Rows, moments: torch.Tensor, block: int) -> dict[str, torch.Tensor]:
    """State that a rank writes of `moments`: its rows, the scales of their blocks, and a
    counter."""
    mine = moments[rows.first : rows.first + rows.count]
    scales = (
        torch.stack([part.abs().amax() for part in mine.flatten().split(block)])
        if mine.numel()
        else None
    )
    found = {"state1": mine.contiguous(), "absmax1": scales, "step": torch.tensor(7.0)}
    return {name: tensor for name, tensor in found.items() if tensor is not None and mine.numel()}


def written(folder: Path, moments: torch.Tensor, ranks: int, block: int) -> list[Any]:
    files = []
    for rank in range(ranks):
        save_file(
            state_of(rows_of(tuple(moments.shape), rank, ranks), moments, block),
            folder / f"{ranks}.{rank}",
        )
        files.append(safe_open(folder / f"{ranks}.{rank}", "pt"))
    return files


def state(files: list[Any]) -> dict[str, Any]:
    entry = {name: SavedTensor(name, files) for name in ("state1", "absmax1", "step")}
    return {
        "optimizer": {"state": {0: entry}},
        "weights": {"lost": [entry["state1"]], "steps": 3},
        "name": "x",
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_each_rank_reads_what_it_would_have_written(
    tmp_path_factory: pytest.TempPathFactory, height: int, before: int, after: int
) -> None:
    moments = torch.randn(height, 8, generator=torch.Generator().manual_seed(height))
    files = written(tmp_path_factory.mktemp("state"), moments, before, 4)
    for rank in range(after):
        rows = rows_of((height, 8), rank, after)
        found = cut(state(files), [rows], [0])
        entry, wanted = found["optimizer"]["state"][0], state_of(rows, moments, 4)
        assert entry["step"] == 7.0 and found["weights"]["steps"] == 3
        assert torch.equal(entry["state1"], moments[rows.first : rows.first + rows.count])
        assert torch.equal(found["weights"]["lost"][0], entry["state1"])
        assert torch.equal(entry["absmax1"], wanted.get("absmax1", torch.zeros(0)))


def test_a_block_of_8_bit_state_is_not_cut(tmp_path: Path) -> None:
    files = written(tmp_path, torch.randn(6, 10), 1, 4)
    with pytest.raises(UsageError, match="use as many ranks as wrote the checkpoint"):
        cut(state(files), [rows_of((6, 10), 1, 2)], [0])
