"""Choice of problems by pass rate: problems that always pass or always fail come less often.

The pass rate of a problem gives the chance that its next group is flat and teaches nothing. Items
have no name, so a digest of their content identifies the problem.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from atropos_common.protocol.records import CurriculumCounts
from atropos_common.system.files import read_regular, write_private
from atropos_common.system.run_dir import ENV_CURRICULUM, RunDir

log = logging.getLogger(__name__)

LEAST_CHANCE = 0.1
"""Lowest chance of a problem; it finds those that have become useful."""
MOST_SKIPPED = 16
"""Limit of items drawn for one choice; if all are skipped, the most useful is taken."""
MOST_PROBLEMS = 50_000
SAVE_S = 30.0
# Factor on the weight of a problem's earlier results after a new one, and after a skip.
KEPT_BY_RESULT, KEPT_BY_SKIP = 0.5, 0.95
# Exponent of the chance. A larger one gives fewer flat groups, and problems come less evenly.
SHARPNESS = 2
# Decay per group of the averages over all problems: about the newest 200 groups count.
KEPT_BY_GROUP = 0.995
# Groups that the averages assume before the first results; half of them are flat.
ASSUMED_GROUPS = 4.0
# Limits of the prior's strength, in completions. A stronger prior would outweigh the results of a
# problem that always scores alike.
WEAKEST, STRONGEST = 0.02, 4.0
DEEPEST = 20
FORMAT = 1


def key_of(item: Any) -> str | None:
    """Return a digest of the item's content; None if a part has no stable form."""
    try:
        content = repr(_plain(item, DEEPEST))
    except (TypeError, ValueError):
        return None
    return blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _plain(value: Any, deepest: int) -> Any:
    """Return the content as lists of plain values, sets and keys in a fixed order."""
    if deepest == 0:
        raise ValueError("an item that contains itself")
    if isinstance(value, Enum):
        return [type(value).__name__, value.name]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, BaseModel):
        value = dict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        pairs = [[_plain(key, deepest - 1), _plain(value[key], deepest - 1)] for key in value]
        return sorted(pairs, key=repr)
    if isinstance(value, Set):
        return sorted((_plain(each, deepest - 1) for each in value), key=repr)
    if isinstance(value, Sequence):
        return [_plain(each, deepest - 1) for each in value]
    if callable(read := getattr(value, "tobytes", None)):  # numpy arrays, pictures
        return [str(getattr(value, "shape", None) or getattr(value, "size", None)), read()]
    if callable(read := getattr(value, "tolist", None)):  # tensors
        return read()
    raise TypeError(f"{type(value).__name__} has no stable form")


def flat_chance(passes: float, fails: float, size: int) -> float:
    """Return the chance that `size` completions all pass or all fail, at a pass rate of
    Beta(passes, fails)."""
    all_pass = all_fail = 1.0
    for made in range(size):
        all_pass *= (passes + made) / (passes + fails + made)
        all_fail *= (fails + made) / (passes + fails + made)
    return all_pass + all_fail


def prior(rate: float, flat: float, size: int) -> tuple[float, float]:
    """Return the Beta distribution of pass rates with this mean and this share of flat groups."""
    low, high = math.log(WEAKEST), math.log(STRONGEST)
    # A stronger prior has fewer flat groups: bisect.
    for _ in range(20):
        middle = (low + high) / 2
        strength = math.exp(middle)
        too_flat = flat_chance(strength * rate, strength * (1 - rate), size) > flat
        low, high = (middle, high) if too_flat else (low, middle)
    strength = math.exp(low)
    return strength * rate, strength * (1 - rate)


@dataclass(slots=True)
class Problem:
    passes: float = 0.0
    fails: float = 0.0
    chance: float | None = 1.0
    """Chance of its newest taken item; None if all were skipped before."""

    def weaken(self, kept: float) -> None:
        self.passes *= kept
        self.fails *= kept


@dataclass
class Averages:
    """Sums over groups, weighted by 1 / chance: estimates as if no item were skipped."""

    groups: float = ASSUMED_GROUPS
    flat: float = ASSUMED_GROUPS / 2
    rate: float = ASSUMED_GROUPS / 2
    made: float = 0.0
    """Groups, unweighted."""
    made_flat: float = 0.0

    def add(self, rate: float, flat: bool, chance: float | None) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) * KEPT_BY_GROUP)
        self.made += 1
        self.made_flat += flat
        if chance is not None:
            self.groups += 1 / chance
            self.flat += flat / chance
            self.rate += rate / chance


@dataclass
class Curriculum:
    path: Path | None = None
    """File of the state; None: not saved."""
    dice: random.Random = field(default_factory=random.Random)
    group_size: int = 8

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys(("offered", "skipped", "known", "without_key"), 0)
        self._problems: dict[str, Problem] = {}
        self._averages = Averages()
        self._scores: list[float] = []
        """Lowest and highest so far."""
        self._saved_at = time.monotonic()
        self._load()
        self._fit()

    async def choose(self, draw: Callable[[], Awaitable[Any]]) -> Any:
        """Draw items until one is taken, and return it."""
        skipped: list[tuple[float, Any, Problem]] = []
        for _ in range(MOST_SKIPPED):
            item = await draw()
            if item is None:
                break
            self.counts["offered"] += 1
            key = key_of(item)
            if key is None:
                self.counts["without_key"] += 1
                return item
            problem = self._problem(key)
            self.counts["known"] += problem.passes + problem.fails > 0
            useful = self._useful(problem)
            # Below 1 for problems that are less useful than an unknown one.
            chance = min(1.0, max(LEAST_CHANCE, (useful / self._usual) ** SHARPNESS))
            if self.dice.random() < chance:
                problem.chance = chance
                return item
            self.counts["skipped"] += 1
            # Its results lose weight, so its chance grows until it is taken again.
            problem.weaken(KEPT_BY_SKIP)
            skipped.append((useful, item, problem))
        if not skipped:
            return None
        self.counts["skipped"] -= 1
        _, item, problem = max(skipped, key=lambda each: each[0])
        problem.chance = None
        return item

    def learn(self, key: str | None, groups: Sequence[Sequence[float]]) -> None:
        """Record the scores of one item's groups."""
        scores = [each for each in groups if len(each) > 1 and all(map(math.isfinite, each))]
        if key is None or not scores:
            return
        every = [score for group in scores for score in group] + self._scores
        self._scores = [min(every), max(every)]
        self.group_size = len(scores[0])
        passes = sum(self._passes(group) for group in scores)
        completions = sum(map(len, scores))
        problem = self._problem(key)
        problem.weaken(KEPT_BY_RESULT)
        problem.passes += passes
        problem.fails += completions - passes
        flat = all(min(group) == max(group) for group in scores)
        self._averages.add(passes / completions, flat, problem.chance)
        self._fit()
        if time.monotonic() - self._saved_at > SAVE_S:
            self.save()

    def _problem(self, key: str) -> Problem:
        # Move it to the end of the dictionary: the least recent problem is dropped first.
        found = self._problems[key] = self._problems.pop(key, Problem())
        if len(self._problems) > MOST_PROBLEMS:
            del self._problems[next(iter(self._problems))]
        return found

    def _passes(self, group: Sequence[float]) -> int:
        """Return how many scores are above the middle of the group's lowest and highest."""
        low, high = min(group), max(group)
        if low == high:
            # Compare a flat group with the middle of all scores so far, or with 0 while all are
            # equal.
            low, high = self._scores
            if low == high:
                return len(group) if low > 0 else 0
        return sum(score > (low + high) / 2 for score in group)

    def _useful(self, problem: Problem) -> float:
        """Return the chance that the problem's next group is not flat."""
        passes, fails = self._prior
        return 1 - flat_chance(passes + problem.passes, fails + problem.fails, self.group_size)

    def _fit(self) -> None:
        known = self._averages
        # A Beta distribution has a mean above 0 and below 1.
        rate = min(0.999, max(0.001, known.rate / known.groups))
        self._prior = prior(rate, known.flat / known.groups, self.group_size)
        self._usual = max(1e-6, 1 - flat_chance(*self._prior, self.group_size))

    def record(self) -> CurriculumCounts:
        known = self._averages
        shares: dict[str, float] = {}
        if known.made:
            shares = {
                "flat_share": known.made_flat / known.made,
                "flat_share_without": known.flat / known.groups,
            }
        return CurriculumCounts(**self.counts, **shares)

    # State for the environment's next process.

    def save(self) -> None:
        self._saved_at = time.monotonic()
        if self.path is None:
            return
        state = {
            "format": FORMAT,
            "scores": self._scores,
            "averages": {
                each.name: getattr(self._averages, each.name) for each in fields(Averages)
            },
            "problems": {
                key: [round(problem.passes, 2), round(problem.fails, 2)]
                for key, problem in self._problems.items()
                if problem.passes or problem.fails
            },
        }
        with suppress(OSError):  # a full disk must not end the environment
            write_private(self.path, json.dumps(state))

    def _load(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            state = json.loads(read_regular(self.path))
            if state["format"] != FORMAT:
                raise ValueError(f"format {state['format']}")
            averages = Averages(**{name: float(value) for name, value in state["averages"].items()})
            problems = {
                str(key): Problem(float(passes), float(fails))
                for key, (passes, fails) in state["problems"].items()
            }
            scores = [float(score) for score in state["scores"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("curriculum: %s cannot be read (%s); starting without it", self.path, error)
            return
        self._averages, self._problems, self._scores = averages, problems, scores
        log.info("curriculum: the pass rates of %d problems are known", len(problems))


def curriculum_of(component: str, group_size: int) -> Curriculum | None:
    if os.environ.get(ENV_CURRICULUM) != "pass_rate":
        return None
    if group_size < 2:
        log.warning("curriculum: with group_size = 1 no group is flat; every item is taken")
        return None
    run = RunDir.from_env()
    path = run.bridge / f"env.{component}.curriculum" if run else None
    return Curriculum(path, group_size=group_size)
