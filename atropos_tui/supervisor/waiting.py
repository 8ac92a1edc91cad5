"""`wait --for X`: has it been reached, can it still be?"""

from __future__ import annotations

import asyncio
import time

from atropos_tui.supervisor.ledger import Ledger
from trainer_core.contracts.control import Phase, State, WaitResult


async def wait_for(ledger: Ledger, target: str, timeout_s: float | None) -> WaitResult:
    """Wait until `target` (ready, done, a component's name) is reached, becomes impossible, or time is up."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        changed = ledger.changed
        found = _look(ledger, target)
        if found is not None:
            return found
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return WaitResult(outcome="timeout", detail=_missing(ledger, target))
        try:
            await asyncio.wait_for(changed.wait(), left)
        except TimeoutError:
            continue


def _look(ledger: Ledger, target: str) -> WaitResult | None:
    if target == "done":
        return _ended(ledger)
    unit = ledger.units.get(target)
    if unit is not None and unit.state in (State.HEALTHY, State.COMPLETED):
        return WaitResult(outcome="reached", detail=f"{target} is {unit.state}")
    if unit is None and ledger.ready():
        return WaitResult(outcome="reached", detail="every component is healthy or done")
    for one in [unit] if unit else ledger.units.values():
        if one.state is State.FAILED:
            return WaitResult(outcome="impossible", detail=f"{one.name} failed: {one.reason}")
    if ledger.phase in (Phase.STOPPING, Phase.ENDED):
        return WaitResult(outcome="impossible", detail=f"the run is {ledger.phase}: {ledger.reason}")
    return None


def _ended(ledger: Ledger) -> WaitResult | None:
    if ledger.phase is not Phase.ENDED:
        return None
    detail = f"exit code {ledger.exit_code}: {ledger.reason}"
    return WaitResult(outcome="reached" if ledger.exit_code == 0 else "impossible", detail=detail)


def _missing(ledger: Ledger, target: str) -> str:
    if target == "done":
        return f"the run is {ledger.phase}"
    units = [ledger.units[target]] if target in ledger.units else list(ledger.units.values())
    reached = (State.HEALTHY, State.COMPLETED)
    return "; ".join(
        f"{unit.name} is {unit.state}" + (f", waiting for {unit.waiting_for}" if unit.waiting_for else "")
        for unit in units
        if unit.state not in reached
    )
