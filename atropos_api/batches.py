"""Our own `GET /batch` and `GET /share`; every other request goes to atroposlib.

A batch has the oldest groups, and survives a lost answer. The state stays atroposlib's.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers, QueryParams
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_common.net.http import AFTER_HEADER, BATCH_HEADER

PATH = "/batch"
SHARE_PATH = "/share"
REGISTER_PATH = "/register"
# Seconds that a request with `AFTER_HEADER` waits for a batch.
LONG_POLL_S = 0.5
# Seconds between two checks of the queue. atroposlib appends to it without any event to wait for.
POLL_S = 0.01
# A live environment asks whenever it reads run-api's status.
DEAD_AFTER_S = 30.0
# A slow environment needs time for a group; a stuck one must not stop training.
LEND_S = 120.0
# Share of an environment with almost no weight; atroposlib's `MIN_ENV_WEIGHT`.
LEAST_SHARE = 0.01
# Key of our `_Share` in atroposlib's dictionary of an environment: it ends with the registration.
SHARE_KEY = "share"
Group = dict[str, Any]
# The same text as atroposlib's.
UNREGISTERED = (
    b'{"status":"error","message":"Trainer not registered. Call /register first.","batch":[]}'
)


@dataclass(frozen=True)
class HandedOut:
    """Batch that was sent, while its groups are still in the queue."""

    name: str
    groups: list[Group]


class Batches:
    # atroposlib takes every full batch out of its queue at once, hands out the newest first, and
    # forgets a batch before it is sent. So `max_batches_offpolicy` of an environment, which counts
    # the queue, would not bound the policy lag (3 gave 5 and 6). Here a trainer that names its last
    # batch (`AFTER_HEADER`) may fetch ahead: the batch stays in the queue, where environments count
    # it, until the trainer asks for the next one. Without the header a batch leaves at once.
    def __init__(self, app: ASGIApp, state: Any) -> None:
        self._app, self._state = app, state
        self._kept: HandedOut | None = None
        self._shares = Shares()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "GET":
            answer = await self._answer(Headers(scope=scope).get(AFTER_HEADER))
            await answer(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == SHARE_PATH and scope["method"] == "GET":
            await self._share(QueryParams(scope["query_string"]))(scope, receive, send)
        else:
            if scope["type"] == "http" and scope["path"] == REGISTER_PATH:
                self._drop_early_groups()
            await self._app(scope, receive, send)

    async def _answer(self, after: str | None) -> Response:
        give_up = time.monotonic() + (0.0 if after is None else LONG_POLL_S)
        while True:
            # Without a trainer there is no batch size, and after /reset_data no queue.
            if getattr(self._state, "batchsize", 0) < 1 or not hasattr(self._state, "queue"):
                return Response(UNREGISTERED, media_type="application/json")
            self._state.started = True  # environments may register from here on
            if batch := self._next(after):
                # A client without the header is atroposlib's own trainer: it neither needs a name
                # nor waits.
                name = {} if after is None else {BATCH_HEADER: batch.name}
                return Response(encoded(batch.groups), media_type="application/json", headers=name)
            # Try again only when the queue changes: forming a batch walks the whole queue.
            groups = len(self._state.queue)
            while len(getattr(self._state, "queue", ())) == groups:
                if time.monotonic() >= give_up:
                    return Response(b'{"batch":null}', media_type="application/json")
                await asyncio.sleep(POLL_S)

    # atroposlib takes a queue for an earlier registration and then ignores this one, and a group
    # makes a queue. A trainer that came after the first group would never get a batch.
    def _drop_early_groups(self) -> None:
        if getattr(self._state, "batchsize", 0) < 1 and hasattr(self._state, "queue"):
            del self._state.queue

    def _share(self, asked: QueryParams) -> Response:
        """Return an environment's queue slots for `ahead` batches; `{}` for the only one."""
        try:
            number, ahead = int(asked["env_id"]), int(asked["ahead"])
        except (KeyError, ValueError):
            return JSONResponse({"error": "env_id and ahead must be whole numbers"}, 422)
        # The batch that was sent is still in the queue, so it is the first of the `ahead` batches.
        kept = self._kept.groups if self._kept else []
        queue, envs = getattr(self._state, "queue", []), getattr(self._state, "envs", [])
        size, found = getattr(self._state, "batchsize", 0), None
        if _by_weight(envs):
            barren = asked.get("barren") == "1"
            found = self._shares.places(number, queue, kept, size, ahead, envs, barren=barren)
        return JSONResponse({} if found is None else asdict(found))

    def _form(self) -> list[Group] | None:
        """Return the groups of the next batch; None until there are enough."""
        queue, size = self._state.queue, self._state.batchsize
        envs = getattr(self._state, "envs", [])
        if _by_weight(envs) and self._shares.is_shared(queue, envs):
            groups = self._shares.form(queue, size, envs)
            # Empty: no groups by share add up to `size`, so atroposlib's rules decide.
            if groups != []:
                return groups
        return form_batch(queue, size, envs)

    def _next(self, after: str | None) -> HandedOut | None:
        """Release the batch named `after` and return the next one."""
        state = self._state
        if self._kept and not set(map(id, self._kept.groups)) <= set(map(id, state.queue)):
            self._kept = None  # /reset_data replaced the queue
        if self._kept and self._kept.name == after:
            self._let_go()
        if not self._kept and (groups := self._form()):
            self._kept = HandedOut(uuid4().hex, groups)
        # With any other name the client missed the batch: it gets the same one again.
        found = self._kept
        if found and after is None:
            self._let_go()
        return found

    def _let_go(self) -> None:
        assert self._kept
        # By identity: two groups may have equal contents.
        gone = set(map(id, self._kept.groups))
        self._state.queue = [group for group in self._state.queue if id(group) not in gone]
        self._state.status_dict["step"] += 1
        self._kept = None


# Weights decide unless an environment sets atroposlib's `min_batch_allocation`.
def _by_weight(envs: list[dict[str, Any]]) -> bool:
    return all(env.get("min_batch_allocation") is None for env in envs if env["connected"])


def form_batch(queue: list[Group], size: int, envs: list[dict[str, Any]]) -> list[Group] | None:
    """Return the oldest groups that add up to `size` sequences, by atroposlib's rules; None if
    there are none.
    """
    from atroposlib.api.utils import (
        find_groups_summing_to_target,
        grab_batch_with_minimum_allocations,
        grab_exact_from_heterogeneous_queue,
    )

    if any(env.get("min_batch_allocation") is not None for env in envs):
        groups, _ = grab_batch_with_minimum_allocations(queue, size, envs)
        return groups
    # This function combines groups of unequal sizes by powers of two, and returns no batch if one
    # group does not fit (3 among groups of 4). Then take any groups that add up.
    groups, _ = grab_exact_from_heterogeneous_queue(queue, size)
    if groups is None and sum(len(group["tokens"]) for group in queue) >= size:
        groups = [queue[at] for at in find_groups_summing_to_target(queue, size)]
    return groups or None


# FastAPI's encoder and gzip take 6 s for 64 sequences of 8,192 tokens.
def encoded(groups: list[Group]) -> bytes:
    """Return the answer as JSON, with null for NaN, infinities and groups that JSON cannot hold."""
    return b'{"batch":[%b]}' % b",".join(map(_encoded, groups))


def _encoded(group: Group) -> bytes:
    try:
        return msgspec.json.encode(group)
    except (ValueError, TypeError, RecursionError) as error:
        env = group.get("env_id")
        print(f"[WARNING] a group of environment {env} cannot be sent as JSON: {error}", flush=True)
        return b"null"


def add_listing(app: FastAPI) -> None:
    names = {"name": "desired_name", "connected": "connected", "registered_at": "last_update"}

    @app.get("/envs")
    async def envs() -> dict[str, list[dict[str, Any]]]:
        known = getattr(app.state, "envs", [])
        return {"envs": [{ours: env[theirs] for ours, theirs in names.items()} for env in known]}


# Shares: which groups a batch has if several environments send.
#
# In order of arrival the fastest environment would fill every batch. So each connected environment
# is owed `weight / sum of weights` of a batch, and a surplus or deficit carries over. A batch waits
# for an environment that is owed more than it has sent, unless it
# - has not asked for its share for `DEAD_AFTER_S`: its process is dead or hangs;
# - reports that none of its groups can be sent (`barren`);
# - has sent nothing for `LEND_S` while a batch waited for it.
# The others use its share until it sends a group again.


@dataclass
class _Share:
    """Accounting of one environment; times in monotonic seconds."""

    owed: float = 0.0
    """Sequences owed from earlier batches; negative after a surplus."""
    asked_at: float | None = None
    """Time of its last request for its share; None for a program that never asks."""
    barren: bool = False
    short_since: float | None = None
    """Start of the wait for its next group."""
    seen: int = 0
    """Number of its groups in the queue at that time."""
    lent: bool = False
    """The others use its share."""


@dataclass(frozen=True)
class Member:
    env: dict[str, Any]
    share: float
    """0 to 1; the shares of all members add up to 1."""
    waited_for: bool

    @property
    def number(self) -> int:
        return int(self.env["registered_id"])

    @property
    def group(self) -> int:
        """Sequences in one of its groups."""
        return max(1, int(self.env.get("group_size") or 1))


@dataclass(frozen=True)
class Places:
    """Queue slots of one environment."""

    places: int
    queued: int
    awaited: bool
    """A batch waits for its groups."""


def _share_of(env: dict[str, Any]) -> _Share:
    share: _Share = env.setdefault(SHARE_KEY, _Share())
    return share


class GroupsMissing(Exception):
    """A batch waits for groups of this environment."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.env["desired_name"])
        self.member = member


class Shares:
    """Batch composition by weight; belongs to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def form(self, queue: list[Group], size: int, envs: list[dict[str, Any]]) -> list[Group] | None:
        """Return the groups of the next batch, oldest first.

        None: the batch waits for an environment. Empty list: no groups add up to `size` this way.
        """
        members = self._members(queue, envs)
        try:
            taken, owed = compose(queue, size, members)
        except GroupsMissing as missing:
            # The clock of `LEND_S` starts at the first batch that this member holds up.
            self._note_short(missing.member, queue)
            return None
        if taken:
            # Whole groups never match a share exactly, so one group's size is a normal debt. More
            # would let an environment that paused flood the next batches.
            largest = max(len(group["tokens"]) for group in taken)
            for member in members:
                _share_of(member.env).owed = min(largest, max(-largest, owed[member.number]))
        # `compose` takes groups by debt; the answer has them in their order of arrival.
        chosen = set(map(id, taken))
        return [group for group in queue if id(group) in chosen]

    def is_shared(self, queue: list[Group], envs: list[dict[str, Any]]) -> bool:
        return len(self._members(queue, envs)) > 1

    def places(
        self,
        number: int,
        queue: list[Group],
        handed_out: Sequence[Group],
        size: int,
        ahead: int,
        envs: list[dict[str, Any]],
        *,
        barren: bool,
    ) -> Places | None:
        """Return the queue slots of environment `number` in the next `ahead` batches; None if it is
        unknown or the only one.

        Args:
            handed_out: groups of the first of these batches, which is still in the queue.
            barren: none of its groups can be sent.
        """
        if not 0 <= number < len(envs) or size < 1:
            return None
        own = _share_of(envs[number])
        own.asked_at, own.barren = self._clock(), barren
        # An environment that asks is alive, even if it has sent nothing yet.
        members = self._members(queue, envs, asking=number)
        if len(members) < 2:
            return None
        count = sum(group.get("env_id") == number for group in handed_out)
        owed = {member.number: _share_of(member.env).owed for member in members}
        # Simulate the coming batches with the present debts.
        for _ in range(ahead - bool(handed_out)):
            count += draw(members, owed, size)[number]
        queued = sum(group.get("env_id") == number for group in queue)
        # `short_since` stays set when the environment turns barren or its share is lent; batches
        # then no longer wait for it.
        waited_for = any(member.waited_for for member in members if member.number == number)
        return Places(count, queued, waited_for and own.short_since is not None)

    # Connected environments that a batch waits for, that have sent groups, or that are `asking`.
    def _members(
        self, queue: list[Group], envs: list[dict[str, Any]], asking: int | None = None
    ) -> list[Member]:
        sent = Counter(group.get("env_id") for group in queue)
        connected = [env for env in envs if env["connected"]]
        takes_part = [
            (env, waited)
            for env in connected
            if (waited := self._waits_for(env, sent[env["registered_id"]]))
            or sent[env["registered_id"]]
            or env["registered_id"] == asking
        ]
        # Weights need not add up to 1; only their ratios count.
        total = sum(max(0.0, env["weight"]) for env, _ in takes_part) or 1.0
        weights = [max(env["weight"], LEAST_SHARE * total) for env, _ in takes_part]
        return [
            Member(env, weight / sum(weights), waited)
            for (env, waited), weight in zip(takes_part, weights, strict=True)
        ]

    def _waits_for(self, env: dict[str, Any], queued: int) -> bool:
        share, now = _share_of(env), self._clock()
        # A new group ends the wait.
        if queued > share.seen:
            share.short_since, share.lent = None, False
        # Batches remove groups; without this a later arrival would go unnoticed.
        share.seen = min(share.seen, queued)
        if share.asked_at is not None and now - share.asked_at > DEAD_AFTER_S:
            return False
        late = share.short_since is not None and now - share.short_since > LEND_S
        if late and not share.lent:
            silence = f"{env['desired_name']} sent no group in {LEND_S:.0f} s"
            print(f"[NOTE] {silence}: until it does, the others have its share", flush=True)
        share.lent = late
        return not share.barren and not late

    def _note_short(self, member: Member, queue: list[Group]) -> None:
        share = _share_of(member.env)
        share.seen = sum(group.get("env_id") == member.number for group in queue)
        share.short_since = self._clock() if share.short_since is None else share.short_since


def compose(
    queue: list[Group], size: int, members: Sequence[Member]
) -> tuple[list[Group], dict[int, float]]:
    """Return the groups of a batch, and the sequences owed to each member after it.

    No groups if none add up to `size`.

    Raises:
        GroupsMissing: the batch waits for a member that has sent too few.
    """
    own: dict[int, deque[Group]] = {member.number: deque() for member in members}
    taken: list[Group] = []
    total = 0
    # Groups of environments that are gone come first: they only get older.
    for group in queue:
        if (number := group.get("env_id")) in own:
            own[number].append(group)
        elif total + len(group["tokens"]) <= size:
            taken.append(group)
            total += len(group["tokens"])
    owed = {
        member.number: _share_of(member.env).owed + member.share * (size - total)
        for member in members
    }
    # Members leave the candidates when none of their groups fits, so the loop ends.
    candidates = list(members)
    while total < size and candidates:
        # The member with the largest debt gives the next group.
        member = max(candidates, key=lambda each: owed[each.number])
        waiting = own[member.number]
        if not waiting or total + len(waiting[0]["tokens"]) > size:
            # Do not fill its share with groups of others: raise, and try again when the queue has
            # changed.
            if member.waited_for and not waiting and total + member.group <= size:
                raise GroupsMissing(member)
            candidates.remove(member)
            continue
        group = waiting.popleft()
        taken.append(group)
        total += len(group["tokens"])
        owed[member.number] -= len(group["tokens"])
    # A batch must have exactly `size` sequences; the trainer's step is built for that.
    return (taken, owed) if total == size else ([], owed)


def draw(members: Sequence[Member], owed: dict[int, float], size: int) -> Counter[int]:
    """Return how many groups each member gives to a batch if none falls short; charge `owed`."""
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
