"""`wait --for X`: has it been reached, can it still be?"""

from __future__ import annotations

import asyncio
import time

from atropos_tui.supervisor.supervisor import Supervisor
from trainer_core.contracts.control import Phase, State, WaitResult


async def wait_for(supervisor: Supervisor, target: str, timeout_s: float | None) -> WaitResult:
    """Wait until `target` (ready, done, a component's name) is reached, becomes impossible, or time is up."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        changed = supervisor.store.changed
        found = _look(supervisor, target)
        if found is not None:
            return found
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return WaitResult(outcome="timeout", detail=_missing(supervisor, target))
        try:
            await asyncio.wait_for(changed.wait(), left)
        except TimeoutError:
            continue


def _look(supervisor: Supervisor, target: str) -> WaitResult | None:
    if target == "done":
        return _ended(supervisor)
    component = supervisor.components.get(target)
    if component is not None and component.state in (State.HEALTHY, State.COMPLETED):
        return WaitResult(outcome="reached", detail=f"{target} is {component.state}")
    if component is None and supervisor.ready():
        return WaitResult(outcome="reached", detail="every component is healthy or done")
    for one in [component] if component else supervisor.components.values():
        if one.state is State.FAILED:
            return WaitResult(outcome="impossible", detail=f"{one.name} failed: {one.reason}")
    if supervisor.phase in (Phase.STOPPING, Phase.ENDED):
        return WaitResult(outcome="impossible", detail=f"the run is {supervisor.phase}: {supervisor.reason}")
    return None


def _ended(supervisor: Supervisor) -> WaitResult | None:
    if supervisor.phase is not Phase.ENDED:
        return None
    detail = f"exit code {supervisor.exit_code}: {supervisor.reason}"
    return WaitResult(outcome="reached" if supervisor.exit_code == 0 else "impossible", detail=detail)


def _missing(supervisor: Supervisor, target: str) -> str:
    if target == "done":
        return f"the run is {supervisor.phase}"
    among = supervisor.components
    return "; ".join(
        f"{each.name} is {each.state}" + (f", waiting for {each.waiting_for}" if each.waiting_for else "")
        for each in ([among[target]] if target in among else among.values())
        if each.state not in (State.HEALTHY, State.COMPLETED)
    )
