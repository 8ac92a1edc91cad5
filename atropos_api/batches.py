"""Our own `GET /batch` and `GET /share`; every other request goes to atroposlib.

A batch has the oldest groups, and survives a lost answer. The state stays atroposlib's.
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
# Seconds that a request with `AFTER_HEADER` waits for a batch.
HOLD_S = 0.5
# Seconds between two checks of the queue. atroposlib appends to it without any event to wait for.
POLL_S = 0.01
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
    # A trainer that names its last batch (`AFTER_HEADER`) may fetch ahead: the batch stays in the
    # queue, where environments count it, until the trainer asks for the next one. Without the
    # header a batch leaves the queue at once.
    # atroposlib takes every full batch out of its queue at once, hands out the newest first, and
    # forgets a batch before it is sent. So `max_batches_offpolicy` of an environment, which counts
    # the queue, would not bound the policy lag (3 gave 5 and 6).
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
