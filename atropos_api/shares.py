"""Which environment's groups make up a batch: each gets its share by weight, however fast it is.

By order of arrival alone the fastest environment fills every batch. Here each connected environment is owed
`weight / sum of weights` of a batch; what one batch gives too much or too little counts in the next one. A batch waits
for an environment that is owed more than it has sent, unless it

- has not asked for its share for `SILENT_S`, so that its process is dead or stands still;
- says that nothing of what it makes can be sent (`barren`);
- has sent nothing for `LEND_S` while a batch waited for it.

Until such an environment sends a group again, the others have its share.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SILENT_S = 30.0
LEND_S = 120.0
LEAST_SHARE = 0.01
"""Of an environment that has nearly no weight, as atroposlib's own `MIN_ENV_WEIGHT`."""
KEY = "share"
"""Of our `_Share` in atroposlib's dictionary of an environment, which lives as long as its registration."""
Group = dict[str, Any]


@dataclass
class _Share:
    """What is known of an environment beside its registration. Times are seconds of a monotonic clock."""

    owed: float = 0.0
    """Sequences of earlier batches; negative where it had more than its share."""
    asked_at: float | None = None
    """When it asked for its share last; None for a program that never does."""
    barren: bool = False
    short_since: float | None = None
    """Since when a batch waits for it without a new group."""
    seen: int = 0
    """Its groups in the queue at that time."""
    lent: bool = False
    """The others have its share; said once."""


@dataclass(frozen=True)
class Member:
    """An environment that takes part in a batch."""

    env: dict[str, Any]
    share: float
    """0 to 1; of all members together 1."""
    waited_for: bool

    @property
    def number(self) -> int:
        return int(self.env["registered_id"])

    @property
    def group(self) -> int:
        """Sequences of one of its groups."""
        return max(1, int(self.env.get("group_size") or 1))


@dataclass(frozen=True)
class Places:
    """How many groups of one environment may be in the queue, and how many are."""

    places: int
    queued: int
    awaited: bool
    """A batch waits for them."""


class Lacking(Exception):
    """A batch waits for this environment's groups."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.env["desired_name"])
        self.member = member


class Shares:
    """Forms batches from a queue. One thread calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def form(self, queue: list[Group], size: int, envs: list[dict[str, Any]]) -> list[Group] | None:
        """Return the groups of the next batch, oldest first; None while it waits for an environment, and an empty list
        where no groups of the queue add up to `size` this way.
        """
        members = self._members(queue, envs)
        try:
            taken, owed = compose(queue, size, members)
        except Lacking as lacking:
            self._note_short(lacking.member, queue)
            return None
        if taken:
            largest = max(len(group["tokens"]) for group in taken)
            for member in members:
                self._of(member.env).owed = min(largest, max(-largest, owed[member.number]))
        chosen = set(map(id, taken))
        return [group for group in queue if id(group) in chosen]

    def several(self, queue: list[Group], envs: list[dict[str, Any]]) -> bool:
        """Return whether there is anything to share."""
        return len(self._members(queue, envs)) > 1

    def places(
        self, number: int, queue: list[Group], handed_out: Sequence[Group], size: int, ahead: int,
        envs: list[dict[str, Any]], *, barren: bool,
    ) -> Places | None:  # fmt: skip
        """Return the places of environment `number` in the next `ahead` batches, of which `handed_out` is the first;
        None where it has the queue to itself, or there is no such environment.
        """
        if not 0 <= number < len(envs) or size < 1:
            return None
        own = self._of(envs[number])
        own.asked_at, own.barren = self._clock(), barren
        members = self._members(queue, envs, asking=number)
        if len(members) < 2:
            return None
        count = sum(group.get("env_id") == number for group in handed_out)
        owed = {member.number: self._of(member.env).owed for member in members}
        for _ in range(ahead - bool(handed_out)):
            count += draw(members, owed, size)[number]
        queued = sum(group.get("env_id") == number for group in queue)
        return Places(count, queued, own.short_since is not None)

    def _of(self, env: dict[str, Any]) -> _Share:
        share: _Share = env.setdefault(KEY, _Share())
        return share

    def _members(self, queue: list[Group], envs: list[dict[str, Any]], asking: int | None = None) -> list[Member]:
        """Return the connected environments that a batch waits for, that have sent groups, or that are `asking`."""
        sent = Counter(group.get("env_id") for group in queue)
        connected = [env for env in envs if env["connected"]]
        takes_part = [
            (env, waited)
            for env in connected
            if (waited := self._is_waited_for(env, sent[env["registered_id"]]))
            or sent[env["registered_id"]]
            or env["registered_id"] == asking
        ]
        total = sum(max(0.0, env["weight"]) for env, _ in takes_part) or 1.0
        weights = [max(env["weight"], LEAST_SHARE * total) for env, _ in takes_part]
        return [
            Member(env, weight / sum(weights), waited)
            for (env, waited), weight in zip(takes_part, weights, strict=True)
        ]

    def _is_waited_for(self, env: dict[str, Any], queued: int) -> bool:
        share, now = self._of(env), self._clock()
        if queued > share.seen:
            share.short_since, share.lent = None, False
        share.seen = min(share.seen, queued)
        if share.asked_at is not None and now - share.asked_at > SILENT_S:
            return False
        late = share.short_since is not None and now - share.short_since > LEND_S
        if late and not share.lent:
            name = env["desired_name"]
            print(
                f"[NOTE] {name} sent no group in {LEND_S:.0f} s: until it does, the others have its share", flush=True
            )
        share.lent = late
        return not share.barren and not late

    def _note_short(self, member: Member, queue: list[Group]) -> None:
        share = self._of(member.env)
        share.seen = sum(group.get("env_id") == member.number for group in queue)
        share.short_since = self._clock() if share.short_since is None else share.short_since


def compose(queue: list[Group], size: int, members: Sequence[Member]) -> tuple[list[Group], dict[int, float]]:
    """Return the groups of a batch, and what each member is owed after it. No groups where none add up.

    Groups of environments that are gone come first: they only get older.

    Raises:
        Lacking: a member that is waited for has sent too few.
    """
    own: dict[int, deque[Group]] = {member.number: deque() for member in members}
    taken: list[Group] = []
    total = 0
    for group in queue:
        if (number := group.get("env_id")) in own:
            own[number].append(group)
        elif total + len(group["tokens"]) <= size:
            taken.append(group)
            total += len(group["tokens"])
    owed = {member.number: _owed(member) + member.share * (size - total) for member in members}
    candidates = list(members)
    while total < size and candidates:
        member = max(candidates, key=lambda each: owed[each.number])
        waiting = own[member.number]
        if not waiting or total + len(waiting[0]["tokens"]) > size:
            if member.waited_for and not waiting and total + member.group <= size:
                raise Lacking(member)
            candidates.remove(member)
            continue
        group = waiting.popleft()
        taken.append(group)
        total += len(group["tokens"])
        owed[member.number] -= len(group["tokens"])
    return (taken, owed) if total == size else ([], owed)


def draw(members: Sequence[Member], owed: dict[int, float], size: int) -> Counter[int]:
    """Return how many groups each member gives to a batch when none is short of them, and charge them to `owed`."""
    for member in members:
        owed[member.number] += member.share * size
    counts: Counter[int] = Counter()
    total, candidates = 0, list(members)
    while total < size and candidates:
        member = max(candidates, key=lambda each: owed[each.number])
        if total + member.group > size:
            candidates.remove(member)
            continue
        counts[member.number] += 1
        total += member.group
        owed[member.number] -= member.group
    return counts


def _owed(member: Member) -> float:
    share: _Share = member.env.setdefault(KEY, _Share())
    return share.owed
