"""From run-api's groups to packed rows: the shift, advantages, temperatures, refused and dropped
groups."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from atropos_common.protocol.bridge import completion_digest
from trainer_core.errors import MissingLogprobs
from trainer_core.rollouts.batch import Baselines, Selection, group_advantages, read_batch
from trainer_core.rollouts.packing import pack
from trainer_core.rollouts.source import Lag, leave_out_by_lag


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
        _read(
            {
                "tokens": [tokens],
                "masks": [masks],
                "scores": [1.0],
                "inference_logprobs": [logprobs],
            }
        ).rollouts,
        9,
    )
    assert (row.predict.tolist(), row.labels.tolist(), row.logprobs.tolist()) == (
        [place - 1],
        [20 + place],
        [-0.5],
    )


def test_the_first_token_never_trains() -> None:
    batch = _read(
        {
            "tokens": [[7, 8]],
            "masks": [[7, 8]],
            "scores": [1.0],
            "inference_logprobs": [[-0.1, -0.2]],
        }
    )
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
    rows = pack(_read(_group(overrides=[{"set_advantage_to_zero": True}, {}])).rollouts, 64)
    assert [row.advantages.tolist() for row in rows] == [[-1.0], [0.0, 0.0]], (
        "rows that teach nothing come last"
    )


def test_a_group_whose_own_advantages_are_0_is_flat() -> None:
    nothing = [[0.0], [0.0]]
    batch = _read(_group(advantages=nothing), _group(advantages=[[0.0], [1.0]]))
    assert (batch.groups, batch.flat_groups) == (2, 1)


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


NONE = [[1.0] * 5, [1.0] * 4]


@pytest.mark.parametrize("missing", [{"inference_logprobs": None}, {"inference_logprobs": []}])
def test_missing_logprobs_are_refused_with_the_cause(missing: dict[str, Any]) -> None:
    with pytest.raises(MissingLogprobs, match="server_type"):
        _read(_group(**missing))
    with pytest.raises(MissingLogprobs, match=r"only placeholders.*server_type"):
        _read(_group(inference_logprobs=NONE), _group(**missing))


def test_who_alone_has_no_logprobs_is_left_out() -> None:
    """One environment of several, one sequence of a group; or all of a batch, once there were
    logprobs."""
    for missing in (None, NONE):
        batch = _read(_group(), _group(inference_logprobs=missing))
        assert len(batch.rollouts) == 2 and batch.left_out == {"without inference_logprobs": 2}
        assert "server_type" in batch.examples["without inference_logprobs"]
        late = _read(_group(inference_logprobs=missing), logprobs_seen=True)
        assert not late.rollouts and late.left_out == {"without inference_logprobs": 2}
    half = _read(_group(inference_logprobs=[_group()["inference_logprobs"][0], [1.0] * 4]))
    assert [len(r.tokens) for r in half.rollouts] == [5] and half.left_out == {
        "without inference_logprobs": 1
    }
    assert half.rollouts[0].advantages[0] == 1, "it still is what the other is compared with"


def test_missing_logprobs_are_left_to_the_trainer() -> None:
    """All of a sequence, or single tokens: they train, and their logprob is not a number until it
    is computed."""
    for missing in (None, [], NONE):
        batch = _read(_group(inference_logprobs=missing), recompute=True)
        assert not batch.left_out and not any(
            rollout.complete or rollout.digests for rollout in batch.rollouts
        )
        assert all(np.isnan(rollout.logprobs[rollout.trained]).all() for rollout in batch.rollouts)
        (row,) = pack(batch.rollouts, 64)
        assert row.labels.tolist() == [8, 9, 10]
    partly = _read(
        _group(inference_logprobs=[[1.0, 1.0, 1.0, -0.8, 1.0], [1.0, 1.0, 1.0, -1.0]]),
        recompute=True,
    )
    assert [rollout.complete for rollout in partly.rollouts] == [False, True]
    assert np.isnan(partly.rollouts[0].logprobs).tolist() == [False] * 4 + [True]
    assert [len(rollout.digests) for rollout in partly.rollouts] == [0, 1]


def _first(row: list[Any], value: Any) -> list[Any]:
    """Both rows of a column, the last entry of the first replaced."""
    return [[*row[0][:-1], value], row[1]]


TOKENS, MASKS, LOGPROBS = _group()["tokens"], _group()["masks"], _group()["inference_logprobs"]
MALFORMED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"masks": [[-100, -100, -100, 8], MASKS[1]]},
        "malformed masks",
        "masks has 4 entries where tokens has 5",
    ),
    (
        {"masks": _first(MASKS, 4)},
        "malformed masks",
        "masks must be -100 where a token does not train, and the token id",
    ),
    ({"masks": _first(MASKS, None)}, "malformed masks", "masks must be a list of whole numbers"),
    ({"masks": None}, "malformed masks", "masks has 0 entries where tokens has 2"),
    ({"masks": [3, 4]}, "malformed masks", "masks must hold one list"),
    ({"scores": [1.0]}, "malformed scores", "scores has 1 entries where tokens has 2"),
    ({"scores": ["1", "0"]}, "malformed scores", "scores must be a list of numbers"),
    ({"scores": [1.0, None]}, "malformed scores", "scores must be a list of numbers"),
    ({"scores": [1.0, 10**400]}, "malformed scores", "scores must be a list of numbers"),
    ({"scores": {"a": 1}}, "malformed scores", "scores is not a list"),
    ({"scores": [1.0, float("nan")]}, "score is not a finite number", "NaN or Infinity"),
    ({"scores": [1.0, float("1e400")]}, "score is not a finite number", "NaN or Infinity"),
    ({"scores": [1e308, -1e308]}, "scores are too far apart to compare", "scores up to 1e.308"),
    (
        {"inference_logprobs": [[1.0, -1.0]]},
        "malformed inference_logprobs",
        "inference_logprobs has 1 entries",
    ),
    (
        {"inference_logprobs": [[-1.0], LOGPROBS[1]]},
        "malformed inference_logprobs",
        "has 1 entries where tokens has 5",
    ),
    (
        {"inference_logprobs": _first(LOGPROBS, float("nan"))},
        "malformed inference_logprobs",
        "holds NaN",
    ),
    (
        {"inference_logprobs": _first(LOGPROBS, float("-inf"))},
        "malformed inference_logprobs",
        "holds NaN",
    ),
    (
        {"inference_logprobs": _first(LOGPROBS, -1e300)},
        "malformed inference_logprobs",
        "below -10000",
    ),
    (
        {"inference_logprobs": _first(LOGPROBS, "-1")},
        "malformed inference_logprobs",
        "a list of numbers",
    ),
    ({"advantages": [[1.0, 2.0], [1.0] * 4]}, "malformed advantages", "advantages has 2 entries"),
    (
        {"advantages": [[1.0] * 5]},
        "malformed advantages",
        "advantages has 1 entries where tokens has 2",
    ),
    ({"advantages": [[1.0], [float("inf")]]}, "malformed advantages", "not a finite number"),
    (
        {"overrides": [{"set_advantage_to_zero": True}]},
        "malformed overrides",
        "overrides has 1 entries",
    ),
    ({"overrides": "no list"}, "malformed overrides", "overrides is not a list"),
    ({"overrides": [{}, "x"]}, "malformed overrides", "overrides is not an object"),
    (
        {"generation_params": [1]},
        "malformed generation_params",
        "generation_params is not an object",
    ),
    (
        {"generation_params": {"temperature": "0.5"}},
        "malformed temperature",
        "must be a finite number",
    ),
    (
        {"group_overrides": {"temperature": 10**400}},
        "malformed temperature",
        "must be a finite number",
    ),
    (
        {"tokens": _first(TOKENS, -7)},
        "token ids outside of the vocabulary",
        "token ids are not negative",
    ),
    (
        {"tokens": _first(TOKENS, 512)},
        "token ids outside of the vocabulary",
        "holds id 512, .*vocabulary has 512",
    ),
    (
        {"tokens": _first(TOKENS, 10**30)},
        "malformed tokens",
        "tokens must be a list of whole numbers",
    ),
    ({"tokens": _first(TOKENS, 9.0)}, "malformed tokens", "tokens must be a list of whole numbers"),
    ({"tokens": _first(TOKENS, [9])}, "malformed tokens", "tokens must be a list of whole numbers"),
    ({"tokens": [None, [1]]}, "malformed tokens", "tokens must hold one list"),
]


BOTH = Selection(reference=True, teacher=True, vocab_size=512)
IDS = [[None, [7], [7], [8, 3, 4], [9]], [[], [], [], []]]
TAUGHT = [[None, [0.0], [0.0], [-0.5, -1.5, -3.0], [-0.1]], [[], [], [], []]]


def _taught(at: int, ids: list[Any], logprobs: list[Any]) -> dict[str, Any]:
    """Both columns of a teacher, an entry of the first sequence replaced."""
    changed = [
        [[*rows[0][:at], new, *rows[0][at + 1 :]], rows[1]]
        for rows, new in ((IDS, ids), (TAUGHT, logprobs))
    ]
    return dict(zip(("distill_token_ids", "distill_logprobs"), changed, strict=True))


MALFORMED += [
    (
        {"ref_logprobs": [[-1.0], LOGPROBS[1]]},
        "malformed ref_logprobs",
        "has 1 entries where tokens has 5",
    ),
    ({"ref_logprobs": _first(LOGPROBS, float("nan"))}, "malformed ref_logprobs", "holds NaN"),
    ({"distill_token_ids": IDS}, "malformed distill_token_ids", "belong together"),
    (_taught(3, [8, 8], [-1.0, -1.0]), "malformed distill_token_ids", "names a token twice"),
    (_taught(3, [8], [-1.0, -1.0]), "malformed distill_logprobs", "another number of entries"),
    (_taught(3, [8], [0.5]), "malformed distill_logprobs", "a number above 0"),
    (_taught(3, [8], ["x"]), "malformed distill_logprobs", "a list of numbers"),
    (
        _taught(3, [512], [-1.0]),
        "token ids outside of the vocabulary",
        "distill_token_ids holds id 512",
    ),
    (_taught(3, 8, -1.0), "malformed distill_token_ids", "one list for each token"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("changes", "reason", "words"), MALFORMED)
def test_a_malformed_group_is_left_out_and_the_rest_trains(
    changes: dict[str, Any], reason: str, words: str
) -> None:
    batch = _read(_group(), _group(env_id=3, **changes), _group(), selection=BOTH)
    assert batch.left_out == {reason: 2} and len(batch.rollouts) == 4 and batch.groups == 2
    assert re.search(
        rf"group 1 of the batch \(environment 'env 3'\).*{words}", batch.examples[reason]
    )


@pytest.mark.parametrize(
    "junk", [None, 3, "text", [], {}, {"tokens": None}, {"tokens": []}, {"tokens": 7}]
)
def test_what_is_no_group_counts_as_one_sequence(junk: Any) -> None:
    batch = _read(junk, _group())
    assert sum(batch.left_out.values()) == 1 and len(batch.rollouts) == 2


def test_an_environments_name_is_text_for_a_screen() -> None:
    group = _group(generation_params={"env": "a\x1b]52;c;x\x07\ud800" + "b" * 10_000})
    (name, _) = (r.env for r in _read(group).rollouts)
    assert len(name) == 80 and name.encode()
    (example,) = _read({**group, "scores": []}).examples.values()
    assert "\x1b" not in example and len(example) < 300


def test_scores_that_differ_by_rounding_are_equal() -> None:
    assert not group_advantages(np.array([1.0, 0.99999994, 1.0, 1.0])).any(), (
        "one unit in the last place of float32"
    )
    assert not group_advantages(np.array([1e6, 1e6 + 0.06])).any()
    assert group_advantages(np.array([1e6, 1e6 + 2.0])).tolist() == [-1.0, 1.0]
    assert group_advantages(np.array([0.0, 1e-5])).tolist() == [-1.0, 1.0]


def test_a_large_score_is_a_score() -> None:
    batch = _read(_group(scores=[1e6, 0.0]))
    assert [r.advantages[0] for r in batch.rollouts] == [1.0, -1.0] and not batch.left_out


def test_what_trains_and_is_odd_is_remarked() -> None:
    (said,) = _read(_group(), _group(inference_logprobs=_first(LOGPROBS, 1.0))).remarks
    assert "have a placeholder instead of a logprob" in said
    assert not _read(_group()).remarks


def _alone(score: float, env: str = "a", **changes: Any) -> dict[str, Any]:
    """The first sequence of a group, as a group."""
    rows = {name: values[:1] for name, values in _group().items()}
    return {**rows, "scores": [score], "generation_params": {"env": env}, **changes}


def test_a_group_of_one_is_compared_with_those_before_it() -> None:
    """Compared by environment, over batches, without groups of several or with advantages."""
    kept = Baselines()
    first = _read(
        _alone(1.0),
        _alone(3.0),
        _alone(7.0, "b"),
        _group(),
        _alone(9.0, advantages=[[0.5]]),
        baselines=kept,
    )
    assert [r.advantages[0] for r in first.rollouts] == [-1.0, 1.0, 0.0, 1.0, -1.0, 0.5]
    assert first.flat_by_env == {"b": 1} and first.groups_by_env == {"a": 3, "b": 1, "unnamed": 1}
    second = _read(_alone(8.0), _alone(9.0, "b"), baselines=kept)
    scores = np.array([1.0, 3.0, 8.0])
    expected = ((8.0 - scores.mean()) / scores.std(), 1.0)
    assert [r.advantages[0] for r in second.rollouts] == pytest.approx(expected)
    assert second.flat_groups == 0
    by_mean = _read(_alone(1.0), _alone(4.0), advantage_std=False)
    assert [r.advantages[0] for r in by_mean.rollouts] == [-1.5, 1.5]
    held = _read(_alone(2.0, overrides=[{"set_advantage_to_zero": True}]), _alone(0.0))
    assert [r.advantages[0] for r in held.rollouts] == [0.0, -1.0]


def test_a_baseline_forgets() -> None:
    """After a thousand scores of 0 the mean follows new ones: 256 of them move it more than half of
    the way."""
    kept = Baselines()
    kept.advantages("a", np.zeros(1000), std=False)
    late = kept.advantages("a", np.ones(256), std=False)
    assert late == pytest.approx(0.5)


def test_a_group_of_one_by_its_score() -> None:
    raw = Selection(group_of_one="score", drop_flat=True)
    batch = _read(_alone(0.25), _alone(0.0), _alone(1e300), selection=raw)
    assert [r.advantages[0] for r in batch.rollouts] == [0.25]
    assert batch.left_out == {
        "in a group of equal scores": 1,
        "scores are too far apart to compare": 1,
    }


def test_what_nobody_reads_is_named() -> None:
    message = {"role": "user", "content": "x", "reward": None}
    batch = _read(
        _group(
            messages=[[message], [message | {"reward": 1.0}]],
            ref_logprobs=LOGPROBS,
            distill_token_ids=[[], []],
        ),
        _group(
            overrides=[{"temperature": 1.0, "color": 3}, None],
            group_overrides={"group_size": 2, "weight": 2.0},
        ),
        _group(
            generation_params={"top_p": 0.9, "top_k": None, "env": "x"}, advantages=[[1.0], [-1.0]]
        ),
        _group(images=[None, None], messages=[], env_id=1),
    )
    assert len(batch.rollouts) == 8 and batch.unused == {
        "messages": 1,
        "messages.reward": 1,
        "ref_logprobs": 1,
        "overrides.color": 1,
        "group_overrides.weight": 1,
        "generation_params.top_p": 1,
        "scores": 1,
    }
    read = _read(
        _group(ref_logprobs=LOGPROBS, distill_token_ids=IDS, distill_logprobs=TAUGHT),
        selection=BOTH,
    )
    assert not read.unused


def test_lists_in_lists_in_place_of_images_cost_a_group_and_not_the_run() -> None:
    """As deep as JSON is read; before, the trainer ended with a RecursionError."""
    deep = json.loads("[" * 900 + "]" * 900)
    batch = _read(_group(), _group(images=deep, env_id=2))
    assert (
        batch.left_out == {"with images, which this trainer cannot read": 2}
        and len(batch.rollouts) == 2
    )


def test_images_are_refused_in_words() -> None:
    batch = _read(_group(), _group(images=[["x"], None], env_id=2))
    assert (
        batch.left_out == {"with images, which this trainer cannot read": 2}
        and len(batch.rollouts) == 2
    )
    assert "(environment 'env 2')" in next(iter(batch.examples.values()))


def test_reference_and_teacher_lie_on_the_token_they_are_about() -> None:
    ref = [[1.0, 1.0, 1.0, -0.3, 1.0], [1.0, 1.0, 1.0, -0.7]]
    group = _group(ref_logprobs=ref, distill_token_ids=IDS, distill_logprobs=TAUGHT)
    (row,) = pack(_read(group, _group(), selection=BOTH).rollouts, 64)
    assert row.labels.tolist() == [8, 9, 8, 9, 10, 10]
    assert (
        row.reference is not None
        and row.teacher_ids is not None
        and row.teacher_logprobs is not None
    )
    assert row.reference.tolist() == pytest.approx([-0.3, *[np.nan] * 3, -0.7, np.nan], nan_ok=True)
    assert row.teacher_ids.tolist() == [[8, 3, 4], [9, 0, 0], *[[0, 0, 0]] * 4]
    none = [-np.inf] * 3
    assert row.teacher_logprobs.tolist() == [
        [-0.5, -1.5, -3.0],
        pytest.approx([-0.1, -np.inf, -np.inf]),
        *[none] * 4,
    ]
    (unasked,) = pack(_read(group).rollouts, 64)
    assert (unasked.reference, unasked.teacher_ids, unasked.teacher_logprobs) == (None, None, None)


def test_a_group_with_a_teacher_teaches_though_its_scores_are_equal() -> None:
    drop = Selection(drop_flat=True, teacher=True)
    group = _group(scores=[1.0, 1.0], distill_token_ids=IDS, distill_logprobs=TAUGHT)
    own = group | {"advantages": [[0.0], [0.0]]}
    batch = _read(group, own, _group(scores=[1.0, 1.0]), selection=drop)
    assert len(batch.rollouts) == 4 and (batch.groups, batch.flat_groups) == (3, 1)


def test_left_out_and_counted() -> None:
    batch = _read(_group(scores=[float("nan"), 1.0]), _group(), seq_len=4)
    assert batch.left_out == {"score is not a finite number": 2, "longer than --seq-len 4": 1}
    assert [len(r.tokens) for r in batch.rollouts] == [4]
    nothing = _group(masks=[[-100] * 5, [-100, -100, -100, 10]])
    assert _read(nothing).left_out == {"nothing generated": 1}


def test_generated_tokens_that_do_not_train_are_counted_by_reason() -> None:
    malformed = _group(scores=[float("nan"), 1.0])
    batch = _read(malformed, _group(), _group(inference_logprobs=None), seq_len=4)
    # The first sequence of the second and third group is too long.
    assert batch.left_out_tokens == {"malformed": 3 + 1, "too_long": 2 + 2}
    assert batch.trained_tokens == 1
    flat = _read(_group(scores=[1.0, 1.0]), selection=Selection(drop_flat=True))
    assert flat.left_out_tokens == {"flat": 3} and flat.trained_tokens == 0
    cut = _read(_group(), selection=Selection(max_completion=2, overlong_mask=True))
    assert cut.left_out_tokens == {"cut_off": 2} and cut.trained_tokens == 1
    held, old, new = _read(_group()), Lag(3), Lag(0)
    assert leave_out_by_lag(held, [old, new], {"unnamed": 2}) == [new]
    assert held.left_out_tokens == {"too_old": 2} and held.trained_tokens == 1
    held.absorb(flat)
    assert held.left_out_tokens == {"too_old": 2, "flat": 3}


def test_positive_logprobs_are_warned_about() -> None:
    with pytest.raises(MissingLogprobs):
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
    assert rollout.digests == (
        completion_digest([8, 9], [-0.25, -0.1]),
        completion_digest([11], [-0.7]),
    )
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


def test_length_and_cuts_of_completions() -> None:
    """Two turns of 3 and 2 tokens and one of 1: a limit holds for a turn; without one the last
    token says it."""
    two, one = [5, 8, 9, 10, 6, 11, 2], [5, 8]
    group = {
        "tokens": [two, one],
        "masks": [[-100, 8, 9, 10, -100, 11, 2], [-100, 8]],
        "scores": [1.0, 1.0],
        "inference_logprobs": [[-1.0] * 7, [-1.0] * 2],
    }
    ends = frozenset([2])
    batch = _read(group, selection=Selection(drop_flat=True, end_tokens=ends))
    assert not batch.rollouts, "the objective leaves both out, and they count all the same"
    assert (batch.completion_tokens_mean, batch.truncated_fraction) == (3.0, 0.5)
    for limit, share in ((1, 1.0), (3, 0.5), (4, 0.0)):
        assert (
            _read(
                group, selection=Selection(max_completion=limit, end_tokens=ends)
            ).truncated_fraction
            == share
        )
    assert _read(group).truncated_fraction is None, (
        "no end token is seen: stop strings, or nobody knows"
    )
    assert (_read().completion_tokens_mean, _read().truncated_fraction) == (None, None)
