"""Line numbers of a profile's keys, and plain reasons for text that is not TOML.

`tomllib` returns no positions, so each statement is parsed alone, only when a problem is reported.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atropos_tui.profile.schema import KeyPath

MAX_STATEMENT_LINES = 200
"""Lines of one value; keys after a longer one get no line number."""
MOST_CHARACTERS = 1024 * 1024
MOST_DOTS = 1000
"""Limit of dots in one line."""
_POSITION = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")
_YAML = re.compile(r"\s*(?:- |---\s*$|[\w.-]+:(?:\s|$))")
_OTHER_WORDS = {
    "True": "true",
    "False": "false",
    "yes": "true",
    "no": "false",
    "on": "true",
    "off": "false",
}
"""Booleans of other languages -> TOML."""
_NOTHING = ("None", "null", "nil", "~")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of `text`.

    Raises:
        ValueError: it is not TOML, or is larger than a profile.
        RecursionError: it is nested too deep.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"more than {MOST_CHARACTERS:,} characters")
    # tomllib's time grows with the square of a key's parts: 64 KB in one key take a minute.
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line with more than {MOST_DOTS:,} dots")
    return tomllib.loads(text)


@dataclass(frozen=True)
class Statement:
    """A table header, or a key with its value."""

    path: KeyPath
    """Key from the top of the file; an entry of `[[env]]` has its index."""
    line: int
    """First line, counted from 1."""
    last: int
    is_table: bool


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line of each key and table; environment flags are split at their dots."""
    lines: dict[KeyPath, int] = {}
    for statement in statements(text):
        lines.setdefault(_nested(statement.path), statement.line)
    return lines


def line_of(lines: dict[KeyPath, int], path: KeyPath) -> int | None:
    """Line of `path`, else of the nearest table around it."""
    # From the key itself outwards: a missing key is reported at its table.
    for length in range(len(path), 0, -1):
        here = path[:length]
        single = here[:1] + here[2:] if length > 1 and here[1] == 0 else here
        if (line := lines.get(here, lines.get(single))) is not None:
            return line
    return None


def statements(text: str) -> Iterator[Statement]:
    """Statements in order, up to the first that does not parse or is too long."""
    rows = text.splitlines()
    table: KeyPath = ()
    counts: dict[KeyPath, int] = {}
    start = 0
    while start < len(rows):
        if not rows[start].strip() or rows[start].lstrip().startswith("#"):
            start += 1
            continue
        found = _parse_from(rows, start)
        if found is None:
            return
        data, end = found
        header = rows[start].lstrip().startswith("[")
        if header:
            is_entry = rows[start].lstrip().startswith("[[")
            table = path = _indexed(_path_of(data), counts, is_entry=is_entry)
        else:
            path = (*table, *_written_path(rows[start], data))
        yield Statement(path, start + 1, end, header)
        start = end


def _parse_from(rows: list[str], start: int) -> tuple[dict[str, Any], int] | None:
    """Data of the statement that begins at `start`, and the index of the row after it."""
    # A value may span lines, so rows are added until the text parses.
    for end in range(start + 1, min(len(rows), start + MAX_STATEMENT_LINES) + 1):
        try:
            return parse_toml("\n".join(rows[start:end])), end
        except (ValueError, RecursionError):
            continue
    return None


def _path_of(data: Any) -> tuple[str, ...]:
    """Keys down to the innermost table or value."""
    path: tuple[str, ...] = ()
    while isinstance(data, dict) and data:
        ((key, data),) = data.items()
        path += (key,)
    return path


def _written_path(row: str, data: dict[str, Any]) -> tuple[str, ...]:
    """Keys of `a.b = value`, without those of an inline table."""
    try:
        # The key alone, with a value that is no table.
        return _path_of(parse_toml(f"{row.partition('=')[0]} = 0"))
    except ValueError:  # an equals sign within a quoted key
        return tuple(data)[:1]


def _indexed(path: tuple[str, ...], counts: dict[KeyPath, int], *, is_entry: bool) -> KeyPath:
    """Path of a header, with the index of each `[[list]]` around it."""
    full: KeyPath = ()
    for depth, key in enumerate(path, 1):
        full += (key,)
        if is_entry and depth == len(path):
            counts[full] = counts.get(full, -1) + 1
        if full in counts:
            full += (counts[full],)
    return full


def _nested(path: KeyPath) -> KeyPath:
    if path[:1] != ("env",) or "args" not in path:
        return path
    at = path.index("args") + 1
    return (*path[:at], *(word for part in path[at:] for word in str(part).split(".")))


def why_not_toml(text: str, error: ValueError) -> tuple[str, str, int | None]:
    """Reason, fix and line for text that `tomllib` refused."""
    message = str(error)
    position = _POSITION.search(message)
    rows = text.splitlines()
    line = int(position[1]) if position and position[1] else len(rows) if position else None
    reason = f"not TOML: {message[: position.start()] if position else message}"
    if position and position[2]:
        reason += f" (column {position[2]})"
    row = rows[line - 1] if line and line <= len(rows) else ""
    if text.lstrip().startswith("{"):
        return "not TOML: this is JSON", "write TOML: `key = value` lines below [table] headers", 1
    if twice := _given_twice(text, line):
        return (*twice, line)
    value = row.partition("=")[2].partition("#")[0].strip()
    if value in _OTHER_WORDS:
        return f"not TOML: {value} is not a value", f"write {_OTHER_WORDS[value]}", line
    if value in _NOTHING:
        return (
            f"not TOML: {value} is not a value",
            "remove the line: the key then has its default",
            line,
        )
    # Common mistakes get their own reason instead of tomllib's.
    if "=" not in row and not row.lstrip().startswith("[") and _YAML.match(row):
        return (
            "not TOML: this is YAML",
            "write TOML: `key = value` lines below [table] headers",
            line,
        )
    if re.fullmatch(r"[A-Za-z_~./$][\w./~${}:-]*", value):
        return f"not TOML: {value} is not a value", f'put text in quotes: "{value}"', line
    return reason, "correct the syntax there", line


def _given_twice(text: str, line: int | None) -> tuple[str, str] | None:
    first: dict[tuple[KeyPath, bool], int] = {}
    for statement in statements(text):
        key = (statement.path, statement.is_table)
        name = ".".join(str(part) for part in statement.path)
        if statement.last == line and key in first:
            if statement.is_table:
                reason = (
                    f"not TOML: the table [{name}] is there twice, in lines {first[key]} and "
                    f"{statement.line}"
                )
                return reason, "put all its keys into one of them"
            reason = f"not TOML: {name} is set twice, in lines {first[key]} and {statement.line}"
            return reason, "remove one of them"
        first.setdefault(key, statement.line)
    return None
