"""What Ctrl+P offers: every action, made from the bindings, and each component's actions by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.dom import DOMNode

from atropos_common.control import Action, ComponentStatus

_NAMED = {"left_square_bracket": "left bracket", "right_square_bracket": "right bracket"}
"""Keys whose own sign would be read as markup."""

Act = Callable[[Action, str], object]


def commands(
    app: App[Any], panels: Iterable[DOMNode], rows: Iterable[ComponentStatus], act: Act
) -> Iterator[SystemCommand]:
    """Commands for the palette.

    Args:
        panels: whose keys work when they have the focus.
        act: asks for an action on a component.
    """
    for owner in (app, *panels):
        for binding in _bindings(owner):
            if binding.tooltip and not binding.system:
                key = _NAMED.get(binding.key) or app.get_key_display(binding)
                yield SystemCommand(
                    binding.description, f"{binding.tooltip} · key {key}", partial(_run, app, binding, owner)
                )
    for row in rows:
        for action in _possible(row):
            yield SystemCommand(
                f"{action.capitalize()} {row.name}", f"{row.name} is {row.state}", partial(act, action, row.name)
            )


def _bindings(owner: DOMNode) -> list[Binding]:
    """One for each action, its first key; a class's own stand before, and instead of, those it inherits."""
    by_key: dict[str, Binding] = {}
    for kind in type(owner).__mro__:
        for binding in Binding.make_bindings(vars(kind).get("BINDINGS", ())):
            by_key.setdefault(binding.key, binding)
    by_action: dict[str, Binding] = {}
    for binding in by_key.values():
        by_action.setdefault(binding.action, binding)
    return list(by_action.values())


async def _run(app: App[Any], binding: Binding, owner: DOMNode) -> None:
    await app.run_action(binding.action, owner)


def _possible(row: ComponentStatus) -> tuple[Action, ...]:
    if row.state.is_resting:
        return ("start",)
    return ("restart", "stop", "kill") if row.state.has_process else ("restart", "stop")
