"""An environment's own stream, `RUN/eval.NAME.jsonl`: accuracies, metrics, counts of its groups."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from openai import APIStatusError

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.record_tail import next_seq
from atropos_common.protocol.records import (
    FAILED,
    FLAT,
    SURPLUS,
    CurriculumCounts,
    EnvCountsRecord,
    EnvMetricsRecord,
    EvalRecord,
    reason_text,
)
from atropos_common.system.files import append_line
from atropos_common.system.run_dir import ENV_COMPONENT, ENV_RUN_ID, RunDir
from atropos_envs.hosting.groups import is_flat, why_left_out

log = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=Record)
# Names under which environments log the share of right answers.
_SHARE = re.compile(r"correct|accuracy|(^|[_/])acc([_/]|$)|pass@|success|solve", re.IGNORECASE)


# Characters; reasons are keys of a record and columns of the screen.
LONGEST_REASON = 160
# Outcomes of episodes that are counted apart.
MANY_OUTCOMES, OTHER_OUTCOMES = 32, "other outcomes"
# Groups in a row that fail or are left out before other environments get our share.
MANY_IN_VAIN = 32
# Flat groups whose scores an example counts.
NEWEST_FLAT = 100


@dataclass(frozen=True)
class Graded:
    correct: bool
    weight_version: int | None = None
    """Oldest weight version behind the answer; None if unknown."""


def component_name(default: str) -> str:
    """Return this component's name in the plan; `default` outside of a run."""
    return os.environ.get(ENV_COMPONENT) or default


def eval_path(name: str, folder: str | None) -> Path | None:
    """Return the file for accuracies: in the run directory, else in `folder`."""
    run = RunDir.from_env()
    if run is not None:
        return run.eval_jsonl(name)
    return Path(folder) / f"eval.{name}.jsonl" if folder else None


class EvalLog:
    """Writer of the stream; after a restart `seq` continues behind the last whole line."""

    def __init__(self, path: Path | None, env: str) -> None:
        self._path = path
        self._env = env
        self._run_id = os.environ.get(ENV_RUN_ID, "")
        self._next = next_seq(path) if path is not None else 0
        self._keeps = True

    def append(self, split: str, graded: list[Graded], policy_step: int | None) -> EvalRecord:
        """Write the accuracy over `graded`, which must not be empty."""
        if not graded:
            raise ValueError(f"no question of {split} was graded")
        # The engine may publish during an evaluation, so the oldest version is the honest one. With
        # an unknown version among them there is no answer.
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
        """Write the numbers of `metrics`, and accuracies of those in `eval/`."""
        # Environments also log tables and strings for wandb.
        kinds = int, float, np.number
        numbers = {
            name: float(value) for name, value in metrics.items() if isinstance(value, kinds)
        }
        for name, value in numbers.items():
            kind, _, split = name.partition("/")
            if kind == "eval" and _SHARE.search(split) and 0 <= value <= 1:
                self._write(
                    EvalRecord(env=self._env, split=split, accuracy=value, policy_step=policy_step)
                )
        if numbers:
            self._write(EnvMetricsRecord(env=self._env, metrics=numbers, policy_step=policy_step))

    def counted(
        self,
        tally: Tally,
        adjusted: Mapping[str, int],
        requests: int,
        step: int | None,
        bounds: Mapping[str, float] | None = None,
        curriculum: CurriculumCounts | None = None,
    ) -> None:
        """Write the counts since the start; `bounds`: workers and queue slots."""
        self._write(
            EnvCountsRecord(
                env=self._env,
                policy_step=step,
                requests=requests,
                sent=tally.sent,
                sent_flat=tally.sent_flat,
                sent_tokens=tally.sent_tokens,
                sent_flat_tokens=tally.sent_flat_tokens,
                left_out=dict(tally.left_out),
                left_out_tokens=dict(tally.left_out_tokens),
                examples=dict(tally.examples),
                failures=dict(tally.failures),
                episodes=dict(tally.episodes),
                evaluation_failures=dict(tally.evaluation_failures),
                adjusted=dict(adjusted),
                curriculum=curriculum,
                **(bounds or {}),
            )
        )

    def _write(self, record: RecordT) -> RecordT:
        stamp = {"run_id": self._run_id, "time": time.time(), "seq": self._next}
        stamped = record.model_copy(update=stamp)
        # A full disk must not end the environment: training waits for room too.
        kept = self._path is None or append_line(self._path, stamped.to_line().encode())
        if not kept and self._keeps:
            log.warning("%s cannot be written: its records are left out until it can", self._path)
        self._keeps = kept
        self._next += int(kept)
        return stamped


def _by_score(scores: Iterable[float]) -> str:
    """Return the most common scores of flat groups, such as `score 1 in 30, 0 in 16`."""
    common = Counter(f"{score:.3g}" for score in scores).most_common(3)
    return f"score {', '.join(f'{score} in {count}' for score, count in common)}"


class Tally:
    """Counts since the start."""

    def __init__(self) -> None:
        self.sent = 0
        """Groups that run-api accepted."""
        self.sent_flat = self.sent_tokens = self.sent_flat_tokens = 0
        self.left_out: Counter[str] = Counter()
        """Groups that did not reach run-api, by reason (`records.py`)."""
        self.left_out_tokens: Counter[str] = Counter()
        """Generated tokens of these groups, and of failed and cancelled rollouts."""
        self.examples: dict[str, str] = {}
        """Newest detail of each reason."""
        self.failures: Counter[str] = Counter()
        """Groups whose rollout failed, by reason."""
        self.evaluation_failures: Counter[str] = Counter()
        """Evaluations that failed since the last success, by reason."""
        self.episodes: Counter[str] = Counter()
        """Episodes of programs, by outcome and by what they did wrong."""
        self.urgent = False
        """A reason is new: write the counts at once."""
        self._scores: list[float] = []
        self._flat_scores: deque[float] = deque(maxlen=NEWEST_FLAT)
        self._barren_since = 0
        """`_in_vain` when run-api last accepted a group."""
        # Pairs of reason and kind that were logged already.
        self._kinds: set[tuple[str, str]] = set()
        self._reported = self._totals

    def failed(self, error: BaseException, tokens: int = 0) -> None:
        """Count a failed rollout that generated `tokens`; log the first of a kind."""
        self._raised("a rollout failed", error, self.failures)
        self.lose(FAILED, tokens)

    def episode(self, outcome: str) -> None:
        """Count an episode; log the first of an outcome."""
        # Programs choose some of the words.
        known = outcome[:LONGEST_REASON]
        if known not in self.episodes and len(self.episodes) >= MANY_OUTCOMES:
            known = OTHER_OUTCOMES
        if known not in self.episodes:
            log.info("episodes: %s. Later ones are only counted", known)
            self.urgent = True
        self.episodes[known] += 1

    def lose(self, reason: str, tokens: int) -> None:
        """Count generated tokens that do not reach run-api."""
        if tokens:
            self.left_out_tokens[reason] += tokens

    def evaluated(self, error: BaseException | None) -> None:
        """Count an evaluation by its error; a success (None) clears the counts."""
        if error is None:
            self.evaluation_failures.clear()
        else:
            self._raised("an evaluation failed", error, self.evaluation_failures)

    def group(
        self, group: Any, group_size: int, max_token_len: int, *, drops_flat: bool
    ) -> str | None:
        """Count a converted group; return why it is not sent."""
        reason = why_left_out(group, group_size, max_token_len, drops_flat=drops_flat)
        if reason is None:
            # For the mean of the next progress line.
            self._scores += group["scores"]
        else:
            self.leave_out(reason)
            if reason == FLAT:
                self._flat_scores.append(group["scores"][0])
                self.examples[FLAT] = _by_score(self._flat_scores)
        return reason

    def leave_out(self, reason: str, words: str = "", kind: str = "") -> None:
        """Count a group that does not reach run-api.

        Args:
            reason: one of `records.py`.
            words: detail of this group; logged once for each `kind`.
            kind: subject of `words`.
        """
        self.left_out[reason] += 1
        if not words:
            return
        self.examples[reason] = words
        if (reason, kind or words) not in self._kinds:
            self._kinds.add((reason, kind or words))
            self.urgent = True
            known = reason_text(reason)
            log.warning("a group is left out (%s): %s. Later ones are only counted", known, words)

    def accepted(self, group: dict[str, Any], tokens: int) -> None:
        """Count a sent group with its generated tokens."""
        self.sent += 1
        self.sent_tokens += tokens
        if is_flat(group):
            self.sent_flat += 1
            self.sent_flat_tokens += tokens
        self._barren_since = self._in_vain

    @property
    def barren(self) -> bool:
        return self._in_vain - self._barren_since >= MANY_IN_VAIN

    @property
    def _in_vain(self) -> int:
        # A surplus group was fine; it was dropped because the queue had no slot for it.
        return self.left_out.total() - self.left_out[SURPLUS] + self.failures.total()

    def news(self) -> bool:
        return self._reported != self._totals

    def line(self) -> str:
        """Return the progress in one line."""
        # The line reports the present counts, so nothing is urgent any more.
        self._reported, self.urgent = self._totals, False
        parts = [f"{self.sent} groups sent"]
        if count := len(self._scores):
            parts.append(f"mean score {sum(self._scores) / count:.3f} over the last {count}")
            self._scores = []
        for reason, count in self.left_out.most_common():
            parts.append(f"{count} left out ({reason_text(reason)})")
        for reason, count in self.failures.most_common(3):
            parts.append(f"{count} failed ({reason})")
        if self.episodes:
            counts = (f"{count} {outcome}" for outcome, count in self.episodes.most_common(6))
            parts.append(f"episodes: {'; '.join(counts)}")
        for reason, count in self.evaluation_failures.most_common(1):
            parts.append(f"{count} evaluations failed ({reason})")
        return ", ".join(parts)

    @property
    def _totals(self) -> tuple[int, ...]:
        counts = (self.left_out, self.failures, self.evaluation_failures, self.episodes)
        return (self.sent, *(each.total() for each in counts))

    def _raised(self, what: str, error: BaseException, counts: Counter[str]) -> None:
        reason = reason_of(error)
        if reason not in counts:
            # Later errors of the same kind are only counted, so the log stays readable.
            log.warning("%s: %s", what, reason, exc_info=None if _is_answer(error) else error)
            self.urgent = True
        counts[reason] += 1


def reason_of(error: BaseException) -> str:
    """Return the error in one line; for tenacity's retries the last attempt's."""
    # Retries may be nested: an environment's own around atroposlib's.
    while hasattr(error, "last_attempt") and error.last_attempt.exception() is not None:
        error = error.last_attempt.exception()
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:LONGEST_REASON] if text else type(error).__name__


# The server refused the request, so a traceback would show nothing useful.
def _is_answer(error: BaseException) -> bool:
    refusals = "EngineRefused", "EngineUnavailable"
    return isinstance(error, APIStatusError) or type(error).__name__ in refusals
