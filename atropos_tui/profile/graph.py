"""Whether the components of a stack fit together: names, dependencies, circles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atropos_common.run_dir import is_safe_name
from atropos_tui.profile.spec import StackSpec


class StackError(ValueError):
    """A stack that cannot be run as written."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with one component, and where it says so."""

    component: str
    field: Literal["name", "depends_on"]
    reason: str
    fix: str


def check_stack(stack: StackSpec) -> None:
    """Let a runnable stack pass.

    Raises:
        StackError: a name twice or not usable in a path, an unknown dependency, a circle; all of them.
    """
    if faults := find_faults(stack):
        raise StackError("; ".join(f"{fault.reason}: {fault.fix}" for fault in faults))


def find_faults(stack: StackSpec) -> list[Fault]:
    """Everything for which the components cannot be started in any order."""
    names = [spec.name for spec in stack.components]
    faults = [
        Fault(name, "name", f"two components are called {name!r}", "give each its own name")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    for name in dict.fromkeys(names):
        if not is_safe_name(name):
            faults.append(Fault(name, "name", f"component name {name!r}", "use letters, digits, dot, dash, underscore"))
    for spec in stack.components:
        for other in dict.fromkeys([*spec.depends_on, *spec.restart_with]):
            if other not in names:
                reason = f"{spec.name} depends on {other!r}, which is not in the stack"
                fix = f"name one of: {', '.join(name for name in names if name != spec.name)}"
                faults.append(Fault(spec.name, "depends_on", reason, fix))
    return [*faults, *_circles(stack)]


def _circles(stack: StackSpec) -> list[Fault]:
    """One fault for each set of components that wait for one another, at its first."""
    waits: dict[str, set[str]] = {}
    for spec in stack.components:
        waits.setdefault(spec.name, set()).update(spec.depends_on)
    reached = {name: _reached(name, waits) for name in waits}
    faults: list[Fault] = []
    named: set[str] = set()
    for name, others in reached.items():
        if name in others and name not in named:
            circle = [other for other in waits if other in others and name in reached[other]]
            named.update(circle)
            reason = f"circular depends_on among: {', '.join(circle)}"
            fix = "take itself out" if len(circle) == 1 else "let one of them not wait for the next"
            faults.append(Fault(name, "depends_on", reason, fix))
    return faults


def _reached(start: str, waits: dict[str, set[str]]) -> set[str]:
    """Everything that `start` waits for, at any distance."""
    reached: set[str] = set()
    open_ = [start]
    while open_:
        new = waits.get(open_.pop(), set()) - reached
        reached |= new
        open_ += new
    return reached
