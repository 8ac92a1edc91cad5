"""The GSM8K environment on a few made-up rows: prompts, scores, dropped groups, test split, missing
hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from atropos_common.protocol.records import EvalRecord, parse_line
from atropos_envs import EnvFault
from atropos_envs.grading import answer_of, is_right
from atropos_envs.gsm8k_server import SYSTEM_PROMPT, Gsm8kEnv, MathProblem, load_rows
from atropos_envs.math_env import boxed, gold_answer, group_scores
from tests.atropos_envs.support import (
    Engine,
    decode,
    encode,
    make_env,
    text_tokenizer,
    write_splits,
)

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [
    MathProblem(question=f"What is {n} plus {n}?", answer=f"It doubles.\n#### {2 * n}")
    for n in range(1, 7)
]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat_tokenizer().save_pretrained(tmp_path / "model")
    write_splits(tmp_path / "data", ROWS[:4], ROWS[4:])
    return tmp_path


def make(folder: Path, url: str, **fields: Any) -> Gsm8kEnv:
    env: Gsm8kEnv = make_env(Gsm8kEnv, folder, url, **fields)
    return env


async def test_a_group_is_scored_and_templated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATROPOS_COMPONENT", raising=False)
    prompts = []

    def answers(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
        prompts.append(decode(prompt))
        return encode("<think>\\boxed{9}</think>\\boxed{6}" if index == 0 else "six")

    async with Engine(answers).running() as url:
        env = make(folder, url)
        await env.setup()
        group = await env.rollout(ROWS[2])
        await env._close_servers()
    assert prompts[0] == f"<system>{SYSTEM_PROMPT}<user>What is 3 plus 3?<assistant>"
    assert group["scores"] == [1.0, -1.0, -1.0, -1.0]
    assert group["tokens"][1] == encode(prompts[0])[:-1] + encode("six")
    assert group["masks"][1] == [-100] * len(prompts[0]) + encode("six")
    assert group["inference_logprobs"][1][len(prompts[0]) :] == [-0.25, -0.5, -0.75, -1.0]
    assert group["generation_params"]["temperature"] == 1.0
    assert group["generation_params"]["max_tokens"] + len(prompts[0]) < 2048, (
        "no sequence may reach the limit"
    )


async def test_where_all_are_right_brevity_decides_and_flat_groups_are_counted(
    folder: Path,
) -> None:
    lengths = [10, 400, 10, 10]

    def right(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
        return encode("." * lengths[index] + "\\boxed{2}")

    async with Engine(right).running() as url:
        env = make(folder, url, max_token_length=len(SYSTEM_PROMPT) + 500)
        await env.setup()
        group = await env.rollout(ROWS[0])
        assert group["scores"][0] == group["scores"][2] == group["scores"][3] > group["scores"][1]
        lengths[1] = 10
        await env.handle_send_to_api(await env.rollout(ROWS[0]))
        assert env.tally.left_out == {"flat": 1}, (
            "a group of equal scores is counted, by its reason"
        )
        with pytest.raises(ValueError, match="cannot be read"):
            await env.rollout({"question": "?", "answer": "no mark"})
        await env._close_servers()


async def test_the_test_split_is_evaluated_greedily(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATROPOS_RUN_DIR", raising=False)
    monkeypatch.delenv("ATROPOS_COMPONENT", raising=False)

    def ten(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
        assert body["temperature"] == 0.0
        return encode("\\boxed{10}")

    async with Engine(ten).running() as url:
        await make(folder, url)._run_evaluate()
    (line,) = (folder / "evals/eval.gsm8k.jsonl").read_text().splitlines()
    record = parse_line(line)
    assert isinstance(record, EvalRecord)
    assert (record.env, record.split, record.correct, record.questions) == ("gsm8k", "test", 1, 2)


async def test_it_is_evaluated_every_few_seconds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATROPOS_RUN_DIR", raising=False)
    monkeypatch.delenv("ATROPOS_COMPONENT", raising=False)
    async with Engine(lambda *_: encode("\\boxed{10}")).running() as url:
        env = make(folder, url, eval_interval_s=60.0)
        await env.setup()
        # No step since the last round: BaseEnv's own interval has no part in this.
        env.curr_step, env.status_dict = 0, {"current_step": 0}
        await env.env_step_checks()
        assert env._evaluated_at is None, "the engine may start for minutes before the first step"
        env.curr_step, env.status_dict = 3, {"current_step": 3}
        await env.env_step_checks()
        assert env.eval_runner is None and env._evaluated_at is not None
        env._evaluated_at -= 61.0
        await env.env_step_checks()
        first = env.eval_runner
        assert first is not None
        await first
        await env.env_step_checks()
        assert env.eval_runner is first, "the interval counts from the start of an evaluation"
        await env._close_servers()
    assert len((folder / "evals/eval.gsm8k.jsonl").read_text().splitlines()) == 1


async def test_problems_come_in_an_order_of_the_seed(folder: Path) -> None:
    orders = []
    for seed in (1, 1, 2):
        env = make(folder, "http://127.0.0.1:9/v1", seed=seed)
        await env.setup()
        orders.append([(await env.get_next_item())["question"] for _ in range(8)])
    assert orders[0] == orders[1] != orders[2]
    assert (
        sorted(orders[0][:4])
        == sorted(orders[0][4:])
        == sorted(row["question"] for row in ROWS[:4])
    )


async def test_a_model_without_chat_template_is_refused(folder: Path) -> None:
    text_tokenizer().save_pretrained(folder / "base")
    with pytest.raises(EnvFault, match="chat template"):
        await make(folder, "http://127.0.0.1:9/v1", tokenizer_name=str(folder / "base")).setup()


def test_a_missing_hub_is_a_sentence_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nTraceback of many lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(EnvFault) as caught:
        load_rows("train", None)
    message = str(caught.value)
    assert (
        "Couldn't reach the Hub" in message
        and "--env.dataset_path" in message
        and "HF_HUB_OFFLINE" in message
    )
    assert "\n" not in message
    assert caught.value.exit_code == 2


def test_the_hub_s_rows_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(*args: Any, split: str) -> list[MathProblem]:
        asked.append((*args, split))
        return ROWS[:2]

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert load_rows("test", None) == ROWS[:2]
    assert asked == [("openai/gsm8k", "main", "test")]


@pytest.mark.parametrize(
    ("content", "said"), [("{", ":1"), ('{"question": "q"}', ":1"), ("", "empty")]
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(EnvFault, match=said):
        load_rows("train", str(tmp_path))
    with pytest.raises(EnvFault, match="no such file"):
        load_rows("test", str(tmp_path))


SOLUTION = (
    "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"
)


def test_the_gold_answer_is_what_follows_the_mark() -> None:
    assert gold_answer(SOLUTION) == "72"
    assert gold_answer("so it costs\n#### 1,234,000") == "1234000"
    for broken in ("no mark at all", "####", "#### "):
        assert boxed(gold_answer(broken)) == ""


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
    assert is_right(answer_of(completion), boxed(gold_answer(SOLUTION))) is right


def test_thousands_separators_do_not_matter() -> None:
    assert is_right("\\boxed{1,234}", boxed(gold_answer("#### 1234")))
    assert is_right("\\boxed{1234}", boxed(gold_answer("#### 1,234")))


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
