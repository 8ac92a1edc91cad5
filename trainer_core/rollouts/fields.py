"""Validate and convert the fields of a group from run-api.

Any environment may have written them. A fault raises `Malformed` with one of a few reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_common.protocol.bridge import GREEDY_BELOW

FLOAT32_MAX = float(np.finfo(np.float32).max)
MOST_AHEAD = 10_000
"""Limit of `max_batches_offpolicy`, in batches."""
NAME_LENGTH = 80
"""Limit of an environment's name, in characters."""

OUT_OF_VOCABULARY = "token ids outside of the vocabulary"
WITH_IMAGES = "with images, which this trainer cannot read"

IGNORED = -100
PLACEHOLDER = 1.0
"""atroposlib's value for a missing logprob."""
POSITIVE_TOLERANCE = 1e-3
"""Upper bound of a logprob: 0, except for rounding."""
LOWEST_LOGPROB = -1e4
"""Lower bound of a logprob; vLLM writes -9999 for probability 0."""

READ_KEYS = {
    "overrides": {"temperature", "set_advantage_to_zero"},
    "group_overrides": {"temperature", "group_size", "skip_teacher_top_k", "teacher_top_k"},
    "generation_params": {"temperature", "env", "max_batches_offpolicy"},
}
"""Keys of each table that this module or atroposlib reads."""
TEACHER = ("distill_token_ids", "distill_logprobs")
OPTIONAL = ("inference_logprobs", "advantages", "overrides", "ref_logprobs", *TEACHER)
"""Lists that a group may leave out."""
NOT_READ = "the trainer does not read it"
WHY_UNUSED = {
    "ref_logprobs": "ref_kl_coef under [trainer] is 0",
    "distill_token_ids": "distill_coef under [trainer] is 0",
    "messages": "the trainer uses tokens and masks",
    "messages.reward": "send advantages instead, which may differ by token",
    "scores": "the group's own advantages replace them; advantage_std, overlong_buffer, "
    "group_of_one and dropping flat groups have no effect (overlong_mask has)",
}
"""Why a field is ignored, or how to make the trainer use it."""


class Malformed(ValueError):
    """A group that must not train, with place, field and `reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _wrong(field: str, detail: str) -> Malformed:
    return Malformed(f"malformed {field}", detail)


@dataclass(frozen=True)
class Group:
    """A group of G sequences whose lists fit together."""

    where: str
    env: str
    tokens: list[list[Any]]
    masks: list[list[Any]]
    scores: NDArray[np.float64]  # [G], finite
    tables: tuple[dict[str, Any], ...]  # generation_params and group_overrides
    # In the order of `OPTIONAL`; empty where the group has none, or where not requested.
    logprobs: list[list[Any]]
    advantages: list[list[Any]]
    overrides: list[Any]
    reference: list[list[Any]]
    teacher_ids: list[list[Any]]
    teacher_logprobs: list[list[Any]]

    @classmethod
    def parse(
        cls, where: str, group: Any, *, reference: bool = False, teacher: bool = False
    ) -> Group:
        """Check a group and split it into its fields.

        Args:
            reference, teacher: read ref_logprobs, and distill_token_ids with distill_logprobs.

        Raises:
            Malformed: the whole group is unusable.
        """
        if not isinstance(group, dict):
            raise _wrong("group", f"{where} is not an object")
        env = environment(group)
        where = f"{where} (environment {env!r})" if env else where
        if _holds_something(group.get("images")):
            why = "the trainer reads text only, and would train image tokens as text"
            raise Malformed(WITH_IMAGES, f"{where}: {why}")
        skipped = set() if reference else {"ref_logprobs"}
        skipped |= set() if teacher else set(TEACHER)
        columns = {
            name: [] if name in skipped else _rows(where, group, name)
            for name in ("tokens", "masks", "scores", *OPTIONAL)
        }
        tokens, scores = columns["tokens"], columns["scores"]
        if not tokens:
            raise _wrong("tokens", f"{where}: tokens holds no sequence")
        given = {name: columns[name] for name in OPTIONAL if columns[name]}
        same_length(where, len(tokens), masks=columns["masks"], scores=scores, **given)
        lists = columns.keys() - {"scores", "overrides"}
        _lists_only(where, "sequence", {n: rows for n, rows in columns.items() if n in lists})
        if bool(columns[TEACHER[0]]) != bool(columns[TEACHER[1]]):
            why = f"{' and '.join(TEACHER)} belong together; one of them is missing"
            raise _wrong(TEACHER[0], f"{where}: {why}")
        values = _numbers(where, "scores", scores)
        if not np.isfinite(values).all():
            what = f"{where}: scores holds NaN or Infinity"
            raise Malformed("score is not a finite number", what)
        names = ("generation_params", "group_overrides")
        tables = tuple(table(where, name, group.get(name)) for name in names)
        optional = (columns[name] for name in OPTIONAL)
        return cls(where, env, tokens, columns["masks"], values, tables, *optional)


def _holds_something(value: Any, levels: int = 4) -> bool:
    if not isinstance(value, list):
        return bool(value)
    # Hostile nesting would exceed Python's stack; deeper lists count as something.
    return not levels or any(_holds_something(each, levels - 1) for each in value)


def unused(group: dict[str, Any], *, reference: bool, teacher: bool) -> Iterator[str]:
    """Yield fields and `TABLE.KEY` of a well-formed group that nothing reads."""
    read = {"ref_logprobs": reference, "distill_token_ids": teacher, "messages": False}
    for name, is_read in read.items():
        if not is_read and _holds_something(group.get(name)):
            yield name
    rows: Any = group.get("messages")
    rows = rows if isinstance(rows, list) else []
    messages = [m for row in rows if isinstance(row, list) for m in row if isinstance(m, dict)]
    if any(message.get("reward") is not None for message in messages):
        yield "messages.reward"
    if group.get("advantages"):
        yield "scores"
    for name, known in READ_KEYS.items():
        tables = group.get(name) or {}
        # `overrides` is a list with one table per sequence; the others are single tables.
        each = tables if isinstance(tables, list) else [tables]
        keys = {key for one in each for key, value in (one or {}).items() if value is not None}
        yield from (f"{name}.{shown(key)}" for key in sorted(keys - known))


def _rows(where: str, group: dict[str, Any], name: str) -> list[Any]:
    values = group.get(name)
    if values is None:
        return []
    if not isinstance(values, list):
        raise _wrong(name, f"{where}: {name} is not a list")
    return values


def same_length(where: str, count: int, **lists: Any) -> None:
    """Check that every value is a list of `count` entries."""
    for name, values in lists.items():
        if not isinstance(values, list):
            raise _wrong(name, f"{where}: {name} is not a list")
        if len(values) != count:
            what = f"{name} has {len(values)} entries where tokens has {count}"
            raise _wrong(name, f"{where}: {what}")


def _lists_only(where: str, of: str, columns: dict[str, list[Any]]) -> None:
    for name, column in columns.items():
        if not all(isinstance(row, list) for row in column):
            raise _wrong(name, f"{where}: {name} must hold one list for each {of}")


def _numbers(spot: str, name: str, values: list[Any], *, whole: bool = False) -> NDArray[Any]:
    with suppress(OverflowError):
        # `type`, because a bool is an instance of int.
        if set(map(type, values)) <= ({int} if whole else {int, float}):
            return np.asarray(values, dtype=np.int64 if whole else np.float64)
    kind = "whole numbers" if whole else "numbers"
    raise _wrong(name, f"{spot}: {name} must be a list of {kind}")


def token_ids(
    spot: str, tokens: list[Any], vocabulary: int | None, *, name: str = "tokens"
) -> NDArray[np.int64]:
    """Convert to [L] int64 within the vocabulary."""
    ids = _numbers(spot, name, tokens, whole=True)
    # An id outside of the vocabulary would crash a GPU process.
    if (ids < 0).any():
        what = f"{name} holds id {ids.min()}, and token ids are not negative"
        raise Malformed(OUT_OF_VOCABULARY, f"{spot}: {what}")
    if vocabulary is not None and (ids >= vocabulary).any():
        raise Malformed(
            OUT_OF_VOCABULARY,
            f"{spot}: {name} holds id {ids.max()}, but the model's vocabulary has {vocabulary} "
            "tokens: the environment uses another model's tokenizer",
        )
    return ids


def table(where: str, name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, f"{where}: {name} is not an object")
    return value


def temperature(spot: str, sources: tuple[dict[str, Any], ...], fallback: float) -> float:
    """Return the first temperature, 1 for greedy decoding."""
    for source in sources:
        value = source.get("temperature")
        if value is None:
            continue
        # Compare before the conversion: an integer may be too large for a float.
        if type(value) not in (int, float) or not abs(value) <= FLOAT32_MAX:
            raise _wrong("temperature", f"{spot}: temperature must be a finite number")
        # Logprobs of greedy decoding are not scaled.
        return float(value) if value >= GREEDY_BELOW else 1.0
    return fallback


def shown(name: str) -> str:
    """Shorten a name for screens, and replace unprintable characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:NAME_LENGTH])


def environment(group: dict[str, Any]) -> str:
    """Name of the environment that sent the group; empty if unknown."""
    params = group.get("generation_params")
    name = params.get("env") if isinstance(params, dict) else None
    if isinstance(name, str):
        return shown(name)
    env_id = group.get("env_id")
    return f"env {env_id}" if type(env_id) is int and abs(env_id) < 2**63 else ""


def batches_ahead(params: dict[str, Any]) -> int | None:
    """Return the environment's `max_batches_offpolicy`, if it sets a bound."""
    ahead = params.get("max_batches_offpolicy")
    return ahead if type(ahead) is int and 0 < ahead <= MOST_AHEAD else None


def masked_tokens(spot: str, masks: list[Any], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    labels = _numbers(spot, "masks", masks, whole=True)
    generated: NDArray[np.bool_] = labels != IGNORED
    # atroposlib repeats the token id in `masks` where a token trains.
    if (labels[generated] != ids[generated]).any():
        wanted = f"{IGNORED} where a token does not train, and the token id where it does"
        if set(np.unique(labels)) <= {0, 1}:
            what = "masks holds 0 and 1, another framework's convention"
            raise _wrong("masks", f"{spot}: {what}. fix: put {wanted}")
        raise _wrong("masks", f"{spot}: masks must be {wanted}")
    return generated


def rollout_logprobs(
    spot: str, given: list[Any], generated: NDArray[np.bool_], *, name: str = "inference_logprobs"
) -> NDArray[np.float64]:
    """Return [L] float64, finite for generated tokens, with placeholders."""
    same_length(spot, len(generated), **{name: given})
    values = _numbers(spot, name, given)
    own = values[generated]
    if not np.isfinite(own).all() or (own < LOWEST_LOGPROB).any():
        what = f"{name} holds NaN, Infinity or a number below {LOWEST_LOGPROB:g}"
        raise _wrong(name, f"{spot}: {what}")
    return values


def advantages(
    spot: str, override: dict[str, Any], given: list[Any] | None, shared: float, length: int
) -> NDArray[np.float32]:
    """Return each token's advantage, [L] float32."""
    if override.get("set_advantage_to_zero", False):
        return np.zeros(length, dtype=np.float32)
    if given is None:
        return np.full(length, shared, dtype=np.float32)
    # One value stands for the whole sequence.
    if len(given) == 1:
        given = given * length
    same_length(spot, length, advantages=given)
    with np.errstate(over="ignore"):
        values = _numbers(spot, "advantages", given).astype(np.float32)
    if not np.isfinite(values).all():
        raise _wrong("advantages", f"{spot}: advantages holds a value that is not a finite number")
    return values


def reference_logprobs(
    spot: str, given: list[Any], generated: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return `ref_logprobs`, [L] float32, NaN for placeholders."""
    values = rollout_logprobs(spot, given, generated, name="ref_logprobs")
    return np.where(values <= POSITIVE_TOLERANCE, values, np.nan).astype(np.float32)


@dataclass(frozen=True)
class Teacher:
    ids: NDArray[np.int64]
    """[L, K], distinct at each position; padded with 0"""
    logprobs: NDArray[np.float32]
    """[L, K] in nats; padded with -inf"""


def teacher_of(
    spot: str,
    ids: list[Any],
    logprobs: list[Any],
    generated: NDArray[np.bool_],
    vocabulary: int | None,
) -> Teacher | None:
    """Read the teacher's tokens of generated positions, if there are any."""
    same_length(spot, len(generated), distill_token_ids=ids, distill_logprobs=logprobs)
    where = np.flatnonzero(generated)
    # Prompt positions may hold anything.
    named, values = [ids[i] for i in where], [logprobs[i] for i in where]
    _lists_only(spot, "token", dict(zip(TEACHER, (named, values), strict=True)))
    counts = [len(row) for row in named]
    if counts != [len(row) for row in values]:
        what = "distill_logprobs has another number of entries than distill_token_ids"
        raise _wrong(TEACHER[1], f"{spot}: {what}")
    # Check all positions in one call: K may differ from position to position.
    flat_ids = token_ids(spot, list(chain.from_iterable(named)), vocabulary, name=TEACHER[0])
    flat = _numbers(spot, TEACHER[1], list(chain.from_iterable(values)))
    if not np.isfinite(flat).all() or (flat > POSITIVE_TOLERANCE).any():
        what = "distill_logprobs holds NaN, Infinity or a number above 0"
        raise _wrong(TEACHER[1], f"{spot}: {what}")
    if any(len(set(row)) < len(row) for row in named):
        raise _wrong(TEACHER[0], f"{spot}: distill_token_ids names a token twice at one position")
    if not len(flat):
        return None
    # filled: [L, K] bool, True where the teacher has a token.
    filled = np.zeros((len(generated), max(counts)), dtype=bool)
    filled[where] = np.arange(max(counts)) < np.array(counts)[:, None]
    # Entry i describes token i, as in vLLM's prompt_logprobs; -inf is probability 0.
    all_ids = np.zeros(filled.shape, dtype=np.int64)
    all_logprobs = np.full(filled.shape, -np.inf, dtype=np.float32)
    all_ids[filled], all_logprobs[filled] = flat_ids, flat
    return Teacher(all_ids, all_logprobs)
