"""An environment's own stream of accuracies: `RUN/eval.NAME.jsonl`, one `EvalRecord` a line, one writer."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from atropos_common.records import EvalRecord
from atropos_common.run_dir import ENV_COMPONENT, ENV_RUN_ID, RunDir


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
        self._next = _repair(path) if path is not None else 0

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
            run_id=self._run_id,
            time=time.time(),
            seq=self._next,
            env=self._env,
            split=split,
            accuracy=correct / len(graded),
            correct=correct,
            questions=len(graded),
            weight_version=min(versions) if len(versions) == len(graded) else None,
            policy_step=policy_step,
        )
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(record.to_line())
        self._next += 1
        return record


def _repair(path: Path) -> int:
    """Cut what follows the last newline and count the lines before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return whole.count(b"\n")
