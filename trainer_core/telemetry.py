"""Where figures go: `telemetry.jsonl`, one record a line, of which this is the only writer; and the trackers.

Each line is flushed at once. Nothing here ever stops training: what cannot be written is said once.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from atropos_common.files import cut_torn_line
from atropos_common.records import RecordError, TrainerRecord, parse_line
from atropos_common.run_dir import ENV_ATTEMPT, ENV_RUN_ID, RunDir
from trainer_core.config import TrainingConfig

Metrics = dict[str, Any]
_TAIL = 1 << 20
"""Bytes of the file's end in which the last whole record is looked for."""


class Telemetry:
    """Stamps records and appends them. `seq` continues where the file ends, also over attempts."""

    def __init__(self, path: Path, *, run_id: str = "", attempt: int = 1, rank: int = 0) -> None:
        self.path = path
        self.run_id = run_id
        self.attempt = attempt
        self.rank = rank
        self.seq = 0
        self._file: TextIO | None = None
        self._warned = False

    def write(self, kind: type[TrainerRecord], step: int, **fields: Any) -> None:
        """Append one record of `kind` that belongs to optimizer step `step`."""
        try:
            file = self._open()
            stamp = {"run_id": self.run_id, "time": time.time(), "attempt": self.attempt, "rank": self.rank}
            record = kind(**stamp, seq=self.seq, step=step, **fields)
            file.write(record.to_line())
            file.flush()
            self.seq += 1
        except OSError as error:
            self.close()
            if not self._warned:
                self._warned = True
                print(f"Warning: cannot write {self.path} ({error}); training goes on without telemetry")

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> TextIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.seq = _next_seq(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        return self._file


def open_telemetry(save_path: str, rank: int) -> Telemetry:
    """The stream of the run directory, or one beside the checkpoints when the trainer runs alone."""
    run_dir = RunDir.from_env()
    path = run_dir.telemetry_jsonl if run_dir else Path(save_path) / "telemetry.jsonl"
    run_id = os.environ.get(ENV_RUN_ID) or (run_dir.root.name if run_dir else "")
    attempt = os.environ.get(ENV_ATTEMPT, "1")
    return Telemetry(path, run_id=run_id, attempt=int(attempt) if attempt.isdigit() else 1, rank=rank)


def _next_seq(path: Path) -> int:
    """The `seq` that follows the last record, once a torn line behind it is cut off."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        cut_torn_line(file.fileno())
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        lines = file.read(min(size, _TAIL)).splitlines()  # a device such as /dev/full has no end to be read to
    for line in reversed(lines):
        with contextlib.suppress(RecordError):
            return parse_line(line).seq + 1
    return 0


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, config: TrainingConfig) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.wandb_project, group=config.wandb_group, config=config.model_dump(mode="json")
        )
        print(f"W&B run: {self._run.url}" if self._run.url else f"W&B run (offline): {self._run.dir}")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def finish(self, summary: Metrics) -> None:
        self._run.summary.update({f"benchmark/{k}": v for k, v in summary.items()})
        self._run.finish()


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, config: TrainingConfig) -> None:
        try:
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError(f"{error}: pip install tensorboardX, which writes without TensorBoard itself") from None
        folder = Path(config.tensorboard_dir or Path(config.save_path).parent / "tensorboard")
        self._writer: Any = SummaryWriter(str(folder))
        print(f"TensorBoard: {folder}")

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Metrics) -> None:
        numbers = {k: v for k, v in summary.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        for name, value in numbers.items():
            self._writer.add_scalar(f"benchmark/{name}", value, 0)
        self._writer.close()


class Trackers:
    """Those that the configuration asks for, under the guides' metric names; the first failure of one is said once and
    ends that one, never the training."""

    def __init__(self, config: TrainingConfig) -> None:
        self._backends: dict[str, Wandb | TensorBoard] = {}
        if config.use_wandb:
            with self._isolated("Weights & Biases"):
                self._backends["Weights & Biases"] = Wandb(config)
        if config.use_tensorboard:
            with self._isolated("TensorBoard"):
                self._backends["TensorBoard"] = TensorBoard(config)

    def log(self, step: int, metrics: Metrics) -> None:
        """Metrics of one step; null values are left out."""
        known = {name: value for name, value in metrics.items() if value is not None}
        for name, backend in list(self._backends.items()):
            with self._isolated(name):
                backend.log(step, known)

    def finish(self, summary: Metrics) -> None:
        """Hand over the benchmark and close every backend."""
        for name, backend in list(self._backends.items()):
            with self._isolated(name):
                backend.finish(summary)

    @contextlib.contextmanager
    def _isolated(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the backend raises, training goes on
            print(f"Warning: {name} failed ({type(error).__name__}: {error}); training goes on without it")
            self._backends.pop(name, None)
