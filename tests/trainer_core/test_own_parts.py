"""Sources, callbacks, settings and files of a library's user, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_core.offline_runs import STEPS, group_of, offline_config, write_lines
from trainer_core import TrainingConfig, UsageError, train
from trainer_core.__main__ import main
from trainer_core.errors import FOREIGN
from trainer_core.objective.registry import objective_hint
from trainer_core.report import METHODS, Callbacks

Groups = list[dict[str, Any]]
BATCHES: list[Groups] = [[group_of(2 * i), group_of(2 * i + 1)] for i in range(STEPS)]


class Lines:
    """Without `on_idle` and `close`, and each batch as a line of a file is."""

    def __init__(self) -> None:
        self.left = iter(BATCHES)

    def next_batch(self, step: int) -> Any:
        return {"batch": next(self.left)}


class NoArguments:
    def __init__(self) -> None:
        self.left = iter(BATCHES)

    def next_batch(self) -> Any:
        return next(self.left)


def generator() -> Iterator[Groups]:
    yield from BATCHES


@pytest.mark.parametrize(
    "source", [BATCHES, [{"batch": b} for b in BATCHES], generator(), Lines(), NoArguments()]
)
def test_sources_of_every_shape(base: Path, tmp_path: Path, source: Any) -> None:
    """Five steps are configured, so that each source comes to its end."""
    result = train(offline_config(base, tmp_path, training_steps=STEPS + 1), rollouts=source)
    assert (result.done, result.step) == (True, STEPS) and "has no more rollouts" in result.reason


class Wrong:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def next_batch(self, step: int, on_idle: Any) -> Any:
        return self.answer


class ThreeArguments:
    def next_batch(self, step: int, on_idle: Any, more: Any) -> Any:
        """Never called."""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (3, r"rollouts: int is not a source of batches"),
        ({"batch": []}, r"rollouts: dict is not a source of batches"),
        (Lines, r"rollouts: Lines is a class"),
        (ThreeArguments(), r"ThreeArguments.next_batch\(step: .* must take \(step, on_idle\)"),
        (Wrong(None), r"Wrong returned NoneType as a batch"),
        (
            Wrong({"tokens": [[1]]}),
            r"Wrong returned dict with the keys tokens as a batch. fix: a batch is a list of "
            r"groups",
        ),
        ([group_of(1)], r"list returned dict with the keys tokens, masks"),
    ],
)
def test_sources_that_are_none(base: Path, tmp_path: Path, source: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train(offline_config(base, tmp_path), rollouts=source)


def test_a_callback_needs_only_the_methods_that_it_has(base: Path, tmp_path: Path) -> None:
    class Steps:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_step(self, report: Any) -> None:
            self.seen.append(report.step)

    steps = Steps()
    train(offline_config(base, tmp_path), rollouts=BATCHES, callbacks=[steps])  # type: ignore[list-item]
    assert steps.seen == [1, 2, 3, 4]
    with pytest.raises(UsageError, match=r"callbacks: Steps is a class. fix: pass an instance"):
        Callbacks([Steps])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=rf"callbacks: int has none of {', '.join(METHODS)}"):
        Callbacks([3])  # type: ignore[list-item]


def test_a_wrong_callback_is_found_before_the_model_loads(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="callbacks"):
        train(
            offline_config(tmp_path / "no model", tmp_path), rollouts=BATCHES, callbacks=[object()]
        )  # type: ignore[list-item]


def test_names_of_other_frameworks_lead_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(FOREIGN.values()) <= TrainingConfig.model_fields.keys()
    assert not FOREIGN.keys() & TrainingConfig.model_fields.keys()
    with pytest.raises(
        UsageError,
        match=r"beta: no such setting. fix: it is called ref_kl_coef here\nlearning_rate: ",
    ):
        TrainingConfig(model_name="m", learning_rate=1e-5, beta=0.1)
    with pytest.raises(
        UsageError, match=r"training_step: no such setting. fix: training_steps may be meant"
    ):
        TrainingConfig(model_name="m", training_step=3)
    assert main(["--model-name", "m", "--learning-rate", "1e-5", "--num-generations=8"]) == 2
    said = capsys.readouterr().err
    assert "--learning-rate: no such flag. fix: it is called lr here" in said
    assert "--num-generations=8: no such flag. fix: it is called group-size here" in said


def test_a_score_that_json_cannot_hold_is_named(base: Path, tmp_path: Path) -> None:
    bad = group_of(2)
    bad["scores"][1] = float("nan")
    path = write_lines(tmp_path / "r.jsonl", [{"batch": BATCHES[0]}, {"batch": [bad, group_of(3)]}])
    with pytest.raises(
        UsageError,
        match=r"line 2: scores holds NaN, which JSON does not allow. fix: remove that group",
    ):
        train(offline_config(base, tmp_path), rollouts=path)


@pytest.mark.parametrize(
    ("fields", "hinted"),
    [
        ({"objective": "dapo"}, True),
        ({"objective": "dapo", "max_completion_tokens": 64}, False),
        ({"objective": "dapo", "overlong_buffer": 0}, False),
        ({}, False),
    ],
)
def test_dapo_without_a_limit_says_what_is_missing(fields: dict[str, Any], hinted: bool) -> None:
    hint = objective_hint(TrainingConfig(model_name="m", **fields))
    assert ("--max-completion-tokens" in hint) is hinted
