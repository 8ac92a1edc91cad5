"""Changes to the text of a profile that keep its comments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atropos_tui.profile.budget.fit import toml

Changes = dict[str, dict[str, Any]]
"""Table ("": top level) -> new values; None removes a key."""


def with_changes(text: str, changes: Changes) -> str:
    """TOML text with new values in several tables."""
    for table, values in changes.items():
        text = with_values(text, table, values)
    return text


def by_table(settings: Mapping[str, Any]) -> Changes:
    changes: Changes = {}
    for key, value in settings.items():
        table, _, name = key.rpartition(".")
        changes.setdefault(table, {})[name] = value
    return changes


def with_comment(text: str, table: str, comment: str) -> str:
    return re.sub(
        rf"^(\[{re.escape(table)}\].*\n)",
        lambda header: f"{header[1]}# {comment}\n",
        text,
        count=1,
        flags=re.MULTILINE,
    )


def with_values(text: str, table: str, values: dict[str, Any]) -> str:
    """An existing key keeps its line and comment; a new key goes to the end of the table."""
    # The top level starts at the first character, a table after its header, a new table at the end
    # of the file.
    header = re.search(rf"^\[{table}\].*\n", text, re.MULTILINE) if table else re.match("", text)
    if header is None:
        text += f"\n[{table}]\n"
    start = header.end() if header else len(text)
    following = re.compile(r"\n*^\[|\n*\Z", re.MULTILINE).search(text, start)
    end = following.start() if following else len(text)
    body = text[start:end]
    for key, value in values.items():
        # Templates have one `key = value` a line, so a value never spans lines; group 1 is the
        # comment.
        line = re.search(rf"^{re.escape(key)} = .*?( *#.*)?$", body, re.MULTILINE)
        if line and value is None:
            body = body[: line.start()] + body[line.end() + 1 :]
        elif line:
            body = f"{body[: line.start()]}{key} = {toml(value)}{line[1] or ''}{body[line.end() :]}"
        elif value is not None:
            body = f"{body.rstrip()}\n{key} = {toml(value)}".lstrip("\n")
    return text[:start] + body.rstrip("\n") + (text[end:] or "\n")


def without_table(text: str, name: str) -> str:
    return re.sub(rf"^\[+{name}\]+(?:.*\n)+?(?=^\[|\Z)", "", text, flags=re.MULTILINE)
