"""Logprobs that rollouts came without, asked of the servers: one of them made the tokens and knew.

What none of them knows stays NaN, and the trainer computes it at its present weights (`step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atropos_common.bridge import MOST_COMPLETIONS, KnownLogprobs, prompt_digest
from trainer_core.errors import EngineError, EngineGone
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


def _parts(gaps: list[_Gap]) -> Iterator[list[_Gap]]:
    """At most `MOST_COMPLETIONS` and about `MOST_TOKENS` at a time: the server refuses larger requests."""
    part: list[_Gap] = []
    size = 0
    for gap in gaps:
        if part and (len(part) == MOST_COMPLETIONS or size + gap.end - gap.start > MOST_TOKENS):
            yield part
            part, size = [], 0
        part.append(gap)
        size += gap.end - gap.start
    if part:
        yield part


class MissingAsker:
    """Asks each server in turn; one that cannot tell is not asked again."""

    def __init__(self, servers: Sequence[Known]) -> None:
        self._servers = list(servers)

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
        for ask in list(self._servers):
            gaps = self._ask(ask, rollouts, gaps) if gaps else gaps
        left = {gap.rollout for gap in gaps}
        counts = {"environment": len(rollouts) - len(lacking), "engine": len(lacking - left), "trainer": len(left)}
        batch.logprobs_from.update({source: count for source, count in counts.items() if count})

    def _ask(self, ask: Known, rollouts: list[Rollout], gaps: list[_Gap]) -> list[_Gap]:
        """The gaps that are left."""
        left: list[_Gap] = []
        asked = 0
        for part in _parts(gaps):
            tokens = [rollouts[gap.rollout].tokens.tolist() for gap in part]
            prompts = [prompt_digest(row[: gap.start]) for row, gap in zip(tokens, part, strict=True)]
            completions = [row[gap.start : gap.end] for row, gap in zip(tokens, part, strict=True)]
            try:
                found = ask(prompts, completions)
            except EngineGone:
                return [*left, *gaps[asked:]]  # it may know the next batch
            except EngineError as error:
                print(f"Missing logprobs are computed here: {error}")
                self._servers.remove(ask)
                return [*left, *gaps[asked:]]
            asked += len(part)
            for gap, known in zip(part, found, strict=True):
                if known is None:
                    left.append(gap)
                    continue
                rollout = rollouts[gap.rollout]
                own = rollout.logprobs[rollout.trained]
                if np.isfinite(own).any() and known.temperature != rollout.temperature:
                    left.append(gap)  # one rollout has one temperature
                    continue
                rollout.logprobs[gap.start : gap.end] = known.logprobs
                before = known.oldest_version if rollout.oldest_version is None else rollout.oldest_version
                oldest = min(known.oldest_version, before)
                rollouts[gap.rollout] = replace(rollout, temperature=known.temperature, oldest_version=oldest)
        return left
