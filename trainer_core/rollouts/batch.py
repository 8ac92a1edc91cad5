"""Judge one batch from run-api: what trains, with which advantage, temperature and rollout logprob.

Pure; no torch. Groups stay groups only as long as advantages need them; afterwards a batch is a list of `Rollout`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer_core.contracts.bridge import completion_digest
from trainer_core.errors import BatchError, MissingLogprobs

IGNORED = -100
"""Mask value of tokens that were not generated."""
PLACEHOLDER = 1.0
"""Logprob that atroposlib writes where there is none."""
FLAT = 1e-8
"""Scores of a group that differ less are equal."""
POSITIVE_TOLERANCE = 1e-3
"""A logprob above this is none: log of a probability, rounding aside, is at most 0."""

NO_LOGPROBS = (
    "GRPO requires inference_logprobs for importance sampling, and {what}. "
    "Only server_type=vllm calls /generate, which returns them: set --openai.server_type vllm in the environment, and "
    "point its base_url at a server with /generate (python -m vllm_server)"
)


@dataclass(frozen=True)
class Selection:
    """What an objective trains on beyond what every objective refuses."""

    drop_flat: bool = False
    """Leave groups of equal scores out (DAPO's dynamic sampling, without asking for replacements)."""
    max_completion: int | None = None
    """Longest completion in tokens; null: no completion is overlong."""
    overlong_buffer: int = 0
    """Scores sink over the last N tokens before `max_completion`; 0: they do not."""
    overlong_penalty: float = 1.0
    overlong_mask: bool = False
    """Leave completions of `max_completion` tokens or more out: they were cut off."""
    vocab_size: int | None = None
    """Token ids must be below; null: unknown."""

    def punishment(self, length: int) -> float:
        """What a completion of `length` tokens loses of its score: 0 to `overlong_penalty`.

        The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), verl's `DAPORewardManager`.
        """
        if not self.overlong_buffer or self.max_completion is None:
            return 0.0
        over = (length - (self.max_completion - self.overlong_buffer)) / self.overlong_buffer
        return self.overlong_penalty * min(1.0, max(0.0, over))

    def cut_off(self, length: int) -> bool:
        """Whether a completion of `length` tokens is left out for its length."""
        return self.overlong_mask and self.max_completion is not None and length >= self.max_completion


@dataclass(frozen=True)
class Rollout:
    """One sequence: prompt and completions, length L."""

    tokens: NDArray[np.int64]
    """[L]"""
    trained: NDArray[np.bool_]
    """[L], true for generated tokens with a logprob; never for the first token, which nothing predicts."""
    logprobs: NDArray[np.float32]
    """[L] rollout logprobs in nats, on the token they belong to; meaningless where not trained."""
    advantages: NDArray[np.float32]
    """[L]"""
    temperature: float
    score: float
    env: str
    digests: tuple[str, ...]
    """One for each contiguous generated segment (each turn)."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first generated one."""
        generated = np.flatnonzero(self.trained)
        return int(generated[0]) if len(generated) else len(self.tokens)


@dataclass
class Batch:
    """What one optimizer step trains on, and what was left out of it."""

    rollouts: list[Rollout]
    groups: int = 0
    flat_groups: int = 0
    """Groups whose scores are all equal: they have no advantage."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Sequences left out, by reason."""
    sample_len: int = 0
    """Length of the first list of inference_logprobs."""
    logprob_sum: float = 0.0
    generated: int = 0
    """Generated tokens and the sum of their logprobs as they came, before anything was left out."""
    unselected_scores: list[float] = field(default_factory=list)
    """Scores of good sequences that the objective leaves out; they count in the mean reward."""

    @property
    def trained_tokens(self) -> int:
        return sum(int(r.trained.sum()) for r in self.rollouts)

    @property
    def tokens(self) -> int:
        return sum(len(r.tokens) for r in self.rollouts)

    @property
    def scores(self) -> NDArray[np.float64]:
        return np.array([*(r.score for r in self.rollouts), *self.unselected_scores], dtype=np.float64)

    @property
    def logprob_warning(self) -> str | None:
        """The guides' warning when logprobs look like placeholders."""
        average = self.logprob_sum / self.generated if self.generated else 0.0
        if average <= POSITIVE_TOLERANCE:
            return None
        return f"ref_logprobs avg {average:.3f} (should be negative!): inference_logprobs are not logprobs"

    def skip(self, reason: str, count: int) -> None:
        if count:
            self.skipped[reason] = self.skipped.get(reason, 0) + count


def group_advantages(scores: NDArray[np.float64], *, std: bool = True) -> NDArray[np.float64]:
    """Advantages of one group, [G]: scores minus their mean, divided by their (population) standard deviation.

    Equal scores give zeros: such a group says nothing about which completion is better.
    """
    centred = scores - scores.mean()
    spread = float(scores.std())
    if spread < FLAT:
        return np.zeros_like(centred)
    return centred / spread if std else centred


def read_batch(
    groups: list[dict[str, Any]], *, seq_len: int, temperature: float = 1.0, advantage_std: bool = True,
    selection: Selection | None = None,
) -> Batch:  # fmt: skip
    """Judge the groups of one `GET /batch`.

    Args:
        groups: as run-api returns them.
        seq_len: sequences longer than this are left out and counted.
        temperature: used where neither overrides nor generation_params name one.
        advantage_std: see `group_advantages`.
        selection: what the objective leaves out, or scores lower.

    Raises:
        BatchError: missing logprobs, ragged lists or wrong token ids, naming the field.
    """
    reader = _Reader(Batch([]), seq_len, temperature, advantage_std, selection or Selection())
    for index, group in enumerate(groups):
        if not isinstance(group, dict):
            raise BatchError(f"group {index} of the batch is no object")
        reader.read(f"group {index} of the batch", group)
    return reader.batch


@dataclass
class _Reader:
    """Judges one group after another into `batch`."""

    batch: Batch
    seq_len: int
    temperature: float
    advantage_std: bool
    selection: Selection

    def read(self, where: str, group: dict[str, Any]) -> None:
        tokens, masks, scores = (_rows(where, group, name) for name in ("tokens", "masks", "scores"))
        count = len(tokens)
        _same_length(where, count, masks=masks, scores=scores)
        if not count:
            return
        logprobs = _rows(where, group, "inference_logprobs")
        if not logprobs:
            raise MissingLogprobs(NO_LOGPROBS.format(what=f"{where} has none"))
        given, overrides = _rows(where, group, "advantages"), _rows(where, group, "overrides")
        optional = {"advantages": given, "overrides": overrides}
        _same_length(where, count, inference_logprobs=logprobs, **{k: v for k, v in optional.items() if v})
        self.batch.groups += 1
        _lists(where, tokens=tokens, masks=masks, inference_logprobs=logprobs)
        self.batch.sample_len = self.batch.sample_len or len(logprobs[0])
        values = _numbers(where, "scores", scores)
        if not np.isfinite(values).all():
            self.batch.skip("score is not a finite number", count)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            shared = self._advantages(masks, values)
            flat = not given and bool(np.ptp(values) < FLAT)
        if not np.isfinite(shared).all():
            self.batch.skip("scores are too far apart to compare", count)
            return
        self.batch.flat_groups += int(flat)
        for i in range(count):
            override = overrides[i] if overrides and isinstance(overrides[i], dict) else {}
            rollout = self._sequence(
                f"{where}, sequence {i}", tokens[i], masks[i], logprobs[i], given[i] if given else None,
                float(shared[i]), float(values[i]), override, group,
            )  # fmt: skip
            if rollout is not None:
                self._select(rollout, flat)

    def _advantages(self, masks: list[Any], values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of one group, overlong completions punished first."""
        if self.selection.overlong_buffer:
            lengths = [sum(label != IGNORED for label in mask) for mask in masks]
            values = values - np.array([self.selection.punishment(length) for length in lengths])
        return group_advantages(values, std=self.advantage_std)

    def _sequence(
        self, spot: str, tokens: list[int], masks: list[int], logprobs: list[float], given: list[float] | None,
        shared: float, score: float, override: dict[str, Any], group: dict[str, Any],
    ) -> Rollout | None:  # fmt: skip
        """The sequence as a rollout; null, and counted, when it is too long or holds nothing generated."""
        _same_length(spot, len(tokens), masks=masks, inference_logprobs=logprobs)
        if len(tokens) > self.seq_len:
            self.batch.skip(f"longer than --seq-len {self.seq_len}", 1)
            return None
        ids, labels = _ids(spot, "tokens", tokens), _ids(spot, "masks", masks)
        generated = labels != IGNORED
        if (labels[generated] != ids[generated]).any() or (ids < 0).any():
            raise BatchError(f"{spot}: masks must be {IGNORED} or the token itself, and token ids not negative")
        vocabulary = self.selection.vocab_size
        if vocabulary is not None and (ids >= vocabulary).any():
            raise BatchError(
                f"{spot}: tokens holds id {ids.max()}, but the model's vocabulary has {vocabulary}: the environment's "
                "tokenizer is of another model"
            )
        if not generated.any():
            self.batch.skip("nothing generated", 1)
            return None
        usable, values = self._usable(spot, generated, _numbers(spot, "inference_logprobs", logprobs))
        return Rollout(
            tokens=ids, trained=usable, logprobs=values, score=score, env=_env_name(group),
            advantages=_advantage(spot, override, given, shared, len(ids)),
            temperature=_temperature(spot, group, override, self.temperature),
            digests=tuple(completion_digest(tokens[a:b], logprobs[a:b]) for a, b in _segments(generated)),
        )  # fmt: skip

    def _usable(
        self, spot: str, generated: NDArray[np.bool_], values: NDArray[np.float64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Which tokens train, and their logprobs."""
        self.batch.generated += int(generated.sum())
        self.batch.logprob_sum += float(values[generated].sum())
        usable = generated & np.isfinite(values) & (values <= POSITIVE_TOLERANCE)
        if not usable.any():
            placeholders = (values[generated] == PLACEHOLDER).all()
            what = f"{spot} has only placeholders" if placeholders else f"{spot} has no real one"
            raise MissingLogprobs(NO_LOGPROBS.format(what=what))
        usable[0] = False
        return usable, np.where(usable, values, 0.0).astype(np.float32)

    def _select(self, rollout: Rollout, flat: bool) -> None:
        """Keep the rollout, unless the objective leaves it out."""
        length = len(rollout.tokens) - rollout.prompt_length
        if flat and self.selection.drop_flat:
            reason = "in a group of equal scores"
        elif self.selection.cut_off(length):
            reason = f"cut off at --max-completion-tokens {self.selection.max_completion}"
        else:
            self.batch.rollouts.append(rollout)
            return
        self.batch.skip(reason, 1)
        self.batch.unselected_scores.append(rollout.score)


def _segments(generated: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open ranges of contiguous generated tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], generated.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _same_length(where: str, count: int, **lists: Any) -> None:
    for name, values in lists.items():
        if not isinstance(values, (list, tuple)):
            raise BatchError(f"{where}: {name} is no list")
        if len(values) != count:
            raise BatchError(f"{where}: {name} has {len(values)} entries where tokens has {count}")


def _lists(where: str, **columns: list[Any]) -> None:
    for name, rows in columns.items():
        if not all(isinstance(row, list) for row in rows):
            raise BatchError(f"{where}: {name} must hold one list for each sequence")


def _rows(where: str, group: dict[str, Any], name: str) -> list[Any]:
    """A list of the group, empty when it is missing."""
    values = group.get(name) or []
    if not isinstance(values, list):
        raise BatchError(f"{where}: {name} is no list")
    return values


def _ids(spot: str, name: str, values: list[Any]) -> NDArray[np.int64]:
    try:
        found = np.asarray(values if values else np.zeros(0, np.int64))
        if found.dtype.kind in "iu" and found.ndim == 1:
            return found.astype(np.int64)
    except (ValueError, OverflowError):
        pass
    raise BatchError(f"{spot}: {name} must be a list of whole numbers")


def _numbers(spot: str, name: str, values: list[Any]) -> NDArray[np.float64]:
    try:
        found = np.asarray(values, dtype=np.float64)
        if found.ndim == 1:
            return found
    except (ValueError, TypeError, OverflowError):
        pass
    raise BatchError(f"{spot}: {name} must be a list of numbers")


def _advantage(
    spot: str, override: dict[str, Any], given: list[float] | None, shared: float, length: int
) -> NDArray[np.float32]:
    """Per token, [L]: zero by override, else the environment's own, else the group's."""
    if override.get("set_advantage_to_zero", False):
        return np.zeros(length, dtype=np.float32)
    if given is None:
        return np.full(length, shared, dtype=np.float32)
    if isinstance(given, list) and len(given) == 1:
        given = given * length
    _same_length(spot, length, advantages=given)
    with np.errstate(over="ignore"):
        values = _numbers(spot, "advantages", given).astype(np.float32)
    if not np.isfinite(values).all():
        raise BatchError(f"{spot}: advantages holds a value that is not a finite number")
    return values


def _temperature(spot: str, group: dict[str, Any], override: dict[str, Any], fallback: float) -> float:
    """Priority: override, generation_params, group_overrides, configuration. Greedy (0) has unscaled logprobs: 1."""
    for source in (override, group.get("generation_params"), group.get("group_overrides")):
        if not isinstance(source, dict) or source.get("temperature") is None:
            continue
        try:
            value = float(source["temperature"])
        except (TypeError, ValueError):
            raise BatchError(f"{spot}: temperature {source['temperature']!r} is no number") from None
        return value if value > 0 and math.isfinite(value) else 1.0
    return fallback


def _env_name(group: dict[str, Any]) -> str:
    params = group.get("generation_params")
    name = params.get("env") if isinstance(params, dict) else None
    if isinstance(name, str):
        return name
    return "" if group.get("env_id") is None else f"env {group['env_id']}"
