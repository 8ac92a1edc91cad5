"""A policy in parts over two and four ranks (gloo) computes, steps and saves as it does whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atropos_common.protocol.manifest import TensorView
from tests.support.ranks import run_ranks, selected
from tests.support.thorough import left_out
from tests.trainer_core.policy.tensor_parallel_ranks import CONFIGS, served, whole_model
from trainer_core.errors import UsageError
from trainer_core.policy.load import attach_views, empty_model
from trainer_core.policy.tensor_parallel import TensorParallel


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format
)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Results of each rank."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    ended = run_ranks(
        "tests.trainer_core.policy.tensor_parallel_ranks:everything",
        folder,
        *selected(request, "model"),
        size=size,
        limit_s=150.0,
    )
    assert [rank.code for rank in ended] == [0] * size, "\n".join(
        rank.output[-3000:] for rank in ended
    )
    return [json.loads((folder / f"answer.{rank}").read_text()) for rank in range(size)]


SLOW = ("tied", "biases")


@pytest.mark.parametrize("model", left_out(CONFIGS, SLOW))
def test_parts_compute_what_the_whole_does(answers: list[Any], model: str) -> None:
    for rank in answers:
        gaps = rank["models"][model]
        print(f"{model}: " + ", ".join(f"{what} {gap:.1g}" for what, gap in gaps.items()))
        assert max(gaps.values()) < 2e-6


def test_copies_of_a_weight_stay_equal_bit_for_bit(answers: list[Any]) -> None:
    for rank in answers:
        found = rank["copies"]
        assert found["after"] == 0 and found["before"] > 0 and found["moved"] > 1e-3, found


def test_layers_are_one_graph_for_the_compiler(answers: list[Any]) -> None:
    for rank in answers:
        assert rank["compiled"] == {"graphs": 1, "breaks": 0, "equal": True}


def test_a_checkpoint_in_parts_is_a_model_and_goes_on_in_as_many(answers: list[Any]) -> None:
    assert [rank["resume"]["read"] for rank in answers] == [1, *[0] * (len(answers) - 1)], (
        "rank 0 alone reads it"
    )
    for rank in answers:
        assert rank["resume"]["equal"]
        refused = rank["resume"]["refused"]
        assert (
            f"a policy in {len(answers)} parts, and this run has 1. fix: continue with single copy"
            in refused
        )


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        (
            "mlp.down_proj.weight",
            True,
            r"model.layers.0.mlp.gate_proj, whose split outputs no layer sums",
        ),
        (
            "input_layernorm.weight",
            True,
            r"model.layers.0.input_layernorm.weight, a \w+Norm, split by rows",
        ),
        ("embed_tokens.weight", False, r"model.embed_tokens.weight, a Embedding, split by columns"),
    ],
)
def test_what_is_cut_in_another_way_is_refused_by_name(name: str, rows: bool, words: str) -> None:
    whole = whole_model(CONFIGS["norms of heads"])
    shards = {}
    for rank in range(2):
        tensors, shards[rank] = served(whole, rank, 2)
        for each, parameter in whole.named_parameters():
            if each.endswith(name):
                dim = 0 if rows else 1
                part = parameter.detach().chunk(2, dim)[rank].contiguous()
                begin = [
                    rank * size // 2 if at == dim else 0 for at, size in enumerate(parameter.shape)
                ]
                tensors[each], shards[rank].views[each] = (
                    part,
                    TensorView(
                        parameter=each,
                        offset=0,
                        shape=list(part.shape),
                        stride=list(part.stride()),
                        begin=begin,
                        whole=list(parameter.shape),
                    ),
                )
    model = empty_model(whole.config, next(whole.parameters()).dtype)
    attach_views(model, tensors, shards[1])
    with pytest.raises(UsageError, match=words):
        TensorParallel(model, shards, 1)
