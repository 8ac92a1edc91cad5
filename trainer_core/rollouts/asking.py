"""Ask the server that made the tokens for data that rollouts came without.

`MissingAsker` asks for logprobs; where no server knows one, NaN stays and the trainer computes it.
`RoutingAsker` asks for the experts that the engine chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from atropos_common.protocol.bridge import MOST_COMPLETIONS, KnownLogprobs, prompt_digest
from trainer_core.errors import EngineError, EngineGone
from trainer_core.rollouts.batch import Batch, segments

AsksLogprobs = Callable[[list[str], list[list[int]]], list[KnownLogprobs | None]]
"""(prompt digests, completions) -> a server's logprobs of each."""
AsksRouting = Callable[[list[str], list[list[int]], list[int]], list[NDArray[Any] | None]]
"""(prompt digests, completions, first token positions) -> a server's experts of each."""
# Limits of tokens a request: 4 MB of JSON and 10 MB of answer for logprobs; 25 MB of answer for
# 48 layers and 8 experts a token.
LOGPROB_TOKENS = 500_000
ROUTING_TOKENS = 50_000

Server = TypeVar("Server")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Turn:
    """Generated tokens [start, end) of a sequence; a request covers [begin, end)."""

    sequence: int
    begin: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


class ServersInTurn(Generic[Server]):
    """Ask one server after the other; drop servers that do not support the request.

    Args:
        most_tokens: limit of tokens a request.
        otherwise: log text for the effect of a dropped server.
    """

    def __init__(self, servers: Sequence[Server], most_tokens: int, otherwise: str) -> None:
        self._servers = list(servers)
        self._most_tokens = most_tokens
        self._otherwise = otherwise

    def ask(
        self,
        wanted: list[_Turn],
        question: Callable[[Server, list[_Turn]], Sequence[Answer | None]],
        take: Callable[[_Turn, Answer], bool],
    ) -> list[_Turn]:
        """Return the turns that no server knows, in order.

        Args:
            question: asks a server about turns; None for unknown ones; may raise EngineError.
            take: uses an answer; False if it is unusable.
        """
        for server in list(self._servers):
            left: list[_Turn] = []
            asked = 0
            try:
                for part in self._parts(wanted):
                    answers = question(server, part)
                    asked += len(part)
                    for turn, answer in zip(part, answers, strict=True):
                        if answer is None or not take(turn, answer):
                            left.append(turn)
            except EngineGone:
                pass  # unreachable now; ask it again for the next batch
            except EngineError as error:
                print(f"{self._otherwise}: {error}")
                self._servers.remove(server)
            # Turns without an answer, and those not asked before an error, go to the next server.
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


def _named(
    sequences: Sequence[NDArray[np.int64]], turns: list[_Turn]
) -> tuple[list[str], list[list[int]]]:
    prompts = [prompt_digest(sequences[turn.sequence][: turn.start].tolist()) for turn in turns]
    return prompts, [sequences[turn.sequence][turn.start : turn.end].tolist() for turn in turns]


class MissingAsker:
    def __init__(self, servers: Sequence[AsksLogprobs]) -> None:
        self._servers = ServersInTurn(
            servers, LOGPROB_TOKENS, "Missing logprobs are computed by the trainer"
        )

    def fill(self, batch: Batch) -> None:
        """Fill in the servers' logprobs with their temperature, and count the sources."""
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
            """Fill the gap, unless it would mix temperatures in a rollout."""
            rollout = rollouts[gap.sequence]
            own = rollout.logprobs[rollout.trained]
            # Ratios need all logprobs of a rollout at one temperature.
            if np.isfinite(own).any() and known.temperature != rollout.temperature:
                return False
            end = gap.start + len(known.logprobs)
            rollout.logprobs[gap.start : end] = known.logprobs
            # The engine did not make the rest, such as the newline that a ChatML template adds
            # after a turn, so the policy never chose it.
            rollout.trained[end : gap.end] = False
            oldest, heat = known.oldest_version, known.temperature
            if rollout.oldest_version is not None:
                oldest = min(oldest, rollout.oldest_version)
            rollouts[gap.sequence] = replace(rollout, temperature=heat, oldest_version=oldest)
            return True

        lacking = {gap.sequence for gap in gaps}
        left = {gap.sequence for gap in self._servers.ask(gaps, question, take)}
        counts = {
            "environment": len(rollouts) - len(lacking),
            "engine": len(lacking - left),
            "trainer": len(left),
        }
        batch.logprobs_from.update({source: count for source, count in counts.items() if count})


@dataclass(frozen=True)
class RouterShape:
    layers: int
    sparse: tuple[int, ...]
    """Indices of layers with routers."""
    chosen: int
    experts: int


class RoutingAsker:
    def __init__(self, servers: Sequence[AsksRouting], shape: RouterShape) -> None:
        self._servers = ServersInTurn(
            servers, ROUTING_TOKENS, "[WARNING] routers use their own choice"
        )
        self._shape = shape

    def fill(self, batch: Batch) -> None:
        """Fill in the servers' recorded experts."""
        batch.asked_routing = True
        turns = [segments(rollout.trained) for rollout in batch.rollouts]
        found = self.look_up([rollout.tokens for rollout in batch.rollouts], turns)
        pairs = zip(batch.rollouts, found, strict=True)
        batch.rollouts = [replace(rollout, experts=experts) for rollout, experts in pairs]

    def of_answer(self, prompt: list[int], token_ids: list[int]) -> NDArray[np.int16] | None:
        """Return the experts of prompt and answer, if a server knows them."""
        whole = np.array([*prompt, *token_ids])
        return self.look_up([whole], [[(len(prompt), len(whole))]])[0]

    def look_up(
        self, sequences: Sequence[NDArray[np.int64]], generated: Sequence[list[tuple[int, int]]]
    ) -> list[NDArray[np.int16] | None]:
        """Return [L, sparse layers, K] for each sequence of length L, -1 for unknown tokens.

        Args:
            generated: half-open ranges of each sequence's completions.
        """
        whole: list[NDArray[np.int16] | None] = [None] * len(sequences)
        turns = []
        for i, ranges in enumerate(generated):
            begin = 0
            for start, end in ranges:
                # A turn's request reads all earlier tokens, so the experts of text between two
                # turns, and of a completion's last token, come with the later turn.
                turns.append(_Turn(i, begin, start, end))
                begin = end - 1

        def question(ask: AsksRouting, part: list[_Turn]) -> list[NDArray[np.int16] | None]:
            answers = ask(*_named(sequences, part), [turn.begin for turn in part])
            return [None if each is None else self._taken(each) for each in answers]

        def take(turn: _Turn, experts: NDArray[np.int16]) -> bool:
            # No experts for the last token: the engine sampled it but never read it. Nor for tokens
            # that a chat template appended, such as a newline.
            if not 0 < len(experts) <= turn.end - 1 - turn.begin:
                return False
            if (into := whole[turn.sequence]) is None:
                shape = (len(sequences[turn.sequence]), *experts.shape[1:])
                into = whole[turn.sequence] = np.full(shape, -1, dtype=np.int16)
            into[turn.begin : turn.begin + len(experts)] = experts
            return True

        self._servers.ask(turns, question, take)
        return whole

    def _taken(self, experts: NDArray[Any]) -> NDArray[np.int16]:
        shape = self._shape
        # Keep the sparse layers only.
        if experts.shape[1] == shape.layers:
            experts = experts[:, list(shape.sparse)]
        layers, chosen = experts.shape[1:]
        fits = (layers, chosen) == (len(shape.sparse), shape.chosen)
        if not fits or (experts >= shape.experts).any():
            raise EngineError(
                f"a server recorded {chosen} experts in each of {layers} layers, numbers up to "
                f"{experts.max()}; this model takes {shape.chosen} of {shape.experts} in "
                f"{len(shape.sparse)} layers"
            )
        taken = experts.astype(np.int16)
        # A token never takes an expert twice, so repeated numbers are unwritten memory. That is
        # alike in all layers, so the first one is enough.
        first = np.sort(taken[:, 0], axis=-1)
        taken[(first[:, 1:] == first[:, :-1]).any(-1)] = -1
        return taken
