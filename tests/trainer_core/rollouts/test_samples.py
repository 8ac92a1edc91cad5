"""Samples in the records: turns, logprob differences, weight versions, and their limits."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from atropos_common.protocol.bridge import VersionSpan
from atropos_common.protocol.token_columns import TokenSpan, pack, unpack
from atropos_common.protocol.trainer_records import RolloutRecord
from trainer_core.ranks.world import ALONE
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import pack as pack_rows
from trainer_core.rollouts.samples import (
    FIRST_TURNS,
    LEFT_OUT,
    MARKER_CHARS,
    MOST_TURNS,
    TEXT_CHARS,
    Sample,
    Samples,
    TextReader,
    sample_fields,
)
from trainer_core.rollouts.source import Lag

PROMPT = 3


def episode(turns: list[int], seed: int = 0) -> Rollout:
    """A prompt of `PROMPT` tokens, then turns of the model and of the environment."""
    rng = np.random.default_rng(seed)
    marks = [False] * PROMPT
    marks += chain.from_iterable([at % 2 == 0] * count for at, count in enumerate(turns))
    length = len(marks)
    values = np.full(length, -1.0, np.float32)
    return Rollout(
        tokens=rng.integers(2, 12, length),
        trained=np.array(marks),
        logprobs=values,
        advantages=np.ones(length, np.float32),
        temperature=1.0,
        score=0.5,
        env="e",
        digests=(),
    )


def written(rollout: Rollout, reader: TextReader, lag: Lag | None = None) -> RolloutRecord:
    count = int(rollout.trained.sum())
    sample = Sample(0, 8, np.linspace(-1.5, -0.5, count).astype(np.float32))
    record = RolloutRecord(step=1, **sample_fields(rollout, sample, lag, reader))
    assert sum(turn.chars for turn in record.turns) == len(record.completion)
    assert RolloutRecord.model_validate_json(record.to_line()) == record
    return record


@pytest.fixture(scope="module")
def reader(base: Path) -> TextReader:
    return TextReader(str(base))


def test_turns_and_differences_fit_the_text(reader: TextReader) -> None:
    rollout = episode([4, 3, 2])
    lag = Lag(2, spans=(VersionSpan(5, 5, 4, 5.0), VersionSpan(5, 6, 2, 5.5)))
    record = written(rollout, reader, lag)
    assert [turn.number for turn in record.turns] == [0, 1, 2]
    assert [turn.tokens for turn in record.turns] == [4, 3, 2]
    assert [turn.oldest for turn in record.turns] == [5, None, 5]
    assert record.turns[2].newest_tokens == 1
    spans = unpack(record.token_chars, record.token_diffs, record.completion)
    assert len(spans) == 9 and record.turn_count == 3
    diffs = [span.diff for span in spans]
    assert diffs[4:7] == [None] * 3, "the environment's tokens have no logprob"
    assert diffs[0] == pytest.approx(-0.5) and diffs[8] == pytest.approx(0.5)


def test_an_episode_of_200_turns_keeps_its_ends_within_the_limits(reader: TextReader) -> None:
    short, long = written(episode([9] * 200), reader), written(episode([400] * 200), reader)
    assert len(short.turns) == MOST_TURNS and short.turns[-1].number == 199
    assert [turn.number for turn in short.turns][: FIRST_TURNS + 1] == [*range(8), 160]
    for record in (short, long):
        assert record.turn_count == 200 and record.turns[-1].number == 199
        assert "characters left out" in record.completion
        assert len(record.completion) <= 2 * TEXT_CHARS
        assert unpack(record.token_chars, record.token_diffs, record.completion)
        assert len(record.to_line()) < 60_000
    assert len(LEFT_OUT.format(10**12)) <= MARKER_CHARS


def test_of_one_long_answer_both_ends_stay(reader: TextReader) -> None:
    rollout = episode([9000])
    record = written(rollout, reader)
    whole = reader.read(rollout.tokens[PROMPT:])
    assert len(record.completion) <= TEXT_CHARS and len(record.turns) == 1
    assert record.completion[:200] == whole[:200] and record.completion[-900:] == whole[-900:]


def test_the_logprobs_kept_are_those_of_the_right_rollout(reader: TextReader) -> None:
    rollouts = [episode([3 + at, 2, 4], seed=at) for at in range(6)]
    samples = Samples(rollouts, [(4, 6), (1, 6)])
    for row in pack_rows(rollouts, 24):
        samples.take(row, row.labels.float())
        samples.take(row, torch.zeros(len(row.labels)))  # a second pass with other weights
    for sample in samples.known(ALONE.gather):
        rollout = rollouts[sample.index]
        assert sample.logprobs is not None
        assert sample.logprobs.tolist() == rollout.tokens[rollout.trained].tolist()


def test_a_character_of_several_tokens_counts_once() -> None:
    class Bytes:
        """Decodes as byte-level tokenizers do: one token, one byte."""

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

        def batch_decode(self, many: list[list[int]]) -> list[str]:
            return [self.decode(ids) for ids in many]

    reader = TextReader.__new__(TextReader)
    reader._tokenizer, reader._texts = Bytes(), {}
    text = "a€😀ü!"
    ids = list(text.encode())
    assert reader.lengths(ids, text) == [1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1]


def test_columns_survive_odd_values_and_refuse_those_that_do_not_fit() -> None:
    spans = [TokenSpan(3, 0.25), TokenSpan(0, None), TokenSpan(700, -99.0), TokenSpan(1, np.nan)]
    lengths, diffs = pack(spans)
    found = unpack(lengths, diffs, "x" * 704)
    assert sum(span.chars for span in found) == 704
    assert found[0] == (3, 0.25) and found[1].diff is None and found[-1].diff is None
    assert found[2].diff == pytest.approx(-32.767)
    assert not unpack(lengths, diffs, "x" * 703)
    assert not unpack("!", diffs, "x") and not unpack(lengths, "", "x" * 704)
