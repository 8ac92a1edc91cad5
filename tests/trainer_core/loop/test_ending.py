"""A run that trained nothing, or nothing in its last steps, ends with a reason, exit code 3 and no
final model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_core.offline_runs import group_of, offline_config, write_lines
from trainer_core import NonFiniteError, NoUpdateError, Sequences, TooMuchLeftOut, train
from trainer_core.__main__ import main
from trainer_core.ending import Updates


def nan_loss(
    logprobs: torch.Tensor, base: torch.Tensor, advantages: torch.Tensor, _: Sequences
) -> torch.Tensor:
    """Finite on the six tokens of the trial, NaN on a batch."""
    return -(logprobs - base).exp() * advantages * (1.0 if len(logprobs) <= 6 else float("nan"))


def batches(count: int, *broken: int, **fields: Any) -> list[Any]:
    """Two groups each; those whose number is among `broken` have an infinite gradient."""
    made = []
    for number in range(count):
        groups = [group_of(2 * number, **fields), group_of(2 * number + 1, **fields)]
        if number in broken:
            groups[0]["advantages"] = [[3e38] * len(tokens) for tokens in groups[0]["tokens"]]
        made.append({"batch": groups})
    return made


def zero_one(groups: list[Any]) -> list[Any]:
    """The same with masks of 0 and 1."""
    for each in (group for batch in groups for group in batch["batch"]):
        each["masks"] = [[int(token >= 0) for token in mask] for mask in each["masks"]]
    return groups


def test_masks_of_another_framework_end_the_run_with_3(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's first attempt: masks as TRL and verl write them."""
    path = write_lines(tmp_path / "m.jsonl", zero_one(batches(3)))
    config = offline_config(base, tmp_path)
    assert main([*config.to_args(), "--rollouts", str(path)]) == 3
    said = capsys.readouterr()
    assert (
        "no update was made, so no final model is saved: 24 of 24 sequences were left out: "
        "malformed masks (24)" in (said.err)
    )
    assert "masks holds 0 and 1, another framework's convention. fix: put -100 where" in said.err
    assert "Training finished" not in said.out
    with pytest.raises(NoUpdateError, match="24 of 24"):
        train(config, rollouts=path)
    assert not (tmp_path / "offline" / "final_model").exists()


@pytest.mark.parametrize(
    "wrong", [{"tokens": [[99999] * 6] * 4}, {"inference_logprobs": [[-1.0]] * 4}]
)
def test_other_groups_that_are_all_malformed(
    base: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    path = write_lines(tmp_path / "m.jsonl", batches(2, **wrong))
    with pytest.raises(NoUpdateError, match="16 of 16 sequences were left out"):
        train(offline_config(base, tmp_path), rollouts=path)


def test_a_loss_that_is_never_finite_ends_the_run_with_3(base: Path, tmp_path: Path) -> None:
    config = offline_config(base, tmp_path, checkpoint_interval=2)
    with pytest.raises(NoUpdateError, match="not a finite number in all 4 steps") as caught:
        train(config, rollouts=[b["batch"] for b in batches(4)], loss_fn=nan_loss)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "offline" / "final_model").exists()


@pytest.mark.parametrize("broken", [(3,), (2, 3), (0, 1, 2)])
def test_a_good_update_among_the_last_three_is_enough(
    base: Path, tmp_path: Path, broken: tuple[int, ...]
) -> None:
    result = train(
        offline_config(base, tmp_path), rollouts=[b["batch"] for b in batches(4, *broken)]
    )
    assert (result.done, result.step, result.weight_version) == (True, 4, 4 - len(broken))


def test_last_steps_without_an_update_fail_and_lose_nothing(base: Path, tmp_path: Path) -> None:
    """The checkpoint has the good step's weights; to resume from it is no success either."""
    made = [b["batch"] for b in batches(4, 1, 2, 3)]
    config = offline_config(base, tmp_path, resume="auto")
    for _ in range(2):
        with pytest.raises(
            NoUpdateError, match=r"the last 3 of 4 steps made no update[\s\S]*step_4"
        ):
            train(config, rollouts=made)
    saved, start = (
        load_file(f / "model.safetensors") for f in (tmp_path / "offline" / "step_4", base)
    )
    assert any(not torch.equal(saved[name], start[name]) for name in saved)
    assert not (tmp_path / "offline" / "final_model").exists()


def test_a_run_that_was_done_before_is_still_done(base: Path, tmp_path: Path) -> None:
    config = offline_config(base, tmp_path, resume="auto", training_steps=100)
    path = write_lines(tmp_path / "r.jsonl", batches(2))
    assert [train(config, rollouts=path).step for _ in range(2)] == [2, 2]


@pytest.mark.parametrize(("version", "kind"), [(0, NoUpdateError), (3, NonFiniteError)])
def test_too_many_skipped_steps_in_a_row(version: int, kind: type[Exception]) -> None:
    updates = Updates(0, 0)
    for step in range(20):
        assert updates.too_many_skipped(version, "") is None, step
        updates.saw(updated=False)
    assert type(updates.too_many_skipped(version, "")) is kind


def test_a_source_that_never_gives_anything_ends(base: Path, tmp_path: Path) -> None:
    class Endless:
        def next_batch(self, step: int) -> Any:
            return zero_one(batches(1))[0]

    with pytest.raises(
        TooMuchLeftOut, match=r"the last 100 batches of Endless .*malformed masks \(800\)"
    ):
        train(offline_config(base, tmp_path), rollouts=Endless())
