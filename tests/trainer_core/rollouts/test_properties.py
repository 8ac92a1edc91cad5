"""Any input of run-api is trained on correctly, or dropped and counted; only input without logprobs
is refused."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.thorough import examples
from trainer_core.config import TrainingConfig
from trainer_core.errors import MissingLogprobs
from trainer_core.objective.loss import Sequences
from trainer_core.objective.registry import OBJECTIVES, Objective, count
from trainer_core.rollouts.batch import Batch, Selection, read_batch
from trainer_core.rollouts.fields import IGNORED, POSITIVE_TOLERANCE
from trainer_core.rollouts.packing import pack

VOCABULARY, SEQ_LEN = 30, 6
CPU = torch.device("cpu")


# Strategies stand here and not where something is drawn: each new one is checked when it is first
# drawn from, which takes longer than the drawing.
YES_OR_NO, ONE_IN_FOUR = st.booleans(), st.integers(0, 3)
LOGPROB = st.one_of(st.floats(-20, 0), st.sampled_from([1.0, -9999.0, 0.0005]))
TOKENS = st.lists(
    st.tuples(st.integers(0, VOCABULARY - 1), YES_OR_NO, LOGPROB), min_size=1, max_size=8
)
SCORE = st.one_of(st.floats(-5, 5), st.sampled_from([0.0, 1.0, 1e6]))
ADVANTAGE = st.floats(-3, 3)
OVERRIDE = st.sampled_from([{}, {"set_advantage_to_zero": True}, {"temperature": 0.5}])


@st.composite
def sequences(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(TOKENS)
    return {
        "tokens": [token for token, _, _ in drawn],
        "masks": [token if generated else IGNORED for token, generated, _ in drawn],
        "inference_logprobs": [logprob if generated else 1.0 for _, generated, logprob in drawn],
    }


MEMBERS = st.lists(sequences(), min_size=1, max_size=3)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    members = draw(MEMBERS)
    group: dict[str, Any] = {
        name: [m[name] for m in members] for name in ("tokens", "masks", "inference_logprobs")
    }
    group["scores"] = [draw(SCORE) for _ in members]
    if draw(YES_OR_NO):
        group["overrides"] = [dict(draw(OVERRIDE)) for _ in members]
    if draw(ONE_IN_FOUR) == 0:
        group["advantages"] = [[draw(ADVANTAGE) for _ in member["tokens"]] for member in members]
    return group


JUNK: list[Any] = [
    None,
    True,
    3,
    -1,
    VOCABULARY,
    10**30,
    10**400,
    2.5,
    math.nan,
    -math.inf,
    -1e300,
    1e39,
    "3",
    "\x1b]52;c;x\x07\ud800",
    [],
    {},
    [[]],
    [None],
    [[None]],
    [["x"]],
    [[1.5]],
    [[-5]],
    [[[[]]]],
    {"temperature": "hot"},
    {"env": ["x"]},
    {"env": "y" * 10_000},
]
TEMPERATURES = [
    {"temperature": value}
    for value in (1e-40, 1e39, 10**400, math.nan, -math.inf, -1, "1", 0, None, True)
]
NEARLY: dict[str, st.SearchStrategy[Any]] = {
    "tokens": st.sampled_from([VOCABULARY, VOCABULARY - 1, 10**9, -1, 2.5, "3", True]),
    "masks": st.sampled_from([VOCABULARY, -1, IGNORED, 0, None]),
    "scores": st.sampled_from([1e39, 1e308, -1e308, math.nan, "1", 10**400]),
    "inference_logprobs": st.sampled_from([-1e39, -1e300, -math.inf, math.nan, 1e300, "-1", 0]),
    "advantages": st.sampled_from([math.nan, 1e39, -1e300, "1", None]),
    "overrides": st.sampled_from(TEMPERATURES),
}
"""Entries of a field, right or almost right."""
EXTRA = ("advantages", "overrides", "generation_params", "group_overrides", "env_id", "images")
KEY = st.text(max_size=3)
nested = st.recursive(
    st.sampled_from(JUNK), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner)
)
garbage = nested.map(
    copy.deepcopy
)  # what is drawn is spoilt further, and the next one would get it so


def _spoil_an_entry(draw: st.DrawFn, group: dict[str, Any]) -> None:
    """One value of one sequence, in tokens together with its mask."""
    name = draw(
        st.sampled_from(
            [name for name in NEARLY if isinstance(group.get(name), list) and group[name]]
        )
    )
    rows, value = group[name], draw(NEARLY[name])
    row = draw(st.integers(0, len(rows) - 1))
    if not isinstance(rows[row], list):
        rows[row] = value
    elif rows[row]:
        place = draw(st.integers(0, len(rows[row]) - 1))
        rows[row][place] = value
        with contextlib.suppress(
            IndexError, KeyError, TypeError
        ):  # where the mask is spoilt already
            if name == "tokens" and group["masks"][row][place] != IGNORED:
                group["masks"][row][place] = value


SEVERAL = st.lists(groups(), min_size=1, max_size=3)
HOW = st.sampled_from([*["entry"] * 6, "table", "field", "row", "short", "long", "gone", "group"])
TABLE, TEMPERATURE = (
    st.sampled_from(["generation_params", "group_overrides"]),
    st.sampled_from(TEMPERATURES),
)


@st.composite
def broken(draw: st.DrawFn) -> list[Any]:
    """Groups of which one or more have something wrong in them, somewhere."""
    made: list[Any] = draw(SEVERAL)
    for _ in range(draw(st.integers(1, 2))):
        index = draw(st.integers(0, len(made) - 1))
        group = made[index]
        how = draw(HOW)
        if how == "group" or not isinstance(group, dict):
            made[index] = draw(garbage)
        elif how == "entry" and isinstance(group.get("scores"), list) and group["scores"]:
            _spoil_an_entry(draw, group)
        elif how == "table":
            group[draw(TABLE)] = draw(TEMPERATURE)
        else:
            _spoil_a_field(draw, group, how)
    return made


def _spoil_a_field(draw: st.DrawFn, group: dict[str, Any], how: str) -> None:
    name = draw(st.sampled_from([*sorted(group), *EXTRA]))
    rows = group.get(name)
    if how == "gone":
        group.pop(name, None)
    elif how == "field" or not isinstance(rows, list) or not rows:
        group[name] = draw(garbage)
    elif how == "short":
        rows.pop()
    elif how == "long":
        rows.append(rows[0])
    else:
        rows[draw(st.integers(0, len(rows) - 1))] = draw(garbage)


def _sequences(group: Any) -> int:
    """How many a group says it holds; 1 where it does not say."""
    tokens = group.get("tokens") if isinstance(group, dict) else None
    return max(1, len(tokens)) if isinstance(tokens, list) else 1


def _read(raw: list[Any], **selection: Any) -> Batch:
    """Without the one exception that there is, so that everything else is seen."""
    return read_batch(
        raw,
        seq_len=SEQ_LEN,
        selection=Selection(vocab_size=VOCABULARY, **selection),
        logprobs_seen=True,
    )


def _judge(raw: list[Any], batch: Batch) -> None:
    """Assert what must hold of every group that is trained on."""
    kept = len(batch.rollouts) + sum(batch.left_out.values())
    assert kept == sum(map(_sequences, raw)), "every sequence is trained on or counted"
    assert len(batch.left_out) <= 12 and all(len(why) < 500 for why in batch.examples.values())
    for rollout in batch.rollouts:
        assert len(rollout.tokens) <= SEQ_LEN and not rollout.trained[0]
        assert (rollout.tokens >= 0).all() and (rollout.tokens < VOCABULARY).all()
        used = rollout.logprobs[rollout.trained]
        assert np.isfinite(used).all() and (used <= POSITIVE_TOLERANCE).all()
        assert np.isfinite(rollout.advantages).all() and math.isfinite(rollout.score)
        assert np.float32(0) < np.float32(rollout.temperature) < np.float32(math.inf)
        assert rollout.env.encode() is not None and len(rollout.env) <= 80
    rows = pack(batch.rollouts, 16)
    assert sum(len(row.labels) for row in rows) == batch.trained_tokens
    for row in rows:
        inside = ~torch.isin(row.predict, torch.tensor(row.lengths).cumsum(0) - 1)
        assert torch.equal(row.labels[inside], row.tokens[row.predict[inside] + 1])
        for name in OBJECTIVES:
            _finite_gradient(name, row)


OBJECTIVE = {name: Objective(TrainingConfig(model_name="m", objective=name)) for name in OBJECTIVES}  # type: ignore[arg-type]


def _finite_gradient(name: str, row: Any) -> None:
    objective = OBJECTIVE[name]
    logprobs = (row.logprobs - 0.1).requires_grad_()
    ids = Sequences(row.sequences, len(row.lengths))
    part = objective.sums(logprobs, row.logprobs, row.advantages, ids, None)
    (part.loss / objective.denominator(count([(ids, None)], CPU))).backward()
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    assert not logprobs.grad[row.advantages == 0].any(), "no advantage, no gradient"


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(groups(), min_size=0, max_size=4), st.booleans(), st.booleans())
def test_well_formed_batches_train_or_are_counted(
    raw: list[dict[str, Any]], drop: bool, mask: bool
) -> None:
    batch = _read(raw, drop_flat=drop, max_completion=4, overlong_buffer=2, overlong_mask=mask)
    _judge(raw, batch)
    zeroed = [
        sequence
        for group in raw
        for sequence, override in zip(group["tokens"], group.get("overrides", []), strict=False)
        if override.get("set_advantage_to_zero")
    ]
    if len(zeroed) == sum(len(group["tokens"]) for group in raw):
        assert not any(rollout.advantages.any() for rollout in batch.rollouts)


@settings(max_examples=examples(400), deadline=None)
@given(broken(), st.booleans(), st.booleans())
def test_broken_groups_are_left_out_and_the_rest_trains(
    raw: list[Any], std: bool, long: bool
) -> None:
    more: dict[str, Any] = (
        {"max_completion": 4, "overlong_buffer": 2, "overlong_mask": True} if long else {}
    )
    selection = Selection(vocab_size=VOCABULARY, **more)
    batch = read_batch(
        raw, seq_len=SEQ_LEN, selection=selection, logprobs_seen=True, advantage_std=std
    )
    _judge(raw, batch)
    # The same words on a screen, whatever was in it.
    assert all(
        text.isprintable() for text in (*batch.examples.values(), *batch.left_out, *batch.remarks)
    )


@settings(max_examples=examples(200), deadline=None)
@given(broken())
def test_only_a_first_batch_without_any_logprobs_is_refused(raw: list[Any]) -> None:
    settled = _read(raw)
    try:
        batch = read_batch(raw, seq_len=SEQ_LEN, selection=Selection(vocab_size=VOCABULARY))
    except MissingLogprobs as error:
        assert "server_type" in str(error) and not settled.rollouts
        return
    assert batch.left_out == settled.left_out and len(batch.rollouts) == len(settled.rollouts)


@settings(max_examples=examples(100), deadline=None)
@given(groups(), st.lists(garbage, max_size=4))
def test_a_good_group_trains_beside_whatever_comes_with_it(
    good: dict[str, Any], others: list[Any]
) -> None:
    alone, beside = _read([good]), _read([*others, good])
    assert [r.digests for r in beside.rollouts] == [r.digests for r in alone.rollouts]
    for one, other in zip(alone.rollouts, beside.rollouts, strict=True):
        assert (
            np.array_equal(one.advantages, other.advantages)
            and one.temperature == other.temperature
        )
