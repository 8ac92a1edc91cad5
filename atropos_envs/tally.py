"""What became of an environment's groups: sent, left out and why, failed and why."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

from openai import APIStatusError

log = logging.getLogger(__name__)

LONGEST_REASON = 160
FLAT = "all scores equal"
SURPLUS = "surplus: begun for groups that might come out flat"
NOT_FINITE = "a score that is not a finite number"
COUNTED = ("Scores are the same in a group", "Group structure invalid", "Token length is too long in a group")
"""How BaseEnv's warnings about such groups begin: one line each, which the counts make needless."""


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of atroposlib's says more than the counts do."""
    return not str(record.msg).startswith(COUNTED)


class Tally:
    """Counts since the start."""

    def __init__(self) -> None:
        self.sent = 0
        """Groups that run-api took."""
        self.left_out: Counter[str] = Counter()
        """Groups that were made and not sent, by reason."""
        self.failures: Counter[str] = Counter()
        """Groups that were not made, by reason."""
        self._scores: list[float] = []
        self._told = (0, 0, 0)

    def failed(self, error: BaseException) -> None:
        """A rollout raised; the first of a kind is logged with the place where it came from."""
        reason = reason_of(error)
        if reason not in self.failures:
            log.warning("a rollout failed: %s", reason, exc_info=None if _is_answer(error) else error)
        self.failures[reason] += 1

    def group(self, group: Any, config: Any, max_token_len: int) -> str | None:
        """Count a group that is made; the reason why it is not sent, None for one that goes out."""
        reason = why_left_out(group, config, max_token_len)
        if reason is None:
            self._scores += [float(score) for score in group["scores"]]
        else:
            self.left_out[reason] += 1
        return reason

    def news(self) -> bool:
        """Something was counted since the last line."""
        return self._told != (self.sent, self.left_out.total(), self.failures.total())

    def line(self) -> str:
        """Progress in one line."""
        self._told = (self.sent, self.left_out.total(), self.failures.total())
        parts = [f"{self.sent} groups sent"]
        if self._scores:
            parts.append(f"mean score {sum(self._scores) / len(self._scores):.3f} over the last {len(self._scores)}")
            self._scores = []
        parts += [f"{count} left out ({reason})" for reason, count in self.left_out.most_common()]
        parts += [f"{count} failed ({reason})" for reason, count in self.failures.most_common(3)]
        return ", ".join(parts)


def why_left_out(group: Any, config: Any, max_token_len: int) -> str | None:
    """BaseEnv's rules for what it does not send, and one of ours; None for a group that goes out."""
    if not isinstance(group, dict):
        return "no group"
    if not all(isinstance(score, (int, float)) and math.isfinite(score) for score in group.get("scores", [])):
        return NOT_FINITE
    overrides = group.get("group_overrides") or {}
    if len(group.get("tokens", [])) != overrides.get("group_size", config.group_size):
        return "another number of completions than group_size"
    if config.ensure_scores_are_not_same and len(set(group["scores"])) == 1:
        return FLAT
    if max_token_len > 0 and any(len(tokens) >= max_token_len for tokens in group["tokens"]):
        return f"a sequence of {max_token_len} tokens or more"
    return None


def reason_of(error: BaseException) -> str:
    """One line; the root of what tenacity's retries wrap."""
    while hasattr(error, "last_attempt") and error.last_attempt.exception() is not None:
        error = error.last_attempt.exception()
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:LONGEST_REASON] if text else type(error).__name__


def _is_answer(error: BaseException) -> bool:
    """The server said no: there is nothing to see in a traceback."""
    return isinstance(error, APIStatusError) or type(error).__name__ in ("EngineRefused", "EngineUnavailable")
