"""Record of the rollout that the present task makes: tokens generated, groups scored.

An environment that drops a group returns None, so its tokens and scores are known only from here.
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
        """Generated tokens that have no outcome yet."""
        self.scored: list[Mapping[str, Any]] = []
        """Groups that the environment began, sent or not."""
        self.returned: Sequence[Any] = ()
        """Groups that the environment returned."""
        self._shares: dict[int, int] = {}

    def divide(self, groups: Sequence[Any]) -> None:
        """Divide the generated tokens among the rollout's groups."""
        self.returned = groups
        own = [generated(group) for group in groups]
        # The engine client counts completions that the environment dropped too. It counts nothing
        # for an environment with a server class of its own.
        self.tokens = max(self.tokens, sum(own))
        if not any(own):
            own = [1] * len(groups)
        ends = [self.tokens * end // sum(own) for end in accumulate(own)]
        shares = (end - start for start, end in pairwise([0, *ends]))
        self._shares = dict(zip(map(id, groups), shares, strict=True))

    def take(self, group: Any = None) -> int:
        """Return the tokens of `group`, or all that have no outcome yet; each token once."""
        count = self.tokens
        if group is not None:
            # A copy that the environment's own `handle_send_to_api` made has no share.
            count = min(count, self._shares.pop(id(group), generated(group)))
        self.tokens -= count
        return count

    @property
    def is_flat(self) -> bool:
        """The environment scored a group, and no two scores of a group differ."""
        scores = self.scores
        return any(len(each) > 1 for each in scores) and all(len(set(each)) < 2 for each in scores)

    @property
    def scores(self) -> list[list[float]]:
        """Scores of each group that the environment returned, else of those that it dropped."""
        return [_scores(group) for group in self.returned or self.scored]


_present: ContextVar[Rollout | None] = ContextVar("rollout", default=None)


def begin_rollout() -> Rollout:
    """Start the record of this task and its children."""
    rollout = Rollout()
    _present.set(rollout)
    return rollout


def present() -> Rollout:
    """Return the record of this task; an empty one outside of a rollout."""
    return _present.get() or Rollout()


def generated(group: Any) -> int:
    """Return the number of tokens that the group's masks leave to train on."""
    masks = group.get("masks") if isinstance(group, Mapping) else None
    try:
        rows = [list(row) for row in masks or []]
        return sum(len(row) - row.count(PROMPT) for row in rows)
    except (TypeError, ValueError):
        return 0  # not a list of numbers: the group is refused later, with its reason


def _scores(group: Any) -> list[float]:
    try:
        return [float(score) for score in group["scores"]]
    except (TypeError, ValueError, KeyError):
        return []


class ScoredDataGroup(dict[str, Any]):
    """atroposlib's group type, which is a plain dictionary; it reports itself to the rollout."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        present().scored.append(self)

    # Environments derive types from atroposlib's, which is a TypedDict, with `total=False`.
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()


def note_scored_groups() -> None:
    """Give environments that are imported later the type above under atroposlib's name."""
    base.ScoredDataGroup = ScoredDataGroup
