"""A group in run-api's form: plain numbers, one advantage for each token, JSON.

Rewards often come from numpy or torch, which JSON cannot hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from atropos_common.protocol.records import (
    FLAT,
    GROUP_SIZE,
    NOT_FINITE,
    RETURNED_NONE,
    TOO_LONG,
)

Group = dict[str, Any]
Read = Callable[[Any, str], Any]
"""Reader of a value at a place, which error messages name."""


# run-api refuses a group without these fields.
NEEDED = ("tokens", "masks", "scores")


class Unsendable(ValueError):
    """run-api cannot take the group; the message names field and type."""


def convert(group: Group) -> None:
    """Replace the numbers of `group` by plain ones.

    Raises:
        Unsendable: a value is not a number, or a field is missing.
    """
    if missing := [name for name in NEEDED if group.get(name) is None]:
        raise Unsendable(f"it has no {missing[0]}")
    for name, read in READERS.items():
        if group.get(name) is not None:
            group[name] = read(group[name], name)
    # After the readers, which made plain numbers of it.
    if group.get("advantages"):
        group["advantages"] = _advantages(group["advantages"], group.get("tokens") or [])


def encoded(group: Group) -> bytes:
    """Return `group` as JSON.

    Raises:
        Unsendable: JSON cannot hold one of its fields.
    """
    fields = []
    for name, value in group.items():
        try:
            # Field by field, so that the error names the field.
            fields.append(f"{json.dumps(name)}:{json.dumps(value, default=_plain)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise Unsendable(f"{name}: {error}") from None
    return f"{{{','.join(fields)}}}".encode()


def why_left_out(
    group: Any, group_size: int, max_token_len: int, *, drops_flat: bool
) -> str | None:
    """Return why a converted group is not sent, None if it is."""
    # BaseEnv's rules, and finite scores.
    if not isinstance(group, dict):
        return RETURNED_NONE
    if not all(math.isfinite(score) for score in group.get("scores", [])):
        return NOT_FINITE
    overrides = group.get("group_overrides") or {}
    if len(group.get("tokens", [])) != overrides.get("group_size", group_size):
        return GROUP_SIZE
    if drops_flat and is_flat(group):
        return FLAT
    if max_token_len > 0 and any(len(tokens) >= max_token_len for tokens in group["tokens"]):
        return TOO_LONG
    return None


def is_flat(group: Group) -> bool:
    """Return True if a converted group teaches the trainer nothing: all scores equal."""
    # Advantages of the environment's own may differ, a teacher's logprobs train at each token, and
    # a lone score is compared with earlier ones.
    own = group.get("advantages") or group.get("distill_token_ids")
    return len(group["scores"]) > 1 and len(set(group["scores"])) == 1 and not own


def _number(value: Any, where: str) -> float:
    try:
        return float(value) if hasattr(value, "__float__") else float(value.item())
    except (TypeError, ValueError, RuntimeError, AttributeError):
        raise _wrong(value, where, "a number") from None


def _whole(value: Any, where: str) -> int:
    # numpy and torch integers, and floats such as 3.0 from a float tensor, are fine.
    number = _number(value, where)
    if not number.is_integer():
        raise _wrong(value, where, "a whole number")
    return int(number)


def _row(value: Any, where: str, kind: type, read: Read) -> list[Any]:
    value = _sequence(value, where, "a list of numbers")
    # Most groups are plain already; a check of the types alone is much faster than a copy.
    if type(value) is list and set(map(type, value)) <= {kind}:
        return value
    return [read(each, f"{where}[{at}]") for at, each in enumerate(value)]


def _numbers(value: Any, where: str) -> list[float]:
    return _row(value, where, float, _number)


def _token_ids(value: Any, where: str) -> list[int]:
    return _row(value, where, int, _whole)


def _rows_of(read: Read) -> Read:
    def rows(value: Any, where: str) -> list[Any]:
        value = _sequence(value, where, "a list")
        return [read(each, f"{where}[{at}]") for at, each in enumerate(value)]

    return rows


def _sequence(value: Any, where: str, wanted: str) -> Sequence[Any]:
    """Return `value`, or the list of an array."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _wrong(value, where, wanted)
    return value


# An environment gives a sequence one advantage, or one for each token.
def _advantage(value: Any, where: str) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return _numbers(value, where) if several else _number(value, where)


# run-api needs one advantage for each token.
def _advantages(given: list[Any], tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    # Padded, so that surplus advantages do not raise here: run-api reports them.
    lengths = [len(ids) for ids in tokens] + [1] * len(given)
    return [one if isinstance(one, list) else [one] * lengths[at] for at, one in enumerate(given)]


# `json.dumps` calls this for what it cannot hold: numpy and torch arrays, and their scalars.
def _plain(value: Any) -> Any:
    for name in ("tolist", "item"):
        if callable(made := getattr(value, name, None)):
            return made()
    raise TypeError(f"JSON cannot hold a {_type(value)}")


def _wrong(value: Any, where: str, wanted: str) -> Unsendable:
    return Unsendable(f"{where} is a {_type(value)} and not {wanted}")


def _type(value: Any) -> str:
    module, name = type(value).__module__, type(value).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


READERS: dict[str, Read] = {
    "tokens": _rows_of(_token_ids),
    "masks": _rows_of(_token_ids),
    "scores": _numbers,
    "advantages": _rows_of(_advantage),
    "inference_logprobs": _rows_of(_numbers),
    "ref_logprobs": _rows_of(_numbers),
    "distill_token_ids": _rows_of(_rows_of(_token_ids)),
    "distill_logprobs": _rows_of(_rows_of(_numbers)),
}
