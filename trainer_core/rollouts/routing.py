"""Which experts the engine took for tokens of rollouts, asked of the servers: one of them made the tokens and knows.

A turn of an environment is a completion of its own. Its request read all tokens before it, so the experts of what
another program put between two turns come with the later one, and those of a turn with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atropos_common.bridge import prompt_digest
from trainer_core.errors import EngineError
from trainer_core.rollouts.asking import ServersInTurn
from trainer_core.rollouts.batch import Batch, segments

Known = Callable[[list[str], list[list[int]], list[int]], list[NDArray[Any] | None]]
"""Digests of prompts, completions and first tokens asked for -> the experts that a server knows of each."""
MOST_TOKENS = 50_000
"""Of one question: some 25 MB come back for 48 layers and 8 experts a token."""


class Shape(Protocol):
    """What is asked of `policy.routing.RouterShape`."""

    @property
    def layers(self) -> int: ...
    @property
    def sparse(self) -> tuple[int, ...]: ...
    @property
    def chosen(self) -> int: ...
    @property
    def experts(self) -> int: ...


@dataclass(frozen=True)
class _Turn:
    """Half-open range of generated tokens of one sequence; from `begin` on its experts are asked for."""

    sequence: int
    begin: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


class RoutingAsker:
    """Knows the experts of sequences, as far as the servers do."""

    def __init__(self, servers: Sequence[Known], shape: Shape) -> None:
        self._servers = ServersInTurn(servers, MOST_TOKENS, "[WARNING] routers go by their own choice")
        self._shape = shape

    def fill(self, batch: Batch) -> None:
        """Put what the servers know into the rollouts of `batch`."""
        batch.asked_routing = True
        turns = [segments(rollout.trained) for rollout in batch.rollouts]
        found = self.look_up([rollout.tokens for rollout in batch.rollouts], turns)
        batch.rollouts = [
            replace(rollout, experts=experts) for rollout, experts in zip(batch.rollouts, found, strict=True)
        ]

    def of_answer(self, prompt: list[int], token_ids: list[int]) -> NDArray[np.int16] | None:
        """Of prompt and answer; null where nobody knows."""
        return self.look_up([np.array([*prompt, *token_ids])], [[(len(prompt), len(prompt) + len(token_ids))]])[0]

    def look_up(
        self, sequences: Sequence[NDArray[np.int64]], generated: Sequence[list[tuple[int, int]]]
    ) -> list[NDArray[np.int16] | None]:
        """[L, sparse layers, K] of each sequence, of length L, -1 where no server knows; null where of no token.

        Args:
            generated: half-open ranges of each sequence's completions.
        """
        whole: list[NDArray[np.int16] | None] = [None] * len(sequences)
        turns = []
        for i, ranges in enumerate(generated):
            begin = 0
            for start, end in ranges:
                turns.append(_Turn(i, begin, start, end))
                begin = end - 1  # the last token of a completion is read by the next request alone

        def question(ask: Known, part: list[_Turn]) -> list[NDArray[np.int16] | None]:
            prompts = [prompt_digest(sequences[turn.sequence][: turn.start].tolist()) for turn in part]
            completions = [sequences[turn.sequence][turn.start : turn.end].tolist() for turn in part]
            answers = ask(prompts, completions, [turn.begin for turn in part])
            return [None if each is None else self._taken(each) for each in answers]

        def take(turn: _Turn, experts: NDArray[np.int16]) -> bool:
            if len(experts) != turn.end - 1 - turn.begin:
                return False
            if (into := whole[turn.sequence]) is None:
                into = np.full((len(sequences[turn.sequence]), *experts.shape[1:]), -1, dtype=np.int16)
                whole[turn.sequence] = into
            into[turn.begin : turn.end - 1] = experts
            return True

        self._servers.ask(turns, question, take)
        return whole

    def _taken(self, experts: NDArray[Any]) -> NDArray[np.int16]:
        """Of the sparse layers; -1 for tokens of which the engine has nothing, for no token takes an expert twice.

        Raises:
            EngineError: they are another model's.
        """
        shape = self._shape
        if experts.shape[1] == shape.layers:
            experts = experts[:, list(shape.sparse)]
        if experts.shape[1:] != (len(shape.sparse), shape.chosen) or (experts >= shape.experts).any():
            layers, chosen = experts.shape[1:]
            raise EngineError(
                f"a server recorded {chosen} experts in each of {layers} layers, up to number {experts.max()}; this "
                f"model takes {shape.chosen} of {shape.experts} in {len(shape.sparse)} layers"
            )
        taken = experts.astype(np.int16)
        first = np.sort(taken[:, 0], axis=-1)  # what was never written is alike in all layers
        taken[(first[:, 1:] == first[:, :-1]).any(-1)] = -1
        return taken
