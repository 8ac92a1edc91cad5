"""Weights of a trainer that is sharded over two ranks: each sends its own rows, and servers get
what one rank would send, to the bit.

The ranks are processes of their own (`broadcast_ranks.py`); the servers are stand-ins whose models
lie as in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.support.ranks import Ended, run_ranks
from tests.support.small_models import SMALL, build
from tests.trainer_core.weight_sync.broadcast_ranks import VERSIONS, Served
from tests.trainer_core.weight_sync.transfer_stand_in import Receiver
from trainer_core.errors import UsageError
from trainer_core.policy.load import Spot, checkpoint_layout
from trainer_core.weight_sync.sending import _cut

UNEVEN = SMALL | {"vocab_size": 81, "intermediate_size": 45, "head_dim": 16}
"""Rows that two ranks cannot halve."""
MODELS = {
    "fused, tied": Qwen3Config(**UNEVEN, tie_word_embeddings=True, attention_bias=True),
    "experts": Qwen3MoeConfig(
        **UNEVEN, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5
    ),
}


def served(config: Any, rank: int) -> Served:
    """A worker's model, of two."""
    spots = checkpoint_layout(build(config))
    return Served(
        {name: spot.shape for name, spot in spots.items() if spot}, torch.bfloat16, rank, 2
    )


@dataclass
class Run:
    """Results of two ranks with each model, one after the other; in the end one of them died."""

    folder: Path
    receivers: dict[str, list[Receiver]]
    ends: list[Ended]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """For each model two servers: two workers with half of it each, and a single one that dies in
    version 2."""
    folder = tmp_path_factory.mktemp("ranks")
    receivers: dict[str, list[Receiver]] = {}
    for name, config in MODELS.items():
        torch.manual_seed(1)
        build(config, torch.bfloat16).save_pretrained(folder / name)
        receivers[name] = [
            Receiver(models=[served(config, 0), served(config, 1)]),
            Receiver(instance="b"),
        ]
        receivers[name][1].fault_at = {2: "dies at update"}
    receivers["lost"] = [Receiver(2), Receiver(instance="b")]
    cases = [(str(folder / name), [each.url for each in receivers[name]]) for name in MODELS]
    cases.append((cases[0][0], [each.url for each in receivers["lost"]]))
    ends = run_ranks(
        "tests.trainer_core.weight_sync.broadcast_ranks:everything",
        folder,
        json.dumps(cases),
        limit_s=150,
    )
    yield Run(folder, receivers, ends)
    for several in receivers.values():
        for each in several:
            each.close()


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_send_what_one_would(run: Run, name: str) -> None:
    two, single = run.receivers[name]
    assert len(two.workers[0].parts) > 10, "in many chunks"
    assert {piece.root for part in two.workers[0].parts for piece in part.pieces} == {0, 1}
    for rank, worker in enumerate(two.workers):
        assert len(worker.kept) == VERSIONS + 1, "once each, whoever else died"
        for version, kept in enumerate(worker.kept):
            expected = served(MODELS[name], rank)
            expected.load_weights(
                list(load_file(run.folder / f"{name}.v{version}.safetensors").items())
            )
            assert all(map(torch.equal, kept, expected.parameters())), (rank, version)
        assert not all(map(torch.equal, worker.kept[0], worker.kept[1]))
    left_out = json.loads((run.folder / f"{name}.left_out.json").read_text())
    assert left_out == [[], [single.url], [single.url]] and single.version == 1


def test_a_rank_that_dies_in_a_publish_is_named(run: Run) -> None:
    assert [end.code for end in run.ends] == [3, 9], "\n".join(
        end.output[-4000:] for end in run.ends
    )
    assert "RankGone: rank 1 has ended" in run.ends[0].output
    assert run.ends[0].at - run.ends[1].at < 8, "seconds after it died"
    for each in run.receivers["lost"]:
        assert each.version == 0 and each.errors, (
            "they have noticed, and answer with nothing half received"
        )


def test_rows_of_a_stack_are_cut_between_its_experts() -> None:
    """Transposed experts, which lie in no piece of memory of their own, belong to one rank each;
    what has parts of each row on several ranks cannot be sent."""
    transposed = Spot("experts", 24, (4, 6), (1, 4))  # the second of three, [3, 6, 4]
    (part,) = _cut("one", transposed, [0, 48, 72])
    assert (part.rank, part.first, part.shape, part.stride, part.offset) == (
        0,
        0,
        (4, 6),
        (1, 4),
        24,
    )
    with pytest.raises(UsageError, match=r"cannot send one from several ranks.*none or lora_only"):
        list(_cut("one", transposed, [0, 36, 72]))
    interleaved = Spot("both", 4, (3, 4), (8, 1))  # every second row of six
    parts = [(p.rank, p.first, p.shape, p.offset) for p in _cut("two", interleaved, [0, 16, 48])]
    assert parts == [(0, 0, (2, 4), 4), (1, 8, (1, 4), 4)]
