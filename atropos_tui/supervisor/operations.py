"""Commands while they are carried out: stop these in order, then start those; and when a command is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from atropos_common.control import CommandRequest, CommandStatus, Phase, Recipe, Refusal, State
from atropos_tui.supervisor.component import Component


class RefusedError(Exception):
    """A command that was not taken: HTTP status and the reason."""

    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(refusal.error)
        self.status = status
        self.refusal = refusal


@dataclass
class Operation:
    """One recipe on its way. `stop`: each gone before the next; `start`: all released together, gates order them."""

    id: str
    request: CommandRequest
    recipe: Recipe
    by_hand: bool = True
    """False for restarts by policy and for the end of the run: no command records."""
    why: str = ""
    """The reason to tell, where it is neither a command nor a crash."""
    stage: Literal["stop", "start", "settle", "over"] = "stop"
    stop: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    not_before: float = 0.0
    """Monotonic time before which nothing is started (backoff)."""
    attempt: int = 0
    """For `kill`: the attempt that shall end."""
    sent: bool = False
    """For `kill`: whether the signal went out."""
    status: Literal["accepted", "running", "done", "failed"] = "accepted"
    detail: str = ""

    @property
    def action(self) -> str:
        return self.request.action

    @property
    def own_id(self) -> str | None:
        """What its transitions carry as their command; None where nobody gave one."""
        return self.id if self.by_hand else None

    def holds(self, name: str) -> bool:
        """Whether `name` must not be started yet because of this operation."""
        return self.stage in ("stop", "start") and name in self.start

    def said(self) -> str:
        """The reason of what it makes happen."""
        if self.why:
            return self.why
        if self.action == "down":
            return "the stack is being stopped"
        whose = self.request.component or "the stack"
        who = {"user": "by hand", "trainer": "asked for by the trainer"}[self.request.initiator]
        return f"{self.action} of {whose} {who if self.by_hand else 'after its crash'}"

    def stopped_for(self, name: str) -> str:
        """What a component that it has stopped is told to have been stopped for."""
        if self.why:
            return f"stopped, since {self.why}"
        if self.action == "down":
            return "stopped with the stack"
        if self.action != "restart":
            return "stopped by hand" + ("" if name == self.request.component else f" with {self.request.component}")
        if not self.by_hand:
            return f"stopped, since {self.request.component} crashed"
        if self.request.initiator == "trainer":
            return "stopped for a restart, as the trainer asked"
        whose = self.request.component or "the stack"
        return "stopped for a restart by hand" + ("" if name == whose else f" of {whose}")

    def as_status(self) -> CommandStatus:
        return CommandStatus(
            command_id=self.id,
            action=self.action,
            component=self.request.component,
            status=self.status,
            detail=self.detail,
        )


def refusal(
    request: CommandRequest, components: Mapping[str, Component], operations: Iterable[Operation], phase: Phase
) -> tuple[int, Refusal] | None:
    """HTTP status and reason if `request` cannot be taken now, else None."""
    if phase is Phase.ENDED:
        return 409, Refusal(error="the run has ended", fix="start a new one: atropos-tui up PROFILE")
    if request.action == "down":
        return None
    if request.action == "restart" and not request.component:
        return _not_as_a_whole(components, operations, phase)
    if not request.component:
        return 422, Refusal(error=f"{request.action} needs a component", fix=f"one of: {', '.join(components)}")
    component = components.get(request.component)
    if component is None:
        return 404, Refusal(error=f"no component {request.component!r}", fix=f"one of: {', '.join(components)}")
    if phase is Phase.STOPPING and request.action != "kill":
        return 409, Refusal(error="the stack is being stopped", fix="wait for its end, or kill the component")
    return _not_in_this_state(request, component) or _in_each_others_way(request, component, operations)


def _not_as_a_whole(
    components: Mapping[str, Component], operations: Iterable[Operation], phase: Phase
) -> tuple[int, Refusal] | None:
    if phase is Phase.STOPPING:
        return 409, Refusal(error="the stack is being stopped", fix="wait for its end")
    if all(component.state.is_resting for component in components.values()):
        return 409, Refusal(error="nothing runs", fix="start the components that shall run")
    for other in operations:
        if other.by_hand and other.stage in ("stop", "start"):
            whole = other.request.component or "the stack"
            return 409, Refusal(
                error=f"{other.action} of {whole} is under way ({other.id})", fix="wait until that command is done"
            )
    return None


def _not_in_this_state(request: CommandRequest, component: Component) -> tuple[int, Refusal] | None:
    action, name, state = request.action, component.name, component.state
    if action == "start" and state is State.BACKOFF:
        return None
    if action == "start" and not state.is_resting:
        fix = f"wait until it is stopped, or use: restart {name}" if state is State.STOPPING else f"use: restart {name}"
        return 409, Refusal(error=f"{name} is {state} already", fix=fix)
    if action == "stop" and (state.is_resting or state is State.STOPPING):
        return 409, Refusal(error=f"{name} is {state} already", fix="nothing to do")
    if action == "kill" and component.child is None:
        return 409, Refusal(error=f"{name} has no process ({state})", fix=f"use: stop {name}, if it shall stay down")
    return None


def _in_each_others_way(
    request: CommandRequest, component: Component, operations: Iterable[Operation]
) -> tuple[int, Refusal] | None:
    if request.action not in ("start", "restart"):
        return None  # stop and kill always win
    for other in operations:
        if other.by_hand and other.stage in ("stop", "start") and component.name in {*other.stop, *other.start}:
            whole = f"{other.action} {other.request.component or ''}".strip()
            return 409, Refusal(
                error=f"{component.name} is part of {whole} ({other.id})", fix="wait until that command is done"
            )
    return None
