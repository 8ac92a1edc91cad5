"""The loop on two ranks: it trains what one rank does, all leave at the same step, and a dead rank
ends the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from atropos_common.system.run_dir import NO_UPDATE_CODE
from tests.support.ranks import run_ranks
from tests.trainer_core.offline_runs import STEPS, group_of, offline_config, write_lines
from trainer_core import train
from trainer_core.__main__ import main
from trainer_core.ranks.world import GONE_CODE
from trainer_core.rollouts.packing import assign_rows, pack, rows_at

LIMIT_S = 10.0
"""In this time the end of a rank has ended all."""


@pytest.fixture
def folder(demo_base: Path, tmp_path: Path) -> Path:
    (tmp_path / "tiny").symlink_to(demo_base)
    return tmp_path


def records(path: Path, kind: str) -> list[dict[str, object]]:
    lines = map(json.loads, (path / "telemetry.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def launched(flags: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer_core.ranks.launch", "2", *flags]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )


def trained(_: Path, *flags: str) -> int:
    """On each rank: the program."""
    return main(list(flags))


@pytest.mark.parametrize("shared", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_ranks_train_what_one_does(folder: Path, shared: int) -> None:
    """Every part of the objective that runs a model, two minibatches twice, and an end by the end
    of the rollouts; with rows of their own, and sharing each."""
    lines = [{"batch": [group_of(2 * i), group_of(2 * i + 1, size=3)]} for i in range(2)]
    rollouts = write_lines(folder / "rollouts.jsonl", lines)
    several = {"minibatches": 2, "epochs": 2, "ratio_base": "proximal", "ref_kl_coef": 0.1}
    config = offline_config(
        folder / "tiny",
        folder,
        rollouts=str(rollouts),
        checkpoint_interval=1,
        lr=1e-4,
        context_parallel=shared,
        **several,
    )
    first, second = run_ranks(
        "tests.trainer_core.ranks.test_loop:trained", folder, *config.to_args()
    )
    assert (first.code, second.code) == (0, 0), (first, second)
    one = train(config.model_copy(update={"save_path": str(folder / "one"), "context_parallel": 1}))
    said = first.output
    assert said.count("Training finished: 2 steps (") == 1 and "has no more rollouts" in said, said
    assert "Training finished" not in second.output
    told = records(Path(config.save_path), "step")
    assert [record["rank"] for record in told] == [0, 0]
    for mine, theirs in zip(told, one.history, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "ratio_mean",
            "entropy_mean",
            "ref_kl",
            "tokens",
            "tis_mean",
            "reward_mean",
        ):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name
    first, second = (
        load_file(path / "final_model" / "model.safetensors")
        for path in (folder / "one", Path(config.save_path))
    )
    for name, tensor in first.items():
        assert torch.allclose(
            second[name], tensor, rtol=0, atol=1e-5 * float(tensor.abs().max())
        ), name


@pytest.mark.slow
def test_two_ranks_keep_the_reference_that_an_adapter_started_from(folder: Path) -> None:
    """Before the first update the KL is 0; ranks that resume go on as one rank that never
    stopped."""
    lines = [{"batch": [group_of(2 * i), group_of(2 * i + 1)]} for i in range(2)]
    rollouts = write_lines(folder / "rollouts.jsonl", lines)
    adapters: dict[str, Any] = {
        "rollouts": str(rollouts),
        "weight_bridge_mode": "lora_only",
        "lr": 1e-2,
    }
    start = train(offline_config(folder / "tiny", folder, training_steps=1, **adapters)).path
    assert start is not None
    adapters |= {"lora_adapter_path": str(start.rename(folder / "start")), "ref_kl_coef": 0.5}
    one = train(
        offline_config(folder / "tiny", folder, save_path=str(folder / "one"), **adapters)
    ).history
    for steps in (1, 2):
        fields = {"training_steps": steps, "checkpoint_interval": 1, "resume": "auto"}
        config = offline_config(folder / "tiny", folder, **fields, **adapters)
        meeting = (
            folder / f"ranks {steps}"
        )  # ranks of one process meet in a file, which the next ones must not find
        meeting.mkdir()
        ended = run_ranks("tests.trainer_core.ranks.test_loop:trained", meeting, *config.to_args())
        assert [rank.code for rank in ended] == [0, 0], ended
    told = [record["ref_kl"] for record in records(Path(config.save_path), "step")[-2:]]
    assert told == pytest.approx([step["ref_kl"] for step in one], rel=1e-4, abs=1e-9)
    assert one[0]["ref_kl"] == pytest.approx(0, abs=1e-9) and one[1]["ref_kl"] > 0


def test_two_ranks_that_train_nothing_end_with_3(folder: Path) -> None:
    lines = [{"batch": [group_of(i, masks=[[1] * 6] * 4)]} for i in range(2)]
    config = offline_config(
        folder / "tiny", folder, rollouts=str(write_lines(folder / "rollouts.jsonl", lines))
    )
    first, second = run_ranks(
        "tests.trainer_core.ranks.test_loop:trained", folder, *config.to_args()
    )
    assert (first.code, second.code) == (NO_UPDATE_CODE, NO_UPDATE_CODE), (first, second)
    assert (
        first.output.count("8 of 8 sequences were left out") == 1
        and "left out" not in second.output
    )


def test_a_stop_between_two_steps_leaves_one_checkpoint(folder: Path) -> None:
    first, second = run_ranks("tests.trainer_core.ranks.looping_ranks:run", folder, "stop")
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "ended: 1 False" in first.output and "ended: 1 False" in second.output
    assert [path.name for path in (folder / "offline").glob("*step_*")] == ["step_1"]


def test_an_error_of_rank_0_is_one_of_all_and_no_step_is_lost(folder: Path) -> None:
    first, second = run_ranks("tests.trainer_core.ranks.looping_ranks:run", folder, "broken")
    assert (first.code, second.code) == (1, 1), (first, second)
    assert "error: run-api is away (known: True)" in first.output
    assert "error: run-api is away (known: True)" in second.output
    assert (
        "✓ No step is lost: the weights of step 2" in first.output
        and "No step is lost" not in second.output
    )
    assert (folder / "offline" / "step_2").is_dir()


@pytest.mark.parametrize(
    "phase",
    [
        "in forward",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("waiting", "in publish", "in save", "in background save")
        ),
    ],
)
def test_a_killed_rank_ends_the_other(folder: Path, phase: str) -> None:
    first, second = run_ranks(
        "tests.trainer_core.ranks.looping_ranks:run", folder, f"killed {phase}"
    )
    assert (first.code, second.code) == (GONE_CODE, -signal.SIGKILL), (first, second)
    assert "rank 1 has ended" in first.output
    assert first.at - second.at < LIMIT_S


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_other_with_its_words(folder: Path) -> None:
    first, second = run_ranks("tests.trainer_core.ranks.looping_ranks:run", folder, "raises")
    assert (first.code, second.code) == (GONE_CODE, 5), (first, second)
    assert "rank 1 has ended: list index out of range" in first.output


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        *(pytest.param(*end, marks=pytest.mark.slow) for end in ((0, 0), (9, 1))),
    ],
)
def test_the_launcher_tells_how_it_ended(folder: Path, number: int, code: int) -> None:
    """A stop of the whole, with a checkpoint; a good end; a rank that is killed, as
    `tests/trainer_core/ranks/test_supervised.py` has it in CI."""
    lines = [{"batch": [group_of(2 * i), group_of(2 * i + 1)]} for i in range(STEPS)] * (
        500 if number else 1
    )
    rollouts = write_lines(folder / "rollouts.jsonl", lines)
    config = offline_config(folder / "tiny", folder, rollouts=str(rollouts), training_steps=2000)
    process = launched(config.to_args(), folder)
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("step 1/") or "rror" in line)
    assert line.startswith("step 1/"), line
    ranks = {
        int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()
    }
    began = time.monotonic()
    (ranks[1] if number == signal.SIGKILL else process).send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert not psutil.pid_exists(ranks[0].pid) and not psutil.pid_exists(ranks[1].pid)
    assert not [path for path in folder.iterdir() if path.name.startswith("atropos-ranks")], (
        "nothing is left"
    )
    if number == signal.SIGKILL:
        assert (
            said.splitlines()[-1] == "error: rank 1 was killed by SIGKILL"
            and time.monotonic() - began < LIMIT_S
        )
    elif number:
        assert "Stopped after step" in said and len(list((folder / "offline").glob("step_*"))) == 1


def test_rows_are_dealt_evenly_and_alike() -> None:
    from tests.support.made_rollouts import rollouts_of

    rollouts = rollouts_of(23)
    for flat in rollouts[:9]:
        flat.advantages[:] = 0.0
    rows = pack(rollouts, 24)
    hands = assign_rows(rows, 3, lambda row: bool(row.advantages.any()))
    assert sorted(i for each in hands for i in each if i >= 0) == list(range(len(rows)))
    assert len({len(each) for each in hands}) == 1
    tokens = [
        sum(len(row.tokens) for row in rows_at(rows, each) if len(row.labels)) for each in hands
    ]
    assert max(tokens) - min(tokens) <= 24, tokens
    mixed = [
        {bool(rows[i].advantages.any()) for i in at if i >= 0} for at in zip(*hands, strict=True)
    ]
    assert sum(len(kinds) > 1 for kinds in mixed) <= 1, "rows that learn stand beside rows that do"
