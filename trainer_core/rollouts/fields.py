"""Validate the fields of a group from run-api, convert them to arrays, and name the fields that the
trainer ignores.

Any environment may have written them, so nothing is assumed. A fault in a group or sequence raises
`Malformed`, whose reason is one of a few under which such groups are counted.
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
"""Limit in batches of an environment's `max_batches_offpolicy`."""
NAME_LENGTH = 80
"""Limit in characters of an environment's name; the rest is cut."""

OUT_OF_VOCABULARY = "token ids outside of the vocabulary"
WITH_IMAGES = "with images, which this trainer cannot read"

IGNORED = -100
"""Mask value of tokens that were not generated."""
PLACEHOLDER = 1.0
"""Placeholder that atroposlib writes for a missing logprob."""
POSITIVE_TOLERANCE = 1e-3
"""Upper bound of a logprob: the log of a probability is at most 0, except for rounding."""
LOWEST_LOGPROB = -1e4
"""Lower bound of a logprob: vLLM writes -9999 for probability 0."""

READ_KEYS = {
    "overrides": {"temperature", "set_advantage_to_zero"},
    "group_overrides": {"temperature", "group_size", "skip_teacher_top_k", "teacher_top_k"},
    "generation_params": {"temperature", "env", "max_batches_offpolicy"},
}
"""Keys of each table that are read, either here or by atroposlib in the environment."""
TEACHER = ("distill_token_ids", "distill_logprobs")
NOT_READ = "the trainer does not read it"
WHY_UNUSED = {
    "ref_logprobs": "ref_kl_coef under [trainer] is 0",
    "distill_token_ids": "distill_coef under [trainer] is 0",
    "messages": "the trainer uses tokens and masks",
    "messages.reward": "send advantages instead, which may differ by token",
    "scores": "the group's own advantages replace them; advantage_std, overlong_buffer, "
    "group_of_one and dropping "
    "flat groups have no effect (overlong_mask has)",
}
"""Why a field is ignored, or what makes the trainer use it."""


class Malformed(ValueError):
    """A group that must not train. The message names the place and the field."""

    def __init__(self, reason: str, detail: str) -> None:
        """`reason` is the category under which such groups are counted."""
        super().__init__(detail)
        self.reason = reason


def _wrong(field: str, detail: str) -> Malformed:
    return Malformed(f"malformed {field}", detail)


@dataclass(frozen=True)
class Group:
    """A group whose lists fit together; the contents of each sequence are not checked yet. Lists
    have length G."""

    where: str
    env: str
    tokens: list[list[Any]]
    masks: list[list[Any]]
    scores: NDArray[np.float64]
    """[G], finite."""
    logprobs: list[list[Any]]
    advantages: list[list[Any]]
    overrides: list[Any]
    reference: list[list[Any]]
    teacher_ids: list[list[Any]]
    teacher_logprobs: list[list[Any]]
    """These six are empty if the group has none; the last three also if they are not requested."""
    tables: tuple[dict[str, Any], ...]
    """generation_params and group_overrides."""

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
            raise Malformed(
                WITH_IMAGES,
                f"{where}: the trainer reads text only, and would train image tokens as text",
            )
        names = [
            "tokens",
            "masks",
            "scores",
            "inference_logprobs",
            "advantages",
            "overrides",
            "ref_logprobs",
            *TEACHER,
        ]
        asked = {"ref_logprobs": reference, **dict.fromkeys(TEACHER, teacher)}
        # In the order of `names`, which the unpacking below relies on.
        columns = {
            name: _rows(where, group, name) if asked.get(name, True) else [] for name in names
        }
        (
            tokens,
            masks,
            scores,
            logprobs,
            advantages,
            overrides,
            ref,
            teacher_ids,
            teacher_logprobs,
        ) = columns.values()
        if not tokens:
            raise _wrong("tokens", f"{where}: tokens holds no sequence")
        given = {name: columns[name] for name in names[3:] if columns[name]}
        same_length(where, len(tokens), masks=masks, scores=scores, **given)
        _lists_only(
            where,
            "sequence",
            **{name: columns[name] for name in names if name not in ("scores", "overrides")},
        )
        if bool(teacher_ids) != bool(teacher_logprobs):
            raise _wrong(
                TEACHER[0],
                f"{where}: {' and '.join(TEACHER)} belong together; one of them is missing",
            )
        values = _numbers(where, "scores", scores)
        if not np.isfinite(values).all():
            raise Malformed(
                "score is not a finite number", f"{where}: scores holds NaN or Infinity"
            )
        tables = tuple(
            table(where, name, group.get(name)) for name in ("generation_params", "group_overrides")
        )
        return cls(
            where,
            env,
            tokens,
            masks,
            values,
            logprobs,
            advantages,
            overrides,
            ref,
            teacher_ids,
            teacher_logprobs,
            tables,
        )


def _holds_something(value: Any, levels: int = 4) -> bool:
    """True if nested lists contain any truthy value; lists deeper than `levels` count as truthy."""
    if not isinstance(value, list):
        return bool(value)
    return not levels or any(_holds_something(each, levels - 1) for each in value)


def unused(group: dict[str, Any], *, reference: bool, teacher: bool) -> Iterator[str]:
    """Names of the fields and `TABLE.KEY` of a well-formed group that nothing reads.

    Args:
        reference, teacher: as in `Group.parse`.
    """
    read = {"ref_logprobs": reference, "distill_token_ids": teacher, "messages": False}
    yield from (
        name for name, is_read in read.items() if not is_read and _holds_something(group.get(name))
    )
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
            raise _wrong(
                name, f"{where}: {name} has {len(values)} entries where tokens has {count}"
            )


def _lists_only(where: str, of: str, **columns: list[Any]) -> None:
    for name, column in columns.items():
        if not all(isinstance(row, list) for row in column):
            raise _wrong(name, f"{where}: {name} must hold one list for each {of}")


def _numbers(spot: str, name: str, values: list[Any], *, whole: bool = False) -> NDArray[Any]:
    """[len(values)]: int64 if `whole`, else float64, with NaN and infinities allowed."""
    with suppress(OverflowError):
        # `type`, because a bool is an instance of int.
        if set(map(type, values)) <= ({int} if whole else {int, float}):
            return np.asarray(values, dtype=np.int64 if whole else np.float64)
    raise _wrong(
        name, f"{spot}: {name} must be a list of {'whole numbers' if whole else 'numbers'}"
    )


def token_ids(
    spot: str, tokens: list[Any], vocabulary: int | None, *, name: str = "tokens"
) -> NDArray[np.int64]:
    """[L] int64. An id outside of the vocabulary would crash a GPU process, so it is refused."""
    ids = _numbers(spot, name, tokens, whole=True)
    if (ids < 0).any():
        raise Malformed(
            OUT_OF_VOCABULARY,
            f"{spot}: {name} holds id {ids.min()}, and token ids are not negative",
        )
    if vocabulary is not None and (ids >= vocabulary).any():
        raise Malformed(
            OUT_OF_VOCABULARY,
            f"{spot}: {name} holds id {ids.max()}, but the model's vocabulary has "
            f"{vocabulary} tokens: the environment "
            "uses another model's tokenizer",
        )
    return ids


def table(where: str, name: str, value: Any) -> dict[str, Any]:
    """The object `name`; empty if it is missing."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, f"{where}: {name} is not an object")
    return value


def temperature(spot: str, sources: tuple[dict[str, Any], ...], fallback: float) -> float:
    """The first temperature in `sources`; 1 for greedy decoding (0), whose logprobs are not
    scaled."""
    for source in sources:
        value = source.get("temperature")
        if value is None:
            continue
        # Compare before the conversion: an integer may be too large for a float.
        if type(value) not in (int, float) or not abs(value) <= FLOAT32_MAX:
            raise _wrong("temperature", f"{spot}: temperature must be a finite number")
        return float(value) if value >= GREEDY_BELOW else 1.0
    return fallback


def shown(name: str) -> str:
    """Shorten a name for files and screens, and replace unprintable characters."""
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
    """The environment's `max_batches_offpolicy`; None if it is missing or sets no bound."""
    ahead = params.get("max_batches_offpolicy")
    return ahead if type(ahead) is int and 0 < ahead <= MOST_AHEAD else None


def masked_tokens(spot: str, masks: list[Any], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[L], True for generated tokens."""
    labels = _numbers(spot, "masks", masks, whole=True)
    generated: NDArray[np.bool_] = labels != IGNORED
    # atroposlib repeats the token id in `masks` where a token trains.
    if (labels[generated] != ids[generated]).any():
        wanted = f"{IGNORED} where a token does not train, and the token id where it does"
        if set(np.unique(labels)) <= {0, 1}:
            raise _wrong(
                "masks",
                f"{spot}: masks holds 0 and 1, another framework's convention. fix: put {wanted}",
            )
        raise _wrong("masks", f"{spot}: masks must be {wanted}")
    return generated


def rollout_logprobs(
    spot: str, given: list[Any], generated: NDArray[np.bool_], *, name: str = "inference_logprobs"
) -> NDArray[np.float64]:
    """[L] float64; values of generated tokens are finite, but may be placeholders."""
    same_length(spot, len(generated), **{name: given})
    values = _numbers(spot, name, given)
    own = values[generated]
    if not np.isfinite(own).all() or (own < LOWEST_LOGPROB).any():
        raise _wrong(
            name, f"{spot}: {name} holds NaN, Infinity or a number below {LOWEST_LOGPROB:g}"
        )
    return values


def advantages(
    spot: str, override: dict[str, Any], given: list[Any] | None, shared: float, length: int
) -> NDArray[np.float32]:
    """Advantage of each token, [L] float32: zero if overridden, else the environment's own, else
    the group's."""
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
    """[L] float32 of `ref_logprobs`, NaN for placeholders."""
    values = rollout_logprobs(spot, given, generated, name="ref_logprobs")
    return np.where(values <= POSITIVE_TOLERANCE, values, np.nan).astype(np.float32)


@dataclass(frozen=True)
class Teacher:
    """A teacher's K most likely tokens at each position of one sequence."""

    ids: NDArray[np.int64]
    """[L, K], distinct at each position; padded with 0"""
    logprobs: NDArray[np.float32]
    """[L, K] in nats; padded with -inf, also at positions without a teacher"""


def teacher_of(
    spot: str,
    ids: list[Any],
    logprobs: list[Any],
    generated: NDArray[np.bool_],
    vocabulary: int | None,
) -> Teacher | None:
    """Read the teacher's tokens of generated positions; None if there are none. Entry i describes
    token i, as in vLLM's prompt_logprobs."""
    same_length(spot, len(generated), distill_token_ids=ids, distill_logprobs=logprobs)
    where = np.flatnonzero(generated)
    # Prompt positions may hold anything.
    named, values = [ids[i] for i in where], [logprobs[i] for i in where]
    _lists_only(spot, "token", distill_token_ids=named, distill_logprobs=values)
    counts = [len(row) for row in named]
    if counts != [len(row) for row in values]:
        raise _wrong(
            TEACHER[1],
            f"{spot}: distill_logprobs has another number of entries than distill_token_ids",
        )
    # Check all positions in one call: K may differ from position to position.
    flat_ids = token_ids(spot, list(chain.from_iterable(named)), vocabulary, name=TEACHER[0])
    flat = _numbers(spot, TEACHER[1], list(chain.from_iterable(values)))
    if not np.isfinite(flat).all() or (flat > POSITIVE_TOLERANCE).any():
        raise _wrong(
            TEACHER[1], f"{spot}: distill_logprobs holds NaN, Infinity or a number above 0"
        )
    if any(len(set(row)) < len(row) for row in named):
        raise _wrong(TEACHER[0], f"{spot}: distill_token_ids names a token twice at one position")
    if not len(flat):
        return None
    # filled: [L, K] bool, True where the teacher has a token.
    filled = np.zeros((len(generated), max(counts)), dtype=bool)
    filled[where] = np.arange(max(counts)) < np.array(counts)[:, None]
    teacher = Teacher(
        np.zeros(filled.shape, dtype=np.int64), np.full(filled.shape, -np.inf, dtype=np.float32)
    )
    teacher.ids[filled], teacher.logprobs[filled] = flat_ids, flat
    return teacher
