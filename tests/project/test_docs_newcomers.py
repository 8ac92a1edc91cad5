"""Documents for newcomers: the keys of the screen, and the example trainer's flags."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from textual.binding import Binding
from textual.dom import DOMNode
from textual.keys import format_key

from atropos_tui.monitor import glossary
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.home.app import HomeApp
from atropos_tui.ui.home.table import RunTable
from atropos_tui.ui.keymap import bindings_of, kinds_with_keys
from atropos_tui.ui.replay import ReplayApp
from atropos_tui.ui.widgets.bars import SearchBar
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.details import Details
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.panel import Listing
from atropos_tui.ui.widgets.rollouts import Rollouts
from atropos_tui.ui.widgets.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
PLACES: dict[str, type[DOMNode]] = {
    "Everywhere": CockpitApp,
    "Components": Components,
    "Charts": Chart,
    "Logs": LogView,
    "Lists": Listing,
    "Rollouts": Rollouts,
    "Events": Events,
    "Component": Details,
    "Settings": Settings,
    "The list of runs": HomeApp,
    "Runs": RunTable,
    "A search": SearchBar,
    "A replay": ReplayApp,
}


def keys_of(kind: type[DOMNode]) -> dict[tuple[str, str], str]:
    """Return the keys of each action of a class, by description and name in the key file."""
    found: dict[tuple[str, str], list[str]] = {}
    for binding in Binding.make_bindings(vars(kind)["BINDINGS"]):
        if kind is ReplayApp and binding.action == "home":
            continue  # it has no list of runs, so its help leaves the key out too
        about = binding.tooltip or binding.description, binding.id or ""
        found.setdefault(about, []).append(f"`{format_key(binding.key)}`")
    return {about: " ".join(keys) for about, keys in found.items()}


def keys_document() -> str:
    """Return `docs/keys.md` from its first section on."""
    parts = []
    for place, kind in PLACES.items():
        rows = "".join(
            f"| {keys} | {about} | {f'`{name}`' if name else ''} |\n"
            for (about, name), keys in keys_of(kind).items()
        )
        parts.append(f"## {place}\n\n| key | | action |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


def test_every_class_with_keys_has_its_section() -> None:
    assert set(PLACES.values()) >= set(kinds_with_keys())


def test_an_action_s_name_stands_for_one_action_of_a_class() -> None:
    for kind in PLACES.values():
        actions: dict[str, set[str]] = {}
        for binding in bindings_of(kind):
            actions.setdefault(binding.id or binding.action, set()).add(binding.action)
        assert all(len(found) == 1 for found in actions.values())


def test_the_keys_of_the_screen_are_those_in_the_document() -> None:
    text = (DOCS / "keys.md").read_text()
    assert text[text.index("## ") :] == keys_document(), (
        "python -m tests.project.test_docs_newcomers prints it"
    )


def test_the_glossary_is_that_of_the_screen() -> None:
    assert (DOCS / "concepts/glossary.md").read_text() == glossary.document(), (
        "python -m atropos_tui.monitor.glossary prints it"
    )


def peer_flags() -> set[str]:
    """Return the flags of atroposlib's example_trainer, read from the source of its parser."""
    spec = importlib.util.find_spec("example_trainer")
    if spec is None or spec.origin is None:
        pytest.skip("atroposlib's wheel brings no example_trainer")
    tree = ast.parse(Path(spec.origin).with_name("cli.py").read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    words = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    return {word for word in words if isinstance(word, str) and word.startswith("--")}


def test_every_flag_of_example_trainer_has_its_row() -> None:
    rows = [
        line
        for line in (DOCS / "from-example-trainer.md").read_text().splitlines()
        if line.startswith("| `--")
    ]
    told = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)`", row.split("|")[1])}
    flags = peer_flags()
    assert len(flags) > 35 and told == flags


def test_the_keys_that_replace_them_exist() -> None:
    from atropos_tui.profile.profile import DERIVED_TRAINER_KEYS
    from trainer_core.config import TrainingConfig

    text = (DOCS / "from-example-trainer.md").read_text()
    named = set(re.findall(r"`\[trainer\] (\w+)", text))
    assert len(named) > 15 and named <= {"gpus", *TrainingConfig.model_fields} - set(
        DERIVED_TRAINER_KEYS
    )


if __name__ == "__main__":
    print(keys_document(), end="")
