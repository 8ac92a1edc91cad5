"""Rollouts of a run's stream, chosen and ordered, as rows for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from atropos_common.protocol.record_base import Number, RecordError
from atropos_common.protocol.record_tail import MAX_LINE_BYTES, kind_words
from atropos_common.protocol.records import parse_line
from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_common.system.files import open_regular
from atropos_tui.monitor.conversation import completion_parts, prompt_parts, tokens_of
from atropos_tui.monitor.patterns import Pattern

SortKey = Literal["newest", "score", "advantage", "lag", "tokens"]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)
_PLACE = re.compile(rb'"attempt": ?(\d{1,9}),.*?"step": ?(\d{1,18})')
_KIND = kind_words(RolloutRecord.KIND)
_HELD = 4
"""Rows kept while reading, times those wanted, before the others are dropped."""


class RolloutMessage(BaseModel):
    """One part of a conversation."""

    role: str
    """system, user, assistant, thinking, call, result or environment."""
    content: str
    turn: int | None
    """Turn of the completion, from 0; None: of the prompt, or not recorded."""


class RolloutToken(BaseModel):
    """One token of a completion."""

    text: str
    logprob_diff: Number | None
    """Trainer minus engine, in nats; None: not generated, or unknown."""
    weight_version: str | None
    """Such as v7, or v7–v8 where the change in between is unknown."""


class RolloutRow(BaseModel):
    """One recorded completion. Its texts are data from a model."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    step: int
    time: float
    env: str
    reward: Number
    advantage: Number
    policy_lag: Number | None
    group_size: int | None
    """Completions of the prompt in the batch."""
    token_count: int | None
    turn_count: int | None
    prompt: str
    completion: str
    messages: list[RolloutMessage]
    tokens: list[RolloutToken]
    """Empty in recordings of earlier releases."""


def row_of(record: RolloutRecord) -> RolloutRow:
    text = record.completion
    messages = [
        RolloutMessage(role=part.role, content=words[part.start : part.end].strip(), turn=number)
        for words, parts in (
            (record.prompt, prompt_parts(record.prompt)),
            (text, completion_parts(record)),
        )
        for part in parts
        for number in [part.turn.number if part.turn else None]
    ]
    tokens = [
        RolloutToken(
            text=text[one.start : one.end],
            logprob_diff=one.diff,
            weight_version=one.version or None,
        )
        for one in tokens_of(record)
    ]
    names = ("step", "time", "env", "reward", "advantage", "policy_lag", "group_size", "turn_count")
    return RolloutRow(
        **{name: getattr(record, name) for name in names},
        token_count=record.tokens,
        prompt=record.prompt,
        completion=text,
        messages=messages,
        tokens=tokens,
    )


def json_line(record: RolloutRecord) -> str:
    """Return one line of JSONL, in ASCII: a terminal obeys some other characters."""
    return json.dumps(row_of(record).model_dump(mode="json"))


@dataclass(frozen=True)
class Choice:
    """Rollouts to read, and their order."""

    step: int | None = None
    env: str | None = None
    pattern: Pattern | None = None
    sort: SortKey = "newest"
    reverse: bool = False
    limit: int = 0
    """0: all."""

    def takes(self, record: RolloutRecord) -> bool:
        if self.step not in (None, record.step) or self.env not in (None, record.env):
            return False
        texts = (record.prompt, record.completion)
        return self.pattern is None or any(self.pattern.search(text) for text in texts)

    def ordered(self, found: list[RolloutRecord]) -> list[RolloutRecord]:
        """Sort: the newest first, otherwise the lowest value first; unknown values last."""
        kept = sorted(found, key=_newest)
        if (value := _VALUES.get(self.sort)) is not None:
            known = [one for one in kept if _is_known(value(one))]
            known.sort(key=value, reverse=self.reverse)  # type: ignore[arg-type]
            kept = known + [one for one in kept if not _is_known(value(one))]
        elif self.reverse:
            kept.reverse()
        return kept[: self.limit] if self.limit else kept


def _newest(record: RolloutRecord) -> tuple[int, int]:
    return -record.step, record.seq


def _is_known(value: float | None) -> bool:
    return value is not None and value == value  # NaN differs from itself


_VALUES: dict[SortKey, Callable[[RolloutRecord], float | None]] = {
    "score": lambda record: record.reward,
    "advantage": lambda record: record.advantage,
    "lag": lambda record: record.policy_lag,
    "tokens": lambda record: record.tokens,
}


def read_rollouts(path: Path, choice: Choice) -> list[RolloutRecord]:
    """Read the chosen rollouts of a trainer's stream that still count; none without a file."""
    first_steps = _first_steps(path)
    found: list[RolloutRecord] = []
    for line in _lines(path):
        try:
            record = parse_line(line)
        except RecordError:
            continue
        if not isinstance(record, RolloutRecord) or not choice.takes(record):
            continue
        if any(later > record.attempt and record.step >= at for later, at in first_steps.items()):
            continue
        found.append(record)
        if choice.limit and len(found) >= _HELD * choice.limit + 100:
            found = choice.ordered(found)
    return choice.ordered(found)


def _first_steps(path: Path) -> dict[int, int]:
    # A later attempt repeats the steps after its checkpoint.
    first: dict[int, int] = {}
    for line in _lines(path):
        if place := _PLACE.search(line):
            attempt, step = int(place[1]), int(place[2])
            first[attempt] = min(first.get(attempt, step), step)
    return first


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            while line := file.readline(MAX_LINE_BYTES):
                if line.endswith(b"\n") and any(words in line[:400] for words in _KIND):
                    yield line
    except OSError:
        return
