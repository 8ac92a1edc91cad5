"""Number of completions in flight, kept at the knee of the engines' throughput curve.

Below the knee an engine could generate more tokens a second. Above it, completions take longer and
train later. The engine measures its own curve (`EngineLoad.knee`). `Concurrency` raises its target
until the knee is known, then follows the knee. A queue at the engine or a full cache ends the rise.
Trials correct a knee that is too low (`trials.py`).
Engines on the trainer's device generate less while a batch always waits for the trainer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import aiohttp
from pydantic import ValidationError

from atropos_common.net.http import key_headers
from atropos_common.protocol.bridge import LOAD_PATH, EngineLoad
from atropos_common.system.run_dir import ENV_AHEAD, ENV_CONCURRENCY, ENV_ENGINE_SHARE
from atropos_envs.hosting.engine_client import root_of
from atropos_envs.hosting.trials import CHANGE_S, REACHED, Trials

log = logging.getLogger(__name__)

# Seconds between two looks at the engines.
LOOK_S = 1.0
LOOK_TIMEOUT = aiohttp.ClientTimeout(total=2)
# Factor and interval of the rise. An interval fills two samples of the engine's curve. The target
# rises only while the share `REACHED` of it is in flight; below, something else is the bound.
RISE, RISE_S = 1.5, 3.0
# A target at the knee moves only if the knee moves by more than this share, and at most once per
# interval (s).
DEAD_BAND, SETTLED_S = 0.15, 10.0
# Weight of a new estimate in the moving average of the knee.
STEADY = 0.1
# An engine counts as full from this share of its slots or of its cache.
FULL = 0.95
# After two full looks in a row, the limit is `EASE` times the running sequences. It grows by the
# factor `REGROWTH` every `EASED_S` seconds, because lengths change.
EASE, EASED_S, REGROWTH = 0.9, 60.0, 1.05
# Limit of the first target. It is low, because an engine knows its knee only after it has run four
# times as many sequences.
FIRST = 32
# Waiting sequences are a queue above this share of the running ones: requests that arrive between
# two steps always wait for a moment.
QUEUED = 0.1
# Weight of a new sample in the mean number of sequences of a group and of an engine.
SMOOTHING = 0.2

# Batches that always wait for the trainer: above the first number the engines beside it generate
# less, below the second one more again.
EXCESS, SCARCE = 1.0, 0.25
# Factors of a change, its interval (s), in which completions in flight end, and the smallest part.
SHRINK, GROW, THROTTLE_S, LEAST_PART = 0.8, 1.25, 10.0, 0.125
# The first steps compile, and say nothing about the trainer's speed.
FIRST_STEPS = 2

Phase = Literal["fixed", "rising", "knee", "engine full", "cache full", "queue slots", "trainer"]
"""Bound on the completions in flight. fixed: the profile's number. rising: not at the knee yet.
engine full: its slots are used. cache full: its KV cache is. queue slots: the lag bound. trainer:
it is slower than the engines, and those on its device make room for it."""


@dataclass
class Concurrency:
    """Number of sequences that one environment keeps in flight at one engine."""

    first: int
    ahead: int
    """Limit of batches filled by groups in flight and in the queue."""
    share: float = 1.0
    """This environment's share of the engines."""
    fixed: bool = False
    """The profile sets the target."""
    target: float = field(init=False)
    phase: Phase = field(init=False)
    _knee: float | None = None
    """Moving average of the engine's estimates."""
    _trials: Trials = field(default_factory=Trials, init=False)
    _moved_at: float = -math.inf
    _limit: float = math.inf
    _full: Phase = "engine full"
    """Cause of `_limit`."""
    _eased_at: float = -math.inf
    _full_before: Phase | None = None

    def __post_init__(self) -> None:
        self.target, self.phase = float(self.first), "fixed" if self.fixed else "rising"

    @property
    def knee(self) -> float | None:
        """This environment's share of the engine's knee, in sequences; None: unknown yet."""
        return None if self._knee is None else max(self._knee, self._trials.proved)

    def without_load(self, batch: int) -> None:
        """Keep two batches of `batch` sequences in flight: the engine reports no load."""
        if not self.fixed:
            self.fixed, self.phase = True, "fixed"
            self.target = max(self.target, 2.0 * batch * self.share)

    def look(self, load: EngineLoad, own: float, now: float, *, free: bool = True) -> None:
        """Move the target.

        Args:
            own: this environment's sequences in flight.
            free: neither the trainer nor the lag bound is the bound.
        """
        if load.knee is not None:
            # Single estimates of a busy engine scatter; their mean is close to the knee.
            now_at, before = load.knee * self.share, self._knee
            self._knee = now_at if before is None else before + STEADY * (now_at - before)
        if self.fixed:
            return
        self._trials.window.look(load, own, free, now)
        if full := self._pressure(load):
            self.phase = self._full = full
            self._full_before, self._eased_at = None, now
            self._trials.give_up(now)
            self._limit = max(self.first, EASE * min(self.target, load.running * self.share))
            self._move(self._limit, now)
            return
        if now - self._eased_at >= EASED_S:
            self._limit, self._eased_at = self._limit * REGROWTH, now
        most = min(load.slots * self.share, self._limit)
        if self._trials.is_on:
            self._move(self._trials.kept(self.target, now), now)
            return
        goal = min(most, math.inf if self.knee is None else self.knee)
        # At a limit the target follows the limit's slow growth.
        band = 0.0 if self.phase == self._full else DEAD_BAND
        if self.target < goal * (1.0 - band):
            # The engine needs `RISE_S` at each level to measure its rate there.
            if now - self._moved_at >= RISE_S and own >= REACHED * self.target:
                self._move(min(goal, RISE * self.target), now)
            if self._limit == math.inf or goal < most:
                self.phase = "rising" if own >= REACHED * self.target else "queue slots"
            return
        if self.target > goal * (1.0 + DEAD_BAND) and now - self._moved_at >= SETTLED_S:
            self._move(goal, now)
        if self._knee is None or self._knee >= most:
            self.phase = self._full
            return
        self.phase = "knee"
        self._move(self._trials.begun(self.target, most, self._knee, now), now)

    def forget_rate(self, now: float) -> None:
        """Measure the token rate again: other engines answer now."""
        self._trials.window.restart(now)

    # Preemptions do not show pressure: each publish preempts all running sequences, to compute
    # their keys and values with the new weights.
    def _pressure(self, load: EngineLoad) -> Phase | None:
        """Return what is full, at the second full look in a row."""
        queued = load.waiting > QUEUED * load.running and load.running >= FULL * load.slots
        found: Phase | None = "cache full" if load.kv_use >= FULL else None
        found = found or ("engine full" if queued else None)
        before, self._full_before = self._full_before, found
        return found if before is not None else None

    def _move(self, target: float, now: float) -> None:
        if target == self.target:
            return
        if round(target) != round(self.target):
            log.info("%.0f sequences in flight (before: %.0f): %s", target, self.target, self.phase)
        self.target, self._moved_at = target, now
        self._trials.window.restart(now + CHANGE_S)


class Throttle:
    """Part of their targets that the engines on the trainer's device keep."""

    def __init__(self) -> None:
        self.part = 1.0
        self._lowest = math.inf
        self._since: float | None = None

    def look(self, queued: float, now: float) -> None:
        """Change the part once in `THROTTLE_S`.

        Args:
            queued: batches that wait for the trainer.
        """
        self._lowest = min(self._lowest, queued)
        if self._since is None:
            self._since = now
        if now - self._since < THROTTLE_S:
            return
        if self._lowest >= EXCESS:
            self.part = max(LEAST_PART, SHRINK * self.part)
        elif self._lowest < SCARCE:
            self.part = min(1.0, GROW * self.part)
        self._lowest, self._since = math.inf, now


# The bound of the whole is the first of these at any engine.
_FIRST_BOUND: tuple[Phase, ...] = (
    "cache full",
    "engine full",
    "queue slots",
    "rising",
    "knee",
    "fixed",
)


class Targets:
    """Number of sequences that one environment keeps in flight at each of its engines."""

    # Engines differ: one that shares its GPU with the trainer has a smaller KV cache, and its
    # completions take longer. Equal engines on one GPU slow each other, so that neither's curve is
    # its own: one that once ran alone would keep a low knee, and the other would get the rest.
    def __init__(
        self,
        whole: Concurrency,
        roots: Sequence[str],
        beside: Collection[str] = (),
        on_one_gpu: Sequence[Sequence[str]] = (),
    ) -> None:
        """Begin with an equal part of `whole` at each engine.

        Args:
            beside: engines on the trainer's device.
            on_one_gpu: groups of equal engines, which have the same target.
        """
        first = max(1, round(whole.first / max(1, len(roots))))
        self.ahead, self.share = whole.ahead, whole.share
        grouped = {root for group in on_one_gpu for root in group}
        self._groups = [*on_one_gpu, *([root] for root in roots if root not in grouped)]
        self.each: dict[str, Concurrency] = {}
        """State of each engine; the engines of a group share one."""
        for group in self._groups:
            self.each |= dict.fromkeys(group, replace(whole, first=first))
        self._present = set(roots)
        self._own: dict[str, float] = {}
        """Moving average of the sequences in flight."""
        self._beside, self._throttle = set(beside), Throttle()

    @property
    def target(self) -> float:
        """Sum over the engines that answer."""
        return sum(self.targets[root] for root in self._present)

    @property
    def targets(self) -> dict[str, float]:
        return {
            root: one.target * (self._throttle.part if self._is_throttled(root) else 1.0)
            for root, one in self.each.items()
        }

    def _is_throttled(self, root: str) -> bool:
        return root in self._beside and not self.each[root].fixed

    @property
    def knee(self) -> float | None:
        """Sum of the engines' knees; None while one is unknown."""
        known = [one.knee for one in self._of_present() if one.knee is not None]
        return sum(known) if known and len(known) == len(self._present) else None

    @property
    def phase(self) -> Phase:
        if self._throttle.part < 1.0:
            return "trainer"
        phases = {one.phase for one in self._of_present()}
        return next((phase for phase in _FIRST_BOUND if phase in phases), "rising")

    def _of_present(self) -> list[Concurrency]:
        return [self.each[root] for root in self._present]

    def look(self, loads: Mapping[str, EngineLoad], own: Mapping[str, float], now: float) -> None:
        """Move the targets of the engines that answer.

        Args:
            own: this environment's sequences in flight at each engine.
        """
        changed, self._present = self._present ^ set(loads), set(loads)
        targets = self.targets
        for root in loads:
            before = self._own.get(root, own[root])
            self._own[root] = before + SMOOTHING * (own[root] - before)
        short = {root for root in loads if self._own[root] < REACHED * targets[root]}
        for group in self._groups:
            one = self.each[group[0]]
            if not changed.isdisjoint(group):
                one.forget_rate(now)
            if present := [root for root in group if root in loads]:
                mean = fmean(own[root] for root in present)
                # A trial that takes sequences from another engine gains nothing.
                free = short <= set(group) and targets[group[0]] == one.target
                one.look(_mean([loads[root] for root in present]), mean, now, free=free)

    def look_at_queue(self, queued: float, step: int, now: float) -> None:
        """Let the engines on the trainer's device make room for it, or generate more again.

        Args:
            queued: batches that wait for the trainer.
            step: batches that it has begun.
        """
        if step > FIRST_STEPS and any(map(self._is_throttled, self.each)):
            self._throttle.look(queued, now)

    def without_load(self, batch: int) -> None:
        """Keep two batches in flight: the engines report no load."""
        for one in self.each.values():
            one.without_load(math.ceil(batch / len(self.each)))


def _mean(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Return the mean load of equal engines; the knee counts once all of them know theirs."""
    knees = [load.knee for load in loads if load.knee is not None]
    return EngineLoad(
        running=round(fmean(load.running for load in loads)),
        waiting=round(fmean(load.waiting for load in loads)),
        kv_use=max(load.kv_use for load in loads),
        generated_tokens=round(fmean(load.generated_tokens for load in loads)),
        steps_s=fmean(load.steps_s for load in loads),
        slots=round(fmean(load.slots for load in loads)),
        knee=fmean(knees) if len(knees) == len(loads) else None,
    )


class GroupMeter:
    """Mean number of sequences in flight of an unfinished group."""

    # Short completions of a group end before its long ones, and a group has none in flight while it
    # is scored or uses a tool. So the target needs more groups than target / group size.
    def __init__(self, group_size: int) -> None:
        self._size = group_size
        self.mean = float(group_size)

    def add(self, sequences: float, groups: int) -> None:
        if groups > 0:
            now = min(self._size, max(0.25 * self._size, sequences / groups))
            self.mean += SMOOTHING * (now - self.mean)

    def groups(self, sequences: float) -> int:
        """Return how many groups have `sequences` in flight."""
        return max(1, round(sequences / self.mean))


def batches_ahead(groups: int, batch: int, most: int) -> int:
    """Return how many batches of `batch` groups need queue slots.

    One more than `groups` in flight fill: no group waits while the trainer takes its next batch.
    """
    return max(1, min(most, math.ceil(groups / max(1, batch)) + 1))


def from_environment(variables: Mapping[str, str], batch: int) -> Concurrency | None:
    """Return the target that the plan sets for a batch of `batch` sequences; None: atroposlib's
    worker settings decide."""
    asked, ahead = variables.get(ENV_CONCURRENCY, ""), int(variables.get(ENV_AHEAD, "1"))
    share = float(variables.get(ENV_ENGINE_SHARE, "1"))
    if not asked:
        return None
    if asked == "auto":
        return Concurrency(max(1, round(min(batch, FIRST) * share)), ahead, share)
    return Concurrency(int(asked), ahead, share, fixed=True)


class LoadReader:
    """Reader of the load of several engines."""

    def __init__(self, urls: Sequence[str], http: Callable[[], aiohttp.ClientSession]) -> None:
        self.roots = [root_of(url) for url in urls]
        self._http = http
        self.has_no_route = False
        """An engine answered that it reports no load."""

    async def read(self) -> dict[str, EngineLoad]:
        """Return the load by address, of the engines that report one."""
        each = await asyncio.gather(*(self._one(root) for root in self.roots))
        return {root: load for root, load in zip(self.roots, each, strict=True) if load is not None}

    async def _one(self, root: str) -> EngineLoad | None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, ValidationError):
            headers = key_headers(os.environ)
            url = f"{root}{LOAD_PATH}"
            async with self._http().get(url, timeout=LOOK_TIMEOUT, headers=headers) as response:
                # 501: vLLM without statistics, or with speculative decoding. 404: another server.
                self.has_no_route = self.has_no_route or response.status in (404, 501)
                if response.status == 200:
                    answer: Any = await response.json()
                    return EngineLoad.model_validate(answer)
        return None


async def every(seconds: float, look: Callable[[], Any]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await look()
