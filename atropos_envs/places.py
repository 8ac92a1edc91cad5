"""Which groups may go out: places in run-api's queue, in the order in which groups were begun, and spare groups.

A group whose scores are all equal teaches nothing and is not sent. Begun for each place alone, groups that come out so
leave it to be filled one round later, and again; the last place of a batch waits longest. So by the measured share of
flat groups more are begun than there are places. The first of them own the places. A spare group waits, however quick
it was, until an owner came out flat or failed, and takes that place: what is trained does not favour short answers.
When the last place is filled the spares that are left are dropped, for the next place is one batch later, and they
would be older than `max_batches_offpolicy` allows.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

WINDOW = 64
"""Groups over which the flat share is measured."""


class Slot:
    """One group from its beginning until it is sent, flat, failed or dropped."""

    def __init__(self, item: Any, uuid: str, step: int) -> None:
        self.item, self.uuid = item, uuid
        self.step = step
        """Batches that the trainer had begun when this began."""
        self.owns = False
        """It has a place."""
        self.made = False
        """Its rollouts are over."""
        self._judged: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def judge(self, goes: bool) -> None:
        """It has a place, or never will."""
        self.owns = goes
        if not self._judged.done():
            self._judged.set_result(goes)

    async def place(self) -> bool:
        """Wait until it has a place: True, or cannot have one any more: False."""
        return await asyncio.shield(self._judged)


class Places:
    """The places of one environment, and the groups that want them."""

    def __init__(self) -> None:
        self.room = 0
        """Places that are not taken by groups in run-api's queue."""
        self.step = 0
        """Batches that the trainer has begun."""
        self._ahead = self._all = 0
        self._slots: list[Slot] = []
        self._flat: deque[bool] = deque(maxlen=WINDOW)

    def looked(self, *, queued: int, came: int, coming: int, places: int, ahead: int, step: int) -> list[Slot]:
        """run-api's view, as far as it goes: `came` groups of ours reached it while it answered and `coming` are on
        their way, and either may be among those that it counted.

        Args:
            queued: groups in its queue.
            places: how many may be there, `ahead` batches of them.
            step: batches that the trainer has begun.

        Returns:
            spare groups that can have no place any more.
        """
        self._all, self._ahead, self.step = places, ahead, step
        self.room = min(max(self.room, places - queued - came), places - queued + coming)
        return self._assign()

    def begin(self, item: Any, uuid: str) -> tuple[Slot, list[Slot]]:
        """A group begins.

        Returns:
            it, and spare groups that can have no place any more.
        """
        slot = Slot(item, uuid, self.step)
        self._slots.append(slot)
        return slot, self._assign()

    def sent(self, slot: Slot | None, groups: int) -> list[Slot]:
        """run-api took `groups`; returns as `begin`."""
        self.room -= groups
        return self.end(slot)

    def came_out(self, *, flat: bool) -> None:
        """A group was made."""
        self._flat.append(flat)

    def end(self, slot: Slot | None) -> list[Slot]:
        """A group is over, whatever became of it; returns as `begin`."""
        self._slots = [each for each in self._slots if each is not slot]
        return self._assign()

    @property
    def all(self) -> int:
        """Places of this environment, taken or not."""
        return self._all

    @property
    def waiting(self) -> int:
        """Groups that are made and wait for a place."""
        return sum(slot.made and not slot.owns for slot in self._slots)

    @property
    def free(self) -> int:
        """Places that no group under way takes."""
        return max(0, self.room - len(self._slots))

    @property
    def full(self) -> bool:
        """There is no place for a group."""
        return self._all > 0 and self.room <= 0

    @property
    def flat_share(self) -> float:
        """Of the newest groups; below 1."""
        return sum(self._flat) / (len(self._flat) + 1)

    def wanted(self) -> int:
        """How many groups should be under way, those that wait for a place or are being sent included."""
        made = sum(slot.made for slot in self._slots)
        # Spare groups fill the last places of a wave. With several batches ahead there is no wave: a place that a flat
        # group leaves is filled while other batches wait, and most spare groups would be made for nothing.
        return made + enough(self.room - made, self.flat_share if self._ahead <= 1 else 0.0)

    def _assign(self) -> list[Slot]:
        """Give free places to the earliest groups without one."""
        owners = sum(slot.owns for slot in self._slots)
        for slot in [each for each in self._slots if not each.owns]:
            if owners >= self.room:
                break
            if self._in_time(slot, before=self._all - self.room + owners):
                slot.judge(True)
                owners += 1
        late = [each for each in self._slots if not each.owns and (self.room <= 0 or not self._in_time(each))]
        for slot in late:
            slot.judge(False)
        return late

    def _in_time(self, slot: Slot, before: int = 0) -> bool:
        """Would it, with `before` groups in front of it, be in time? One that began while the trainer was at batch S
        may be in batch S + ahead at the latest."""
        return self.step + 1 + before * self._ahead // max(1, self._all) <= slot.step + self._ahead


def enough(useful: int, flat_share: float) -> int:
    """Groups to have under way so that at least `useful` are not flat, in five of six cases: as many as give that
    number on average less one standard deviation of it."""
    if useful <= 0:
        return 0
    useful_share = 1 - flat_share
    spread = math.sqrt(flat_share * useful_share)
    root = (spread + math.sqrt(spread**2 + 4 * useful_share * useful)) / (2 * useful_share)
    return math.ceil(root**2 - 1e-9)
