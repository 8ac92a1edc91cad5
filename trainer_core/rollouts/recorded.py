"""Rollouts in a file: recorded while a run trains on them, and replayed without a server.

One JSON object a line: `{"batch": [GROUP, ...]}` of one step, or a GROUP. Consecutive groups make
up a batch of `batch_size` x `gradient_accumulation_steps` sequences. A recorder adds to a batch:

    step            that trained on it, from 1; replaces earlier lines of the same or a later step
    weight_version  of the policy at that step
    lag_bounds      environment -> largest allowed policy lag at that step
    versions        digest of a completion -> its oldest and newest weight version, number of
                    tokens, and their mean version
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

from atropos_common.protocol.bridge import KnownLogprobs, VersionSpan, prompt_digest
from atropos_common.system.files import cut_torn_line, open_regular
from trainer_core.config import TrainingConfig
from trainer_core.errors import RolloutsEnd, UsageError
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.client import RawBatch
from trainer_core.rollouts.source import LagMeter, Lags


class Provenance(Protocol):
    """Source of facts about completions: a server, or a recording of it."""

    def versions(self, digests: list[str]) -> list[VersionSpan | None]:
        """Return the weight versions of each completion."""

    def logprobs(
        self, prompts: list[str], completions: list[list[int]]
    ) -> list[KnownLogprobs | None]:
        """Return the engine's logprobs of each completion."""


class RecordedLine(msgspec.Struct, omit_defaults=True):
    """One line of the file; other fields are skipped."""

    batch: list[Any] | None = None
    step: int | None = None
    weight_version: int | None = None
    lag_bounds: dict[str, int] = {}
    versions: dict[str, VersionSpan] = {}
    logprobs: dict[str, dict[str, Any]] = {}


class _Head(msgspec.Struct):
    batch: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None
    step: int | None = None


class _Place(NamedTuple):
    offsets: list[int]
    """Offsets in bytes of its line, or of its groups' lines."""
    end: int
    """Offset after its last line."""
    step: int


class RecordedRollouts:
    """Batches of a file in order, and the `Provenance` of the last one."""

    def __init__(self, path: str | Path, batch_size: int) -> None:
        """Index the file.

        Args:
            batch_size: sequences of a batch made of single groups.

        Raises:
            UsageError: the file is missing, has an invalid line, or no complete batch.
        """
        self.path = Path(path)
        self.name = str(path)
        self._batch_size = batch_size
        try:
            self._file = open_regular(self.path, unlinked=0)
        except OSError as error:
            raise UsageError(f"--rollouts {path}: {error.strerror}") from None
        self._places = _places(self._file, self.path, batch_size)
        if not self._places:
            what = f"it has no complete batch of {batch_size} sequences"
            raise UsageError(f"--rollouts {path}: {what}")
        # Only the first line: the file may still grow.
        self._digest = blake2b(self._read(self._places[0].offsets[0]), digest_size=8).hexdigest()
        """Digest of the first line, by which a checkpoint recognizes the file."""
        self._next: int | None = None
        self._offset: int | None = None
        """Offset after the last batch; None before the first one."""
        self._line = RecordedLine()
        first, last = self._places[0].step, self._places[-1].step
        print(f"✓ Rollouts of {self.path}: {len(self._places)} batches, steps {first} to {last}")

    def next_batch(self, step: int, on_idle: Callable[[], None] = lambda: None) -> RawBatch:
        """Return the batch after the last one, at first the one after `step`."""
        if self._next is None:
            self._next = self._first(step)
        if self._next >= len(self._places):
            raise RolloutsEnd(f"{self.path} has no more rollouts")
        place = self._places[self._next]
        lines = [self._read(offset) for offset in place.offsets]
        self._next, self._offset = self._next + 1, place.end
        # The fields of a group are its environment's, whatever they are called.
        if msgspec.json.decode(lines[0], type=_Head).batch is None:
            self._line = RecordedLine()
            return [msgspec.json.decode(line) for line in lines]
        try:
            self._line = msgspec.json.decode(lines[0], type=RecordedLine)
        except msgspec.ValidationError as error:
            raise UsageError(f"--rollouts {self.path}: step {place.step}: {error}") from None
        return self._line.batch or []

    def position(self) -> dict[str, Any]:
        """Position of the next batch, for a checkpoint."""
        # Not derived from the step: batches that trained nothing have none. In bytes, so that it
        # also holds for another batch size.
        return {"offset": self._offset, "file": self._digest}

    def go_on_from(self, position: dict[str, Any] | None) -> None:
        """Start at a checkpoint's `position`, if it is of this file."""
        if not position or position["file"] != self._digest or position["offset"] is None:
            return
        self._offset = position["offset"]
        starts = [place.offsets[0] for place in self._places]
        if self._offset in (*starts, self._places[-1].end):
            self._next = bisect_left(starts, self._offset)
            return
        # Single groups, of which a batch had another number before.
        self._places = _places(self._file, self.path, self._batch_size, self._offset)
        self._next = 0

    def _first(self, step: int) -> int:
        before = self._places[0].step - 1  # steps done before the recording began
        after = step if step >= before else before + step
        return bisect_left([place.step for place in self._places], after + 1)

    def _read(self, offset: int) -> bytes:
        self._file.seek(offset)
        return self._file.readline()

    @property
    def lag_bounds(self) -> dict[str, int]:
        """Largest allowed policy lag of each environment in the recorded run."""
        return self._line.lag_bounds

    @property
    def weight_version(self) -> int | None:
        """Weight version that trained on the last batch."""
        return self._line.weight_version

    def versions(self, digests: list[str]) -> list[VersionSpan | None]:
        return [self._line.versions.get(digest) for digest in digests]

    def logprobs(
        self, prompts: list[str], completions: list[list[int]]
    ) -> list[KnownLogprobs | None]:
        names = map(_name, prompts, completions)
        found = (self._line.logprobs.get(name) for name in names)
        return [None if known is None else KnownLogprobs.model_validate(known) for known in found]

    def close(self) -> None:
        self._file.close()


class RecordedLags(LagMeter):
    """Policy lag in the recorded run, whose versions the file has."""

    def __init__(self, source: RecordedRollouts) -> None:
        super().__init__([source.versions])
        self._source = source

    def measure(self, rollouts: list[Rollout], version: int) -> Lags:
        # The replay's own version numbers have no relation to the recorded ones.
        recorded = self._source.weight_version
        return super().measure(rollouts, version if recorded is None else recorded)

    def bounds(self, derived: dict[str, int]) -> dict[str, int]:
        """Return the recorded bounds, which depended on that run's mode."""
        return self._source.lag_bounds


def _places(file: BinaryIO, path: Path, batch_size: int, offset: int = 0) -> list[_Place]:
    """Index the lines from `offset` on."""
    places: list[_Place] = []
    groups: list[int] = []
    held = 0
    file.seek(offset)
    for number, line in enumerate(file, 1):
        # Only heads are decoded here: a file may be larger than memory.
        head, start = _head(line, path, number), offset
        offset += len(line)
        if head is None:
            continue
        if head.batch is not None:
            # A batch without a step follows the one before it.
            step = (places[-1].step + 1 if places else 1) if head.step is None else head.step
            # A run that resumed from a checkpoint repeats steps: the later lines count.
            while places and places[-1].step >= step:
                places.pop()
            places.append(_Place([start], offset, step))
            continue
        groups.append(start)
        held += len(head.tokens or [])
        if held >= batch_size:
            places.append(_Place(groups, offset, places[-1].step + 1 if places else 1))
            groups, held = [], 0
    if groups:
        rest = f"its last {held} sequences do not fill a batch of {batch_size}"
        print(f"[WARNING] {path}: {rest} and are left out")
    return places


def _head(line: bytes, path: Path, number: int) -> _Head | None:
    """Parse a line's head; None for an empty or torn line."""
    if not line.strip():
        return None
    where = f"--rollouts {path}, line {number}"
    try:
        head = msgspec.json.decode(line, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The writer died in the middle of its last line.
        if not line.endswith(b"\n"):
            print(f"[WARNING] {path}: line {number} is incomplete and is left out")
            return None
        if not_json := re.search(rb'"(\w+)":[^"]*?(NaN|-?Infinity)', line):
            field, value = (part.decode() for part in not_json.groups())
            raise UsageError(
                f"{where}: {field} holds {value}, which JSON does not allow. fix: remove that "
                "group, or put a number there (json.dumps writes NaN unless allow_nan is False)"
            ) from None
        raise UsageError(f"{where}: not a batch or group of rollouts ({error})") from None
    if head.batch is None and head.tokens is None:
        raise UsageError(f'{where}: neither {{"batch": [...]}} nor a group with `tokens`')
    return head


class Recorder:
    """Append each batch that trains, with the servers' answers about it."""

    def __init__(self, path: str | Path) -> None:
        """Open the file for appending.

        Raises:
            UsageError: the file cannot be written.
        """
        self.path = Path(path)
        self._line = RecordedLine()
        self._failed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # 0600: rollouts may contain private text. O_APPEND: a resumed run continues the file.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
            cut_torn_line(self._file)
        except OSError as error:
            raise UsageError(f"--record-rollouts {path}: {error.strerror}") from None

    def write(
        self, step: int, version: int, batch: RawBatch, lag_bounds: dict[str, int] | None = None
    ) -> None:
        """Write the batch that optimizer step `step` trains at weights `version`."""
        self._line.batch, self._line.step, self._line.weight_version = batch, step, version
        self._line.lag_bounds = lag_bounds or {}
        try:
            # `os.write` may write less than it gets.
            left = memoryview(msgspec.json.encode(self._line) + b"\n")
            while left:
                left = left[os.write(self._file, left) :]
        except (OSError, RecursionError) as error:
            cut_torn_line(self._file)
            if not self._failed:
                print(f"[WARNING] the recording of rollouts is incomplete: {self.path}: {error}")
            self._failed = True
        # Also after a failure: the answers belong to this batch only.
        self._line = RecordedLine(versions={}, logprobs={})

    def record_answers_of(self, server: Provenance) -> Provenance:
        return _RecordedProvenance(server, self)

    def add_versions(self, digests: list[str], answers: list[VersionSpan | None]) -> None:
        pairs = zip(digests, answers, strict=True)
        self._line.versions |= {digest: pair for digest, pair in pairs if pair is not None}

    def add_logprobs(self, names: list[str], answers: list[KnownLogprobs | None]) -> None:
        pairs = zip(names, answers, strict=True)
        self._line.logprobs |= {name: known.model_dump() for name, known in pairs if known}

    def close(self) -> None:
        os.close(self._file)


class _RecordedProvenance:
    """A provenance that passes its answers to a recorder."""

    def __init__(self, server: Provenance, recorder: Recorder) -> None:
        self._server, self._recorder = server, recorder

    def versions(self, digests: list[str]) -> list[VersionSpan | None]:
        answers = self._server.versions(digests)
        self._recorder.add_versions(digests, answers)
        return answers

    def logprobs(
        self, prompts: list[str], completions: list[list[int]]
    ) -> list[KnownLogprobs | None]:
        answers = self._server.logprobs(prompts, completions)
        self._recorder.add_logprobs(list(map(_name, prompts, completions)), answers)
        return answers


def _name(prompt: str, completion: list[int]) -> str:
    return f"{prompt} {prompt_digest(completion)}"


def open_rollouts(config: TrainingConfig) -> RecordedRollouts:
    """Open the file `config.rollouts`."""
    return RecordedRollouts(config.rollouts or "", config.sequences_per_step)
