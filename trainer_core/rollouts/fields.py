"""The fields of a group as run-api hands them over: checked one by one, as arrays, and those that nothing reads named.

Whoever wrote the environment wrote them, so nothing about them is taken for granted. What is wrong with a group or one
of its sequences is `Malformed`, whose reason is one of a few by which such groups are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_common.bridge import GREEDY_BELOW

FLOAT32_MAX = float(np.finfo(np.float32).max)
MOST_AHEAD = 10_000
"""Limit in batches of what an environment may say of itself."""
NAME_LENGTH = 80
"""Characters of an environment's name that are kept."""

OUT_OF_VOCABULARY = "token ids outside of the vocabulary"
WITH_IMAGES = "with images, which this trainer cannot read"

IGNORED = -100
"""Mask value of tokens that were not generated."""
PLACEHOLDER = 1.0
"""Logprob that atroposlib writes where there is none."""
POSITIVE_TOLERANCE = 1e-3
"""A logprob above this is none: log of a probability, rounding aside, is at most 0."""
LOWEST_LOGPROB = -1e4
"""A lower one is none either: vLLM says -9999 where a probability is 0."""

READ_KEYS = {
    "overrides": {"temperature", "set_advantage_to_zero"},
    "group_overrides": {"temperature", "group_size", "skip_teacher_top_k", "teacher_top_k"},
    "generation_params": {"temperature", "env", "max_batches_offpolicy"},
}
"""What is read of a table: here, or by atroposlib itself on the environment's side."""
TEACHER = ("distill_token_ids", "distill_logprobs")
NOBODY_READS = "nothing here reads it"
WHY_UNUSED = {
    "ref_logprobs": "they count with ref_kl_coef under [trainer], which is 0",
    "distill_token_ids": "it is distilled with distill_coef under [trainer], which is 0",
    "messages": "tokens and masks are what trains",
    "messages.reward": "send it as advantages, which may differ by token",
    "scores": "its own advantages train in their place; advantage_std, overlong_buffer, group_of_one and the leaving "
    "out of equal groups play no part (overlong_mask does)",
}
"""Why a field does not train as it is, or how it would."""


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


@dataclass(frozen=True)
class Group:
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
    reference: list[list[Any]]
    teacher_ids: list[list[Any]]
    teacher_logprobs: list[list[Any]]
    """These six are empty when the group has none, and the last three where they are not asked for."""
    tables: tuple[dict[str, Any], ...]
    """generation_params and group_overrides."""

    @classmethod
    def parse(cls, where: str, group: Any, *, reference: bool = False, teacher: bool = False) -> Group:
        """Args:
            reference, teacher: read ref_logprobs, and distill_token_ids with distill_logprobs.

        Raises:
            Malformed: as a whole.
        """
        if not isinstance(group, dict):
            raise _wrong("group", f"{where} is no object")
        env = environment(group)
        where = f"{where} (environment {env!r})" if env else where
        if _holds_something(group.get("images")):
            raise Malformed(WITH_IMAGES, f"{where}: it learns from text alone, and their places would train as text")
        names = ["tokens", "masks", "scores", "inference_logprobs", "advantages", "overrides", "ref_logprobs", *TEACHER]
        asked = {"ref_logprobs": reference, **dict.fromkeys(TEACHER, teacher)}
        columns = {name: _rows(where, group, name) if asked.get(name, True) else [] for name in names}
        tokens, masks, scores, logprobs, advantages, overrides, ref, teacher_ids, teacher_logprobs = columns.values()
        if not tokens:
            raise _wrong("tokens", f"{where}: tokens holds no sequence")
        given = {name: columns[name] for name in names[3:] if columns[name]}
        same_length(where, len(tokens), masks=masks, scores=scores, **given)
        _lists_only(where, "sequence", **{name: columns[name] for name in names if name not in ("scores", "overrides")})
        if bool(teacher_ids) != bool(teacher_logprobs):
            raise _wrong(TEACHER[0], f"{where}: {' and '.join(TEACHER)} belong together, and one of them is missing")
        values = _numbers(where, "scores", scores)
        if not np.isfinite(values).all():
            raise Malformed("score is not a finite number", f"{where}: scores holds NaN or Infinity")
        tables = tuple(table(where, name, group.get(name)) for name in ("generation_params", "group_overrides"))
        return cls(
            where, env, tokens, masks, values, logprobs, advantages, overrides, ref, teacher_ids, teacher_logprobs,
            tables,
        )  # fmt: skip


def _holds_something(value: Any, levels: int = 4) -> bool:
    """Whether a list, or a list of lists, holds more than nothings; lists in more than `levels` lists are something."""
    if not isinstance(value, list):
        return bool(value)
    return not levels or any(_holds_something(each, levels - 1) for each in value)


def unused(group: dict[str, Any], *, reference: bool, teacher: bool) -> Iterator[str]:
    """Names of what a group that is well-formed holds and nobody reads: fields, and `TABLE.KEY`.

    Args:
        reference, teacher: as in `Group.parse`.
    """
    read = {"ref_logprobs": reference, "distill_token_ids": teacher, "messages": False}
    yield from (name for name, is_read in read.items() if not is_read and _holds_something(group.get(name)))
    rows: Any = group.get("messages")
    rows = rows if isinstance(rows, list) else []
    messages = [m for row in rows if isinstance(row, list) for m in row if isinstance(m, dict)]
    if any(message.get("reward") is not None for message in messages):
        yield "messages.reward"
    if group.get("advantages"):
        yield "scores"
    for name, known in READ_KEYS.items():
        tables = group.get(name) or {}
        each = tables if isinstance(tables, list) else [tables]
        keys = {key for one in each for key, value in (one or {}).items() if value is not None}
        yield from (f"{name}.{shown(key)}" for key in sorted(keys - known))


def _rows(where: str, group: dict[str, Any], name: str) -> list[Any]:
    """A list of the group, empty when it is missing."""
    values = group.get(name)
    if values is None:
        return []
    if not isinstance(values, list):
        raise _wrong(name, f"{where}: {name} is no list")
    return values


def same_length(where: str, count: int, **lists: Any) -> None:
    """Every one is a list of `count` entries."""
    for name, values in lists.items():
        if not isinstance(values, list):
            raise _wrong(name, f"{where}: {name} is no list")
        if len(values) != count:
            raise _wrong(name, f"{where}: {name} has {len(values)} entries where tokens has {count}")


def _lists_only(where: str, of: str, **columns: list[Any]) -> None:
    """Every entry is a list: that of one `of`."""
    for name, column in columns.items():
        if not all(isinstance(row, list) for row in column):
            raise _wrong(name, f"{where}: {name} must hold one list for each {of}")


def _numbers(spot: str, name: str, values: list[Any], *, whole: bool = False) -> NDArray[Any]:
    """[len(values)]: int64 for `whole` ones, else float64, NaN and infinities included."""
    with suppress(OverflowError):
        if set(map(type, values)) <= ({int} if whole else {int, float}):
            return np.asarray(values, dtype=np.int64 if whole else np.float64)
    raise _wrong(name, f"{spot}: {name} must be a list of {'whole numbers' if whole else 'numbers'}")


def token_ids(spot: str, tokens: list[Any], vocabulary: int | None, *, name: str = "tokens") -> NDArray[np.int64]:
    """[L]; an id that the model has no row for would end a GPU's process."""
    ids = _numbers(spot, name, tokens, whole=True)
    if (ids < 0).any():
        raise Malformed(OUT_OF_VOCABULARY, f"{spot}: {name} holds id {ids.min()}, and token ids are not negative")
    if vocabulary is not None and (ids >= vocabulary).any():
        raise Malformed(
            OUT_OF_VOCABULARY,
            f"{spot}: {name} holds id {ids.max()}, but the model's vocabulary has {vocabulary}: the environment's "
            "tokenizer is of another model",
        )
    return ids


def table(where: str, name: str, value: Any) -> dict[str, Any]:
    """An object, empty when it is missing."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, f"{where}: {name} is no object")
    return value


def temperature(spot: str, sources: tuple[dict[str, Any], ...], fallback: float) -> float:
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


def shown(name: str) -> str:
    """A name for a file or a screen: cut, and without controls and lone surrogates."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:NAME_LENGTH])


def environment(group: dict[str, Any]) -> str:
    """Who sent the group, as far as it says so."""
    params = group.get("generation_params")
    name = params.get("env") if isinstance(params, dict) else None
    if isinstance(name, str):
        return shown(name)
    env_id = group.get("env_id")
    return f"env {env_id}" if type(env_id) is int and abs(env_id) < 2**63 else ""


def batches_ahead(params: dict[str, Any]) -> int | None:
    """The environment's `max_batches_offpolicy`; None where it does not say, or sets no bound."""
    ahead = params.get("max_batches_offpolicy")
    return ahead if type(ahead) is int and 0 < ahead <= MOST_AHEAD else None


def masked_tokens(spot: str, masks: list[Any], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[L], true for generated tokens."""
    labels = _numbers(spot, "masks", masks, whole=True)
    generated: NDArray[np.bool_] = labels != IGNORED
    if (labels[generated] != ids[generated]).any():
        wanted = f"{IGNORED} where a token does not train, and the token id where it does"
        if set(np.unique(labels)) <= {0, 1}:
            raise _wrong("masks", f"{spot}: masks holds 0 and 1, which is another framework's convention: put {wanted}")
        raise _wrong("masks", f"{spot}: masks must be {wanted}")
    return generated


def rollout_logprobs(
    spot: str, given: list[Any], generated: NDArray[np.bool_], *, name: str = "inference_logprobs"
) -> NDArray[np.float64]:
    """[L]; those of generated tokens are finite, though not all of them logprobs."""
    same_length(spot, len(generated), **{name: given})
    values = _numbers(spot, name, given)
    own = values[generated]
    if not np.isfinite(own).all() or (own < LOWEST_LOGPROB).any():
        raise _wrong(name, f"{spot}: {name} holds NaN, Infinity or a number below {LOWEST_LOGPROB:g}")
    return values


def advantages(
    spot: str, override: dict[str, Any], given: list[Any] | None, shared: float, length: int
) -> NDArray[np.float32]:
    """Per token, [L]: zero by override, else the environment's own, else the group's."""
    if override.get("set_advantage_to_zero", False):
        return np.zeros(length, dtype=np.float32)
    if given is None:
        return np.full(length, shared, dtype=np.float32)
    if len(given) == 1:
        given = given * length
    same_length(spot, length, advantages=given)
    with np.errstate(over="ignore"):
        values = _numbers(spot, "advantages", given).astype(np.float32)
    if not np.isfinite(values).all():
        raise _wrong("advantages", f"{spot}: advantages holds a value that is not a finite number")
    return values


def reference_logprobs(spot: str, given: list[Any], generated: NDArray[np.bool_]) -> NDArray[np.float32]:
    """[L] of `ref_logprobs`, NaN where the environment gives none."""
    values = rollout_logprobs(spot, given, generated, name="ref_logprobs")
    return np.where(values <= POSITIVE_TOLERANCE, values, np.nan).astype(np.float32)


@dataclass(frozen=True)
class Teacher:
    """What a teacher says about each token of one sequence: its K most likely ones there."""

    ids: NDArray[np.int64]
    """[L, K], distinct at each position; 0 where it names fewer"""
    logprobs: NDArray[np.float32]
    """[L, K] in nats; -Infinity where it names fewer, everywhere in a position without a teacher"""


def teacher_of(
    spot: str, ids: list[Any], logprobs: list[Any], generated: NDArray[np.bool_], vocabulary: int | None
) -> Teacher | None:
    """Entry i is about token i, as vLLM's prompt_logprobs are; those of tokens that were not generated are not read.
    Null where no generated token has one."""
    same_length(spot, len(generated), distill_token_ids=ids, distill_logprobs=logprobs)
    where = np.flatnonzero(generated)
    named, values = [ids[i] for i in where], [logprobs[i] for i in where]
    _lists_only(spot, "token", distill_token_ids=named, distill_logprobs=values)
    counts = [len(row) for row in named]
    if counts != [len(row) for row in values]:
        raise _wrong(TEACHER[1], f"{spot}: distill_logprobs has another number of entries than distill_token_ids")
    flat_ids = token_ids(spot, list(chain.from_iterable(named)), vocabulary, name=TEACHER[0])
    flat = _numbers(spot, TEACHER[1], list(chain.from_iterable(values)))
    if not np.isfinite(flat).all() or (flat > POSITIVE_TOLERANCE).any():
        raise _wrong(TEACHER[1], f"{spot}: distill_logprobs holds NaN, Infinity or a number above 0")
    if any(len(set(row)) < len(row) for row in named):
        raise _wrong(TEACHER[0], f"{spot}: distill_token_ids names a token twice at one position")
    if not len(flat):
        return None
    filled = np.zeros((len(generated), max(counts)), dtype=bool)
    filled[where] = np.arange(max(counts)) < np.array(counts)[:, None]
    teacher = Teacher(np.zeros(filled.shape, dtype=np.int64), np.full(filled.shape, -np.inf, dtype=np.float32))
    teacher.ids[filled], teacher.logprobs[filled] = flat_ids, flat
    return teacher
