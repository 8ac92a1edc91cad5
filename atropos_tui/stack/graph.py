"""Whether the components of a stack fit together: names, dependencies, circles."""

from __future__ import annotations

from atropos_tui.stack.spec import StackSpec
from trainer_core.contracts.run_dir import is_safe_name


class StackError(ValueError):
    """A stack that cannot be run as written."""


def check_stack(stack: StackSpec) -> None:
    """Let a runnable stack pass.

    Raises:
        StackError: a name twice or not usable in a path, an unknown dependency, a circle.
    """
    names = [spec.name for spec in stack.components]
    for name in names:
        if names.count(name) > 1:
            raise StackError(f"two components are called {name!r}: give each its own name")
        if not is_safe_name(name):
            raise StackError(f"component name {name!r}: use letters, digits, dot, dash, underscore")
    for spec in stack.components:
        for other in [*spec.depends_on, *spec.restart_with]:
            if other not in names:
                raise StackError(f"{spec.name} depends on {other!r}, which is not in the stack")
    done: set[str] = set()
    while len(done) < len(names):
        ready = {s.name for s in stack.components if s.name not in done and set(s.depends_on) <= done}
        if not ready:
            raise StackError(f"circular depends_on among: {', '.join(n for n in names if n not in done)}")
        done |= ready
