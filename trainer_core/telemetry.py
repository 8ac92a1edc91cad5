"""Telemetry (`telemetry.jsonl`, with this module as its only writer) and trackers."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from atropos_common.protocol.record_tail import RecordTail, next_seq
from atropos_common.protocol.records import EnvMetricsRecord, EvalRecord
from atropos_common.protocol.trainer_records import RolloutRecord, TrainerRecord
from atropos_common.system.run_dir import ENV_ATTEMPT, ENV_RUN_ID, RunDir
from trainer_core.config import TrainingConfig

Metrics = dict[str, Any]
TABLE_ROWS = 64  # completions that trackers collect into one table


class Telemetry:
    """Stamps and appends records; `seq` continues across attempts."""

    def __init__(self, path: Path, *, run_id: str = "", attempt: int = 1, rank: int = 0) -> None:
        self.path = path
        self.run_id = run_id
        self.attempt = attempt
        self.rank = rank
        self.seq = 0
        self.listener: Callable[[TrainerRecord], None] = lambda record: None
        """Called with every written record."""
        self._file: TextIO | None = None
        self._warned = False

    # A failed write never stops training; it is reported once.
    def write(self, kind: type[TrainerRecord], step: int, **fields: Any) -> None:
        """Append one record of `kind` for optimizer step `step`."""
        try:
            file = self._open()
            stamp = {
                "run_id": self.run_id,
                "time": time.time(),
                "attempt": self.attempt,
                "rank": self.rank,
            }
            record = kind(**stamp, seq=self.seq, step=step, **fields)
            file.write(record.to_line())
            file.flush()
            # Only after a successful write, so that `seq` has no gaps.
            self.seq += 1
            self.listener(record)
        except OSError as error:
            # The next write opens the file again, in case the disk recovers.
            self.close()
            if not self._warned:
                self._warned = True
                print(
                    f"Warning: cannot write {self.path} ({error}); training goes on without "
                    f"telemetry"
                )

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> TextIO:
        if self._file is not None and not self.path.exists():
            self.close()  # the file was removed: nobody would read what is written on
        if self._file is None:
            # Continue the numbers of an earlier attempt's file.
            self.seq = next_seq(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        return self._file


def open_telemetry(save_path: str, rank: int) -> Telemetry:
    """Open the run directory's stream, or one in `save_path` if the trainer runs alone."""
    run_dir = RunDir.from_env()
    path = run_dir.telemetry_jsonl if run_dir else Path(save_path) / "telemetry.jsonl"
    run_id = os.environ.get(ENV_RUN_ID) or (run_dir.root.name if run_dir else "")
    attempt = os.environ.get(ENV_ATTEMPT, "1")
    return Telemetry(
        path, run_id=run_id, attempt=int(attempt) if attempt.isdigit() else 1, rank=rank
    )


def numbers_of(record: TrainerRecord) -> Metrics:
    """Every number of a record as KIND/FIELD, and of a table in it as KIND/FIELD/KEY."""
    found: Metrics = {}
    for name, value in record.model_dump(exclude=set(TrainerRecord.model_fields)).items():
        inner = (
            {f"{name}/{key}": each for key, each in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        found |= {
            f"{record.kind}/{key}": each
            for key, each in inner.items()
            if isinstance(each, (int, float))
        }
    return found


class Wandb:
    """A Weights & Biases run, shared by all attempts (WANDB_RUN_ID)."""

    def __init__(self, config: TrainingConfig) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.wandb_project,
            group=config.wandb_group,
            config=config.model_dump(mode="json"),
        )
        self._table = wandb.Table
        # Our step is a metric of its own: a resumed attempt repeats steps, and wandb's counter only
        # grows.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        print(
            f"W&B run: {self._run.url}" if self._run.url else f"W&B run (offline): {self._run.dir}"
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics | {"step": step})

    def table(self, step: int, rows: list[RolloutRecord]) -> None:
        columns = ["step", "env", "reward", "advantage", "policy_lag", "prompt", "completion"]
        data = [[getattr(row, name) for name in columns] for row in rows]
        self._run.log({"completions": self._table(columns=columns, data=data), "step": step})

    def finish(self, summary: Metrics) -> None:
        self._run.summary.update({f"benchmark/{k}": v for k, v in summary.items()})
        self._run.finish()


class TensorBoard:
    """TensorBoard event files: one folder, one file an attempt."""

    def __init__(self, config: TrainingConfig, first_step: int) -> None:
        try:
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError(
                f"{error}: pip install tensorboardX, which writes without TensorBoard itself"
            ) from None
        folder = Path(config.tensorboard_dir or Path(config.save_path).parent / "tensorboard")
        # `purge_step` hides what earlier attempts wrote from this step on.
        self._writer: Any = SummaryWriter(
            str(folder), purge_step=first_step, filename_suffix=f".{first_step}"
        )
        print(f"TensorBoard: {folder}")

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, rows: list[RolloutRecord]) -> None:
        for row in rows:
            # Four spaces: TensorBoard renders Markdown, so this is a code block.
            text = f"{row.prompt}{row.completion}".replace("\n", "\n    ")
            self._writer.add_text(
                f"completions/{row.env or 'env'}", f"reward {row.reward}\n\n    {text}", row.step
            )

    def finish(self, summary: Metrics) -> None:
        numbers = {
            k: v for k, v in summary.items() if isinstance(v, (int, float)) and math.isfinite(v)
        }
        for name, value in numbers.items():
            self._writer.add_scalar(f"benchmark/{name}", value, 0)
        self._writer.close()


class Environments:
    """Metrics of the run's environments, read from their own files."""

    def __init__(self) -> None:
        self._run = RunDir.from_env()
        # Existing files are read from their end: earlier attempts have logged those records.
        self._tails: dict[Path, RecordTail] = {
            path: RecordTail(path, from_end=True) for path in self._files()
        }

    def _files(self) -> list[Path]:
        return sorted(self._run.root.glob("eval.*.jsonl")) if self._run else []

    def news(self) -> Metrics:
        """Metrics since the last call: eval/ENV/SPLIT and env/ENV/METRIC."""
        found: Metrics = {}
        for path in self._files():
            for record in self._tails.setdefault(path, RecordTail(path)).read():
                if isinstance(record, EvalRecord):
                    found[f"eval/{record.env}/{record.split}"] = record.accuracy
                elif isinstance(record, EnvMetricsRecord):
                    found |= {
                        f"env/{record.env}/{name}": value for name, value in record.metrics.items()
                    }
        return found


class Trackers:
    """The configured trackers. One that fails is reported and dropped; training goes on."""

    def __init__(self, config: TrainingConfig, first_step: int = 1) -> None:
        self._backends: dict[str, Wandb | TensorBoard] = {}
        self._numbers: Metrics = {}
        self._rows: list[RolloutRecord] = []
        self._environments = Environments()
        if config.use_wandb:
            with self._isolated("Weights & Biases"):
                self._backends["Weights & Biases"] = Wandb(config)
        if config.use_tensorboard:
            with self._isolated("TensorBoard"):
                self._backends["TensorBoard"] = TensorBoard(config, first_step)

    def see(self, record: TrainerRecord) -> None:
        """Keep a telemetry record for the next `log`."""
        if isinstance(record, RolloutRecord):
            self._rows.append(record)
        else:
            self._numbers |= numbers_of(record)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log one step's metrics and everything collected since the last call."""
        known = {name: value for name, value in metrics.items() if value is not None}
        known = self._numbers | known | self._environments.news()
        self._numbers = {}
        self._call("log", step, known)
        if len(self._rows) >= TABLE_ROWS:
            self._show_rows(step)

    def _show_rows(self, step: int) -> None:
        rows, self._rows = self._rows, []
        self._call("table", step, rows)

    def finish(self, summary: Metrics) -> None:
        """Log the benchmark and close every tracker."""
        if self._rows:
            self._show_rows(self._rows[-1].step)
        self._call("finish", summary)

    def _call(self, method: str, *values: Any) -> None:
        # A copy: `_isolated` removes a failed tracker from the dict.
        for name, backend in list(self._backends.items()):
            with self._isolated(name):
                getattr(backend, method)(*values)

    @contextlib.contextmanager
    def _isolated(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of a tracker: training goes on
            print(
                f"Warning: {name} failed ({type(error).__name__}: {error}); training goes on "
                f"without it"
            )
            self._backends.pop(name, None)
