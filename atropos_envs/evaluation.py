"""An environment's own stream, `RUN/eval.NAME.jsonl`: accuracies, its own metrics, what became of its groups."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from openai import APIStatusError

from atropos_common.group_reasons import SURPLUS, in_words
from atropos_common.record_tail import next_seq
from atropos_common.records import EnvCountsRecord, EnvMetricsRecord, EvalRecord, Record
from atropos_common.run_dir import ENV_COMPONENT, ENV_RUN_ID, RunDir
from atropos_envs.groups import why_left_out

log = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=Record)
_SHARE = re.compile(r"correct|accuracy|(^|[_/])acc([_/]|$)|pass@|success|solve", re.IGNORECASE)
"""Names under which environments log the share of right answers."""


LONGEST_REASON = 160
MANY_IN_VAIN = 32
"""Groups that failed or were left out, one after the other, before other environments may have our share."""


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

    def counted(
        self, tally: Tally, adjusted: Mapping[str, int], requests: int, step: int | None,
        bounds: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Write what became of the groups and requests since the start; `bounds`: workers and queue slots."""
        self._write(
            EnvCountsRecord(
                env=self._env, policy_step=step, requests=requests, sent=tally.sent, left_out=dict(tally.left_out),
                examples=dict(tally.examples), failures=dict(tally.failures),
                evaluation_failures=dict(tally.evaluation_failures), adjusted=dict(adjusted),
                **(bounds or {}),
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


class Tally:
    """Counts since the start."""

    def __init__(self) -> None:
        self.sent = 0
        """Groups that run-api accepted."""
        self.left_out: Counter[str] = Counter()
        """Groups that run-api does not have, by reason (`atropos_common/group_reasons.py`)."""
        self.examples: dict[str, str] = {}
        """Newest words about a reason: which field run-api refused, which type JSON cannot hold."""
        self.failures: Counter[str] = Counter()
        """Groups that were not made, by reason."""
        self.evaluation_failures: Counter[str] = Counter()
        """Evaluations that failed since the last one that did not, by reason."""
        self.urgent = False
        """A reason was counted for the first time: it is to be written at once."""
        self._scores: list[float] = []
        self._barren_since = 0
        """Groups that were made in vain or failed when run-api accepted one last."""
        self._kinds: set[tuple[str, str]] = set()
        self._told = self._now

    def failed(self, error: BaseException) -> None:
        """Count a rollout that raised; log the first of a kind with the place where it came from."""
        self._raised("a rollout failed", error, self.failures)

    def evaluated(self, error: BaseException | None) -> None:
        """Count an evaluation: `error` is what it raised, None where it did not."""
        if error is None:
            self.evaluation_failures.clear()
        else:
            self._raised("an evaluation failed", error, self.evaluation_failures)

    def group(self, group: Any, config: Any, max_token_len: int) -> str | None:
        """Count a converted group that is made; return the reason why it is not sent, None for one that goes out."""
        reason = why_left_out(group, config, max_token_len)
        if reason is None:
            self._scores += group["scores"]
        else:
            self.leave_out(reason)
        return reason

    def leave_out(self, reason: str, words: str = "", kind: str = "") -> None:
        """Count a group that run-api does not have.

        Args:
            reason: one of `atropos_common/group_reasons.py`.
            words: what is wrong with this one; logged once for each `kind`.
            kind: what `words` are about.
        """
        self.left_out[reason] += 1
        if not words:
            return
        self.examples[reason] = words
        if (reason, kind or words) not in self._kinds:
            self._kinds.add((reason, kind or words))
            self.urgent = True
            log.warning("a group is left out (%s): %s. More of the kind are counted", in_words(reason), words)

    def accepted(self) -> None:
        """Count a group that run-api accepted."""
        self.sent += 1
        self._barren_since = self._in_vain

    @property
    def barren(self) -> bool:
        """Whether of the newest `MANY_IN_VAIN` groups none could be sent."""
        return self._in_vain - self._barren_since >= MANY_IN_VAIN

    @property
    def _in_vain(self) -> int:
        return self.left_out.total() - self.left_out[SURPLUS] + self.failures.total()

    def news(self) -> bool:
        """Return whether something was counted since the last line."""
        return self._told != self._now

    def line(self) -> str:
        """Return the progress in one line."""
        self._told, self.urgent = self._now, False
        parts = [f"{self.sent} groups sent"]
        if self._scores:
            parts.append(f"mean score {sum(self._scores) / len(self._scores):.3f} over the last {len(self._scores)}")
            self._scores = []
        parts += [f"{count} left out ({in_words(reason)})" for reason, count in self.left_out.most_common()]
        parts += [f"{count} failed ({reason})" for reason, count in self.failures.most_common(3)]
        parts += [f"{count} evaluations failed ({reason})" for reason, count in self.evaluation_failures.most_common(1)]
        return ", ".join(parts)

    @property
    def _now(self) -> tuple[int, ...]:
        counts = (self.left_out, self.failures, self.evaluation_failures)
        return (self.sent, *(each.total() for each in counts))

    def _raised(self, what: str, error: BaseException, counts: Counter[str]) -> None:
        reason = reason_of(error)
        if reason not in counts:
            log.warning("%s: %s", what, reason, exc_info=None if _is_answer(error) else error)
            self.urgent = True
        counts[reason] += 1


def reason_of(error: BaseException) -> str:
    """One line; the root of what tenacity's retries wrap."""
    while hasattr(error, "last_attempt") and error.last_attempt.exception() is not None:
        error = error.last_attempt.exception()
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:LONGEST_REASON] if text else type(error).__name__


def _is_answer(error: BaseException) -> bool:
    """The server said no: there is nothing to see in a traceback."""
    return isinstance(error, APIStatusError) or type(error).__name__ in ("EngineRefused", "EngineUnavailable")
