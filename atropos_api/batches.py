"""Our own `GET /batch`: oldest groups first, one batch at a time, none lost on the way.

atroposlib takes every full batch out of its queue at once, hands out the newest first, and forgets
a batch before it is sent. A lost answer therefore loses a batch. `max_batches_offpolicy` of an
environment, which counts the queue, does not bound the policy lag (3 gave 5 and 6). FastAPI's
encoder and gzip take 6 s for 64 sequences of 8,192 tokens.

`Batches` answers this route and `/share`; every other request goes to atroposlib. The state stays
atroposlib's (`app.state`; `queue` is a list of groups). With several environments each gives its
share (`shares.py`), and `/share` reports how many groups that is. With one environment, or with
`min_batch_allocation`, atroposlib's functions choose the groups.

A trainer that names its last batch (`AFTER_HEADER`) may fetch ahead. The batch stays in the queue,
where environments count it, until the trainer asks for the next one. Such a request also waits up
to `HOLD_S` for a batch. Without the header a batch leaves the queue at once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers, QueryParams
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_api.shares import Shares
from atropos_common.net.http import AFTER_HEADER, BATCH_HEADER

PATH = "/batch"
SHARE_PATH = "/share"
HOLD_S = 0.5
"""Seconds that a request with `AFTER_HEADER` waits for a batch."""
# Seconds between two checks of the queue. atroposlib appends to it without any event to wait for.
POLL_S = 0.01
Group = dict[str, Any]
UNREGISTERED = (
    b'{"status":"error","message":"Trainer not registered. Call /register first.","batch":[]}'
)
"""Same text as atroposlib's answer."""


@dataclass(frozen=True)
class HandedOut:
    """Batch that was sent but not yet released: its groups are still in the queue."""

    name: str
    groups: list[Group]


class Batches:
    """ASGI application that answers `GET /batch` and `GET /share`, and passes the rest to `app`."""

    def __init__(self, app: ASGIApp, state: Any) -> None:
        """Wrap `app`; `state` is `app.state` of atroposlib's application."""
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
            await self._app(scope, receive, send)

    async def _answer(self, after: str | None) -> Response:
        give_up = time.monotonic() + (0.0 if after is None else HOLD_S)
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

    def _share(self, asked: QueryParams) -> Response:
        """Answer how many groups environment `env_id` may have in the queue for `ahead` batches,
        and how many it has; `{}` if it is the only one."""
        try:
            number, ahead = int(asked["env_id"]), int(asked["ahead"])
        except (KeyError, ValueError):
            return JSONResponse({"error": "env_id and ahead must be whole numbers"}, 422)
        # The batch that was sent counts as the first of the `ahead` batches, since it is still in
        # the queue.
        state, kept = self._state, self._kept.groups if self._kept else []
        queue, size, envs = (
            getattr(state, "queue", []),
            getattr(state, "batchsize", 0),
            getattr(state, "envs", []),
        )
        found = None
        if _by_weight(envs):
            barren = asked.get("barren") == "1"
            found = self._shares.places(number, queue, kept, size, ahead, envs, barren=barren)
        return JSONResponse({} if found is None else asdict(found))

    def _form(self) -> list[Group] | None:
        """Return the groups of the next batch; None until there are enough."""
        queue, size, envs = (
            self._state.queue,
            self._state.batchsize,
            getattr(self._state, "envs", []),
        )
        if _by_weight(envs) and self._shares.is_shared(queue, envs):
            groups = self._shares.form(queue, size, envs)
            # An empty list: no groups of the environments' shares add up to `size`. Then
            # atroposlib's rules decide.
            if groups != []:
                return groups
        return form_batch(queue, size, envs)

    def _next(self, after: str | None) -> HandedOut | None:
        """Return the batch after the one named `after`, which is released. A client that missed a
        batch gets the same one again."""
        state = self._state
        if self._kept and not set(map(id, self._kept.groups)) <= set(map(id, state.queue)):
            # The queue was emptied or replaced, so the names of its batches mean nothing any more.
            self._kept = None  # /reset_data
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


def _by_weight(envs: list[dict[str, Any]]) -> bool:
    """Return True if weights decide, False if an environment sets atroposlib's
    `min_batch_allocation`."""
    return all(env.get("min_batch_allocation") is None for env in envs if env["connected"])


def form_batch(queue: list[Group], size: int, envs: list[dict[str, Any]]) -> list[Group] | None:
    """Return the oldest groups that add up to `size` sequences, by atroposlib's rules; None if
    there are none."""
    from atroposlib.api.utils import (
        find_groups_summing_to_target,
        grab_batch_with_minimum_allocations,
        grab_exact_from_heterogeneous_queue,
    )

    if any(env.get("min_batch_allocation") is not None for env in envs):
        groups, _ = grab_batch_with_minimum_allocations(queue, size, envs)
        return groups
    # That function combines groups of unequal sizes by powers of two. It never returns a batch if
    # one group does not fit (3 among groups of 4). Then take any groups that add up, by
    # atroposlib's function for its buffer.
    groups, _ = grab_exact_from_heterogeneous_queue(queue, size)
    if groups is None and sum(len(group["tokens"]) for group in queue) >= size:
        groups = [queue[at] for at in find_groups_summing_to_target(queue, size)]
    return groups or None


def encoded(groups: list[Group]) -> bytes:
    """Return the answer as JSON. NaN and infinities become null, and so does a group that JSON
    cannot hold; the others are unharmed."""
    return b'{"batch":[%b]}' % b",".join(map(_encoded, groups))


def _encoded(group: Group) -> bytes:
    try:
        return msgspec.json.encode(group)
    except (ValueError, TypeError, RecursionError) as error:
        print(
            f"[WARNING] a group of environment {group.get('env_id')} cannot be sent as JSON: "
            f"{error}",
            flush=True,
        )
        return b"null"


def add_listing(app: FastAPI) -> None:
    """Add the route `/envs` to atroposlib's application."""

    @app.get("/envs")
    async def envs() -> dict[str, list[dict[str, Any]]]:
        """All environments since the trainer's registration; `registered_at` in Unix seconds."""
        known = getattr(app.state, "envs", [])
        return {
            "envs": [
                {
                    "name": env["desired_name"],
                    "connected": env["connected"],
                    "registered_at": env["last_update"],
                }
                for env in known
            ]
        }
