"""What a command touches, as data, before it touches anything. Pure functions from a `StackSpec`."""

from __future__ import annotations

from atropos_tui.stack.spec import StackSpec
from trainer_core.contracts.control import Action, Recipe


def recipe(stack: StackSpec, action: Action, component: str | None, *, initiator: str = "user") -> Recipe:
    """The blast radius of `action`: who stops, in which order, and who starts again.

    A restart asked for by the trainer never stops that trainer: it waits for the new engine itself.

    Raises:
        KeyError: no such component.
    """
    order = [spec.name for spec in stack.components]
    if action == "down":
        return Recipe(action=action, stop=order[::-1], note="Stops the whole stack; the run ends.")
    if component not in order:
        raise KeyError(component)
    if action == "start":
        return Recipe(action=action, component=component, start=[component])
    if action in ("stop", "kill"):
        return Recipe(action=action, component=component, stop=[component], note=_left_alone(stack, component))
    touched = _taken_along(stack, component)
    if initiator == "trainer":
        touched -= {spec.name for spec in stack.components if spec.role == "trainer"}
    touched |= {component}
    start = [name for name in order if name in touched]
    return Recipe(
        action=action, component=component, stop=start[::-1], start=start, note=_why(stack, component, touched)
    )


def _taken_along(stack: StackSpec, component: str) -> set[str]:
    """Transitive closure of `restart_with`."""
    found: set[str] = set()
    todo = [component]
    while todo:
        name = todo.pop()
        spec = stack.component(name)
        if name not in found and spec is not None:
            found.add(name)
            todo += spec.restart_with
    return found


def _why(stack: StackSpec, component: str, touched: set[str]) -> str:
    spec = stack.component(component)
    others = sorted(touched - {component})
    if not others or spec is None:
        return ""
    reasons = {
        "engine": "its weights live in the engine's memory: it saves a checkpoint, stops, and goes on from there",
        "api": "run-api keeps its state in memory and forgets who is registered",
    }
    return f"{', '.join(others)} restart too: {reasons.get(spec.role.value, 'they depend on it')}."


def _left_alone(stack: StackSpec, component: str) -> str:
    spec = stack.component(component)
    bound = spec.restart_with if spec else []
    users = [other.name for other in stack.components if component in other.depends_on and other.name not in bound]
    notes = [f"{', '.join(users)} keep running without it."] if users else []
    if bound and spec and spec.role == "engine":
        notes.append(f"{', '.join(bound)} cannot go on without it: what was trained since the last checkpoint is lost.")
    return " ".join(notes)
