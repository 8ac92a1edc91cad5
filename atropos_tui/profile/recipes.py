"""Effects of a command as data, before it runs. Pure."""

from __future__ import annotations

from collections.abc import Collection

from atropos_common.protocol.control import Action, Recipe
from atropos_tui.profile.spec import ComponentSpec, StackSpec, reached


def recipe(
    stack: StackSpec,
    action: Action,
    component: str | None,
    *,
    initiator: str = "user",
    among: Collection[str] | None = None,
) -> Recipe:
    """Components that `action` stops and starts, in order.

    A restart that the trainer requests never stops the trainer.

    Args:
        among: limits the components that restart with it.

    Raises:
        KeyError: no such component.
    """
    order = [spec.name for spec in stack.components]
    if action == "down":
        return Recipe(action=action, stop=order[::-1], note="Stops the whole stack; the run ends.")
    if action == "restart" and component is None:
        start = order if among is None else [name for name in order if name in among]
        note = "Restarts the whole stack; the trainer saves a checkpoint and continues from it."
        return Recipe(action=action, stop=start[::-1], start=start, note=note)
    spec = stack.component(component) if component is not None else None
    if spec is None:
        raise KeyError(component)
    # Transitive: a component that restarts may force others to restart too.
    touched = {spec.name} | reached(
        spec.name, {part.name: part.restart_with for part in stack.components}
    )
    if among is not None:  # components without a process now are not restarted
        touched &= set(among)
    # The trainer waits for its new engine, so it must not be stopped by its own request.
    if initiator == "trainer":
        touched -= {part.name for part in stack.components if part.role == "trainer"}
    touched |= {spec.name}
    start = [name for name in order if name in touched]
    stop = start[::-1]  # a component stops before those that it depends on
    match action:
        case "start":
            return Recipe(action=action, component=component, start=start)
        case "stop":
            return Recipe(
                action=action,
                component=component,
                stop=stop,
                note=_left_alone(stack, spec, touched),
            )
        case "kill":
            return _killed(stack, spec, start)
    return Recipe(
        action=action, component=component, stop=stop, start=start, note=_why(spec, touched)
    )


def _killed(stack: StackSpec, spec: ComponentSpec, touched: list[str]) -> Recipe:
    policy = spec.restart
    if restarts_after_crash(spec):
        stopped, start = touched, touched
        ends = f"crash {policy.max_restarts + 1} within {policy.window_s:g} s ends the run."
        note = f"Counts as a crash; {ends} {_why(spec, set(touched))}".rstrip()
    else:
        stopped, start = [part.name for part in stack.components], []
        rule = "is never" if policy.policy == "never" else "allows no restart"
        note = f"Counts as a crash, and its restart policy {rule}: the run ends with code 3."
    stop = [spec.name, *(name for name in reversed(stopped) if name != spec.name)]
    return Recipe(action="kill", component=spec.name, stop=stop, start=start, note=note)


def restarts_after_crash(spec: ComponentSpec) -> bool:
    """False: a crash ends the run."""
    return spec.restart.policy != "never" and spec.restart.max_restarts > 0


def _why(spec: ComponentSpec, touched: set[str]) -> str:
    others = sorted(touched - {spec.name})
    if not others:
        return ""
    reasons = {
        "engine": "the weights are in its memory: the trainer saves a checkpoint, stops, and "
        "resumes from it",
        "api": "run-api keeps registrations in memory only",
    }
    depends = _verb(others, "it depends on it", "they depend on it")
    return (
        f"{', '.join(others)} {_verb(others, 'restarts', 'restart')} too: "
        f"{reasons.get(spec.role.value, depends)}."
    )


def _verb(subjects: list[str], singular: str, plural: str) -> str:
    return singular if len(subjects) == 1 else plural


def _left_alone(stack: StackSpec, spec: ComponentSpec, touched: Collection[str]) -> str:
    bound = [
        other.name
        for other in stack.components
        if other.name in touched and other.name != spec.name
    ]
    users = [
        other.name
        for other in stack.components
        if spec.name in other.depends_on and other.name not in touched
    ]
    notes = (
        [f"{', '.join(users)} {_verb(users, 'keeps', 'keep')} running without it."] if users else []
    )
    if bound:
        first = " with a checkpoint" if spec.role == "engine" else ""
        notes.append(
            f"{', '.join(bound)} cannot run without it and {_verb(bound, 'stops', 'stop')} "
            f"first{first}; "
            f"atropos-tui start {spec.name} starts all of them again."
        )
    return " ".join(notes)
