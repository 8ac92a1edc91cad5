"""Logprobs that rollouts came without, asked of the servers: one of them made the tokens and knew.

What none of them knows stays NaN, and the trainer computes it at its present weights (`step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from atropos_common.bridge import KnownLogprobs, prompt_digest
from trainer_core.rollouts.asking import ServersInTurn
from trainer_core.rollouts.batch import Batch, Rollout, segments

Known = Callable[[list[str], list[list[int]]], list[KnownLogprobs | None]]
"""Digests of prompts and completions -> what a server knows of each."""
MOST_TOKENS = 500_000
"""Of one question: 4 MB as JSON there, 10 MB back."""


@dataclass(frozen=True)
class _Gap:
    """Half-open range of generated tokens in a rollout that lack a logprob."""

    rollout: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class MissingAsker:
    """Fills the gaps of batches with what the servers know."""

    def __init__(self, servers: Sequence[Known]) -> None:
        self._servers = ServersInTurn(servers, MOST_TOKENS, "Missing logprobs are computed here")

    def fill(self, batch: Batch) -> None:
        """Put what the servers know into the rollouts of `batch`, with the temperature that goes with it, and count
        where logprobs came from."""
        rollouts = batch.rollouts
        gaps = [
            _Gap(i, start, end)
            for i, rollout in enumerate(rollouts)
            if not rollout.complete
            for start, end in segments(rollout.trained & np.isnan(rollout.logprobs))
        ]
        lacking = {gap.rollout for gap in gaps}
        left = {gap.rollout for gap in self._servers.ask(gaps, partial(_question, rollouts), partial(_take, rollouts))}
        counts = {"environment": len(rollouts) - len(lacking), "engine": len(lacking - left), "trainer": len(left)}
        batch.logprobs_from.update({source: count for source, count in counts.items() if count})


def _question(rollouts: list[Rollout], ask: Known, gaps: list[_Gap]) -> list[KnownLogprobs | None]:
    tokens = [rollouts[gap.rollout].tokens.tolist() for gap in gaps]
    prompts = [prompt_digest(row[: gap.start]) for row, gap in zip(tokens, gaps, strict=True)]
    return ask(prompts, [row[gap.start : gap.end] for row, gap in zip(tokens, gaps, strict=True)])


def _take(rollouts: list[Rollout], gap: _Gap, known: KnownLogprobs) -> bool:
    """Fill the gap; not where its rollout has logprobs of another temperature: one rollout has one."""
    rollout = rollouts[gap.rollout]
    own = rollout.logprobs[rollout.trained]
    if np.isfinite(own).any() and known.temperature != rollout.temperature:
        return False
    rollout.logprobs[gap.start : gap.end] = known.logprobs
    before = known.oldest_version if rollout.oldest_version is None else rollout.oldest_version
    oldest = min(known.oldest_version, before)
    rollouts[gap.rollout] = replace(rollout, temperature=known.temperature, oldest_version=oldest)
    return True
