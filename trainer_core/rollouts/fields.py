"""What the fields of a group must be. Whoever can reach run-api can put anything there: nothing here trusts it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-5
"""vLLM takes a lower temperature for greedy decoding, whose logprobs are unscaled."""
FLOAT32_MAX = float(np.finfo(np.float32).max)
NAME_LENGTH = 80
"""Characters of an environment's name that are kept."""

OUT_OF_VOCABULARY = "token ids outside of the vocabulary"


class Malformed(ValueError):
    """A group that must not be trained on. The message names the place and the field."""

    def __init__(self, reason: str, detail: str) -> None:
        """Args:
        reason: one of a few, by which such groups are counted.
        """
        super().__init__(detail)
        self.reason = reason


def wrong(field: str, detail: str) -> Malformed:
    """`field` is not what it must be."""
    return Malformed(f"malformed {field}", detail)


def rows(where: str, group: dict[str, Any], name: str) -> list[Any]:
    """A list of the group, empty when it is missing."""
    values = group.get(name)
    if values is None:
        return []
    if not isinstance(values, list):
        raise wrong(name, f"{where}: {name} is no list")
    return values


def same_length(where: str, count: int, **lists: Any) -> None:
    """Every one is a list of `count` entries."""
    for name, values in lists.items():
        if not isinstance(values, list):
            raise wrong(name, f"{where}: {name} is no list")
        if len(values) != count:
            raise wrong(name, f"{where}: {name} has {len(values)} entries where tokens has {count}")


def lists_only(where: str, **columns: list[Any]) -> None:
    """Every entry is a list: that of one sequence."""
    for name, column in columns.items():
        if not all(isinstance(row, list) for row in column):
            raise wrong(name, f"{where}: {name} must hold one list for each sequence")


def whole_numbers(spot: str, name: str, values: list[Any]) -> NDArray[np.int64]:
    """[len(values)]"""
    try:
        if set(map(type, values)) <= {int}:
            return np.asarray(values, dtype=np.int64)
    except OverflowError:
        pass
    raise wrong(name, f"{spot}: {name} must be a list of whole numbers")


def numbers(spot: str, name: str, values: list[Any]) -> NDArray[np.float64]:
    """[len(values)], NaN and infinities included."""
    try:
        if set(map(type, values)) <= {int, float}:
            return np.asarray(values, dtype=np.float64)
    except OverflowError:
        pass
    raise wrong(name, f"{spot}: {name} must be a list of numbers")


def token_ids(spot: str, tokens: list[Any], vocabulary: int | None) -> NDArray[np.int64]:
    """[L]; an id that the model has no row for would end a GPU's process."""
    ids = whole_numbers(spot, "tokens", tokens)
    if (ids < 0).any():
        raise Malformed(OUT_OF_VOCABULARY, f"{spot}: tokens holds id {ids.min()}, and token ids are not negative")
    if vocabulary is not None and (ids >= vocabulary).any():
        raise Malformed(
            OUT_OF_VOCABULARY,
            f"{spot}: tokens holds id {ids.max()}, but the model's vocabulary has {vocabulary}: the environment's "
            "tokenizer is of another model",
        )
    return ids


def table(where: str, name: str, value: Any) -> dict[str, Any]:
    """An object, empty when it is missing."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(name, f"{where}: {name} is no object")
    return value


def temperature(spot: str, sources: tuple[dict[str, Any], ...], fallback: float) -> float:
    """The first that names one. Greedy (0) has unscaled logprobs: 1."""
    for source in sources:
        value = source.get("temperature")
        if value is None:
            continue
        if type(value) not in (int, float) or not _fits(value):
            raise wrong("temperature", f"{spot}: temperature must be a finite number")
        return float(value) if value >= GREEDY_BELOW else 1.0
    return fallback


def _fits(value: float) -> bool:
    """Whether a float32 holds it. Comparing first: an integer may be too large to become a float."""
    return abs(value) <= FLOAT32_MAX


def environment(group: dict[str, Any]) -> str:
    """Who sent the group, as far as it says so: text for a file or a screen, cut and without lone surrogates."""
    params = group.get("generation_params")
    name = params.get("env") if isinstance(params, dict) else None
    if isinstance(name, str):
        return name[:NAME_LENGTH].encode("utf-8", "replace").decode()
    env_id = group.get("env_id")
    return f"env {env_id}" if isinstance(env_id, int) and abs(env_id) < 2**63 else ""
