"""The math-zero environment on made-up problems: prompts, boxes, truncated, empty and hostile
completions."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from atropos_common.protocol.records import EvalRecord, parse_line
from atropos_envs import EnvFault
from atropos_envs.grading import answer_of, is_right
from atropos_envs.math_env import HubSplit, MathProblem
from atropos_envs.math_zero_server import PROMPT, MathZeroConfig, MathZeroEnv
from tests.atropos_envs.support import (
    Engine,
    decode,
    encode,
    make_env,
    text_tokenizer,
    write_splits,
)

NOWHERE = "http://127.0.0.1:9/v1"
ROWS = [
    MathProblem(question="What is one half of one half?", answer="\\frac{1}{4}"),
    MathProblem(question="Which set has {1} and {2}?", answer="\\{1, 2\\}"),
    MathProblem(question="Solve x + 1 = 3.", answer="\\boxed{2}"),
    MathProblem(question="Where is the point?", answer="(3, \\frac{\\pi}{2})"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ATROPOS_RUN_DIR", raising=False)
    monkeypatch.delenv("ATROPOS_COMPONENT", raising=False)
    text_tokenizer().save_pretrained(tmp_path / "model")
    write_splits(tmp_path / "data", ROWS[:2], ROWS[2:])
    return tmp_path


def make(folder: Path, url: str = NOWHERE, **fields: Any) -> MathZeroEnv:
    env: MathZeroEnv = make_env(MathZeroEnv, folder, url, **fields)
    return env


async def one_group(
    folder: Path, completions: list[list[int]], row: MathProblem = ROWS[0], **fields: Any
) -> Any:
    async with Engine(lambda prompt, body, index: completions[index]).running() as url:
        env = make(folder, url, group_size=len(completions), **fields)
        await env.setup()
        group = await env.rollout(row)
        await env._close_servers()
    return group


async def test_the_prompt_is_plain_text_and_answers_are_compared_as_mathematics(
    folder: Path,
) -> None:
    engine = Engine(
        lambda prompt, body, index: encode(
            [" So \\boxed{0.25}", " \\boxed{2/8}", " \\boxed{4}", ""][index]
        )
    )
    async with engine.running() as url:
        env = make(folder, url)
        await env.setup()
        group = await env.rollout(ROWS[0])
        await env._close_servers()
    body = engine.bodies[0]
    prompt = decode(body["prompt"]["prompt_token_ids"])
    assert prompt == PROMPT.format(question=ROWS[0]["question"]) and prompt.endswith("Solution:")
    assert body["stop"] == MathZeroEnv.stop and body["temperature"] == 1.0
    assert body["max_tokens"] + len(prompt) < 4096, "no sequence may reach the limit"
    assert group["scores"] == [1.0, 1.0, -1.0, -1.0]
    assert group["overrides"] == [{}, {}, {}, {}]
    assert group["masks"][2] == [-100] * len(prompt) + encode(" \\boxed{4}")
    assert group["inference_logprobs"][3][len(prompt) :] == [-0.25], (
        "an empty completion is its end token"
    )


async def test_braces_in_a_question_reach_the_prompt_as_they_are(folder: Path) -> None:
    env = make(folder)
    assert "{1} and {2}" in decode(env.prompt_ids(ROWS[1]))


async def test_a_truncated_completion_is_wrong_and_not_trained_on(folder: Path) -> None:
    right, cut = encode("\\boxed{0.25}"), encode("\\boxed{0.25} and then")[:-1]
    group = await one_group(folder, [right, cut])
    assert group["scores"] == [1.0, -1.0]
    assert group["overrides"] == [{}, {"set_advantage_to_zero": True}]
    group = await one_group(folder, [right, cut], mask_truncated=False)
    assert group["overrides"] == [{}, {}]


@pytest.mark.parametrize(
    "texts", [["", "", ""], ["\\boxed{0.25}", "\\boxed{1/4}"], ["1/4", "the answer is $1/4$"]]
)
async def test_a_group_of_equal_scores_is_a_flat_one(folder: Path, texts: list[str]) -> None:
    group = await one_group(folder, [encode(text) for text in texts])
    assert len(set(group["scores"])) == 1


async def test_an_answer_that_cannot_be_read_is_dropped_before_anything_is_asked(
    folder: Path,
) -> None:
    engine = Engine()
    async with engine.running() as url:
        env = make(folder, url)
        with pytest.raises(ValueError, match="cannot be read"):
            await env.rollout(MathProblem(question="?", answer=""))
    assert engine.bodies == []


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("\\frac{1}{4}", "\\boxed{0.25}", True),
        ("(3, \\frac{\\pi}{2})", "\\boxed{\\left(3, \\pi/2\\right)}", True),
        ("(3, \\frac{\\pi}{2})", "\\boxed{(\\pi/2, 3)}", False),
        ("[-2,7]", "\\boxed{[-2, 7]}", True),
        ("[-2,7]", "\\boxed{(-2, 7)}", False),
        ("p - q", "\\boxed{-q + p}", True),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", True),
        ("2", "\\boxed{5} no: \\boxed{2}", True),
        ("2", "\\boxed{2} no: \\boxed{5}", False),
        ("2", "\\boxed{1, 2, 3}", False),
        ("2", "<think>\\boxed{2}</think> I cannot tell", False),
        ("2", "\x1b[31m\\boxed{2}\x00\u202e", True),
    ],
)
async def test_forms_of_an_answer(folder: Path, answer: str, text: str, right: bool) -> None:
    env = make(folder)
    gold = env.gold(MathProblem(question="", answer=answer))
    assert is_right(answer_of(text), gold) is right


async def test_the_local_test_split_is_evaluated_greedily(folder: Path) -> None:
    def two(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
        assert body["temperature"] == 0.0 and body["stop"] == MathZeroEnv.stop
        return encode("\\boxed{2}")

    async with Engine(two).running() as url:
        await make(folder, url)._run_evaluate()
    (line,) = (folder / "evals/eval.math-zero.jsonl").read_text().splitlines()
    record = parse_line(line)
    assert isinstance(record, EvalRecord)
    assert (record.env, record.split, record.correct, record.questions) == (
        "math-zero",
        "test",
        1,
        2,
    )


async def test_the_hub_s_columns_are_named_for_each_data_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {
        ("zwhe99/DeepMath-103K", "train"): [
            {"question": "1+1?", "final_answer": "2", "difficulty": 1.0},
            {"question": "broken", "final_answer": None},
        ],
        ("HuggingFaceH4/MATH-500", "test"): [{"problem": "2+2?", "answer": "4", "solution": "s"}]
        * 200,
        ("HuggingFaceH4/aime_2024", "train"): [{"problem": "3+3?", "answer": "6", "year": "2024"}],
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, split: tables[name, split])
    env = make(folder, dataset_path=None)
    await env.setup()
    assert await env.get_next_item() == {"question": "1+1?", "answer": "2"}
    assert await env.get_next_item() == {"question": "1+1?", "answer": "2"}, (
        "a row without an answer is left out"
    )
    assert {split: len(rows) for split, rows in env.eval_questions().items()} == {
        "math500": 128,
        "aime24": 1,
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", ":1: not a problem"),
        (b'{"question": "q"}', ":1: not"),
        (b"\n", "is empty"),
        (b"\xff\xfe", "as text"),
    ],
)
async def test_a_broken_data_set_is_named_with_its_line(
    folder: Path, content: bytes, said: str
) -> None:
    (folder / "data/train.jsonl").write_bytes(content)
    with pytest.raises(EnvFault, match=said):
        await make(folder).setup()


def test_an_empty_split_of_the_hub_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, split: [])
    with pytest.raises(EnvFault, match="test split of a/b is empty"):
        HubSplit("a/b", "test").load()


def test_the_shipped_yaml_sets_fields_that_exist() -> None:
    settings = yaml.safe_load((Path(__file__).parents[2] / "profiles/math-zero.yaml").read_text())
    assert set(settings) == {"env"} and settings["env"]
    assert set(settings["env"]) <= set(MathZeroConfig.model_fields)
    MathZeroConfig(**settings["env"])


async def test_the_program_takes_its_yaml_and_the_flags_win(folder: Path) -> None:
    asked = []

    def answer(prompt: list[int], body: dict[str, Any], index: int) -> list[int]:
        asked.append(body["max_tokens"] + len(prompt))
        return encode("\\boxed{2}")

    # eval_size from the flag; max_token_length from the file, and it is not the class's default.
    (folder / "env.yaml").write_text("env:\n  max_token_length: 3000\n  eval_size: 2\n")
    async with Engine(answer).running() as url:
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "atropos_envs.math_zero_server",
            "evaluate",
            "--config",
            str(folder / "env.yaml"),
            "--env.dataset_path",
            str(folder / "data"),
            "--env.tokenizer_name",
            str(folder / "model"),
            "--env.data_dir_to_save_evals",
            str(folder / "evals"),
            "--env.eval_size",
            "1",
            "--openai.model_name",
            str(folder / "model"),
            "--openai.base_url",
            url,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(program.communicate(), 100)
    assert program.returncode == 0, output.decode()
    assert asked == [2999]
    assert len((folder / "evals/eval.math-zero.jsonl").read_text().splitlines()) == 1
