"""The tiny model: tokenizer, the task's split, warm start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from atropos_envs import EnvFault, warm_start
from atropos_envs.arithmetic import (
    HELD_OUT,
    OPERANDS,
    Sum,
    all_questions,
    load_task,
    make_task,
    reward,
    write_task,
)
from atropos_envs.tiny_model import EOS_ID, VOCABULARY, build_tiny_model, save_model

operands = st.integers(0, OPERANDS - 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(build_tiny_model(seed=3), tmp_path_factory.mktemp("models") / "tiny")


def test_the_tokenizer_is_one_id_per_character_and_adds_nothing(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.encode("1+2=") == [3, 12, 4, 13]
    assert len(tokenizer) == 14
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer.decode([3, 12, 4, 13, 5, EOS_ID], skip_special_tokens=True) == "1+2=3"
    assert tokenizer.encode("Hi") == [0, 0], (
        "an unknown character must not vanish: vLLM refuses empty prompts"
    )


@given(operands, operands)
def test_the_warm_start_encodes_as_the_saved_tokenizer_does(left: int, right: int) -> None:
    question = Sum(left, right)
    ids = warm_start.encode(question.prompt + question.answer)
    names = {index: token for token, index in VOCABULARY.items()}
    assert "".join(names[index] for index in ids) == question.prompt + question.answer


def test_the_model_loads_by_the_auto_class_with_the_weights_of_its_seed(
    tiny: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert sum(parameter.numel() for parameter in model.parameters()) == 789_632
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == EOS_ID
    again = (
        save_model(build_tiny_model(seed=3), tmp_path / "again") / "model.safetensors"
    ).read_bytes()
    other = (
        save_model(build_tiny_model(seed=4), tmp_path / "other") / "model.safetensors"
    ).read_bytes()
    assert again == (tiny / "model.safetensors").read_bytes() != other


def test_unused_rows_are_rows_of_the_model_and_no_tokens(short: None, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    assert warm_start.main(["--output", str(out), "--vocab-rows", "128"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == 128
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 14
    assert tokenizer.decode([3, 100, 12]) == "1+", "a row that is no token is no text"
    with pytest.raises(ValueError, match="13 rows are too few"):
        save_model(build_tiny_model(vocab_rows=13), tmp_path / "narrow")


def test_two_runs_may_make_the_same_model_at_once(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other is done while this one teaches: its model stays, and nothing of ours is left beside
    it."""
    out = tmp_path / "model"

    def other_is_faster(*_: Any) -> dict[str, float]:
        out.mkdir()
        (out / "config.json").write_text("{}")
        return {}

    monkeypatch.setattr(warm_start, "measure", other_is_faster)
    assert warm_start.main(["--output", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and (
        out / "config.json"
    ).read_text() == "{}"


def test_a_model_that_appears_while_torch_is_imported_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    monkeypatch.setattr(torch, "set_num_threads", lambda _: out.mkdir())
    assert warm_start.main(["--output", str(out)]) == 0
    assert "another process has just made it" in capsys.readouterr().out
    assert warm_start.main(["--output", str(out)]) == 2, "there before it began: a mistake"


def test_too_few_rows_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        warm_start.main(["--output", str(tmp_path / "model"), "--vocab-rows", "13"])
    assert "--vocab-rows 13: the 14 tokens need a row each" in capsys.readouterr().err


def test_building_a_model_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_tiny_model(seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_bfloat16_is_saved_as_such(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        save_model(build_tiny_model(dtype="bfloat16"), tmp_path)
    )
    assert model.dtype == torch.bfloat16


# The task


@given(operands, operands)
def test_forgetting_the_carry_is_wrong_exactly_where_there_is_one(left: int, right: int) -> None:
    question = Sum(left, right)
    assert question.carries == (question.without_carry != question.answer)
    assert int(question.answer) == left + right
    tens = left // 10 + right // 10
    assert int(question.without_carry) == tens * 10 + (left + right) % 10


@given(st.integers(0, 10_000))
def test_the_split_is_disjoint_and_depends_on_the_seed_alone(seed: int) -> None:
    task = make_task(seed)
    assert len(task.held_out) == HELD_OUT
    assert not set(task.held_out) & set(task.training)
    assert task == make_task(seed)
    carries = {question for question in all_questions() if question.carries}
    assert carries <= set(task.held_out) | set(task.training)


def test_seeds_hold_different_questions_out() -> None:
    assert make_task(0).held_out != make_task(1).held_out


@given(st.lists(st.integers(0, 13), max_size=5))
def test_only_the_exact_digits_and_the_end_are_rewarded(completion: list[int]) -> None:
    answer = [3, 4]
    assert reward(completion, answer, EOS_ID) == (1.0 if completion == [3, 4, EOS_ID] else 0.0)
    assert reward([3, 4], answer, EOS_ID) == 0.0, "without its end it goes on"
    assert reward([*answer, EOS_ID], answer, EOS_ID) == 1.0


def test_the_split_comes_back_from_the_model_folder_whatever_the_seed(tmp_path: Path) -> None:
    task = make_task(7)
    write_task(task, tmp_path, {"greedy": 0.3})
    assert load_task(tmp_path, seed=1) == task
    assert load_task(tmp_path / "elsewhere", seed=1) == make_task(1)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"seed": 0, "held_out": [], "training": [[1, 2]]}',
        '{"seed": 0, "held_out": [[1, 2]], "training": [[1, 2]]}',
        '{"seed": 0, "held_out": [[1, 99]], "training": [[1, 2]]}',
    ],
)
def test_a_damaged_task_file_is_refused_with_the_way_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "task.json").write_text(content)
    with pytest.raises(EnvFault, match="warm-start again"):
        load_task(tmp_path, seed=0)


# The warm start


def test_labels_cover_the_answer_and_the_end_alone() -> None:
    examples = warm_start.make_examples(make_task(0).training)
    tokens, labels = warm_start.sample_batch(examples, torch.Generator().manual_seed(0))
    assert tokens.shape == labels.shape == (warm_start.BATCH, 9)
    for row, row_labels in zip(tokens.tolist(), labels.tolist(), strict=True):
        prompt_length = row.index(VOCABULARY["="]) + 1
        end = row.index(EOS_ID) + 1
        expected = [warm_start.IGNORED] * prompt_length + row[prompt_length:end]
        assert row_labels == expected + [warm_start.IGNORED] * (9 - end)


def test_the_teacher_forgets_as_often_as_it_says() -> None:
    carries = [question for question in all_questions() if question.carries]
    examples = warm_start.make_examples(carries)
    generator = torch.Generator().manual_seed(1)
    right = {tuple(row) for row in examples.right.tolist()}
    rows = [
        tuple(row)
        for _ in range(60)
        for row in warm_start.sample_batch(examples, generator)[0].tolist()
    ]
    forgotten = sum(row not in right for row in rows) / len(rows)
    assert forgotten == pytest.approx(warm_start.FORGETS, abs=0.03)


def test_the_learning_rate_rises_then_falls_to_its_share() -> None:
    factors = [warm_start.learning_rate_factor(step) for step in range(warm_start.STEPS)]
    peak = warm_start.WARMUP_STEPS
    assert factors[peak] == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == pytest.approx(warm_start.FINAL_LR)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "STEPS", 4)
    monkeypatch.setattr(
        warm_start,
        "measure",
        lambda model, task: {"held_out": warm_start.accuracy(model, task.held_out)},
    )


def test_a_warm_start_is_whole_and_the_same_for_the_same_seed(short: None, tmp_path: Path) -> None:
    accuracies = warm_start.warm_start(tmp_path / "a", seed=2)
    assert warm_start.warm_start(tmp_path / "b", seed=2) == accuracies
    assert (tmp_path / "a/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors"
    ).read_bytes()
    assert json.loads((tmp_path / "a/task.json").read_text())["accuracy"] == accuracies
    untrained = save_model(build_tiny_model(seed=2), tmp_path / "untrained")
    assert (tmp_path / "a/model.safetensors").read_bytes() != (
        untrained / "model.safetensors"
    ).read_bytes()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == 14


def test_a_warm_start_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(warm_start, "teach", fails)
    with pytest.raises(RuntimeError):
        warm_start.warm_start(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    assert warm_start.main(["--output", str(tmp_path / "model")]) == 2
    assert "delete it" in capsys.readouterr().err


def test_greedy_answers_do_not_depend_on_the_company(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    questions = make_task(0).held_out
    together = warm_start.answer_questions(model, questions)
    assert together == [warm_start.answer_questions(model, [question])[0] for question in questions]
    assert all(len(answer) <= 4 for answer in together)
