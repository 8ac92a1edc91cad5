"""Conversations: roles, tool calls and results, tokens; rows for programs and their order."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from atropos_common.protocol.token_columns import TokenSpan, pack
from atropos_common.protocol.trainer_records import RolloutRecord, RolloutTurn
from atropos_tui.monitor.conversation import (
    called,
    completion_parts,
    prompt_parts,
    shown,
    tokens_of,
)
from atropos_tui.monitor.rollout_export import Choice, json_line, read_rollouts

PROMPT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 3*4?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'
RESULT = (
    "<|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
TURNS = [f"Let me see. {CALL}", RESULT, "<think>easy</think>It is 12.<|im_end|>"]


def rollout(step: int = 1, reward: float = 0.5, **fields: object) -> RolloutRecord:
    given = {"prompt": PROMPT, "completion": "".join(TURNS), "advantage": 0.0} | fields
    return RolloutRecord.model_validate({"step": step, "reward": reward, **given})


def told(record: RolloutRecord) -> list[tuple[str, str]]:
    parts = completion_parts(record)
    return [(part.role, shown(part, record.completion)) for part in parts]


CONVERSATION = [
    ("assistant", "Let me see."),
    ("call", 'calculator(expression="3*4")'),
    ("result", "12"),
    ("thinking", "easy"),
    ("assistant", "It is 12."),
]


def test_a_prompt_and_a_completion_with_a_tool_are_turns_by_role() -> None:
    assert [(part.role, shown(part, PROMPT)) for part in prompt_parts(PROMPT)] == [
        ("system", "Be brief."),
        ("user", "What is 3*4?"),
    ]
    turns = [RolloutTurn(at, len(text), 9) for at, text in enumerate(TURNS)]
    assert told(rollout(turns=turns)) == CONVERSATION
    assert told(rollout()) == CONVERSATION, "an old recording has no turns"
    assert told(rollout(turns=[RolloutTurn(0, 3, 1)])) == CONVERSATION, "nor one that does not fit"


def test_llama_and_plain_text_have_roles_too() -> None:
    llama = (
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert [(part.role, shown(part, llama)) for part in prompt_parts(llama)] == [("user", "Hi")]
    assert told(rollout(completion="7<eos>")) == [("assistant", "7")]


def test_an_odd_call_is_shown_as_written() -> None:
    for text in ("{", "[]", '{"name": 1}x', '{"name": "f", "arguments": [1]}', "[" * 5000):
        assert called(text) == ""
    assert called('{"name": "f", "arguments": "{\\"a\\": 1}"}') == "f(a=1)"


def test_left_out_turns_are_counted() -> None:
    turns = [RolloutTurn(0, 2, 1), RolloutTurn(7, 2, 1), RolloutTurn(8, 2, 1)]
    parts = completion_parts(rollout(completion="aabbcc", turns=turns))
    assert [(part.role, part.skipped) for part in parts] == [
        ("assistant", 0),
        ("environment", 6),
        ("assistant", 0),
    ]


def test_tokens_have_differences_and_the_version_that_made_them() -> None:
    spans = [TokenSpan(2, 0.004), TokenSpan(2, -0.3), TokenSpan(2, None), TokenSpan(2, 5.0)]
    lengths, diffs = pack(spans)
    turns = [RolloutTurn(0, 4, 2, 7, 8, 1), RolloutTurn(1, 2, 1), RolloutTurn(2, 2, 1, 7, 9)]
    record = rollout(completion="aabbccdd", turns=turns, token_chars=lengths, token_diffs=diffs)
    tokens = tokens_of(record)
    assert [token.version for token in tokens] == ["v7", "v8", "", "v7–v9"]
    assert [token.level for token in tokens] == [0, 2, None, 4]
    row = json.loads(json_line(record))
    assert [token["text"] for token in row["tokens"]] == ["aa", "bb", "cc", "dd"]
    assert row["tokens"][1]["logprob_diff"] == -0.3
    assert tokens_of(rollout()) == []


def test_an_episode_at_the_limits_of_the_record_is_read_at_once() -> None:
    turns = [RolloutTurn(at, 160, 40, 1, 2, 5) for at in range(48)]
    text = ("<tool_call>{<think>" * 9)[:160] * 48
    lengths, diffs = pack([TokenSpan(4, 0.1)] * (len(text) // 4))
    record = rollout(completion=text, turns=turns, token_chars=lengths, token_diffs=diffs)
    began = time.perf_counter()
    assert len(completion_parts(record)) >= 48 and len(tokens_of(record)) == len(text) // 4
    assert time.perf_counter() - began < 0.5


def written(path: Path, records: list[RolloutRecord]) -> Path:
    path.write_text("".join(record.to_line() for record in records) + '{"kind":"rollout"')
    return path


def test_the_lowest_score_of_a_step_comes_first(tmp_path: Path) -> None:
    made = [
        rollout(step, reward, seq=step * 10 + at)
        for step in (1, 2)
        for at, reward in enumerate((0.5, math.nan, -1.0, 2.0))
    ]
    path = written(tmp_path / "telemetry.jsonl", made)
    found = read_rollouts(path, Choice(step=2, sort="score"))
    assert [one.reward for one in found[:3]] == [-1.0, 0.5, 2.0] and math.isnan(found[3].reward)
    assert {one.step for one in found} == {2}
    highest = read_rollouts(path, Choice(sort="score", reverse=True, limit=1))
    assert [one.reward for one in highest] == [2.0]
    assert [one.step for one in read_rollouts(path, Choice())] == [2] * 4 + [1] * 4
    assert read_rollouts(tmp_path / "none", Choice()) == []


def test_steps_that_a_later_attempt_repeats_do_not_count(tmp_path: Path) -> None:
    first = [rollout(step, 0.0, attempt=1, seq=step) for step in range(1, 6)]
    second = [rollout(step, 1.0, attempt=2, seq=10 + step) for step in range(4, 6)]
    path = written(tmp_path / "telemetry.jsonl", [*first, *second])
    found = read_rollouts(path, Choice())
    assert [(one.step, one.attempt) for one in found] == [(5, 2), (4, 2), (3, 1), (2, 1), (1, 1)]


def test_a_limit_on_a_long_stream_changes_nothing_but_the_count(tmp_path: Path) -> None:
    made = [rollout(step, (step * 37) % 101, seq=step) for step in range(400)]
    path = written(tmp_path / "telemetry.jsonl", made)
    whole = read_rollouts(path, Choice(sort="score"))
    assert read_rollouts(path, Choice(sort="score", limit=3)) == whole[:3]
