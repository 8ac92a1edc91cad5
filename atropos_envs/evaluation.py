"""An environment's own stream, `RUN/eval.NAME.jsonl`: accuracies, its own metrics, what became of its groups."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from atropos_common.record_tail import next_seq
from atropos_common.records import EnvCountsRecord, EnvMetricsRecord, EvalRecord, Record
from atropos_common.run_dir import ENV_COMPONENT, ENV_RUN_ID, RunDir
from atropos_envs.tally import Tally

RecordT = TypeVar("RecordT", bound=Record)
_SHARE = re.compile(r"correct|accuracy|(^|[_/])acc([_/]|$)|pass@|success|solve", re.IGNORECASE)
"""Names under which environments log the share of right answers."""


@dataclass(frozen=True)
class Graded:
    """One question answered."""

    correct: bool
    weight_version: int | None = None
    """Oldest weight version behind the answer; null when the server names none."""


def component_name(default: str) -> str:
    """This program's name in the plan; `default` when it runs alone."""
    return os.environ.get(ENV_COMPONENT) or default


def eval_path(name: str, folder: str | None) -> Path | None:
    """Where accuracies go: the run directory, else `folder`, else nowhere."""
    run = RunDir.from_env()
    if run is not None:
        return run.eval_jsonl(name)
    return Path(folder) / f"eval.{name}.jsonl" if folder else None


class EvalLog:
    """Appends records; a restarted environment goes on where the last whole line ended."""

    def __init__(self, path: Path | None, env: str) -> None:
        """Open `path` (None: records are made, and kept nowhere) and cut a torn last line off."""
        self._path = path
        self._env = env
        self._run_id = os.environ.get(ENV_RUN_ID, "")
        self._next = next_seq(path) if path is not None else 0

    def append(self, split: str, graded: list[Graded], policy_step: int | None) -> EvalRecord:
        """Write the accuracy over `graded` and return the record.

        Raises:
            ValueError: nothing was graded, so there is no accuracy.
        """
        if not graded:
            raise ValueError(f"no question of {split} was graded")
        versions = [each.weight_version for each in graded if each.weight_version is not None]
        correct = sum(each.correct for each in graded)
        record = EvalRecord(
            env=self._env,
            split=split,
            accuracy=correct / len(graded),
            correct=correct,
            questions=len(graded),
            weight_version=min(versions) if len(versions) == len(graded) else None,
            policy_step=policy_step,
        )
        return self._write(record)

    def measured(self, metrics: Mapping[str, Any], policy_step: int | None) -> None:
        """Numbers by name, as an environment hands them to wandb; shares of right answers in `eval/` are accuracies."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float, np.number))}
        for name, value in numbers.items():
            kind, _, split = name.partition("/")
            if kind == "eval" and _SHARE.search(split) and 0 <= value <= 1:
                self._write(EvalRecord(env=self._env, split=split, accuracy=value, policy_step=policy_step))
        if numbers:
            self._write(EnvMetricsRecord(env=self._env, metrics=numbers, policy_step=policy_step))

    def counted(self, tally: Tally, adjusted: Mapping[str, int], step: int | None) -> None:
        """What became of the groups since the start, and of the requests."""
        self._write(
            EnvCountsRecord(
                env=self._env, policy_step=step, sent=tally.sent, left_out=dict(tally.left_out),
                failures=dict(tally.failures), adjusted=dict(adjusted),
            )
        )  # fmt: skip

    def _write(self, record: RecordT) -> RecordT:
        """Stamp and append; return what was written."""
        stamped = record.model_copy(update={"run_id": self._run_id, "time": time.time(), "seq": self._next})
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(stamped.to_line())
        self._next += 1
        return stamped
