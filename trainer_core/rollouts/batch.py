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
from trainer_core.errors import BatchError

IGNORED = -100
"""Mask value of tokens that were not generated."""
PLACEHOLDER = 1.0
"""Logprob that atroposlib writes where there is none."""
POSITIVE_TOLERANCE = 1e-3
"""A logprob above this is none: log of a probability, rounding aside, is at most 0."""

NO_LOGPROBS = (
    "GRPO requires inference_logprobs for importance sampling, and {what}. "
    "Only server_type=vllm calls /generate, which returns them: set --openai.server_type vllm in the environment, and "
    "point its base_url at a server with /generate (python -m vllm_server)"
)


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

    @property
    def trained_tokens(self) -> int:
        return sum(int(r.trained.sum()) for r in self.rollouts)

    @property
    def tokens(self) -> int:
        return sum(len(r.tokens) for r in self.rollouts)

    @property
    def scores(self) -> NDArray[np.float64]:
        return np.array([r.score for r in self.rollouts], dtype=np.float64)

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
    if spread < 1e-8:
        return np.zeros_like(centred)
    return centred / spread if std else centred


def read_batch(
    groups: list[dict[str, Any]], *, seq_len: int, temperature: float = 1.0, advantage_std: bool = True
) -> Batch:
    """Judge the groups of one `GET /batch`.

    Args:
        groups: as run-api returns them.
        seq_len: sequences longer than this are left out and counted.
        temperature: used where neither overrides nor generation_params name one.
        advantage_std: see `group_advantages`.

    Raises:
        BatchError: missing logprobs, ragged lists or wrong token ids, naming the field.
    """
    batch = Batch([])
    for index, group in enumerate(groups):
        _read_group(batch, index, group, seq_len, temperature, advantage_std)
    return batch


def _read_group(
    batch: Batch, index: int, group: dict[str, Any], seq_len: int, temperature: float, advantage_std: bool
) -> None:
    where = f"group {index} of the batch"
    tokens, masks, scores = (group.get(name) or [] for name in ("tokens", "masks", "scores"))
    count = len(tokens)
    if not count:
        return
    _same_length(where, count, masks=masks, scores=scores)
    logprobs = group.get("inference_logprobs")
    if not logprobs:
        raise BatchError(NO_LOGPROBS.format(what=f"{where} has none"))
    _same_length(where, count, inference_logprobs=logprobs)
    given = group.get("advantages")
    if given is not None:
        _same_length(where, count, advantages=given)
    batch.groups += 1
    batch.sample_len = batch.sample_len or len(logprobs[0])
    values = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(values).all():
        batch.skip("score is not a finite number", count)
        return
    shared = group_advantages(values, std=advantage_std)
    batch.flat_groups += int(given is None and not shared.any())
    for i in range(count):
        spot = f"{where}, sequence {i}"
        if len(tokens[i]) > seq_len:
            batch.skip(f"longer than --seq-len {seq_len}", 1)
            continue
        override = _override(group, i)
        advantage = _advantage(spot, override, None if given is None else given[i], float(shared[i]), len(tokens[i]))
        rollout = _read_sequence(
            batch, spot, tokens[i], masks[i], logprobs[i], advantage, float(values[i]),
            _temperature(group, override, temperature), _env_name(group),
        )  # fmt: skip
        if rollout is None:
            batch.skip("nothing generated", 1)
        else:
            batch.rollouts.append(rollout)


def _read_sequence(
    batch: Batch, spot: str, tokens: list[int], masks: list[int], logprobs: list[float],
    advantage: NDArray[np.float32], score: float, temperature: float, env: str,
) -> Rollout | None:  # fmt: skip
    _same_length(spot, len(tokens), masks=masks, inference_logprobs=logprobs)
    ids = np.asarray(tokens, dtype=np.int64)
    labels = np.asarray(masks, dtype=np.int64)
    values = np.asarray(logprobs, dtype=np.float64)
    generated = labels != IGNORED
    if (labels[generated] != ids[generated]).any() or (ids < 0).any():
        raise BatchError(f"{spot}: masks must be {IGNORED} or the token itself, and token ids not negative")
    if not generated.any():
        return None
    batch.generated += int(generated.sum())
    batch.logprob_sum += float(values[generated].sum())
    usable = generated & np.isfinite(values) & (values <= POSITIVE_TOLERANCE)
    if not usable.any():
        what = (
            f"{spot} has only placeholders" if (values[generated] == PLACEHOLDER).all() else f"{spot} has no real one"
        )
        raise BatchError(NO_LOGPROBS.format(what=what))
    digests = tuple(completion_digest(tokens[a:b], logprobs[a:b]) for a, b in _segments(generated))
    usable[0] = False
    return Rollout(ids, usable, values.astype(np.float32), advantage, temperature, score, env, digests)


def _segments(generated: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open ranges of contiguous generated tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], generated.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _same_length(where: str, count: int, **lists: list[Any]) -> None:
    for name, values in lists.items():
        if len(values) != count:
            raise BatchError(f"{where}: {name} has {len(values)} entries where tokens has {count}")


def _override(group: dict[str, Any], i: int) -> dict[str, Any]:
    overrides = group.get("overrides") or []
    return overrides[i] if i < len(overrides) and isinstance(overrides[i], dict) else {}


def _advantage(
    spot: str, override: dict[str, Any], given: list[float] | None, shared: float, length: int
) -> NDArray[np.float32]:
    """Per token, [L]: zero by override, else the environment's own, else the group's."""
    if override.get("set_advantage_to_zero", False):
        return np.zeros(length, dtype=np.float32)
    if given is None:
        return np.full(length, shared, dtype=np.float32)
    if len(given) == 1:
        given = list(given) * length
    _same_length(spot, length, advantages=given)
    values = np.asarray(given, dtype=np.float32)
    if not np.isfinite(values).all():
        raise BatchError(f"{spot}: advantages holds a value that is not a finite number")
    return values


def _temperature(group: dict[str, Any], override: dict[str, Any], fallback: float) -> float:
    """Priority: override, generation_params, group_overrides, configuration. Greedy (0) has unscaled logprobs: 1."""
    for source in (override, group.get("generation_params") or {}, group.get("group_overrides") or {}):
        if source.get("temperature") is not None:
            value = float(source["temperature"])
            return value if value > 0 and math.isfinite(value) else 1.0
    return fallback


def _env_name(group: dict[str, Any]) -> str:
    name = (group.get("generation_params") or {}).get("env")
    if isinstance(name, str):
        return name
    return "" if group.get("env_id") is None else f"env {group['env_id']}"
