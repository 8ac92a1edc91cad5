"""From recorded turns to sequences that a trainer takes: tokens, masks, logprobs."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from atropos_common.protocol.bridge import RecordedTurn
from atropos_envs.hosting.rollout import PROMPT

# Logprob of a token that the policy did not sample; a real one is at most 0.
UNSAMPLED = 1.0


@dataclass(eq=False)
class Sequence:
    """One path through a conversation."""

    temperature: float
    tokens: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    """The token where it trains, else -100."""
    logprobs: list[float] = field(default_factory=list)
    """Nats where the token trains, else 1."""
    turns: list[int] = field(default_factory=list)
    """Numbers of the turns that it trains."""
    finish_reason: str = ""
    """Finish reason of its last turn."""

    @property
    def trained(self) -> int:
        return len(self.masks) - self.masks.count(PROMPT)

    def extend(self, number: int, turn: RecordedTurn) -> None:
        self._add_prompt(turn.prompt_ids)
        self.tokens += turn.token_ids
        self.masks += turn.token_ids
        self.logprobs += turn.logprobs
        self.turns.append(number)
        self.finish_reason = turn.finish_reason

    def _add_prompt(self, ids: Items[int]) -> None:
        self.tokens += ids
        self.masks += [PROMPT] * len(ids)
        self.logprobs += [UNSAMPLED] * len(ids)

    @classmethod
    def branch(cls, ids: Items[int], temperature: float) -> Sequence:
        """Return a sequence that begins with `ids`, which it does not train."""
        new = cls(temperature)
        new._add_prompt(ids)
        return new


def sequences_of(turns: Items[RecordedTurn]) -> list[Sequence]:
    """Return one sequence for each branch; each turn trains in exactly one of them."""
    made: list[Sequence] = []
    # Turn -> its sequence, and the number of that sequence's tokens up to the turn's end.
    ends: list[tuple[Sequence, int]] = []
    for number, turn in enumerate(turns):
        before, length = (None, 0) if turn.after is None else ends[turn.after]
        # A trainer knows one temperature of a sequence.
        if before and len(before.tokens) == length and before.temperature == turn.temperature:
            sequence = before
        else:
            begin = before.tokens[:length] if before else []
            sequence = Sequence.branch(begin, turn.temperature)
            made.append(sequence)
        sequence.extend(number, turn)
        ends.append((sequence, len(sequence.tokens)))
    return [sequence for sequence in made if sequence.trained]
