"""Rollouts as people look at them: by group, searched, and one completion against another. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from trainer_core.contracts.records import RolloutRecord

Change = Literal["same", "gone", "new"]
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
DIFF_WORDS = 2000
"""Of each side; what comes after is compared no more, since the cost grows with the square."""


@dataclass(frozen=True)
class Group:
    """Completions of one prompt in one step, as far as the stream holds them."""

    step: int
    env: str
    prompt: str
    rollouts: tuple[RolloutRecord, ...]

    @property
    def reward_mean(self) -> float:
        return sum(rollout.reward for rollout in self.rollouts) / len(self.rollouts)


def groups(rollouts: Iterable[RolloutRecord], pattern: re.Pattern[str] | None = None) -> list[Group]:
    """Newest step first; within a step by prompt, in the order of the stream. With `pattern`, only what matches it.

    A match in the prompt keeps the whole group, one in a completion keeps that completion.
    """
    wanted = [rollout for rollout in rollouts if pattern is None or _matches(rollout, pattern)]
    order: dict[tuple[int, str, str], int] = {}
    for at, rollout in enumerate(wanted):
        order.setdefault(_key(rollout), at)
    ranked = sorted(wanted, key=lambda rollout: (-rollout.step, order[_key(rollout)]))
    return [Group(*key, tuple(members)) for key, members in groupby(ranked, key=_key)]


def _key(rollout: RolloutRecord) -> tuple[int, str, str]:
    return rollout.step, rollout.env, rollout.prompt


def _matches(rollout: RolloutRecord, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(text) for text in (rollout.prompt, rollout.completion, rollout.env))


def earlier_twin(rollout: RolloutRecord, rollouts: Sequence[RolloutRecord]) -> RolloutRecord | None:
    """What to compare `rollout` with: the same prompt in the latest earlier step, else any completion of that env then.

    None where no earlier step is known.
    """
    before = [other for other in rollouts if other.step < rollout.step and other.env == rollout.env]
    same = [other for other in before if other.prompt == rollout.prompt]
    return max(same or before, key=lambda other: other.step, default=None)


def diff(old: str, new: str) -> list[tuple[Change, str]]:
    """`old` against `new`, word by word: stretches that stayed, went and came, in reading order."""
    before, after = _WORDS.findall(old), _WORDS.findall(new)
    rest = "".join(before[DIFF_WORDS:]), "".join(after[DIFF_WORDS:])
    before, after = before[:DIFF_WORDS], after[:DIFF_WORDS]
    parts: list[tuple[Change, str]] = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(("same", "".join(before[i1:i2])))
            continue
        parts += _replaced("".join(before[i1:i2]), "".join(after[j1:j2]))
    return parts + _replaced(*rest)


def _replaced(before: str, after: str) -> list[tuple[Change, str]]:
    both: list[tuple[Change, str]] = [("gone", before), ("new", after)]
    return [part for part in both if part[1]]
