"""Rollouts whose logprobs are compared, and the trainer's own logprobs at earlier weight versions.

To rollouts of older weights a policy that sharpens looks like another temperature. The trainer's
own logprobs of the same tokens, before and after those updates, tell the two apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.samples import Found
from trainer_core.rollouts.source import Lag

SEQUENCES = 16
"""Most sequences of an environment that are compared."""
TOKENS = 64
"""Most trained tokens of a sequence that are compared, from its first."""
KEPT = 16
"""Weight versions whose logprobs are kept."""
UNKNOWN_LAG = 4
"""Lag, in weight versions, of rollouts whose version no server knows."""


class Compared(NamedTuple):
    """Rollouts of one environment."""

    env: str
    rollouts: list[Rollout]
    lag: int | None
    """Lag of the oldest one in weight versions; None: unknown."""


class Then(NamedTuple):
    """Rollouts of one environment with the trainer's logprobs at an earlier weight version."""

    version: int
    rollouts: list[Rollout]


def compared(rollouts: Sequence[Rollout], lags: Sequence[Lag | None]) -> list[Compared]:
    """Choose the freshest rollouts of each environment, of as many prompts as there are."""
    found: dict[str, list[int]] = {}
    for index in spread_out(rollouts, lags):
        found.setdefault(rollouts[index].env, []).append(index)
    sets = []
    for env, chosen in found.items():
        ages = [lag.oldest for lag in map(lags.__getitem__, chosen) if lag is not None]
        parts = [first_tokens(rollouts[i], rollouts[i].logprobs) for i in chosen]
        sets.append(Compared(env, parts, max(ages) if len(ages) == len(chosen) else None))
    return sets


def spread_out(rollouts: Sequence[Rollout], lags: Sequence[Lag | None] = ()) -> list[int]:
    """Return indices of up to `SEQUENCES` rollouts of each environment, the freshest first.

    Of one lag, each prompt comes once before any comes twice: completions of one prompt are alike,
    and a temperature always fits a handful of equal tokens.
    """
    times: Counter[tuple[int, str, bytes]] = Counter()
    ranked: list[tuple[int, int, int]] = []
    for index, rollout in enumerate(rollouts):
        if rollout.trained.any():
            lag = _lag(lags[index]) if lags else 0
            prompt = rollout.tokens[: rollout.prompt_length].tobytes()
            times[lag, rollout.env, prompt] += 1
            ranked.append((lag, times[lag, rollout.env, prompt], index))
    taken: Counter[str] = Counter()
    chosen = []
    for _, _, index in sorted(ranked):
        taken[rollouts[index].env] += 1
        if taken[rollouts[index].env] <= SEQUENCES:
            chosen.append(index)
    return chosen


def _lag(lag: Lag | None) -> int:
    return UNKNOWN_LAG if lag is None else lag.oldest


def first_tokens(rollout: Rollout, logprobs: NDArray[np.float32]) -> Rollout:
    """Return the rollout up to its first `TOKENS` trained tokens, with these logprobs, [L]."""
    end = int(np.flatnonzero(rollout.trained)[:TOKENS][-1]) + 1
    # Copies: a view would keep the whole rollout in memory.
    return replace(
        rollout,
        tokens=rollout.tokens[:end].copy(),
        trained=rollout.trained[:end].copy(),
        logprobs=logprobs[:end].copy(),
        # Equal advantages: `pack` gives rollouts without one a row of their own.
        advantages=np.zeros(end, dtype=np.float32),
        experts=None if rollout.experts is None else rollout.experts[:end].copy(),
        reference=None,
        teacher=None,
        base=None,
    )


class EarlierLogprobs:
    """The trainer's logprobs of a few tokens at each of the last weight versions."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Rollout]] = {}

    def keep(self, version: int, rollouts: Sequence[Rollout], found: Found) -> None:
        """Keep the logprobs of the first trained tokens that were computed at `version`."""
        kept = []
        for index, values in sorted(found.items()):
            rollout = rollouts[index]
            own = np.zeros(len(rollout.tokens), dtype=np.float32)
            own[np.flatnonzero(rollout.trained)[: len(values)]] = values
            kept.append(first_tokens(rollout, own))
        self._kept[version] = kept
        for old in sorted(self._kept)[:-KEPT]:
            del self._kept[old]

    def at(self, version: int, env: str) -> Then | None:
        """Return what is kept of `env` at the newest version up to `version`, else at the oldest.

        None: nothing is kept.
        """
        known = {
            kept: own
            for kept, every in self._kept.items()
            if (own := [rollout for rollout in every if rollout.env == env])
        }
        if not known:
            return None
        then = max((kept for kept in known if kept <= version), default=min(known))
        return Then(then, known[then])
