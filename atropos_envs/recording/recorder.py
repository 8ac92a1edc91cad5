"""Records what a program asks an engine for, as sequences that train.

async with Recorder(client).rollout() as rollout:
    await play(rollout.base_url, rollout.api_key)
    recorded = await rollout.collect()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from atropos_common.protocol.bridge import RecordedTurn
from atropos_envs.hosting.engine_client import EngineClient, Server
from atropos_envs.hosting.rollout import present
from atropos_envs.recording.proxy import Counts, RolloutProxy
from atropos_envs.recording.sequences import Sequence, sequences_of

ENDED = frozenset({"stop", "length", "abort"})
# Most seconds for telling the engines that nobody will collect a rollout.
DISCARD_S = 2.0


class LostTurns(RuntimeError):
    """The engine ended or dropped the rollout before its turns were collected."""


@dataclass(frozen=True)
class Recorded:
    turns: list[RecordedTurn]
    sequences: list[Sequence]
    counts: Counts

    @property
    def replaced(self) -> int:
        """Turns for which sampled tokens replaced another encoding of an earlier answer."""
        return sum(turn.replaced > 0 for turn in self.turns)

    @property
    def rewritten(self) -> int:
        """Turns that continue no earlier one because its text was changed."""
        return sum(turn.rewritten for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(turn.token_ids) for turn in self.turns)


class OpenRollout:
    """A rollout that a program plays."""

    def __init__(self, proxy: RolloutProxy, client: EngineClient) -> None:
        self._proxy, self._client = proxy, client
        self._taken: set[Server] = set()
        """Engines whose turns were collected."""

    @property
    def base_url(self) -> str:
        """Address for OpenAI clients, `/v1` included."""
        return self._proxy.base_url

    @property
    def api_key(self) -> str:
        return self._proxy.key

    @property
    def model(self) -> str:
        """Name of the served model; any other name is answered too, and counted."""
        return self._proxy.model

    @property
    def counts(self) -> Counts:
        return self._proxy.counts

    async def collect(self) -> Recorded:
        """Return what was recorded. Call it once, after the last answer.

        Raises:
            LostTurns: turns are missing, since an engine has restarted.
        """
        turns: list[RecordedTurn] = []
        for server in self._proxy.servers:
            try:
                taken = await self._client.take(server, self._proxy.name)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise LostTurns(f"{server.root} does not answer ({error})") from None
            self._taken.add(server)
            # Each server counts its turns from 0.
            first = len(turns)
            for turn in taken:
                after = None if turn.after is None else turn.after + first
                turns.append(turn.model_copy(update={"after": after}))
        ended = sum(turn.finish_reason in ENDED for turn in turns)
        if ended < self.counts.answered:
            missing = self.counts.answered - ended
            raise LostTurns(f"{missing} of {self.counts.answered} answers are not recorded")
        recorded = Recorded(turns, sequences_of(turns), self.counts)
        present().tokens += recorded.tokens
        return recorded

    async def discard(self) -> None:
        """Let the engines forget the turns that were not collected."""
        left = self._proxy.asked - self._taken
        takes = [self._client.take(server, self._proxy.name) for server in left]
        # An engine that is away has nothing to forget, and keeps no other from it.
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                await asyncio.gather(*takes, return_exceptions=True)


class Recorder:
    """Opens rollouts at the engines of `client`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    @asynccontextmanager
    async def rollout(self, **options: Any) -> AsyncIterator[OpenRollout]:
        """Open a rollout. It belongs to the present task's group, whose rollouts share an engine.

        Args:
            options: fields that replace those of each request, such as `temperature`.
        """
        proxy = RolloutProxy(self._client, options)
        await proxy.start()
        rollout = OpenRollout(proxy, self._client)
        try:
            yield rollout
        finally:
            await proxy.close()
            await rollout.discard()
