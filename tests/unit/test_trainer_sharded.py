"""A step of two ranks is the step of one: loss, gradient and every parameter, whatever trains and however it is kept.

Two processes start once (`sharded_ranks.py`) and run all cases, each beside the same case on one rank.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.ranks import run_ranks
from tests.unit.sharded_ranks import CASES

ROUNDING = 1e-6
"""Relative: of the loss, and of a tensor's elements to its largest."""
LATER = 1e-5
"""After a second step: AdamW divides a gradient by its own size, so where one is near 0 its rounding is not."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from benchmarks.model_zoo import save

    folder = tmp_path_factory.mktemp("sharded")
    for model in {model for model, _ in CASES.values()}:
        save(model, folder / model)
    ends = run_ranks("tests.unit.sharded_ranks:all_cases", folder, limit_s=180)
    assert [end.code for end in ends] == [0, 0], "\n".join(end.output[-4000:] for end in ends)
    answers: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answers


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_step_as_one(found: dict[str, Any], case: str) -> None:
    """With rows of uneven length, one of them empty, and rows without any advantage. With stochastic rounding as well:
    an element's random bits depend on its place in the whole parameter, not on the rank that has it."""
    numbers = found.get(case)
    assert isinstance(numbers, dict), numbers
    assert numbers["gradient"] < ROUNDING and numbers["loss"] < ROUNDING and numbers["weights"] < ROUNDING
    assert numbers["later"] < LATER and numbers["norm"] < LATER and numbers["rest"] < LATER
    assert numbers["proof"] < LATER
