"""Rollouts of a step whose text goes into the records: their choice, turns and tokens.

`Samples` also keeps the logprobs of the rollouts that `compared.py` chooses.

A record is bounded: `TEXT_CHARS` of prompt and completion, and `MOST_TURNS` turns. What exceeds
them is left out in the middle, because a reader needs how an episode begins and how it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atropos_common.protocol.bridge import VersionSpan
from atropos_common.protocol.token_columns import TokenSpan, pack
from atropos_common.protocol.trainer_records import RolloutTurn
from trainer_core.rollouts.batch import Rollout, segments
from trainer_core.rollouts.packing import PackedRow
from trainer_core.rollouts.source import Lag

TEXT_CHARS = 4000
"""Limit of a prompt and of a completion, in characters; several turns also get what the prompt
leaves of its part."""
MOST_TURNS = 48
"""Limit of the turns of a completion, the environment's included."""
FIRST_TURNS = 8
"""Turns of these that are its first."""
FIRST_SHARE = 0.25
"""Part of a completion's characters that its beginning gets."""
LEFT_OUT = "\n… {:,} characters left out …\n"
MARKER_CHARS = 48
"""Limit of `LEFT_OUT`, in characters."""
MOST_PIECES = 4
"""Longest run of tokens that make one character, in tokens."""


Found = dict[int, NDArray[np.float32]]
"""Index of a rollout -> logprobs of its trained tokens."""


@dataclass(frozen=True)
class Sample:
    """One rollout of a batch that is written as text."""

    index: int
    """Index in the batch."""
    group_size: int
    logprobs: NDArray[np.float32] | None = None
    """Trainer's logprobs of the trained tokens, in nats; None: not computed."""


@dataclass
class Samples:
    """The samples of one batch, and the trainer's logprobs of their tokens."""

    rollouts: Sequence[Rollout]
    chosen: list[tuple[int, int]]
    """Index and group size of each sample."""
    compared: Sequence[int] = ()
    """Indices of further rollouts whose logprobs are kept."""
    _found: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # By their tokens: minibatches replace the rollouts, and keep this array.
        wanted = {*self.compared, *(index for index, _ in self.chosen)}
        self._wanted = {id(self.rollouts[index].tokens): index for index in wanted}

    def take(self, row: PackedRow, logprobs: torch.Tensor) -> None:
        """Keep the logprobs of the samples in a row.

        Args:
            logprobs: [T] of the row's labels.
        """
        # Only the first pass counts: later ones of the same batch have other weights.
        start = 0
        for member in row.members:
            end = start + int(member.trained.sum())
            index = self._wanted.get(id(member.tokens))
            if index is not None and index not in self._found and end <= len(logprobs):
                self._found[index] = logprobs[start:end].detach().clone()
            start = end

    def known(self, gather: Callable[[Found], list[Found]]) -> list[Sample]:
        """Return the samples; `gather` returns the logprobs that each rank computed."""
        found = self._gathered([index for index, _ in self.chosen], gather)
        return [Sample(index, size, found.get(index)) for index, size in self.chosen]

    def first_logprobs(self, gather: Callable[[Found], list[Found]], most: int) -> Found:
        """Return up to `most` logprobs of each of `compared` that have been computed."""
        return self._gathered(self.compared, gather, most)

    def _gathered(
        self, wanted: Sequence[int], gather: Callable[[Found], list[Found]], most: int | None = None
    ) -> Found:
        if not wanted:
            return {}
        known = {index: self._found[index][:most] for index in wanted if index in self._found}
        own: Found = {}
        if known:  # one copy from the device for all
            whole = torch.cat([*known.values()]).float().cpu().numpy()
            ends = np.cumsum([len(part) for part in known.values()])[:-1]
            own = dict(zip(known, np.split(whole, ends), strict=True))
        return {index: value for part in gather(own) for index, value in part.items()}


def sampled(rollouts: Sequence[Rollout], wanted: int, step: int) -> list[tuple[int, int]]:
    """Choose `wanted` rollouts to write as text; return indices and sizes of their groups."""
    # Whole groups, since a reader compares within a group; of the last one as many as fit, from
    # best to worst. Flat groups teach nothing, so they come last.
    groups: dict[bytes, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.tokens[: rollout.prompt_length].tobytes(), []).append(index)
    # Rotate by step, so that successive records do not always show the same prompts.
    rotated = [list(groups.values())[(at + step) % len(groups)] for at in range(len(groups))]
    found: list[tuple[int, int]] = []
    for group in sorted(
        rotated, key=lambda group: len({rollouts[index].score for index in group}) < 2
    ):
        by_score = sorted(group, key=lambda index: -rollouts[index].score)
        # Sorted by score only for the choice; the records keep the order of the batch.
        kept = set(
            by_score
            if len(group) <= wanted - len(found)
            else _spread(by_score, wanted - len(found))
        )
        found += [(index, len(group)) for index in group if index in kept]
        if len(found) >= wanted:
            break
    return found


def _spread(ranked: Sequence[int], wanted: int) -> list[int]:
    return [ranked[i * (len(ranked) - 1) // max(1, wanted - 1)] for i in range(wanted)]


class TextReader:
    """Decodes token ids with the model's tokenizer; without one it prints the ids."""

    def __init__(self, model_name: str) -> None:
        from transformers import AutoTokenizer

        self._texts: dict[int, str] = {}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
        except (OSError, ValueError, ImportError, KeyError) as error:
            print(
                f"No tokenizer in {model_name} ({type(error).__name__}): rollouts are shown "
                f"as token ids"
            )
            self._tokenizer = None

    def read(self, tokens: Any) -> str:
        ids = [int(t) for t in tokens]
        return str(self._tokenizer.decode(ids) if self._tokenizer else " ".join(map(str, ids)))

    def lengths(self, tokens: Any, text: str) -> list[int]:
        """Return the characters that each token adds to `text`; empty if that is unclear."""
        ids = [int(t) for t in tokens]
        if self._tokenizer is None:
            return []
        # One call for all new ids: decoding them one by one costs more than the whole text.
        if new := sorted(set(ids) - self._texts.keys()):
            self._texts |= zip(new, self._tokenizer.batch_decode([[i] for i in new]), strict=True)
        pieces = _characters(ids, [self._texts[token] for token in ids], self._tokenizer.decode)
        if sum(pieces) == len(text):
            return pieces
        # Some tokenizers drop the space before a text's first word, so a token alone is too short.
        pieces = _in_context(ids, self._tokenizer.decode)
        return pieces if sum(pieces) == len(text) else []


Decode = Callable[[list[int]], str]


def _characters(ids: list[int], texts: list[str], decode: Decode) -> list[int]:
    # A character of several tokens counts for the last of them.
    counts = [len(text) for text in texts]
    at = 0
    while at < len(ids):
        if "\ufffd" in texts[at]:
            for end in range(at + 2, min(at + MOST_PIECES, len(ids)) + 1):
                if "\ufffd" not in (whole := decode(ids[at:end])):
                    counts[at:end] = [0] * (end - at - 1) + [len(whole)]
                    at = end - 1
                    break
        at += 1
    return counts


def _in_context(ids: list[int], decode: Decode) -> list[int]:
    # What a token adds behind its predecessor.
    first = [len(decode(ids[:1]))] if ids else []
    return first + [
        len(decode([before, token])) - len(decode([before])) for before, token in pairwise(ids)
    ]


class _Piece(NamedTuple):
    """A token, or another part of a turn."""

    text: str
    diff: float | None
    turn: int


def sample_fields(
    rollout: Rollout, sample: Sample, lag: Lag | None, reader: TextReader
) -> dict[str, Any]:
    """Fields of a `rollout` record."""
    start = rollout.prompt_length
    trained = rollout.advantages[rollout.trained]
    prompt = _cut_text(reader.read(rollout.tokens[:start]))
    runs = _runs(rollout.trained, start)
    pieces = list(_pieces(rollout, runs, _differences(rollout, sample), reader))
    limit = TEXT_CHARS if len(runs) < 2 else 2 * TEXT_CHARS - len(prompt)
    kept = _shortened(pieces, limit, len(runs))
    lengths, diffs = pack(TokenSpan(len(one.text), one.diff) for one in kept)
    return {
        "env": rollout.env,
        "prompt": prompt,
        "completion": "".join(one.text for one in kept),
        "reward": rollout.score,
        # A rollout without a trained token has no mean.
        "advantage": float(trained.mean(dtype=np.float64)) if len(trained) else 0.0,
        "policy_lag": None if lag is None else lag.oldest,
        "tokens": len(rollout.tokens) - start,
        "group_size": sample.group_size,
        "turns": _turns(kept, runs, rollout, lag),
        "turn_count": len(runs),
        "token_chars": lengths,
        "token_diffs": diffs,
    }


def _runs(trained: NDArray[np.bool_], start: int) -> list[tuple[int, int]]:
    """Half-open ranges of the turns from `start` on: the model's, the environment's, and so on."""
    edges = np.flatnonzero(np.diff(trained[start:].astype(np.int8))) + start + 1
    bounds = [start, *map(int, edges), len(trained)]
    return [(a, b) for a, b in pairwise(bounds) if b > a]


def _differences(rollout: Rollout, sample: Sample) -> list[float | None]:
    # [L]: trainer minus engine, in nats, where both are known.
    found: list[float | None] = [None] * len(rollout.tokens)
    where = np.flatnonzero(rollout.trained)
    if sample.logprobs is not None and len(sample.logprobs) == len(where):
        for at, value in zip(where, sample.logprobs - rollout.logprobs[where], strict=True):
            found[at] = float(value) if np.isfinite(value) else None
    return found


def _pieces(
    rollout: Rollout,
    runs: Sequence[tuple[int, int]],
    diffs: Sequence[float | None],
    reader: TextReader,
) -> Iterator[_Piece]:
    for turn, (a, b) in enumerate(runs):
        text = reader.read(rollout.tokens[a:b])
        lengths = reader.lengths(rollout.tokens[a:b], text)
        if not lengths:  # one piece for the whole turn
            yield _Piece(text, None, turn)
            continue
        end = 0
        for length, diff in zip(lengths, diffs[a:b], strict=True):
            end += length
            yield _Piece(text[end - length : end], diff, turn)


def _cut_text(text: str, limit: int = TEXT_CHARS) -> str:
    pieces = _shortened([_Piece(text, None, 0)], limit, 1)
    return "".join(one.text for one in pieces)


def _shortened(pieces: list[_Piece], limit: int, turns: int) -> list[_Piece]:
    """Leave out the middle: at most `limit` characters and `MOST_TURNS` turns stay."""
    whole = sum(len(one.text) for one in pieces)
    if whole <= limit and turns <= MOST_TURNS:
        return pieces
    room = limit - MARKER_CHARS
    first = list(_from_start(pieces, int(room * FIRST_SHARE), FIRST_TURNS))
    mirrored = (_Piece(p.text[::-1], p.diff, turns - 1 - p.turn) for p in reversed(pieces))
    rest = room - sum(len(one.text) for one in first)
    last = [
        _Piece(p.text[::-1], p.diff, turns - 1 - p.turn)
        for p in _from_start(mirrored, rest, MOST_TURNS - FIRST_TURNS)
    ][::-1]
    missing = whole - sum(len(one.text) for one in (*first, *last))
    return [*first, _Piece(LEFT_OUT.format(missing), None, first[-1].turn if first else 0), *last]


def _from_start(pieces: Iterable[_Piece], room: int, turns: int) -> Iterator[_Piece]:
    for piece in pieces:
        if room <= 0 or piece.turn >= turns:
            return
        yield piece._replace(text=piece.text[:room])
        room -= len(piece.text)


def _turns(
    kept: Sequence[_Piece], runs: Sequence[tuple[int, int]], rollout: Rollout, lag: Lag | None
) -> list[RolloutTurn]:
    # The servers name the versions of each turn with logprobs; both lists have the same order.
    made = segments(rollout.trained)
    spans = lag.spans if lag is not None else ()
    known = dict(zip(made, spans, strict=True)) if len(made) == len(spans) else {}
    found = []
    for turn, pieces in groupby(kept, key=lambda one: one.turn):
        a, b = runs[turn]
        span: VersionSpan | None = known.get((a, b))
        chars = sum(len(one.text) for one in pieces)
        found.append(
            RolloutTurn(turn, chars, b - a, None, None)
            if span is None
            else RolloutTurn(turn, chars, b - a, span.oldest, span.newest, _newest_tokens(span))
        )
    return found


def _newest_tokens(span: VersionSpan) -> int | None:
    # From the mean, which decides it only for two neighbouring versions.
    if span.newest != span.oldest + 1 or not span.tokens:
        return None
    return round((span.mean - span.oldest) * span.tokens)
