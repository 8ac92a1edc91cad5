"""What must not be written to a file: values that look like secrets, in tables, command lines and `--set` words.

A `${VAR}` reference stays, since it gives nothing away; so do numbers, since a token *limit* is no token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

REDACTED = "(redacted)"
PLACEHOLDER = "local"
"""Stands where a local server wants some key; everybody may read it."""

_SECRET = re.compile(
    r"(?<![a-z])(api[_-]?key|access[_-]?key|private[_-]?key|key|secret|token|pass|passwd|password|credentials?|auth)"
    r"(?![a-z])",
    re.IGNORECASE,
)


def hide(name: str, value: str) -> str:
    """`value`, unless `name` says that it is a secret."""
    harmless = value.startswith("${") or value == PLACEHOLDER or not value or value.replace(".", "").isdecimal()
    return REDACTED if _SECRET.search(name) and not harmless else value


def hide_command(words: Sequence[str]) -> list[str]:
    """A command line: `--flag value`, `--flag=value` and `KEY=VALUE` alike."""
    shown: list[str] = []
    before = ""
    for word in words:
        name, separator, value = word.partition("=")
        if separator:
            shown.append(f"{name}={hide(name, value)}")
        elif before.startswith("-") and not word.startswith("-"):
            shown.append(hide(before, word))
        else:
            shown.append(word)
        before = word
    return shown


def hide_tree(data: Any, name: str = "") -> Any:
    """Nested tables and lists as TOML or JSON hold them; a list called `command` is read as a command line."""
    if isinstance(data, dict):
        return {key: hide_tree(value, str(key)) for key, value in data.items()}
    if isinstance(data, list):
        if name == "command" and all(isinstance(word, str) for word in data):
            return hide_command(data)
        return [hide_tree(item, name) for item in data]
    return hide(name, data) if isinstance(data, str) else data
