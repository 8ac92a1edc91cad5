"""Metrics in trackers, over all attempts of a run, with the real libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.trainer_records import (
    RolloutRecord,
    StepRecord,
    TimingRecord,
)
from atropos_envs.hosting.evaluation import EvalLog, Graded
from trainer_core.config import TrainingConfig
from trainer_core.telemetry import TABLE_ROWS, Telemetry, Trackers, numbers_of

ATTEMPT = """
import sys
from pathlib import Path
from atropos_common.protocol.trainer_records import MemoryRecord, RolloutRecord
from trainer_core.config import TrainingConfig
from trainer_core.telemetry import Telemetry, Trackers

first = int(sys.argv[1])
config = TrainingConfig(model_name="m", use_wandb=True, wandb_project="p", wandb_group="g")
trackers = Trackers(config, first)
telemetry = Telemetry(Path("telemetry.jsonl"))
telemetry.listener = trackers.see
telemetry.write(MemoryRecord, first, rss_bytes=7)
rollout = {"prompt": "1+1=", "completion": "shown-to-wandb", "reward": 1.0, "advantage": 0.5}
telemetry.write(RolloutRecord, first, **rollout)
trackers.log(first, {"train/loss": 0.5})
trackers.finish({"steps": first})
"""


class Backend:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.tables: list[list[RolloutRecord]] = []

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.logged.append((step, metrics))

    def table(self, step: int, rows: list[RolloutRecord]) -> None:
        self.tables.append(rows)

    def finish(self, summary: dict[str, Any]) -> None:
        pass


def trackers_with(backend: Backend) -> Trackers:
    trackers = Trackers(TrainingConfig(model_name="m"))
    trackers._backends["backend"] = backend  # type: ignore[assignment]
    return trackers


def rollout(step: int) -> RolloutRecord:
    return RolloutRecord(
        step=step, env="sums", prompt="1+1=", completion="2", reward=1.0, advantage=0.5
    )


TIMES = {
    "step_s": 2.0,
    "data_wait_s": 0.5,
    "train_s": 1.0,
    "sync_s": 0.25,
    "checkpoint_s": 0.0,
    "tokens_per_s": 7.0,
}


def test_every_number_of_a_record_has_a_name() -> None:
    record = TimingRecord(step=3, **TIMES, newer=4)
    found = numbers_of(record)
    assert found["timing/step_s"] == 2.0 and found["timing/newer"] == 4, (
        "also what a newer writer adds"
    )
    assert "timing/mfu" not in found and not any(
        name.endswith(("/seq", "/time", "/attempt")) for name in found
    )
    assert numbers_of(
        StepRecord.model_construct(kind="step", left_out={"too long": 2}, optimizer_steps=3)
    ) == {
        "step/left_out/too long": 2,
        "step/optimizer_steps": 3,
        "step/skipped_sequences": 0,
        "step/skipped_update": False,
        "step/too_old": 0,
    }


def test_trackers_get_what_telemetry_and_the_environments_wrote(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("ATROPOS_RUN_DIR", str(tmp_path))
    evals = EvalLog(tmp_path / "eval.sums.jsonl", "sums")
    evals.append("held_out", [Graded(False)], 0)
    backend = Backend()
    trackers = trackers_with(backend)
    telemetry = Telemetry(tmp_path / "telemetry.jsonl")
    telemetry.listener = trackers.see
    telemetry.write(TimingRecord, 4, **TIMES)
    evals.append("held_out", [Graded(True)], 4)
    evals.measured({"train/percent_correct": 0.75}, 4)
    trackers.log(4, {"train/loss": 0.5, "train/gpu_memory_gb": None})
    trackers.log(5, {"train/loss": 0.25})
    (step, metrics), (_, after) = backend.logged
    assert step == 4 and metrics["timing/step_s"] == 2.0 and metrics["train/loss"] == 0.5
    assert metrics["eval/sums/held_out"] == 1.0, (
        "what an earlier attempt has seen does not come again"
    )
    assert (
        metrics["env/sums/train/percent_correct"] == 0.75 and "train/gpu_memory_gb" not in metrics
    )
    assert after == {"train/loss": 0.25}, "each number once"


def test_completions_come_as_tables_and_the_last_ones_at_the_end() -> None:
    backend = Backend()
    trackers = trackers_with(backend)
    for step in range(1, TABLE_ROWS + 3):
        trackers.see(rollout(step))
        trackers.log(step, {})
    assert [len(rows) for rows in backend.tables] == [TABLE_ROWS]
    trackers.finish({})
    assert [row.step for row in backend.tables[1]] == [TABLE_ROWS + 1, TABLE_ROWS + 2]


@pytest.mark.slow
def test_two_attempts_are_one_run_of_wandb(tmp_path: Path) -> None:
    """In processes of their own: the client starts a service."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    env = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "WANDB_RUN_ID": "run-7",
        "WANDB_RESUME": "allow",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    for first in (1, 3):
        command = [sys.executable, "-c", ATTEMPT, str(first)]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
    runs = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert [run.name for run in runs] == ["run-run-7.wandb"] * 2, (
        "`wandb sync` uploads those of one id as one run"
    )
    for run in runs:
        content = run.read_bytes()
        assert all(
            name in content
            for name in (b"train/loss", b"memory/rss_bytes", b"completions", b"benchmark/steps")
        )
    tables = [
        table.read_text() for table in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    ]
    assert len(tables) == 2 and all("shown-to-wandb" in table for table in tables)


def test_two_attempts_are_one_folder_of_tensorboard(tmp_path: Path) -> None:
    """The second begins at step 3 and hides what the first wrote from there on, which it had
    lost."""
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = TrainingConfig(model_name="m", use_tensorboard=True, save_path=str(tmp_path / "out"))
    for first, steps, loss in ((1, (1, 2, 3), 0.5), (3, (3, 4), 0.25)):
        trackers = Trackers(config, first)
        trackers.see(rollout(first))
        for step in steps:
            trackers.log(step, {"train/loss": loss})
        trackers.finish({"steps": 4})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.25),
        (4, 0.25),
    ]
    assert events.Tags()["tensors"] == ["completions/sums/text_summary"]
