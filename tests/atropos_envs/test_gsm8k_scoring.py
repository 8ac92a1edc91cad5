"""GSM8K scoring: answers compared as mathematics, the length penalty, groups that teach nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_envs.math_env import gold_answer, group_scores, is_right, parse_gold

SOLUTION = (
    "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"
)


def test_the_gold_answer_is_what_follows_the_mark() -> None:
    assert gold_answer(SOLUTION) == "72"
    assert gold_answer("so it costs\n#### 1,234,000") == "1234000"
    for broken in ("no mark at all", "####", "#### "):
        assert gold_answer(broken) == "" and parse_gold(broken) == []


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("<think>48 + 24</think> The answer is \\boxed{72}.", True),
        ("\\boxed{72.0}", True),
        ("\\boxed{144/2}", True),
        ("\\boxed{\\frac{144}{2}}", True),
        ("\\boxed{73}", False),
        ("\\boxed{72} is what one might think.</think> But it is \\boxed{73}", False),
        ("the answer is 72", False),
        ("", False),
    ],
)
def test_answers_are_compared_as_mathematics(completion: str, right: bool) -> None:
    assert is_right(completion, parse_gold(SOLUTION)) is right


def test_thousands_separators_do_not_matter() -> None:
    assert is_right("\\boxed{1,234}", parse_gold("#### 1234"))
    assert is_right("\\boxed{1234}", parse_gold("#### 1,234"))


def test_a_mixed_group_gets_plus_and_minus_one_whatever_the_lengths() -> None:
    assert group_scores([True, False, True], [10, 2000, 1990], 2000) == [1.0, -1.0, 1.0]


def test_all_wrong_or_all_right_and_short_teaches_nothing() -> None:
    assert group_scores([False, False], [10, 500], 1000) == [-1.0, -1.0]
    assert group_scores([True, True], [10, 500], 1000) == [1.0, 1.0]
    assert len(set(group_scores([True, True], [800, 800], 1000))) == 1


def test_where_all_are_right_length_costs_from_half_of_the_limit() -> None:
    assert group_scores([True] * 4, [500, 750, 1000, 1200], 1000) == [1.0, 0.5, 0.0, 0.0]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), min_size=1, max_size=8))
def test_of_two_right_completions_the_longer_one_never_scores_more(
    members: list[tuple[bool, int]],
) -> None:
    right, lengths = [m[0] for m in members], [m[1] for m in members]
    scores = group_scores(right, lengths, 2048)
    assert all(-1.0 <= score <= 1.0 for score in scores)
    if all(right):
        by_length = [score for _, score in sorted(zip(lengths, scores, strict=True))]
        assert by_length == sorted(by_length, reverse=True)
