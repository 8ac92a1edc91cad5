"""Rollouts for readers: grouped, searched, and compared. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Literal, TypeVar, get_args

from atropos_common.protocol.trainer_records import RolloutRecord
from atropos_tui.monitor.patterns import Pattern

Change = Literal["same", "gone", "new"]
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
# Words compared on each side, more than a record has.
DIFF_WORDS = 4000


@dataclass(frozen=True)
class RolloutGroup:
    """Completions of one prompt in one step, as far as the stream has them."""

    step: int
    env: str
    prompt: str
    rollouts: tuple[RolloutRecord, ...]


def groups(rollouts: Iterable[RolloutRecord], pattern: Pattern | None = None) -> list[RolloutGroup]:
    """Group rollouts, newest step first. A match in the prompt keeps the group, else the
    completion."""
    wanted = [rollout for rollout in rollouts if pattern is None or _matches(rollout, pattern)]
    order: dict[tuple[int, str, str], int] = {}
    for at, rollout in enumerate(wanted):
        order.setdefault(_key(rollout), at)
    ranked = sorted(wanted, key=lambda rollout: (-rollout.step, order[_key(rollout)]))
    return [RolloutGroup(*key, tuple(members)) for key, members in groupby(ranked, key=_key)]


def _key(rollout: RolloutRecord) -> tuple[int, str, str]:
    return rollout.step, rollout.env, rollout.prompt


def _matches(rollout: RolloutRecord, pattern: Pattern) -> bool:
    return any(pattern.search(text) for text in (rollout.prompt, rollout.completion, rollout.env))


_ROLE = r"(?:<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>|<\|)"
# Start of a user turn in chat templates: ChatML, Gemma, Llama 3 and 2, Phi, Zephyr.
_USER = re.compile(_ROLE + r"\s*user\s*(?:<\|end_header_id\|>|\|>)?\s*|\[INST\]\s*")
# Special tokens of templates and tokenizers.
_TOKENS = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|\[/?INST\]|</?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|think)>|<(?:bos|eos|pad)>"
)
# A shorter common beginning of questions is not cut.
SHARED = 16


def question(prompt: str) -> str:
    """Return the user's last turn, or the whole prompt, without special tokens."""
    *before, last = _USER.split(prompt)
    if before:
        last = _TOKENS.split(last, maxsplit=1)[0]
    return _TOKENS.sub(" ", last).strip()


def answer(completion: str) -> str:
    return _TOKENS.sub(" ", completion).strip()


def shared_beginning(questions: Iterable[str]) -> int:
    """Return the length of the common beginning of different questions, if long enough."""
    different = sorted(set(questions))
    if len(different) < 2:
        return 0
    # In sorted order, all texts between share the beginning of the first and the last.
    pairs = zip(different[0], different[-1], strict=False)
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    common = common[: len(common) - len(common.split(" ")[-1])]  # whole words
    return len(common) if len(common) >= SHARED else 0


def known_rewards(rollouts: Iterable[RolloutRecord]) -> list[float]:
    """Return the finite rewards."""
    return [one.reward for one in rollouts if math.isfinite(one.reward)]


Only = Literal["all", "worse", "flat"]
ONLY: tuple[Only, ...] = get_args(Only)
Order = Literal[
    "newest", "lowest reward", "highest reward", "lowest advantage", "highest advantage"
]
ORDERS: tuple[Order, ...] = get_args(Order)
Row = TypeVar("Row")


def in_order(rows: Sequence[Row], order: Order, of: Callable[[Row], RolloutRecord]) -> list[Row]:
    """Sort rows that are newest first; rows without a finite value come last."""
    if order == "newest":
        return list(rows)
    high, _, name = order.partition(" ")
    sign = -1 if high == "highest" else 1

    def key(row: Row) -> tuple[bool, float]:
        value: float = getattr(of(row), name)
        return (False, sign * value) if math.isfinite(value) else (True, 0.0)

    return sorted(rows, key=key)


def chosen(found: Iterable[RolloutGroup], only: Only) -> list[RolloutGroup]:
    """Filter groups: all; completions below their group's mean or without reward; flat groups."""
    if only == "all":
        return list(found)
    if only == "flat":
        rewards = ((group, [one.reward for one in group.rollouts]) for group in found)
        return [group for group, values in rewards if len(set(values)) == 1 < len(values)]
    kept = []
    for group in found:
        worse = tuple(one for one in group.rollouts if one.advantage < 0 or one.reward <= 0)
        kept += [replace(group, rollouts=worse)] if worse else []
    return kept


def earlier_twin(rollout: RolloutRecord, rollouts: Sequence[RolloutRecord]) -> RolloutRecord | None:
    """Return a rollout to compare with: an earlier one of the same prompt, else of the
    environment."""
    before = [other for other in rollouts if other.step < rollout.step and other.env == rollout.env]
    same = [other for other in before if other.prompt == rollout.prompt]
    return max(same or before, key=lambda other: other.step, default=None)


def diff(old: str, new: str) -> list[tuple[Change, str]]:
    """Compare word by word: unchanged, removed and added parts, in reading order."""
    before, after = _WORDS.findall(old), _WORDS.findall(new)
    rest = "".join(before[DIFF_WORDS:]), "".join(after[DIFF_WORDS:])
    before, after = before[:DIFF_WORDS], after[:DIFF_WORDS]
    parts: list[tuple[Change, str]] = []
    i = j = 0
    for here, there in [*_stayed(before, after), (len(before), len(after))]:
        parts += _replaced("".join(before[i:here]), "".join(after[j:there]))
        if parts and parts[-1][0] == "same":
            parts[-1] = "same", parts[-1][1] + "".join(before[here : here + 1])
        elif here < len(before):
            parts.append(("same", before[here]))
        i, j = here + 1, there + 1
    return parts + _replaced(*rest)


def _stayed(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    # Longest common subsequence, as pairs of indices, by rows of bits (Hyyrö 2004): the cost does
    # not depend on the texts. `difflib` takes minutes for those of a collapsed policy.
    places: dict[str, int] = {}
    for at, word in enumerate(after):
        places[word] = places.get(word, 0) | 1 << at
    everywhere = row = (1 << len(after)) - 1
    rows = []
    for word in before:
        met = row & places.get(word, 0)
        row = (row + met | row - met) & everywhere
        rows.append(row)
    # Bit j of row i is 0 if `after[j]` extends the common subsequence of `before[: i + 1]` and
    # `after[: j + 1]`.
    pairs = []
    i, j = len(before) - 1, len(after) - 1
    while i >= 0 and j >= 0:
        if before[i] == after[j]:
            pairs.append((i, j))
            i, j = i - 1, j - 1
        elif rows[i] >> j & 1:
            j -= 1
        else:
            i -= 1
    return pairs[::-1]


def _replaced(before: str, after: str) -> list[tuple[Change, str]]:
    both: list[tuple[Change, str]] = [("gone", before), ("new", after)]
    return [part for part in both if part[1]]
