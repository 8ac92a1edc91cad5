"""Queue slots in run-api: which groups may be sent, and how many spare groups to start.

A flat group is not sent, so more groups are started than there are slots.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

# Groups over which the flat share is measured: at least, and at most. In between it is the number
# in flight, because the number to start is in proportion to 1 / (1 - share).
WINDOW, LONGEST = 64, 512
# Highest flat share that counts.
MOST_FLAT = WINDOW / (WINDOW + 1)


class PendingGroup:
    def __init__(self, item: Any, uuid: str, step: int) -> None:
        self.item, self.uuid = item, uuid
        self.step = step
        """Batches that the trainer had begun at the group's start."""
        self.has_slot = False
        self.made = False
        """Its rollouts are finished."""
        self.useful = 1
        """Groups that it sends; some environments make several at once."""
        self.useful_since: int | None = None
        """Batches that the trainer had begun when something to send was finished."""
        # Resolved once, to True or False, by `decide`.
        self._decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def decide(self, goes: bool) -> None:
        """Give the group a slot, or refuse it one for good."""
        self.has_slot = goes
        if not self._decided.done():
            self._decided.set_result(goes)

    async def wait_for_slot(self) -> bool:
        """Wait for `decide`; return True for a slot."""
        # A cancelled waiter must not cancel the future: `decide` still sets it.
        return await asyncio.shield(self._decided)


class QueueSlots:
    def __init__(self) -> None:
        self.open_slots = 0
        """Slots without a group in run-api's queue."""
        self.step = 0
        """Batches that the trainer has begun."""
        self._ahead = self._all = 0
        self._groups: list[PendingGroup] = []
        self._flat: deque[bool] = deque(maxlen=LONGEST)

    def update(
        self, *, queued: int, came: int, coming: int, places: int, ahead: int, step: int
    ) -> list[PendingGroup]:
        """Update the slots from run-api's view of the queue.

        Args:
            queued: groups in the queue.
            came: our groups that reached run-api while it answered; `queued` may include them.
            coming: our groups on their way; `queued` may include them.
            places: our slots, for `ahead` batches.

        Returns:
            Spare groups that can no longer get a slot.
        """
        self._all, self._ahead, self.step = places, ahead, step
        # The lower bound assumes that `queued` misses all of `came`, the upper bound that it
        # includes all of `coming`.
        self.open_slots = min(
            max(self.open_slots, places - queued - came), places - queued + coming
        )
        return self._assign()

    def begin(self, item: Any, uuid: str) -> tuple[PendingGroup, list[PendingGroup]]:
        """Register a new group; return it, and spare groups as `update` does."""
        group = PendingGroup(item, uuid, self.step)
        self._groups.append(group)
        return group, self._assign()

    def sent(self, group: PendingGroup | None, groups: int) -> list[PendingGroup]:
        """Count `groups` that run-api accepted; return as `update`."""
        self.open_slots -= groups
        if group is None or group.useful <= groups:
            return self.end(group)
        group.useful -= groups
        return self._assign()

    def finish(self, group: PendingGroup, *, useful: int, flat: bool) -> list[PendingGroup]:
        """Count a group whose rollouts are finished; return other groups as `update`.

        Args:
            useful: number of groups to be sent.
            flat: it is 0, since all is flat. A group that is neither has failed.
        """
        self._flat.append(flat)
        group.made = useful > 0 or flat
        if not useful:
            return []
        if group not in self._groups:
            # A task of the environment's own sends after the group's end: nothing would decide it.
            group.decide(True)
            return []
        group.useful, group.useful_since = useful, self.step
        late = self._assign()
        # The group itself learns it from `wait_for_slot`.
        return [each for each in late if each is not group]

    def end(self, group: PendingGroup | None) -> list[PendingGroup]:
        """Remove a group; return as `update`."""
        self._groups = [each for each in self._groups if each is not group]
        return self._assign()

    @property
    def all(self) -> int:
        """Slots of this environment, used or not."""
        return self._all

    @property
    def waiting(self) -> int:
        """Finished groups that wait for a slot."""
        return sum(group.made and not group.has_slot for group in self._groups)

    @property
    def free(self) -> int:
        """Slots without a group in the queue or in flight."""
        return max(0, self.open_slots - len(self._groups))

    @property
    def full(self) -> bool:
        return self._all > 0 and self.open_slots <= 0

    @property
    def flat_share(self) -> float:
        """Share of flat groups among the newest, below 1."""
        newest = list(self._flat)[-max(WINDOW, len(self._groups)) :]
        # The added 1 keeps the share low while there are few results.
        return min(MOST_FLAT, sum(newest) / (len(newest) + 1))

    @property
    def demand(self) -> float:
        """Share of the groups that the trainer can use in time."""
        # 1 up to two queued batches, one of which trains; 0 from four on.
        batch = self._all / max(1, self._ahead)
        queued = (self._all - self.open_slots) / max(1.0, batch)
        return min(1.0, max(0.0, (4.0 - queued) / 2.0))

    @property
    def making(self) -> int:
        return sum(not group.made for group in self._groups)

    def wanted(self, most: int | None = None) -> int:
        """Return the number of groups to have in flight, spare groups included.

        Args:
            most: limit of unfinished groups; None: no limit.
        """
        made = sum(group.made for group in self._groups)
        wanted = enough(self.open_slots - made, self.flat_share, surely=self._ahead <= 1)
        return made + (wanted if most is None else min(most, wanted))

    # With one batch ahead, groups get slots in the order of their starts: by order of completion,
    # the few slots of a batch would favour short answers. So a finished spare group waits until a
    # group with a slot is flat or fails. All spare groups are dropped as soon as the last slot is
    # filled.
    # With several batches ahead, groups get slots once they are finished. While the engine is the
    # limit, slots are not short then. A spare group that waited for older ones, half of which may
    # be flat, would be too late.
    def _assign(self) -> list[PendingGroup]:
        groups = [
            each for each in self._groups if self._ahead <= 1 or each.useful_since is not None
        ]
        # Groups with a slot that have not reached run-api yet; they use up open slots.
        owners = sum(each.useful for each in self._groups if each.has_slot)
        for group in [each for each in groups if not each.has_slot]:
            if owners >= self.open_slots:
                break
            if self._in_time(group, before=self._all - self.open_slots + owners):
                group.decide(True)
                owners += group.useful
        without = [each for each in groups if not each.has_slot]
        full = self.open_slots <= 0 and self._ahead <= 1
        late = [each for each in without if full or not self._in_time(each)]
        # The caller cancels their rollouts and uses their items again.
        for group in late:
            group.decide(False)
        return late

    def _in_time(self, group: PendingGroup, before: int = 0) -> bool:
        # `before` groups precede it in the queue. A group that started at batch S must be in batch
        # S + ahead or earlier. With several batches ahead S is the end of its rollouts: a limit
        # from their start would leave out long answers more often than short ones. The next slot
        # of a full queue is one batch later.
        limit = group.step + self._ahead
        if self._ahead > 1 and group.useful_since is not None:
            limit = group.useful_since + self._ahead + 1
        return self.step + 1 + before * self._ahead // max(1, self._all) <= limit


def enough(useful: int, flat_share: float, *, surely: bool = True) -> int:
    """Return how many groups to start so that `useful` are not flat.

    Args:
        surely: in 5 of 6 cases; else on average.
    """
    if useful <= 0:
        return 0
    useful_share = 1 - flat_share
    # With flat share f and u = 1 - f, n groups have n * u useful ones on average, with a standard
    # deviation of sqrt(n * f * u). `useful` is the average less one deviation: solve
    # n * u - sqrt(n * f * u) = useful for sqrt(n).
    spread = math.sqrt(flat_share * useful_share) if surely else 0.0
    root = (spread + math.sqrt(spread**2 + 4 * useful_share * useful)) / (2 * useful_share)
    # The small term keeps rounding errors from adding a group.
    return math.ceil(root**2 - 1e-9)


@dataclass
class WorkerMeter:
    """Mean numbers of groups and queue slots."""

    values: dict[str, list[float]] = field(default_factory=dict)
    _means: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        workers: int,
        slots: QueueSlots | None,
        *,
        awaited: bool | None,
        in_engine: float | None,
    ) -> None:
        """Add a sample; None: unknown.

        Args:
            workers: groups in flight.
            awaited: a batch waits for this environment's share.
            in_engine: completions that it waits for.
        """
        # Keys are field names of `EnvCountsRecord`. An unknown value adds no key, so the record has
        # None.
        now: dict[str, float] = {"workers": workers}
        if awaited is not None:
            now["awaited"] = awaited
        if in_engine is not None:
            now["in_engine"] = in_engine
        if slots is not None:
            now |= {"waiting_for_slot": slots.waiting, "free_slots": slots.free}
        for name, value in now.items():
            self.values.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """Return the means as fields of an `env_counts` record, and start over.

        Without a sample since the last call they are the same.
        """
        if self.values:
            self._means = {name: fmean(values) for name, values in self.values.items()}
        self.values = {}
        return dict(self._means)
