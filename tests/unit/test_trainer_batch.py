"""From run-api's groups to packed rows: the shift, advantages, temperatures, what is refused and what is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer_core.contracts.bridge import completion_digest
from trainer_core.errors import BatchError
from trainer_core.rollouts.batch import group_advantages, read_batch
from trainer_core.rollouts.packing import pack


def _group(**changes: Any) -> dict[str, Any]:
    """Two sequences: prompt 5 6 7, completions 8 9 and 10."""
    return {
        "tokens": [[5, 6, 7, 8, 9], [5, 6, 7, 10]],
        "masks": [[-100, -100, -100, 8, 9], [-100, -100, -100, 10]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.8, -0.9], [1.0, 1.0, 1.0, -1.0]],
        **changes,
    }


def _read(*groups: dict[str, Any], **options: Any) -> Any:
    return read_batch(list(groups), **{"seq_len": 64, **options})


def test_shift_by_one() -> None:
    (row,) = pack(_read(_group()).rollouts, 64)
    # the last trained token of each sequence is only a label
    assert row.tokens.tolist() == [5, 6, 7, 8, 5, 6, 7]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    # 8 is predicted from 7 at 2, 9 from 8 at 3, 10 from the second 7 at 6
    assert row.predict.tolist() == [2, 3, 6]
    assert row.labels.tolist() == [8, 9, 10]
    assert row.logprobs.tolist() == pytest.approx([-0.8, -0.9, -1.0])
    assert row.advantages.tolist() == pytest.approx([1.0, 1.0, -1.0])
    assert row.lengths == (4, 3)


@pytest.mark.parametrize("place", range(1, 6))
def test_a_single_trained_token_is_predicted_by_the_one_before(place: int) -> None:
    tokens = list(range(20, 26))
    masks = [t if i == place else -100 for i, t in enumerate(tokens)]
    logprobs = [-0.5 if i == place else 1.0 for i in range(6)]
    (row,) = pack(
        _read({"tokens": [tokens], "masks": [masks], "scores": [1.0], "inference_logprobs": [logprobs]}).rollouts, 9
    )
    assert (row.predict.tolist(), row.labels.tolist(), row.logprobs.tolist()) == ([place - 1], [20 + place], [-0.5])


def test_the_first_token_never_trains() -> None:
    batch = _read({"tokens": [[7, 8]], "masks": [[7, 8]], "scores": [1.0], "inference_logprobs": [[-0.1, -0.2]]})
    (row,) = pack(batch.rollouts, 8)
    assert row.labels.tolist() == [8]


def test_advantages_per_group() -> None:
    values = group_advantages(np.array([1.0, 0.0, 0.0, 1.0]))
    assert values.tolist() == [1.0, -1.0, -1.0, 1.0]
    values = group_advantages(np.array([3.0, 1.0, 2.0]))
    assert values.mean() == pytest.approx(0) and values.std() == pytest.approx(1)
    assert group_advantages(np.array([3.0, 1.0]), std=False).tolist() == [1.0, -1.0]


def test_equal_scores_have_no_advantage_and_are_counted() -> None:
    batch = _read(_group(scores=[0.1, 0.1]), _group())
    assert (batch.groups, batch.flat_groups) == (2, 1)
    assert not batch.rollouts[0].advantages.any() and batch.rollouts[2].advantages.any()


def test_advantages_of_the_environment_and_overrides_win() -> None:
    given = [[0.0, 0.0, 0.0, 2.0, 3.0], [0.0, 0.0, 0.0, -4.0]]
    (row,) = pack(_read(_group(advantages=given)).rollouts, 64)
    assert row.advantages.tolist() == [2.0, 3.0, -4.0]
    (row,) = pack(_read(_group(advantages=[[2.0], [-4.0]])).rollouts, 64)
    assert row.advantages.tolist() == [2.0, 2.0, -4.0], "one value stands for the whole sequence"
    (row,) = pack(_read(_group(overrides=[{"set_advantage_to_zero": True}, {}])).rollouts, 64)
    assert row.advantages.tolist() == [0.0, 0.0, -1.0]


def test_temperature_priority() -> None:
    assert [r.temperature for r in _read(_group(), temperature=0.7).rollouts] == [0.7, 0.7]
    group = _group(generation_params={"temperature": 0.5}, overrides=[{"temperature": 0.9}, {}])
    assert [r.temperature for r in _read(group, temperature=0.7).rollouts] == [0.9, 0.5]
    (row,) = pack(_read(group).rollouts, 64)
    assert row.temperatures.tolist() == pytest.approx([0.9, 0.9, 0.5])
    assert _read(_group(generation_params={"temperature": 0.0})).rollouts[0].temperature == 1.0


def test_placeholders_and_masked_tokens_never_train() -> None:
    group = _group(inference_logprobs=[[1.0, 1.0, 1.0, -0.8, 1.0], [-0.3, -0.3, -0.3, -1.0]])
    (row,) = pack(_read(group).rollouts, 64)
    assert row.labels.tolist() == [8, 10]


@pytest.mark.parametrize("missing", [{"inference_logprobs": None}, {"inference_logprobs": []}])
def test_missing_logprobs_are_refused_with_the_cause(missing: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match="server_type"):
        _read(_group(**missing))
    with pytest.raises(BatchError, match=r"only placeholders.*server_type"):
        _read(_group(inference_logprobs=[[1.0] * 5, [1.0] * 4]))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"masks": [[-100, -100, -100, 8], [-100, -100, -100, 10]]}, "masks has 4 entries where tokens has 5"),
        ({"scores": [1.0]}, "scores has 1 entries where tokens has 2"),
        ({"inference_logprobs": [[1.0, -1.0]]}, "inference_logprobs has 1"),
        ({"masks": [[-100, -100, -100, 8, 4], [-100, -100, -100, 10]]}, "masks must be -100 or the token itself"),
        ({"advantages": [[1.0, 2.0], [1.0] * 4]}, "advantages has 2 entries"),
        ({"advantages": [[1.0] * 5]}, "advantages has 1 entries where tokens has 2"),
        ({"advantages": [[1.0] * 5, [1.0] * 4, [1.0]]}, "advantages has 3 entries where tokens has 2"),
        ({"overrides": [{"set_advantage_to_zero": True}]}, "overrides has 1 entries where tokens has 2"),
        ({"overrides": "no list"}, "overrides is no list"),
        ({"tokens": [[5, 6, -7, 8, 9], [5, 6, 7, 10]]}, "token ids not negative"),
    ],
)
def test_malformed_batches_name_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BatchError, match=field):
        _read(_group(**changes))


def test_left_out_and_counted() -> None:
    batch = _read(_group(scores=[float("nan"), 1.0]), _group(), seq_len=4)
    assert batch.skipped == {"score is not a finite number": 2, "longer than --seq-len 4": 1}
    assert [len(r.tokens) for r in batch.rollouts] == [4]
    nothing = _group(masks=[[-100] * 5, [-100, -100, -100, 10]])
    assert _read(nothing).skipped == {"nothing generated": 1}


def test_positive_logprobs_are_warned_about() -> None:
    with pytest.raises(BatchError):
        _read(_group(inference_logprobs=[[1.0, 1.0, 1.0, 0.9, 0.8], [1.0, 1.0, 1.0, 0.7]]))
    mixed = _read(_group(inference_logprobs=[[1.0, 1.0, 1.0, 0.9, -0.1], [1.0, 1.0, 1.0, -0.1]]))
    assert "ref_logprobs avg 0.233 (should be negative!)" in (mixed.logprob_warning or "")
    assert _read(_group()).logprob_warning is None


def test_digest_for_each_turn() -> None:
    group = {
        "tokens": [[5, 8, 9, 6, 11]],
        "masks": [[-100, 8, 9, -100, 11]],
        "scores": [1.0],
        "inference_logprobs": [[1.0, -0.25, -0.1, 1.0, -0.7]],
    }
    (rollout,) = _read(group).rollouts
    assert rollout.digests == (completion_digest([8, 9], [-0.25, -0.1]), completion_digest([11], [-0.7]))
    assert rollout.prompt_length == 1


def test_packing_respects_the_budget_and_loses_nothing() -> None:
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(20):
        length = int(rng.integers(2, 30))
        tokens = rng.integers(0, 50, length).tolist()
        groups.append(
            {
                "tokens": [tokens],
                "masks": [[-100, *tokens[1:]]],
                "scores": [1.0],
                "inference_logprobs": [[-0.5] * length],
            }
        )
    rollouts = _read(*groups).rollouts
    rows = pack(rollouts, 40)
    assert all(len(row.tokens) <= 40 for row in rows)
    assert sum(len(row.tokens) for row in rows) == sum(len(r.tokens) - 1 for r in rollouts)
    assert sum(len(row.labels) for row in rows) == sum(len(r.tokens) - 1 for r in rollouts)
    assert len(pack(rollouts, 1)) == 20
