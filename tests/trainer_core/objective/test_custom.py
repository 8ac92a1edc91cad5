"""A custom loss: the same numbers as the objective that it copies, and a message for every
mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer_core.objective import my_losses
from tests.trainer_core.offline_runs import STEPS, group_of, offline_config, write_lines
from trainer_core import LossError, Sequences, TrainingConfig, UsageError, grpo_loss, train
from trainer_core.__main__ import main
from trainer_core.objective.loss import Bounds, correct, from_function
from trainer_core.objective.registry import own_loss

CPU = torch.device("cpu")
SAME = (
    "loss",
    "grad_norm",
    "ratio_mean",
    "clip_fraction",
    "kl_k3",
    "tis_mean",
    "tis_masked_fraction",
)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [{"batch": [group_of(2 * i), group_of(2 * i + 1)]} for i in range(STEPS)]
    return write_lines(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", lines)


@pytest.mark.parametrize(
    "fields",
    [
        {"dual_clip": 0.0},
        {
            "dual_clip": 0.0,
            "ratio_base": "proximal",
            "tis_mask": "sequence",
            "kl_coef": 0.1,
            "epochs": 2,
        },
        {"dual_clip": 0.0, "loss_denominator": "sequences"},
    ],
)
def test_a_copy_of_grpo_trains_as_grpo(
    base: Path, batches: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """The loss is given by its name and as a function; weights, masks, KL and denominators stay the
    trainer's."""
    config = offline_config(base, tmp_path, training_steps=2, **fields)
    named = TrainingConfig.model_validate(
        config.model_dump(exclude_unset=True) | {"loss": f"{my_losses.__name__}:clipped"}
    )
    runs = [
        train(config, rollouts=batches),
        train(named, rollouts=batches),
        train(config, rollouts=batches, loss_fn=my_losses.clipped),
    ]
    figures = [[[step[name] for name in SAME] for step in run.history] for run in runs]
    assert figures[0] == figures[1] == figures[2]


def test_terms_weights_and_masks_are_added() -> None:
    torch.manual_seed(0)
    logprobs, rollout, base = (-torch.rand(8, dtype=torch.float64) * 3 for _ in range(3))
    advantages, sequences = (
        torch.randn(8, dtype=torch.float64),
        Sequences(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]), 3),
    )
    common: dict[str, Any] = {
        "sequences": sequences,
        "correction": correct(base, rollout, Bounds(mask="token"), sequences),
        "kl_coef": 0.3,
        "penalty": torch.rand(8, dtype=torch.float64),
        "per_sequence": True,
    }
    ours = from_function(my_losses.clipped, "mine")(logprobs, rollout, advantages, **common)
    theirs = grpo_loss(logprobs, rollout, advantages, **common)
    assert [x.item() for x in ours] == pytest.approx([x.item() for x in theirs], rel=1e-12)


def test_sums_of_ones_own_are_taken_as_they_are(base: Path, batches: Path, tmp_path: Path) -> None:
    result = train(
        offline_config(base, tmp_path, training_steps=1), rollouts=batches, loss_fn=my_losses.sums
    )
    assert result.history[0]["ratio_mean"] == 1.0 and result.history[0]["clip_fraction"] == 0.0
    for fields in ({"kl_coef": 0.1}, {"ratio_base": "proximal"}):
        with pytest.raises(
            LossError, match=r"returns LossSums, which excludes --.*return losses by token"
        ):
            own_loss(offline_config(base, tmp_path, **fields), my_losses.sums, CPU)


def test_a_function_may_ignore_advantages(base: Path, tmp_path: Path) -> None:
    """Then groups of equal scores teach, too: each row of them has a gradient, however they are
    packed."""
    flat = [group_of(i, scores=[1.0] * 4) for i in range(2)]
    path = write_lines(tmp_path / "r.jsonl", [{"batch": flat}])

    def imitate(
        logprobs: torch.Tensor, base_: torch.Tensor, advantages: torch.Tensor, _: Sequences
    ) -> torch.Tensor:
        return -logprobs

    configs = [
        offline_config(base, tmp_path, training_steps=1, pack_tokens=tokens)
        for tokens in (16, 2048)
    ]
    several, one = (train(config, rollouts=path, loss_fn=imitate).history[0] for config in configs)
    assert (
        several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4) and one["grad_norm"] > 0
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "tests.trainer_core.objective.my_losses:nothing",
            "the module tests.trainer_core.objective.my_losses has no nothing",
        ),
        (
            "tests.trainer_core.objective.no_such:f",
            r"cannot import tests.trainer_core.objective.no_such \(ModuleNotFoundError",
        ),
        ("tests.trainer_core.objective.my_losses:a_list", "expected a function, found list"),
        (
            "tests.trainer_core.objective.my_losses:three_arguments",
            r"must take \(logprobs, .*too many positional",
        ),
        (
            "tests.trainer_core.objective.my_losses:summed",
            r"tried on six tokens, returned shape \[\]; it must return",
        ),
        ("tests.trainer_core.objective.my_losses:number", "returned float; it must return"),
        ("tests.trainer_core.objective.my_losses:nan", "returned a loss of nan"),
        ("tests.trainer_core.objective.my_losses:root", "has one with NaN or infinity"),
        (
            "tests.trainer_core.objective.my_losses:constant",
            "must have a finite gradient through logprobs; it has none",
        ),
        ("tests.trainer_core.objective.my_losses:raises", "raised KeyError: 'oops'"),
    ],
)
def test_mistakes_in_words(base: Path, tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        own_loss(offline_config(base, tmp_path, loss=name), None, CPU)


def test_the_program_says_so_before_it_waits_for_a_server(
    base: Path, batches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-name", str(base), "--loss", "no function"]) == 2
    assert "write package.module:function" in capsys.readouterr().err
    flags = offline_config(base, tmp_path).to_args()
    assert (
        main(
            [
                *flags,
                "--rollouts",
                str(batches),
                "--loss",
                "tests.trainer_core.objective.my_losses:nan",
            ]
        )
        == 2
    )
    assert "returned a loss of nan" in capsys.readouterr().err


def test_one_that_fails_later_loses_nothing(
    base: Path, batches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two minibatches of two rows: in the middle of the second one. What is saved is what the first
    one made."""
    fields: dict[str, Any] = {
        "minibatches": 2,
        "torch_threads": 1,
        "pack_tokens": 20,
        "training_steps": 1,
    }
    my_losses.calls.clear()
    with pytest.raises(LossError, match="raised ValueError: no more"):
        train(
            offline_config(base, tmp_path, **fields),
            rollouts=batches,
            loss_fn=my_losses.raises_later,
        )
    assert "No step is lost: the weights of step 1" in capsys.readouterr().out
    saved = load_file(tmp_path / "offline" / "step_1" / "model.safetensors")
    my_losses.calls.clear()
    result = train(
        offline_config(base, tmp_path, **fields), rollouts=batches, loss_fn=my_losses.nan_later
    )
    assert len(my_losses.calls) == 5 and result.path is not None
    first = load_file(result.path / "model.safetensors")
    assert all(torch.equal(saved[name], first[name]) for name in saved)
