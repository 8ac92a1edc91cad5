"""Rollouts in a file: written while a run trains on them, read back where there is neither run-api nor a server.

One JSON object a line, in run-api's own words: `{"batch": [GROUP, ...]}` as `GET /batch` answers, which is what one
step trains on; or a GROUP as environments send it (`tokens`, `masks`, `scores`, `inference_logprobs`, ...), of which as
many make up a batch as hold `batch_size` x `gradient_accumulation_steps` sequences. A recorder adds what the run's
servers knew, so that a replay knows it too; a file made by hand needs none of it:

    step            that trained on the batch, from 1; a line replaces those before it with the same or a later one
    weight_version  that the policy held then
    lag_bounds      environment -> largest policy lag that trained then
    versions        digest of a completion -> its oldest and newest weight version
    logprobs        digests of a prompt and a completion that came without -> `KnownLogprobs`
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from atropos_common.bridge import KnownLogprobs, prompt_digest
from atropos_common.files import cut_torn_line, open_regular
from trainer_core.config import TrainingConfig
from trainer_core.errors import RolloutsEnd, UsageError
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.client import RawBatch
from trainer_core.rollouts.source import LagMeter, Lags


class Witness(Protocol):
    """Who knows what of completions: a server, or what was recorded of one."""

    def versions(self, digests: list[str]) -> list[tuple[int, int] | None]:
        """Oldest and newest weight version of each completion; null for one not known."""

    def logprobs(self, prompts: list[str], completions: list[list[int]]) -> list[KnownLogprobs | None]:
        """What it computed when it made each completion, by the digest of its prompt and its tokens."""


class RecordedLine(msgspec.Struct, omit_defaults=True):
    """One line of the file; a group's other fields are passed over."""

    batch: list[Any] | None = None
    step: int | None = None
    weight_version: int | None = None
    lag_bounds: dict[str, int] = {}
    versions: dict[str, tuple[int, int]] = {}
    logprobs: dict[str, dict[str, Any]] = {}


class _Head(msgspec.Struct):
    """What the first reading of a line needs."""

    batch: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None
    step: int | None = None


class _Place(NamedTuple):
    """Where a batch lies in the file."""

    offsets: list[int]
    """Of its line, or of the lines of its groups."""
    step: int


class RecordedRollouts:
    """The batches of a file, one after another: a `RolloutSource`, and a `Witness` of the batch that came last."""

    def __init__(self, path: str | Path, batch_size: int) -> None:
        """Args:
            batch_size: sequences of a batch that is made of lines with one group each.

        Raises:
            UsageError: no such file, a line of it that is no batch and no group, or no batch at all.
        """
        self.path = Path(path)
        try:
            self._file = open_regular(self.path, unlinked=0)
        except OSError as error:
            raise UsageError(f"--rollouts {path}: {error.strerror}") from None
        self._places = _places(self._file, self.path, batch_size)
        if not self._places:
            raise UsageError(f"--rollouts {path}: not one batch of {batch_size} sequences in it")
        self._digest = blake2b(self._read(self._places[0].offsets[0]), digest_size=8).hexdigest()
        """Digest of the first line, by which a checkpoint recognises the file."""
        self._next: int | None = None
        self._line = RecordedLine()
        first, last = self._places[0].step, self._places[-1].step
        print(f"✓ Rollouts of {self.path}: {len(self._places)} batches, of steps {first} to {last}")

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """The batch after the last one; at first the one that belongs to the optimizer step after `step`.

        Raises:
            RolloutsEnd: there is none left.
        """
        if self._next is None:
            self._next = self._first(step)
        if self._next >= len(self._places):
            raise RolloutsEnd(f"{self.path} holds no more rollouts")
        lines = [self._read(offset) for offset in self._places[self._next].offsets]
        self._next += 1
        self._line = msgspec.json.decode(lines[0], type=RecordedLine)
        return self._line.batch if self._line.batch is not None else [msgspec.json.decode(line) for line in lines]

    def position(self) -> dict[str, Any]:
        """The place of the next batch, for a checkpoint: lines that trained nothing make it differ from the step."""
        return {"batch": self._next, "file": self._digest}

    def go_on_from(self, position: dict[str, Any] | None) -> None:
        """Start at the `position` of a checkpoint; in another file, or without one, the step decides."""
        if position and position["file"] == self._digest:
            self._next = position["batch"]

    def _first(self, step: int) -> int:
        """Which batch comes first when `step` optimizer steps are done: that of the step after them, or as many further
        on where the record itself begins later."""
        before = self._places[0].step - 1
        return bisect_left([place.step for place in self._places], step + 1 if step >= before else before + step + 1)

    def _read(self, offset: int) -> bytes:
        self._file.seek(offset)
        return self._file.readline()

    @property
    def lag_bounds(self) -> dict[str, int]:
        """The largest policy lag of each environment's rollouts when the last batch was recorded."""
        return self._line.lag_bounds

    @property
    def weight_version(self) -> int | None:
        """What the policy held when it trained on the last batch; null where nobody wrote that down."""
        return self._line.weight_version

    def versions(self, digests: list[str]) -> list[tuple[int, int] | None]:
        """As a `Witness`."""
        return [self._line.versions.get(digest) for digest in digests]

    def logprobs(self, prompts: list[str], completions: list[list[int]]) -> list[KnownLogprobs | None]:
        """As a `Witness`."""
        found = (self._line.logprobs.get(_name(*pair)) for pair in zip(prompts, completions, strict=True))
        return [None if known is None else KnownLogprobs.model_validate(known) for known in found]

    def close(self) -> None:
        self._file.close()


class RecordedLags(LagMeter):
    """Policy lag as it was when the rollouts were recorded: the versions in the file are that run's."""

    def __init__(self, source: RecordedRollouts) -> None:
        super().__init__([source.versions])
        self._source = source

    def measure(self, rollouts: list[Rollout], version: int) -> Lags:
        recorded = self._source.weight_version
        return super().measure(rollouts, version if recorded is None else recorded)

    def bounds(self, derived: dict[str, int]) -> dict[str, int]:
        """The bounds that held when the batch was recorded: they depend on the mode of then."""
        return self._source.lag_bounds


def _places(file: BinaryIO, path: Path, batch_size: int) -> list[_Place]:
    """Where each batch lies, in the order of training."""
    places: list[_Place] = []
    groups: list[int] = []
    held = offset = 0
    for number, line in enumerate(file, 1):
        head, start = _head(line, path, number), offset
        offset += len(line)
        if head is None:
            continue
        if head.batch is not None:
            step = (places[-1].step + 1 if places else 1) if head.step is None else head.step
            while places and places[-1].step >= step:
                places.pop()
            places.append(_Place([start], step))
            continue
        groups.append(start)
        held += len(head.tokens or [])
        if held >= batch_size:
            places.append(_Place(groups, places[-1].step + 1 if places else 1))
            groups, held = [], 0
    if groups:
        print(f"[WARNING] {path}: its last {held} sequences make up no batch of {batch_size} and are left out")
    return places


def _head(line: bytes, path: Path, number: int) -> _Head | None:
    """What kind of line it is; null for an empty one, and for one that its writer did not finish.

    Raises:
        UsageError: neither a batch nor a group.
    """
    if not line.strip():
        return None
    try:
        head = msgspec.json.decode(line, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not line.endswith(b"\n"):
            print(f"[WARNING] {path}: line {number} breaks off and is left out")
            return None
        if not_json := re.search(rb'"(\w+)":[^"]*?(NaN|-?Infinity)', line):
            field, value = (part.decode() for part in not_json.groups())
            raise UsageError(
                f"--rollouts {path}, line {number}: {field} holds {value}, which JSON cannot hold. fix: leave that "
                "group out, or put a number there (json.dumps writes NaN unless allow_nan is False)"
            ) from None
        raise UsageError(f"--rollouts {path}, line {number}: no batch and no group of rollouts ({error})") from None
    if head.batch is None and head.tokens is None:
        raise UsageError(f'--rollouts {path}, line {number}: neither {{"batch": [...]}} nor a group with `tokens`')
    return head


class Recorder:
    """Appends each batch that trains, with what the servers said of it."""

    def __init__(self, path: str | Path) -> None:
        """Raises: UsageError: the file cannot be written."""
        self.path = Path(path)
        self._line = RecordedLine()
        self._failed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            cut_torn_line(self._file)
        except OSError as error:
            raise UsageError(f"--record-rollouts {path}: {error.strerror}") from None

    def write(self, step: int, version: int, batch: RawBatch, lag_bounds: dict[str, int] | None = None) -> None:
        """The batch that optimizer step `step` trains on, with weights of `version`. What cannot be written is said
        once; training goes on."""
        self._line.batch, self._line.step, self._line.weight_version = batch, step, version
        self._line.lag_bounds = lag_bounds or {}
        try:
            left = memoryview(msgspec.json.encode(self._line) + b"\n")
            while left:
                left = left[os.write(self._file, left) :]
        except (OSError, RecursionError) as error:
            cut_torn_line(self._file)
            if not self._failed:
                print(f"[WARNING] rollouts are not recorded whole: {self.path}: {error}")
            self._failed = True
        self._line = RecordedLine(versions={}, logprobs={})

    def overhear(self, server: Witness) -> Witness:
        """`server`, whose answers are remembered for the next `write`."""
        return _Overheard(server, self)

    def heard_versions(self, digests: list[str], answers: list[tuple[int, int] | None]) -> None:
        pairs = zip(digests, answers, strict=True)
        self._line.versions |= {digest: pair for digest, pair in pairs if pair is not None}

    def heard_logprobs(self, names: list[str], answers: list[KnownLogprobs | None]) -> None:
        pairs = zip(names, answers, strict=True)
        self._line.logprobs |= {name: known.model_dump() for name, known in pairs if known is not None}

    def close(self) -> None:
        os.close(self._file)


class _Overheard:
    """A witness whose answers a recorder writes down."""

    def __init__(self, server: Witness, recorder: Recorder) -> None:
        self._server, self._recorder = server, recorder

    def versions(self, digests: list[str]) -> list[tuple[int, int] | None]:
        answers = self._server.versions(digests)
        self._recorder.heard_versions(digests, answers)
        return answers

    def logprobs(self, prompts: list[str], completions: list[list[int]]) -> list[KnownLogprobs | None]:
        answers = self._server.logprobs(prompts, completions)
        names = [_name(*pair) for pair in zip(prompts, completions, strict=True)]
        self._recorder.heard_logprobs(names, answers)
        return answers


def _name(prompt: str, completion: list[int]) -> str:
    return f"{prompt} {prompt_digest(completion)}"


def open_rollouts(config: TrainingConfig) -> RecordedRollouts:
    """The file that `config.rollouts` names."""
    return RecordedRollouts(config.rollouts or "", config.sequences_per_step)
