"""The states of a component and the steps between them that are allowed. Pure; imports nothing but contracts."""

from __future__ import annotations

from atropos_common.control import State

TRANSITIONS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.STARTING, State.STOPPED, State.COMPLETED, State.FAILED}),
    State.STARTING: frozenset(
        {State.HEALTHY, State.STOPPING, State.STOPPED, State.BACKOFF, State.FAILED, State.COMPLETED}
    ),
    State.HEALTHY: frozenset(
        {State.UNHEALTHY, State.STOPPING, State.STOPPED, State.BACKOFF, State.FAILED, State.COMPLETED}
    ),
    State.UNHEALTHY: frozenset(
        {State.HEALTHY, State.STOPPING, State.STOPPED, State.BACKOFF, State.FAILED, State.COMPLETED}
    ),
    State.STOPPING: frozenset({State.STOPPED, State.BACKOFF, State.FAILED, State.COMPLETED}),
    State.BACKOFF: frozenset({State.PENDING, State.STOPPED, State.FAILED}),
    State.STOPPED: frozenset({State.PENDING}),
    State.FAILED: frozenset({State.PENDING}),
    State.COMPLETED: frozenset({State.PENDING}),
}
"""From each state, where a component may go next."""


class IllegalTransitionError(AssertionError):
    """A step that `TRANSITIONS` does not allow: a fault of the supervisor."""


def check(old: State, new: State) -> None:
    """Let an allowed step pass.

    Raises:
        IllegalTransitionError: the step is not in the table.
    """
    if new not in TRANSITIONS[old]:
        raise IllegalTransitionError(f"{old} -> {new}")


def satisfies(state: State, condition: str) -> bool:
    """Whether a dependency in `state` meets `condition` (started, healthy, completed)."""
    if condition == "completed":
        return state is State.COMPLETED
    if condition == "healthy":
        return state in (State.HEALTHY, State.COMPLETED)
    return state in (State.STARTING, State.HEALTHY, State.UNHEALTHY, State.COMPLETED)
