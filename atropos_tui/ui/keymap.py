"""The user's key file: other keys for actions, and own commands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode
from textual.keys import KEY_ALIASES, Keys, _character_to_key, format_key
from textual.screen import Screen

from atropos_tui.monitor.format import one_line
from atropos_tui.profile.errors import did_you_mean
from atropos_tui.ui.own_commands import OwnCommand, command_of

# Actions of a replay exist only there, those of the list of runs not in a replay.
ELSEWHERE = ("replay", "runs")
MODIFIERS = ("ctrl", "shift", "alt", "super", "hyper", "meta")
_NAMES = {key.value for key in Keys} | set(KEY_ALIASES) | {f"f{n}" for n in range(1, 25)}


def action_id(name: str, tip: str) -> str:
    """Return the name of an action in the key file, from the words of its binding."""
    # A tip starts with its panel's name and a colon, except for keys that work everywhere.
    panel, colon, _ = tip.partition(": ")
    where = panel if colon else "" if tip else "move"
    return ".".join(re.sub(r"[^a-z0-9]+", "-", part.lower()) for part in (where, name) if part)


def key_name(text: str) -> str | None:
    """Return Textual's name of a key such as `G`, `/`, `ctrl+r` or `f5`; None if there is none."""
    if len(text) == 1:
        return _character_to_key(text) if text.isprintable() and text != " " else None
    *modifiers, key = text.split("+")
    if not set(modifiers) <= set(MODIFIERS):
        return None
    if len(key) == 1:
        return text if modifiers and key.isalnum() else None
    return text if key in _NAMES or text in _NAMES or _is_character(key) else None


def _is_character(name: str) -> bool:
    # Names of characters, for example `left_square_bracket`.
    return bool(re.fullmatch(r"[a-z]+(_[a-z]+)+|plus|minus|comma|slash|tilde|at|ampersand", name))


def bindings_of(kind: type[DOMNode]) -> list[Binding]:
    """Return the bindings of a class and its bases, the class's own first."""
    by_key: dict[str, Binding] = {}
    for base in kind.__mro__:
        for binding in Binding.make_bindings(vars(base).get("BINDINGS", ())):
            by_key.setdefault(binding.key, binding)
    return list(by_key.values())


def remapped(bindings: Iterable[Binding], keys: Mapping[str, str]) -> Iterator[Binding]:
    """Yield the bindings with the user's keys."""
    moved: set[str] = set()
    for binding in bindings:
        wanted = keys.get(binding.id or "")
        if wanted is None:
            yield binding
        elif binding.id not in moved:
            moved.add(binding.id or "")
            yield from (binding.with_key(key) for key in wanted.split(","))


@dataclass(frozen=True)
class KeyFile:
    """Content of the key file; wrong entries are left out and named in `problems`."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys by action, separated by commas."""
    commands: tuple[OwnCommand, ...] = ()
    problems: tuple[str, ...] = ()


def read_key_file(path: Path, kinds: Iterable[type[DOMNode]]) -> KeyFile:
    """Return the user's keys for the actions of `kinds`, the app first."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return KeyFile()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return KeyFile(problems=(f"{path.name}: {one_line(reason)}; nothing of it is used",))
    problems = [
        f"{name}: not a section of this file; fix: use [keys] or [ui.command.NAME]"
        for name in data
        if name not in ("keys", "ui")
    ]
    tables = [bindings_of(kind) for kind in kinds]
    keys = _keys(data.get("keys", {}), tables, problems)
    commands = _commands(data.get("ui", {}), tables, keys, problems)
    return KeyFile(keys, commands, tuple(f"{path.name}: {problem}" for problem in problems))


def _keys(given: Any, tables: list[list[Binding]], problems: list[str]) -> dict[str, str]:
    if not isinstance(given, dict):
        problems.append("keys: not a section; fix: write [keys] on a line of its own")
        return {}
    known = {binding.id for table in tables for binding in table if binding.id}
    panels = {name.partition(".")[0] for name in known if "." in name}
    keys: dict[str, str] = {}
    for name, value in _flat(given):
        words = value if isinstance(value, list) else [value]
        names = [key_name(word) if isinstance(word, str) else None for word in words]
        if (panel := name.partition(".")[0]) in ELSEWHERE and panel not in panels:
            continue
        if name not in known:
            fix = did_you_mean(name, sorted(known), 2) or "docs/keys.md lists the actions"
            problems.append(f"keys.{name}: not an action; {fix.strip()}")
        elif not names or None in names:
            wrong = words[names.index(None)] if names else value
            fix = 'fix: write "G", "/", "ctrl+r", "f5" or a list of these'
            problems.append(f"keys.{name}: {one_line(repr(wrong))} is not a key; {fix}")
        else:
            keys[name] = ",".join(filter(None, names))
            if clash := _clash(tables, keys, name):
                problems.append(f"keys.{name}: {clash}; fix: give that action another key")
                del keys[name]
    return keys


def _flat(given: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    # `charts.smooth = "M"` is a table within a table in TOML.
    for name, value in given.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _clash(tables: list[list[Binding]], keys: Mapping[str, str], name: str) -> str:
    wanted = keys[name].split(",")
    for table in tables:
        if any(binding.id == name for binding in table):
            for binding in remapped(table, keys):
                if binding.id != name and binding.key in wanted:
                    taken_by = binding.id or binding.description or binding.action
                    return f"{format_key(binding.key)} is the key of {taken_by}"
    return ""


def _commands(
    given: Any, tables: list[list[Binding]], keys: Mapping[str, str], problems: list[str]
) -> tuple[OwnCommand, ...]:
    section = given.get("command", {}) if isinstance(given, dict) else None
    if not isinstance(section, dict) or set(given) - {"command"}:
        problems.append("ui: only [ui.command.NAME] may stand here")
        return ()
    taken = {
        binding.key: binding.id or binding.description or binding.action
        # The first one names the key: a replay has the keys of a live run without their ids.
        for table in reversed(tables)
        for binding in remapped(table, keys)
    }
    found = []
    for name, entry in section.items():
        command, wrong = command_of(name, entry)
        key = key_name(command.key) if command else None
        if command and key is None:
            wrong = [f"key: {command.key!r} is not a key"]
        elif command and key in taken:
            wrong = [f"key: {command.key} is the key of {taken[key]}; fix: choose another"]
        elif command and key:
            taken[key] = f"ui.command.{name}"
            found.append(command.model_copy(update={"key": key}))
        problems += [f"ui.command.{name}.{problem}" for problem in wrong]
    return tuple(found)


def kinds_with_keys() -> list[type[DOMNode]]:
    """Return the imported classes that have keys, the app of a run first, then other apps."""
    own = [kind for kind in _below(DOMNode) if kind.__module__.startswith("atropos_tui.")]
    own = [kind for kind in own if not issubclass(kind, Screen)]  # dialogs keep their keys
    own = list(dict.fromkeys(kind for kind in own if "BINDINGS" in vars(kind)))
    return sorted(own, key=lambda kind: (not issubclass(kind, App), ".home." in kind.__module__))


def _below(kind: type[DOMNode]) -> Iterator[type[DOMNode]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)
