"""A resumed run restores more than weights and optimizer, and names the settings that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_core.offline_runs import group_of, offline_config, write_lines
from trainer_core import UsageError, train
from trainer_core.__main__ import main

LORA: dict[str, Any] = {"weight_bridge_mode": "lora_only", "lr": 1e-2}


def good(count: int, size: int = 4) -> list[Any]:
    return [
        {"batch": [group_of(i * 8 // size + j, size) for j in range(8 // size)]}
        for i in range(count)
    ]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rollouts.jsonl", good(8))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*model.safetensors")))


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def cut_and_whole(base: Path, tmp_path: Path, path: Path, **fields: Any) -> tuple[Path, Path]:
    """The final models of six steps in one go, and of three and three."""
    alone = {"save_path": str(tmp_path / "whole")}
    whole = train(
        offline_config(base, tmp_path, training_steps=6, **alone, **fields), rollouts=path
    )
    places = {"save_path": str(tmp_path / "cut"), "checkpoint_interval": 3}
    train(offline_config(base, tmp_path, training_steps=3, **places, **fields), rollouts=path)
    resumed = offline_config(base, tmp_path, training_steps=6, **places, **fields, resume="auto")
    again = train(resumed, rollouts=path)
    assert whole.path is not None and again.path is not None
    return whole.path, again.path


@pytest.mark.parametrize("final", [False, True])
def test_a_file_with_lines_that_train_nothing_resumes_at_its_place(
    base: Path, tmp_path: Path, final: bool
) -> None:
    """Also from final_model, which keeps no optimizer."""
    useless = {"batch": [group_of(50, masks=[[0]] * 4)]}
    path = write_lines(tmp_path / "gap.jsonl", [useless, useless, *good(8)])
    if not final:
        assert same(*cut_and_whole(base, tmp_path, path))
        return
    config = offline_config(base, tmp_path, training_steps=3, resume="auto")
    train(config, rollouts=path)
    more = train(config.model_copy(update={"training_steps": 4}), rollouts=path)
    whole = train(offline_config(base, tmp_path, save_path=str(tmp_path / "whole")), rollouts=path)
    assert more.history[0]["reward_mean"] == whole.history[3]["reward_mean"]


def test_another_file_begins_where_the_step_says(
    base: Path, tmp_path: Path, rollouts: Path
) -> None:
    config = offline_config(base, tmp_path, training_steps=2, checkpoint_interval=1, resume="auto")
    train(config, rollouts=rollouts)
    other = write_lines(
        tmp_path / "other.jsonl",
        [{"batch": [group_of(70 + i), group_of(80 + i)]} for i in range(4)],
    )
    more = train(config.model_copy(update={"training_steps": 3}), rollouts=other)
    third = [score for seed in (72, 82) for score in group_of(seed)["scores"]]
    assert more.history[0]["reward_mean"] == pytest.approx(sum(third) / 8)


def test_the_mean_of_groups_of_one_goes_on(base: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "ones.jsonl", good(8, size=1))
    assert same(*cut_and_whole(base, tmp_path, path))


@pytest.mark.parametrize(("was", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_dtype_is_refused_in_words(
    base: Path,
    tmp_path: Path,
    rollouts: Path,
    was: str,
    now: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(
        offline_config(base, tmp_path, dtype=was, training_steps=2, checkpoint_interval=2),
        rollouts=rollouts,
    )
    saved = tmp_path / "offline" / "step_2"
    config = offline_config(base, tmp_path, dtype=now, resume=str(saved), rollouts=str(rollouts))
    assert main(config.to_args()) == 2
    said = capsys.readouterr().err
    assert (
        f"its optimizer state belongs to {was} weights, and this run trains {now}. fix: "
        f"resume with --dtype {was}" in said
    )


def test_fewer_steps_than_were_made_are_refused(base: Path, tmp_path: Path, rollouts: Path) -> None:
    steps = {"training_steps": 2, "checkpoint_interval": 2}
    config = offline_config(base, tmp_path / "out", resume="auto", **steps)
    train(config, rollouts=rollouts)
    with pytest.raises(UsageError, match=r"--training-steps 1: .*step_2 has 2 already"):
        train(config.model_copy(update={"training_steps": 1}), rollouts=rollouts)


def test_other_settings_are_named_in_one_line(
    base: Path, tmp_path: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"training_steps": 2, "checkpoint_interval": 2}
    train(offline_config(base, tmp_path, **fields), rollouts=rollouts)
    saved = tmp_path / "offline" / "step_2"
    capsys.readouterr()
    train(offline_config(base, tmp_path, training_steps=2, resume=str(saved)), rollouts=rollouts)
    assert "Differs" not in capsys.readouterr().out, (
        "the interval of checkpoints trains nothing else"
    )
    other = {"objective": "cispo", "lr": 0.002, "lr_schedule": "cosine", "seed": 3}
    train(
        offline_config(base, tmp_path, training_steps=3, resume=str(saved), **other),
        rollouts=rollouts,
    )
    line = (
        "[NOTE] Differs from the checkpoint: --training-steps 2 -> 3; --seed 0 -> 3; "
        "--objective grpo -> cispo; "
        "--lr 0.001 -> 0.002; --lr-schedule constant -> cosine\n"
    )
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing"])
def test_a_save_path_that_cannot_be_written_is_found_first(
    base: Path, tmp_path: Path, rollouts: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("trainer_core.loop.Run", None)  # nothing is loaded
    config = offline_config(base, tmp_path, save_path=str(tmp_path / place), checkpoint_interval=0)
    with pytest.raises(
        UsageError,
        match=rf"--save-path .*{place}: checkpoints cannot be written there .*fix: choose",
    ):
        train(config, rollouts=rollouts)


def test_the_reference_of_an_adapter_is_the_one_that_it_started_from(
    base: Path, tmp_path: Path, rollouts: Path
) -> None:
    """Before the first update it is the policy; a resumed run goes on with it, wherever that folder
    is by then."""
    first = train(offline_config(base, tmp_path, **LORA), rollouts=rollouts).path
    assert first is not None
    start = first.rename(tmp_path / "sft")
    fields = {**LORA, "lora_adapter_path": str(start), "ref_kl_coef": 0.5}
    place = {"save_path": str(tmp_path / "whole")}
    whole = train(
        offline_config(base, tmp_path, training_steps=6, **fields, **place), rollouts=rollouts
    )
    pulls = [step["ref_kl"] for step in whole.history]
    assert pulls[0] == pytest.approx(0.0, abs=1e-9) and 0 < pulls[1] < 0.5

    place = {"save_path": str(tmp_path / "cut"), "checkpoint_interval": 3}
    part = train(
        offline_config(base, tmp_path, training_steps=3, **fields, **place), rollouts=rollouts
    )
    kept = weights(tmp_path / "cut" / "adapter_step_3" / "reference")
    assert all(torch.equal(kept[name], value) for name, value in weights(start).items())
    settings = json.loads((start / "adapter_config.json").read_text())
    for path in start.iterdir():
        path.unlink()
    own = (
        {"lora_r": settings["r"], "lora_alpha": settings["lora_alpha"]}
        | LORA
        | {"ref_kl_coef": 0.5}
    )
    rest = train(
        offline_config(base, tmp_path, training_steps=6, resume="auto", **own, **place),
        rollouts=rollouts,
    )
    assert [step["ref_kl"] for step in part.history + rest.history] == pulls
    assert whole.path is not None and rest.path is not None and same(whole.path, rest.path)


def test_the_reference_of_a_new_adapter_is_the_base(
    base: Path, tmp_path: Path, rollouts: Path
) -> None:
    """Also where a resume names an adapter: the run did not start from it."""
    fields = {**LORA, "ref_kl_coef": 0.5, "checkpoint_interval": 2}
    whole = train(offline_config(base, tmp_path, **fields), rollouts=rollouts)
    pulls = [step["ref_kl"] for step in whole.history]
    assert pulls[0] == pytest.approx(0.0, abs=1e-9) and pulls[1] > 0
    saved = tmp_path / "offline" / "adapter_step_2"
    assert not (saved / "reference").exists()
    later = {"resume": str(saved), "lora_adapter_path": str(whole.path)}
    assert [
        step["ref_kl"]
        for step in train(
            offline_config(base, tmp_path, **fields, **later), rollouts=rollouts
        ).history
    ] == pulls[2:]
