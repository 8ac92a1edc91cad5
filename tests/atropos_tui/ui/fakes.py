"""A supervisor in memory, for behaviour that a real one does not show on demand. Implements
`ui.feed.Control`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from atropos_common.protocol.control import (
    Accepted,
    Action,
    CommandRequest,
    Recipe,
    RunStatus,
    Snapshot,
)
from atropos_common.protocol.record_base import Record
from atropos_tui.supervisor.client import NoSupervisor, Refused


class FakeControl:
    """Answers with `status`; None means that there is no supervisor. Records every command."""

    def __init__(self, status: RunStatus | None = None) -> None:
        self.answer = status
        self.refusal: Refused | None = None
        self.commands: list[CommandRequest] = []

    async def status(self) -> RunStatus:
        if self.answer is None:
            raise NoSupervisor("no supervisor runs here")
        return self.answer

    async def events(self, after: int = -1) -> AsyncIterator[Snapshot | Record]:
        yield Snapshot(status=await self.status())
        await asyncio.Event().wait()

    async def recipe(self, action: Action, component: str | None = None) -> Recipe:
        await self.status()
        if self.refusal:
            raise self.refusal
        both = (
            ["trainer", "vllm"]
            if component == "vllm" and action == "restart"
            else [component or "everything"]
        )
        return Recipe(
            action=action,
            component=component,
            stop=[] if action == "start" else both,
            start=both[::-1] if action in ("restart", "start") else [],
            note="trainer restarts too." if len(both) > 1 else "",
        )

    async def command(self, request: CommandRequest) -> Accepted:
        self.commands.append(request)
        return Accepted(
            command_id="c1", recipe=await self.recipe(request.action, request.component)
        )
