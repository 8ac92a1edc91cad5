"""Transitions that a component may make between its states."""

from __future__ import annotations

from atropos_common.protocol.control import (
    State,
)

ENDS = frozenset({State.STOPPED, State.BACKOFF, State.FAILED, State.COMPLETED})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.STARTING, State.STOPPED, State.COMPLETED, State.FAILED}),
    State.STARTING: ENDS | {State.HEALTHY, State.STOPPING},
    State.HEALTHY: ENDS | {State.UNHEALTHY, State.STOPPING},
    State.UNHEALTHY: ENDS | {State.HEALTHY, State.STOPPING},
    State.STOPPING: ENDS,
    State.BACKOFF: frozenset({State.PENDING, State.STOPPED, State.FAILED}),
    State.STOPPED: frozenset({State.PENDING}),
    State.FAILED: frozenset({State.PENDING}),
    State.COMPLETED: frozenset({State.PENDING}),
}


class IllegalTransitionError(AssertionError):
    pass


def check_step(old: State, new: State) -> None:
    """Raises:
    IllegalTransitionError: `TRANSITIONS` does not have it.
    """
    if new not in TRANSITIONS[old]:
        raise IllegalTransitionError(f"{old} -> {new}")
