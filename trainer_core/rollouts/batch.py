"""Judge one batch from run-api: what trains, with which advantage, temperature and rollout logprob.

Pure; no torch. A group that is malformed in any way is left out whole and counted, and the rest of the batch trains.
Groups stay groups only as long as advantages need them; afterwards a batch is a list of `Rollout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_common.bridge import completion_digest
from trainer_core.errors import MissingLogprobs

GREEDY_BELOW = 1e-5
"""vLLM takes a lower temperature for greedy decoding, whose logprobs are unscaled."""
FLOAT32_MAX = float(np.finfo(np.float32).max)
NAME_LENGTH = 80
"""Characters of an environment's name that are kept."""

OUT_OF_VOCABULARY = "token ids outside of the vocabulary"

IGNORED = -100
"""Mask value of tokens that were not generated."""
PLACEHOLDER = 1.0
"""Logprob that atroposlib writes where there is none."""
FLAT = 1e-6
"""Scores of a group that differ less, relative to the largest one above 1, are equal: rounding alone does that."""
POSITIVE_TOLERANCE = 1e-3
"""A logprob above this is none: log of a probability, rounding aside, is at most 0."""
LOWEST_LOGPROB = -1e4
"""A lower one is none either: vLLM says -9999 where a probability is 0."""

NO_LOGPROBS = (
    "GRPO requires inference_logprobs for importance sampling, and {what}. "
    "Only server_type=vllm calls /generate, which returns them: set --openai.server_type vllm in the environment, and "
    "point its base_url at a server with /generate (python -m vllm_server)"
)
WITHOUT_LOGPROBS = "without inference_logprobs"
"""Why a sequence is left out."""
RECOMPUTED = (
    "sequences came without inference_logprobs: the trainer's own stand in (missing_logprobs = recompute), so their "
    "ratio begins at 1 whatever the policy lag"
)

ALONE = "groups of one sequence have no advantage and teach nothing: env.group_size must be 2 or more"
PARTLY = "generated tokens have no logprob (a placeholder in its place) and do not train"
UNREAD = ("ref_logprobs", "distill_token_ids", "distill_logprobs", "images")
"""Fields of a group that run-api hands over and nothing here reads."""


@dataclass(frozen=True)
class Selection:
    """What an objective trains on beyond what every objective refuses."""

    drop_flat: bool = False
    """Leave groups of equal scores out (DAPO's dynamic sampling, without asking for replacements)."""
    max_completion: int | None = None
    """Longest completion (that of one turn) in tokens; null: no completion is overlong."""
    overlong_buffer: int = 0
    """Scores sink over the last N tokens before `max_completion`; 0: they do not."""
    overlong_penalty: float = 1.0
    overlong_mask: bool = False
    """Leave completions of `max_completion` tokens or more out: they were cut off."""
    vocab_size: int | None = None
    """Token ids must be below; null: unknown."""
    end_tokens: frozenset[int] = frozenset()
    """With which a completion ends by itself."""

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
    """[L], true for generated tokens that train; never for the first token, which nothing predicts."""
    logprobs: NDArray[np.float32]
    """[L] rollout logprobs in nats, on the token they belong to; meaningless where not trained. NaN where the
    environment sent none, and the trainer is to put its own."""
    advantages: NDArray[np.float32]
    """[L]"""
    temperature: float
    score: float
    env: str
    digests: tuple[str, ...]
    """One for each contiguous generated segment (each turn)."""

    @property
    def complete(self) -> bool:
        """Whether every trained token came with a logprob."""
        return not bool(np.isnan(self.logprobs[self.trained]).any())

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
    """Well-formed ones."""
    flat_groups: int = 0
    """Groups whose scores are all equal: they have no advantage."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Sequences left out, by reason; a group that does not say how many it holds counts as one."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first place where a reason was met, in words."""
    remarks: dict[str, int] = field(default_factory=dict)
    """What is odd about that which trains, and how many times."""
    sample_len: int = 0
    """Length of the first list of inference_logprobs that holds some; 0: none does."""
    logprob_sum: float = 0.0
    generated: int = 0
    """Generated tokens and the sum of their logprobs as they came, placeholders included."""
    unselected_scores: list[float] = field(default_factory=list)
    """Scores of good sequences that the objective leaves out; they count in the mean reward."""
    completion_tokens: list[int] = field(default_factory=list)
    """Generated tokens of each good sequence, those that the objective leaves out included."""
    reached_limit: list[bool] = field(default_factory=list)
    """Whether a turn of each was as long as one may be; empty where no limit is known."""
    ended: list[bool] = field(default_factory=list)
    """Whether the last generated token of each is one with which a completion ends."""

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
    def completion_tokens_mean(self) -> float | None:
        """Generated tokens of a sequence, all of its turns together."""
        return float(np.mean(self.completion_tokens)) if self.completion_tokens else None

    @property
    def truncated_fraction(self) -> float | None:
        """Share of sequences with a turn as long as one may be; where no limit is known, of those that do not end with
        an end token, unless none does: then completions may well end otherwise, as by a stop string."""
        if self.reached_limit:
            return float(np.mean(self.reached_limit))
        return 1.0 - float(np.mean(self.ended)) if any(self.ended) else None

    @property
    def logprob_warning(self) -> str | None:
        """The guides' warning when logprobs look like placeholders."""
        average = self.logprob_sum / self.generated if self.generated else 0.0
        if average <= POSITIVE_TOLERANCE:
            return None
        return f"ref_logprobs avg {average:.3f} (should be negative!)"

    def leave_out(self, reason: str, count: int, example: str = "") -> None:
        """Count `count` sequences that do not train."""
        self.left_out[reason] = self.left_out.get(reason, 0) + count
        self.examples.setdefault(reason, example)

    def remark(self, text: str, count: int = 1) -> None:
        """Count something odd that is no reason to leave anything out."""
        if count:
            self.remarks[text] = self.remarks.get(text, 0) + count


def group_advantages(scores: NDArray[np.float64], *, std: bool = True) -> NDArray[np.float64]:
    """Advantages of one group, [G]: scores minus their mean, divided by their (population) standard deviation.

    Equal scores give zeros: such a group says nothing about which completion is better.
    """
    if _equal(scores):
        return np.zeros_like(scores)
    centred = scores - scores.mean()
    return centred / scores.std() if std else centred


def _equal(scores: NDArray[np.float64]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.ptp(scores) < FLAT * max(1.0, float(np.abs(scores).max())))


def read_batch(
    groups: Sequence[Any], *, seq_len: int, temperature: float = 1.0, advantage_std: bool = True,
    selection: Selection | None = None, logprobs_seen: bool = False, recompute: bool = False,
) -> Batch:  # fmt: skip
    """Judge the groups of one `GET /batch`, whatever they hold.

    Args:
        groups: as run-api returns them.
        seq_len: sequences longer than this are left out and counted.
        temperature: used where neither overrides nor generation_params name one.
        advantage_std: see `group_advantages`.
        selection: what the objective leaves out, or scores lower.
        logprobs_seen: an earlier batch had logprobs, so the settings are right and this batch alone is wrong.
        recompute: tokens without a logprob train, with NaN in its place; else their sequence is left out.

    Raises:
        MissingLogprobs: no sequence of the batch has logprobs, and none had before.
    """
    reader = _Reader(Batch([]), seq_len, temperature, advantage_std, selection or Selection(), recompute)
    for index, group in enumerate(groups):
        reader.read(f"group {index} of the batch", group)
    batch = reader.batch
    if WITHOUT_LOGPROBS in batch.left_out and not batch.sample_len and not logprobs_seen:
        raise MissingLogprobs(batch.examples[WITHOUT_LOGPROBS])
    return batch


@dataclass(frozen=True)
class _Group:
    """A group whose lists fit together; what is in those of one sequence is not looked at yet. All of length G."""

    where: str
    env: str
    tokens: list[list[Any]]
    masks: list[list[Any]]
    scores: NDArray[np.float64]
    """Finite."""
    logprobs: list[list[Any]]
    advantages: list[list[Any]]
    overrides: list[Any]
    """These three are empty when the group has none."""
    tables: tuple[dict[str, Any], ...]
    """generation_params and group_overrides."""

    @classmethod
    def parse(cls, where: str, group: Any) -> _Group:
        """Raises: Malformed."""
        if not isinstance(group, dict):
            raise _wrong("group", f"{where} is no object")
        env = _environment(group)
        where = f"{where} (environment {env!r})" if env else where
        names = ("tokens", "masks", "scores", "inference_logprobs", "advantages", "overrides")
        columns = {name: _rows(where, group, name) for name in names}
        tokens, masks, scores, logprobs, advantages, overrides = columns.values()
        if not tokens:
            raise _wrong("tokens", f"{where}: tokens holds no sequence")
        given = {name: columns[name] for name in names[3:] if columns[name]}
        _same_length(where, len(tokens), masks=masks, scores=scores, **given)
        _lists_only(where, **{name: columns[name] for name in names if name not in ("scores", "overrides")})
        values = _numbers(where, "scores", scores)
        if not np.isfinite(values).all():
            raise Malformed("score is not a finite number", f"{where}: scores holds NaN or Infinity")
        tables = tuple(_table(where, name, group.get(name)) for name in ("generation_params", "group_overrides"))
        return cls(where, env, tokens, masks, values, logprobs, advantages, overrides, tables)


@dataclass(frozen=True)
class _Judged:
    """One sequence: a rollout, or why there is none."""

    rollout: Rollout | None
    reason: str = ""
    example: str = ""
    generated: int = 0
    logprob_sum: float = 0.0
    """Generated tokens and the sum of their logprobs as they came."""
    placeholders: int = 0
    """Generated tokens without a logprob."""


@dataclass
class _Reader:
    """Judges one group after another into `batch`."""

    batch: Batch
    seq_len: int
    temperature: float
    advantage_std: bool
    selection: Selection
    recompute: bool

    def read(self, where: str, raw: Any) -> None:
        """Take a group in, or leave it out as a whole."""
        try:
            group = _Group.parse(where, raw)
            shared = self._advantages(group)
            judged = [self._sequence(group, i, float(value)) for i, value in enumerate(shared)]
        except Malformed as error:
            tokens = raw.get("tokens") if isinstance(raw, dict) else None
            count = len(tokens) if isinstance(tokens, list) else 0
            self.batch.leave_out(error.reason, max(1, count), str(error))
            return
        self.batch.groups += 1
        flat = not group.advantages and _equal(group.scores)
        self.batch.flat_groups += int(flat)
        self.batch.remark(ALONE, int(flat and len(judged) == 1))
        for name in UNREAD:
            self.batch.remark(f"groups come with {name}, which this trainer does not use", int(bool(raw.get(name))))
        for each, mask in zip(judged, group.masks, strict=True):
            self._take(each, mask, flat)

    def _advantages(self, group: _Group) -> NDArray[np.float64]:
        """What the scores say, [G] and finite in float32, overlong completions punished first."""
        with np.errstate(over="ignore", invalid="ignore"):
            scores = group.scores
            if self.selection.overlong_buffer:
                scores = scores - np.array([self.selection.punishment(_longest_turn(mask)) for mask in group.masks])
            advantages = group_advantages(scores, std=self.advantage_std)
            if np.isfinite(advantages.astype(np.float32)).all() and np.isfinite(scores.std()):
                return advantages
        raise Malformed("scores are too far apart to compare", f"{group.where}: scores up to {np.abs(scores).max():g}")

    def _sequence(self, group: _Group, i: int, shared: float) -> _Judged:
        """The sequence as a rollout, unless it is too long, or holds nothing generated or no logprob."""
        spot, tokens = f"{group.where}, sequence {i}", group.tokens[i]
        override = _table(spot, "overrides", group.overrides[i] if group.overrides else None)
        logprobs = group.logprobs[i] if group.logprobs else None
        _same_length(spot, len(tokens), masks=group.masks[i])
        if len(tokens) > self.seq_len:
            return _Judged(None, f"longer than --seq-len {self.seq_len}", f"{spot}: {len(tokens)} tokens")
        ids = _token_ids(spot, tokens, self.selection.vocab_size)
        labels = _numbers(spot, "masks", group.masks[i], whole=True)
        generated = labels != IGNORED
        if (labels[generated] != ids[generated]).any():
            raise _wrong("masks", f"{spot}: masks must be {IGNORED} or the token itself")
        advantages = _advantage(spot, override, group.advantages[i] if group.advantages else None, shared, len(ids))
        temperature = _temperature(spot, (override, *group.tables), self.temperature)
        if not generated[1:].any():
            return _Judged(None, "nothing generated", f"{spot}: masks is {IGNORED} behind the first token")
        if logprobs is None and not self.recompute:
            return _Judged(None, WITHOUT_LOGPROBS, NO_LOGPROBS.format(what=f"{group.where} has none"))
        values = np.full(len(ids), PLACEHOLDER) if logprobs is None else _logprobs(spot, logprobs, generated)
        real = generated & (values <= POSITIVE_TOLERANCE)
        own = values[generated]
        seen = (
            (len(own), float(own.sum()), int((own > POSITIVE_TOLERANCE).sum())) if logprobs is not None else (0, 0.0, 0)
        )
        usable = generated.copy() if self.recompute else real.copy()
        usable[0] = False
        if not usable.any():
            what = "only placeholders" if (own == PLACEHOLDER).all() else "no real one"
            return _Judged(None, WITHOUT_LOGPROBS, NO_LOGPROBS.format(what=f"{spot} has {what}"), *seen)
        known = np.where(real, values, np.nan) if self.recompute else values
        asked = logprobs if logprobs is not None and (not self.recompute or real[generated].all()) else []
        rollout = Rollout(
            tokens=ids, trained=usable, logprobs=np.where(usable, known, 0.0).astype(np.float32),
            advantages=advantages, temperature=temperature, score=float(group.scores[i]), env=group.env,
            digests=tuple(completion_digest(tokens[a:b], asked[a:b]) for a, b in _segments(generated) if asked),
        )  # fmt: skip
        return _Judged(rollout, "", "", *seen)

    def _take(self, judged: _Judged, mask: list[Any], flat: bool) -> None:
        """Keep the rollout, unless there is none or the objective leaves it out."""
        batch, rollout = self.batch, judged.rollout
        batch.generated += judged.generated
        batch.logprob_sum += judged.logprob_sum
        if rollout is None:
            batch.leave_out(judged.reason, 1, judged.example)
            return
        if rollout.complete:
            batch.sample_len = batch.sample_len or len(rollout.tokens)
        self._measure(rollout, mask)
        if flat and self.selection.drop_flat:
            reason = "in a group of equal scores"
        elif self.selection.overlong_mask and self.selection.cut_off(_longest_turn(mask)):
            reason = f"cut off at --max-completion-tokens {self.selection.max_completion}"
        else:
            batch.rollouts.append(rollout)
            batch.remark(
                *((RECOMPUTED, int(not rollout.complete)) if self.recompute else (PARTLY, judged.placeholders))
            )
            return
        batch.leave_out(reason, 1)
        batch.unselected_scores.append(rollout.score)

    def _measure(self, rollout: Rollout, mask: list[Any]) -> None:
        """How long it became, and how it ended."""
        generated, limit = np.flatnonzero(rollout.trained), self.selection.max_completion
        self.batch.completion_tokens.append(len(generated))
        self.batch.ended.append(int(rollout.tokens[generated[-1]]) in self.selection.end_tokens)
        if limit is not None:
            self.batch.reached_limit.append(_longest_turn(mask) >= limit)


def _longest_turn(mask: list[Any]) -> int:
    """Tokens of the longest contiguous generated segment: what the environment's limit is for."""
    runs = groupby(mask, key=lambda label: label != IGNORED)
    return max((sum(1 for _ in run) for generated, run in runs if generated), default=0)


def _segments(generated: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open ranges of contiguous generated tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], generated.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _logprobs(spot: str, logprobs: list[Any], generated: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[L]; those of generated tokens are finite, though not all of them logprobs."""
    _same_length(spot, len(generated), inference_logprobs=logprobs)
    values = _numbers(spot, "inference_logprobs", logprobs)
    own = values[generated]
    if not np.isfinite(own).all() or (own < LOWEST_LOGPROB).any():
        what = f"{spot}: inference_logprobs holds NaN, Infinity or a number below {LOWEST_LOGPROB:g}"
        raise _wrong("inference_logprobs", what)
    return values


def _advantage(
    spot: str, override: dict[str, Any], given: list[Any] | None, shared: float, length: int
) -> NDArray[np.float32]:
    """Per token, [L]: zero by override, else the environment's own, else the group's."""
    if override.get("set_advantage_to_zero", False):
        return np.zeros(length, dtype=np.float32)
    if given is None:
        return np.full(length, shared, dtype=np.float32)
    if len(given) == 1:
        given = given * length
    _same_length(spot, length, advantages=given)
    with np.errstate(over="ignore"):
        values = _numbers(spot, "advantages", given).astype(np.float32)
    if not np.isfinite(values).all():
        raise _wrong("advantages", f"{spot}: advantages holds a value that is not a finite number")
    return values


class Malformed(ValueError):
    """A group that must not be trained on. The message names the place and the field."""

    def __init__(self, reason: str, detail: str) -> None:
        """Args:
        reason: one of a few, by which such groups are counted.
        """
        super().__init__(detail)
        self.reason = reason


def _wrong(field: str, detail: str) -> Malformed:
    """`field` is not what it must be."""
    return Malformed(f"malformed {field}", detail)


def _rows(where: str, group: dict[str, Any], name: str) -> list[Any]:
    """A list of the group, empty when it is missing."""
    values = group.get(name)
    if values is None:
        return []
    if not isinstance(values, list):
        raise _wrong(name, f"{where}: {name} is no list")
    return values


def _same_length(where: str, count: int, **lists: Any) -> None:
    """Every one is a list of `count` entries."""
    for name, values in lists.items():
        if not isinstance(values, list):
            raise _wrong(name, f"{where}: {name} is no list")
        if len(values) != count:
            raise _wrong(name, f"{where}: {name} has {len(values)} entries where tokens has {count}")


def _lists_only(where: str, **columns: list[Any]) -> None:
    """Every entry is a list: that of one sequence."""
    for name, column in columns.items():
        if not all(isinstance(row, list) for row in column):
            raise _wrong(name, f"{where}: {name} must hold one list for each sequence")


def _numbers(spot: str, name: str, values: list[Any], *, whole: bool = False) -> NDArray[Any]:
    """[len(values)]: int64 for `whole` ones, else float64, NaN and infinities included."""
    with suppress(OverflowError):
        if set(map(type, values)) <= ({int} if whole else {int, float}):
            return np.asarray(values, dtype=np.int64 if whole else np.float64)
    raise _wrong(name, f"{spot}: {name} must be a list of {'whole numbers' if whole else 'numbers'}")


def _token_ids(spot: str, tokens: list[Any], vocabulary: int | None) -> NDArray[np.int64]:
    """[L]; an id that the model has no row for would end a GPU's process."""
    ids = _numbers(spot, "tokens", tokens, whole=True)
    if (ids < 0).any():
        raise Malformed(OUT_OF_VOCABULARY, f"{spot}: tokens holds id {ids.min()}, and token ids are not negative")
    if vocabulary is not None and (ids >= vocabulary).any():
        raise Malformed(
            OUT_OF_VOCABULARY,
            f"{spot}: tokens holds id {ids.max()}, but the model's vocabulary has {vocabulary}: the environment's "
            "tokenizer is of another model",
        )
    return ids


def _table(where: str, name: str, value: Any) -> dict[str, Any]:
    """An object, empty when it is missing."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, f"{where}: {name} is no object")
    return value


def _temperature(spot: str, sources: tuple[dict[str, Any], ...], fallback: float) -> float:
    """The first that names one. Greedy (0) has unscaled logprobs: 1."""
    for source in sources:
        value = source.get("temperature")
        if value is None:
            continue
        # Compared first: an integer may be too large to become a float.
        if type(value) not in (int, float) or not abs(value) <= FLOAT32_MAX:
            raise _wrong("temperature", f"{spot}: temperature must be a finite number")
        return float(value) if value >= GREEDY_BELOW else 1.0
    return fallback


def _environment(group: dict[str, Any]) -> str:
    """Who sent the group, as far as it says so: text for a file or a screen, cut and without lone surrogates."""
    params = group.get("generation_params")
    name = params.get("env") if isinstance(params, dict) else None
    if isinstance(name, str):
        return name[:NAME_LENGTH].encode("utf-8", "replace").decode()
    env_id = group.get("env_id")
    return f"env {env_id}" if isinstance(env_id, int) and abs(env_id) < 2**63 else ""
