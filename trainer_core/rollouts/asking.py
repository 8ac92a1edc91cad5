"""What rollouts came without, asked of the servers: one of them made the tokens and knows.

Logprobs (`MissingAsker`): what no server knows stays NaN, and the trainer computes it at its present weights
(`step.py`). And which experts the engine took for tokens (`RoutingAsker`): a turn of an environment is a completion of
its own. Its request read all tokens before it, so the experts of what another program put between two turns come with
the later one, and those of a turn with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from atropos_common.bridge import MOST_COMPLETIONS, KnownLogprobs, prompt_digest
from trainer_core.errors import EngineError, EngineGone
from trainer_core.rollouts.batch import Batch, segments

AsksLogprobs = Callable[[list[str], list[list[int]]], list[KnownLogprobs | None]]
"""Digests of prompts and completions -> what a server knows of each."""
AsksRouting = Callable[[list[str], list[list[int]], list[int]], list[NDArray[Any] | None]]
"""Digests of prompts, completions and first tokens asked for -> the experts that a server knows of each."""
LOGPROB_TOKENS = 500_000
"""Of one question: 4 MB as JSON there, 10 MB back."""
ROUTING_TOKENS = 50_000
"""Of one question: some 25 MB come back for 48 layers and 8 experts a token."""

Server = TypeVar("Server")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Turn:
    """Half-open range of generated tokens of one sequence; what is asked for begins at `begin`."""

    sequence: int
    begin: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


class ServersInTurn(Generic[Server]):
    """Asks one server after the other until each turn is answered; one that cannot tell is not asked again.

    Args:
        most_tokens: about so many go into one question: the server refuses larger ones.
        otherwise: what happens without a server that cannot tell, in words for its log.
    """

    def __init__(self, servers: Sequence[Server], most_tokens: int, otherwise: str) -> None:
        self._servers = list(servers)
        self._most_tokens = most_tokens
        self._otherwise = otherwise

    def ask(
        self, wanted: list[_Turn], question: Callable[[Server, list[_Turn]], Sequence[Answer | None]],
        take: Callable[[_Turn, Answer], bool],
    ) -> list[_Turn]:  # fmt: skip
        """What no server knows, in the order asked.

        Args:
            question: asks a server about some; None for what it does not know. May raise EngineError.
            take: uses an answer; False when it is of no use.
        """
        for server in list(self._servers):
            left: list[_Turn] = []
            asked = 0
            try:
                for part in self._parts(wanted):
                    answers = question(server, part)
                    asked += len(part)
                    pairs = zip(part, answers, strict=True)
                    left += [turn for turn, answer in pairs if answer is None or not take(turn, answer)]
            except EngineGone:
                pass  # it may know the next batch
            except EngineError as error:
                print(f"{self._otherwise}: {error}")
                self._servers.remove(server)
            wanted = [*left, *wanted[asked:]]
        return wanted

    def _parts(self, wanted: list[_Turn]) -> Iterator[list[_Turn]]:
        part: list[_Turn] = []
        size = 0
        for turn in wanted:
            if part and (len(part) == MOST_COMPLETIONS or size + turn.tokens > self._most_tokens):
                yield part
                part, size = [], 0
            part.append(turn)
            size += turn.tokens
        if part:
            yield part


def _named(sequences: Sequence[NDArray[np.int64]], turns: list[_Turn]) -> tuple[list[str], list[list[int]]]:
    """Digests of the prompts of `turns`, and their completions."""
    prompts = [prompt_digest(sequences[turn.sequence][: turn.start].tolist()) for turn in turns]
    return prompts, [sequences[turn.sequence][turn.start : turn.end].tolist() for turn in turns]


class MissingAsker:
    """Fills the gaps of batches with what the servers know."""

    def __init__(self, servers: Sequence[AsksLogprobs]) -> None:
        self._servers = ServersInTurn(servers, LOGPROB_TOKENS, "Missing logprobs are computed here")

    def fill(self, batch: Batch) -> None:
        """Put what the servers know into the rollouts of `batch`, with the temperature that goes with it, and count
        where logprobs came from."""
        rollouts = batch.rollouts
        sequences = [rollout.tokens for rollout in rollouts]
        gaps = [
            _Turn(i, start, start, end)
            for i, rollout in enumerate(rollouts)
            if not rollout.complete
            for start, end in segments(rollout.trained & np.isnan(rollout.logprobs))
        ]

        def question(ask: AsksLogprobs, part: list[_Turn]) -> list[KnownLogprobs | None]:
            return ask(*_named(sequences, part))

        def take(gap: _Turn, known: KnownLogprobs) -> bool:
            """Fill the gap, unless its rollout has logprobs of another temperature: one rollout has one.

            Tokens of the gap that the engine did not make are not trained: the policy never chose them. The newline
            that a ChatML template puts behind the end of a turn is the usual one.
            """
            rollout = rollouts[gap.sequence]
            own = rollout.logprobs[rollout.trained]
            if np.isfinite(own).any() and known.temperature != rollout.temperature:
                return False
            end = gap.start + len(known.logprobs)
            rollout.logprobs[gap.start : end] = known.logprobs
            rollout.trained[end : gap.end] = False
            before = known.oldest_version if rollout.oldest_version is None else rollout.oldest_version
            oldest = min(known.oldest_version, before)
            rollouts[gap.sequence] = replace(rollout, temperature=known.temperature, oldest_version=oldest)
            return True

        lacking = {gap.sequence for gap in gaps}
        left = {gap.sequence for gap in self._servers.ask(gaps, question, take)}
        counts = {"environment": len(rollouts) - len(lacking), "engine": len(lacking - left), "trainer": len(left)}
        batch.logprobs_from.update({source: count for source, count in counts.items() if count})


@dataclass(frozen=True)
class RouterShape:
    """What a recorded choice of experts looks like for a model."""

    layers: int
    sparse: tuple[int, ...]
    """Which of the layers choose."""
    chosen: int
    """Experts a token."""
    experts: int


class RoutingAsker:
    """Knows the experts of sequences, as far as the servers do."""

    def __init__(self, servers: Sequence[AsksRouting], shape: RouterShape) -> None:
        self._servers = ServersInTurn(servers, ROUTING_TOKENS, "[WARNING] routers go by their own choice")
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

        def question(ask: AsksRouting, part: list[_Turn]) -> list[NDArray[np.int16] | None]:
            answers = ask(*_named(sequences, part), [turn.begin for turn in part])
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
