"""A command in progress, and the refusal of one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Literal

from atropos_common.protocol.control import (
    CommandRequest,
    CommandStatus,
    Refusal,
)


class RefusedError(Exception):
    def __init__(self, status: int, error: str, fix: str = "") -> None:
        super().__init__(error)
        self.status = status
        self.refusal = Refusal(error=error, fix=fix)


@dataclass
class Operation:
    """One recipe in progress. `stop` goes one after the other; `start` is released together,
    ordered by gates."""

    id: str
    request: CommandRequest
    by_hand: bool = True
    """False for restarts by policy and the end of the run: no command records."""
    why: str = ""
    """Reason to show if it is neither a command nor a crash."""
    stage: Literal["stop", "start", "settle", "over"] = "stop"
    stop: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    not_before: float = 0.0
    """Earliest monotonic time of a start (backoff)."""
    attempt: int = 0
    sent: bool = False
    status: Literal["accepted", "running", "done", "failed"] = "accepted"
    detail: str = ""

    @property
    def action(self) -> str:
        return self.request.action

    @property
    def own_id(self) -> str | None:
        """Command id of its transitions."""
        return self.id if self.by_hand else None

    def holds(self, name: str) -> bool:
        """True if `name` must not start yet."""
        return self.stage in ("stop", "start") and name in self.start

    def cause(self) -> str:
        if self.why:
            return self.why
        if self.action == "down":
            return "the stack is being stopped"
        target = self.request.component or "the stack"
        by = {"user": "by hand", "trainer": "asked for by the trainer"}[self.request.initiator]
        return f"{self.action} of {target} {by if self.by_hand else 'after its crash'}"

    def stopped_for(self, name: str) -> str:
        """Reason of the stop of component `name`."""
        if self.why:
            return f"stopped because {self.why}"
        if self.action == "down":
            return "stopped with the stack"
        if self.action != "restart":
            return "stopped by hand" + (
                "" if name == self.request.component else f" with {self.request.component}"
            )
        if not self.by_hand:
            return f"stopped because {self.request.component} crashed"
        if self.request.initiator == "trainer":
            return "stopped for a restart that the trainer requested"
        target = self.request.component or "the stack"
        return "stopped for a restart by hand" + ("" if name == target else f" of {target}")

    def as_status(self) -> CommandStatus:
        return CommandStatus(
            command_id=self.id,
            action=self.action,
            component=self.request.component,
            status=self.status,
            detail=self.detail,
        )


def new_id() -> str:
    return secrets.token_hex(4)
