"""From recorded turns to sequences: one a branch, each turn trained once."""

from __future__ import annotations

from atropos_common.protocol.bridge import RecordedTurn
from atropos_envs.recording.groups import GroupMaker
from atropos_envs.recording.sequences import sequences_of


def _turn(
    after: int | None, prompt: list[int], made: list[int], temperature: float = 1.0
) -> RecordedTurn:
    return RecordedTurn(
        after=after,
        prompt_ids=prompt,
        token_ids=made,
        logprobs=[-0.1 * token for token in made],
        token_versions=[(0, len(made))],
        temperature=temperature,
        finish_reason="stop",
    )


def test_turns_in_a_row_are_one_sequence() -> None:
    (one,) = sequences_of([_turn(None, [1, 2], [3, 4]), _turn(0, [5], [6])])
    assert one.tokens == [1, 2, 3, 4, 5, 6] and one.masks == [-100, -100, 3, 4, -100, 6]
    assert one.logprobs == [1.0, 1.0, -0.1 * 3, -0.1 * 4, 1.0, -0.1 * 6]
    assert one.turns == [0, 1] and one.trained == 3


def test_a_second_continuation_is_a_branch_that_does_not_train_the_beginning() -> None:
    turns = [_turn(None, [1], [2]), _turn(0, [3], [4]), _turn(0, [5], [6]), _turn(2, [7], [8])]
    first, second = sequences_of(turns)
    assert first.tokens == [1, 2, 3, 4] and first.turns == [0, 1]
    assert second.tokens == [1, 2, 5, 6, 7, 8] and second.masks == [-100, -100, -100, 6, -100, 8]
    assert first.trained + second.trained == sum(len(turn.token_ids) for turn in turns)


def test_turns_of_another_temperature_train_apart() -> None:
    first, second = sequences_of([_turn(None, [1], [2]), _turn(0, [3], [4], temperature=0.5)])
    assert (first.temperature, first.turns) == (1.0, [0])
    assert (second.temperature, second.turns) == (0.5, [1]) and second.tokens == [1, 2, 3, 4]


def test_a_turn_without_tokens_trains_nothing() -> None:
    assert sequences_of([_turn(None, [1], [])]) == []


def test_branches_fill_groups_of_their_own() -> None:
    maker = GroupMaker(2)
    forked = sequences_of([_turn(None, [1], [2, 3]), _turn(None, [1], [4])])
    plain = sequences_of([_turn(None, [1], [5])])
    (first,) = maker.groups([forked, plain], [1.0, 0.0])
    assert first["tokens"] == [[1, 2, 3], [1, 5]] and first["scores"] == [1.0, 0.0]
    assert maker.waiting == 1
    flat = maker.groups([forked, plain], [1.0, 1.0])
    assert len(flat) == 1 and maker.waiting == 1, "branches of a flat group teach nothing"
    _, branches = maker.groups([plain, forked], [3.0, 1.0])
    assert branches["tokens"] == [[1, 4], [1, 4]] and branches["scores"] == [1.0, 1.0]
    assert branches["advantages"] == [1.0, -1.0] and maker.waiting == 0
