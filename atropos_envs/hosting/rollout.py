"""Record of the current task's rollout: generated tokens and scored groups.

An environment that drops a group returns None; this record keeps the group's tokens and scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import accumulate, pairwise
from typing import Any

from atroposlib.envs import base

# Mask of a prompt token.
PROMPT = -100


class Rollout:
    def __init__(self) -> None:
        self.tokens = 0
        """Generated tokens that `take` has not returned yet."""
        self.scored: list[Mapping[str, Any]] = []
        """Groups that the environment constructed, sent or dropped."""
        self.returned: Sequence[Any] = ()
        self._shares: dict[int, int] = {}

    def divide(self, groups: Sequence[Any]) -> None:
        """Divide the generated tokens among the returned groups."""
        self.returned = groups
        own = [generated(group) for group in groups]
        # The engine client also counts completions that the environment dropped. It counts nothing
        # for an environment with its own server class.
        self.tokens = max(self.tokens, sum(own))
        if not any(own):
            own = [1] * len(groups)
        ends = [self.tokens * end // sum(own) for end in accumulate(own)]
        shares = (end - start for start, end in pairwise([0, *ends]))
        self._shares = dict(zip(map(id, groups), shares, strict=True))

    def take(self, group: Any = None) -> int:
        """Return and remove the tokens of `group`; without one, all that remain."""
        count = self.tokens
        if group is not None:
            # A copy that the environment's own `handle_send_to_api` made has no share.
            count = min(count, self._shares.pop(id(group), generated(group)))
        self.tokens -= count
        return count

    @property
    def is_flat(self) -> bool:
        """True if there are groups of several scores, and each has equal scores."""
        scores = self.scores
        return any(len(each) > 1 for each in scores) and all(len(set(each)) < 2 for each in scores)

    @property
    def scores(self) -> list[list[float]]:
        """Scores of the returned groups; if there are none, of the dropped ones."""
        return [_scores(group) for group in self.returned or self.scored]


_present: ContextVar[Rollout | None] = ContextVar("rollout", default=None)


def begin_rollout() -> Rollout:
    """Start the record of this task and its children."""
    rollout = Rollout()
    _present.set(rollout)
    return rollout


def present() -> Rollout:
    """Return this task's record; an empty one outside of a rollout."""
    return _present.get() or Rollout()


def generated(group: Any) -> int:
    """Return the number of tokens that the group's masks select for training."""
    masks = group.get("masks") if isinstance(group, Mapping) else None
    try:
        rows = [list(row) for row in masks or []]
        return sum(len(row) - row.count(PROMPT) for row in rows)
    except (TypeError, ValueError):
        return 0  # not a list of numbers: a later check refuses the group with a reason


def _scores(group: Any) -> list[float]:
    try:
        return [float(score) for score in group["scores"]]
    except (TypeError, ValueError, KeyError):
        return []


class ScoredDataGroup(dict[str, Any]):
    """Replacement of atroposlib's group type; adds itself to the task's rollout."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        present().scored.append(self)

    # Accept `total=False`: environments use it to derive types from atroposlib's TypedDict.
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()


def note_scored_groups() -> None:
    """Replace atroposlib's group type for environments that are imported later."""
    base.ScoredDataGroup = ScoredDataGroup
