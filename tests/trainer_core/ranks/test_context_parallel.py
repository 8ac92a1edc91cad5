"""Ranks that share rows step as one rank with whole rows, for every kind of attention; other cases
are refused.

Two processes start once (`sharded_ranks.py`) and run all cases, each beside the same case on one
rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atropos_common.models.model_math import why_not_shared, why_not_spread
from benchmarks.support.model_zoo import ZOO, save
from tests.support.ranks import run_ranks, selected
from tests.support.thorough import left_out
from tests.trainer_core.ranks.sharded_ranks import SHARED
from tests.trainer_core.ranks.test_sharded import equal
from trainer_core.config import TrainingConfig, sharding_contradictions

pytestmark = pytest.mark.timeout(300)


def steps(folder: Path, *cases: str, size: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    config = ZOO["Qwen3"].build()
    config.num_key_value_heads = 1
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "one key")
    for model in {model for model, _ in SHARED.values()} & ZOO.keys():
        save(model, folder / model)
    ends = run_ranks(
        "tests.trainer_core.ranks.sharded_ranks:shared_rows", folder, *cases, size=size, limit_s=180
    )
    assert [end.code for end in ends] == [0] * size, "\n".join(end.output[-4000:] for end in ends)
    answers: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answers


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return steps(tmp_path_factory.mktemp("shared"), *selected(request, "case"), size=2)


SLOW = ("one key for all heads", "latent", "routing replayed", "sequences")


@pytest.mark.parametrize("case", left_out(SHARED, SLOW))
def test_two_ranks_that_share_rows_step_as_one(found: dict[str, Any], case: str) -> None:
    """Rows of uneven length, of several sequences and of one that both ranks have a part of."""
    equal(found.get(case))


@pytest.mark.slow
def test_four_ranks_of_which_two_share(tmp_path: Path) -> None:
    """One of the pairs has an empty row, which is shorter than it has ranks."""
    for numbers in steps(
        tmp_path, "as many keys as ranks", "adapters", "reference", size=4
    ).values():
        equal(numbers)


def test_what_cannot_be_shared_is_said() -> None:
    config = TrainingConfig(
        model_name="m", context_parallel=2, weight_bridge_mode="shared_vllm", use_shared_memory=True
    )
    assert sharding_contradictions(config, 4) == []
    (said,) = sharding_contradictions(config, 3)
    assert "--context-parallel 2" in said and "the trainer has 3" in said and "trainer.gpus" in said
    (said,) = sharding_contradictions(config.model_copy(update={"use_shared_memory": False}), 2)
    assert "single copy" in said and "mode broadcast" in said
    assert why_not_shared({"num_attention_heads": 12}, 4) is None
    refused = why_not_shared({"num_attention_heads": 12}, 8)
    assert refused is not None and "12 attention heads" in refused[0] and "to 6" in refused[1]
    assert why_not_spread(vars(ZOO["Qwen3-Next"].build())) is not None, (
        "what carries a state is shared by nobody"
    )
