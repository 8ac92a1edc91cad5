"""A step of two ranks equals that of one: loss, gradient and every parameter, for everything that
trains. Any number of ranks continues from a checkpoint.

Two processes start once (`sharded_ranks.py`) and run all cases, each beside the same case on one
rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks, selected
from tests.support.thorough import left_out
from tests.trainer_core.ranks.sharded_ranks import CASES, RESUMED
from trainer_core.config import TrainingConfig, sharding_contradictions
from trainer_core.errors import UsageError
from trainer_core.policy.sharding import load_for
from trainer_core.ranks.world import World

pytestmark = pytest.mark.timeout(300)

ROUNDING = 1e-6
"""Relative: of the loss, and of a tensor's elements to its largest."""
LATER = 1e-5
"""After a second step: AdamW divides a gradient by its own size, so where one is near 0 its
rounding is not."""


def equal(numbers: Any) -> None:
    """Assert that several ranks found what one did."""
    assert isinstance(numbers, dict), numbers
    assert (
        numbers["gradient"] < ROUNDING
        and numbers["loss"] < ROUNDING
        and numbers["weights"] < ROUNDING
    )
    assert numbers["later"] < LATER and numbers["norm"] < LATER and numbers["rest"] < LATER
    assert numbers["proof"] < LATER


SLOW = (
    "fp32 masters beside",
    "stochastic",
    "routing replayed",
    "checkpointing",
    "some layers",
    "reference",
)
"""Cases that only `make test-all` runs; each differs in one thing from a case that CI has."""


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    from benchmarks.support.model_zoo import save

    folder = tmp_path_factory.mktemp("sharded")
    for model in {model for model, _ in [*CASES.values(), *RESUMED.values()]}:
        save(model, folder / model)
    cases = [
        *selected(request, "case"),
        *map("resume {}".format, selected(request, "resumed")),
        "broken disk",
    ]
    ends = run_ranks(
        "tests.trainer_core.ranks.sharded_ranks:all_cases", folder, *cases, limit_s=180
    )
    assert [end.code for end in ends] == [0, 0], "\n".join(end.output[-4000:] for end in ends)
    answers: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answers


@pytest.mark.parametrize("case", left_out(CASES, SLOW))
def test_two_ranks_step_as_one(found: dict[str, Any], case: str) -> None:
    """With rows of uneven length, one of them empty, and rows without any advantage. With
    stochastic rounding as well: an element's random bits depend on its place in the whole
    parameter, not on the rank that has it."""
    equal(found.get(case))


@pytest.mark.parametrize("resumed", RESUMED)
def test_another_number_of_ranks_goes_on_the_same(found: dict[str, Any], resumed: str) -> None:
    """From two ranks to one, from one to two, and from two to two: what was written is what is
    read, to the bit, and the next step is that of who wrote it. A checkpoint of two ranks loads as
    a plain model."""
    numbers = found.get(f"resume {resumed}")
    assert isinstance(numbers, dict), numbers
    assert (
        numbers["written"]
        == numbers["read"]
        == numbers["same"]
        == numbers.get("served", 0.0)
        == 0.0
    )
    assert numbers["to one"] < ROUNDING and numbers["to two"] < ROUNDING


def test_what_one_rank_cannot_write_is_written_by_none(found: dict[str, Any]) -> None:
    """Its error is that of all, and nothing is left; a disk that is full for one is waited for by
    all."""
    assert found.get("broken disk") == {"in background": 0.0}


def test_what_cannot_be_spread_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    from benchmarks.support.model_zoo import ZOO

    config = TrainingConfig(model_name="m", optimizer="adafactor")
    (said,) = sharding_contradictions(config, 2)
    assert "--optimizer adafactor" in said and "adamw_8bit" in said
    assert sharding_contradictions(config, 1) == []
    adapters = TrainingConfig(model_name="m", optimizer="adafactor", weight_bridge_mode="lora_only")
    assert sharding_contradictions(adapters, 2) == []  # every rank has them whole
    ZOO["Qwen3-Next"].build().save_pretrained(tmp_path)
    world = World()
    world.size = 2
    with pytest.raises(UsageError, match="carry a state from token to token"):
        load_for(world, tmp_path, torch.float32, torch.device("cpu"))
