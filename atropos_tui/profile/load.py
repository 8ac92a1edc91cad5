"""A profile's tables: find the file, read TOML, merge what it `extends`, apply `--set`.

Tables merge key by key, and the extending profile wins; a list replaces the whole list.
"""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from atropos_tui.errors import Problem, UserError
from atropos_tui.profile.errors import did_you_mean, nearest_names, printable, value_text
from atropos_tui.profile.schema import PROGRAM_KEYS, SECTION_LISTS, KeyPath

MAX_PROFILE_BYTES = 1024 * 1024
"""Bytes; a larger file is probably a model."""
SET = "--set"
EXAMPLES = ("demo", "gsm8k", "math-zero")
MOST_NEAREST = 3
"""Similar profiles that a fix lists."""
MOST_FILES = 1000
CACHE = "ATROPOS_CACHE"
"""Variable with the folder for prepared models."""

PROGRAMS = set(PROGRAM_KEYS)
"""An `[env]` that sets one drops the inherited others."""
OF_PROGRAM = {"name", "args", "config", "weight"}
"""Keys that belong to an environment's program."""


@dataclass(frozen=True)
class Origins:
    main: str = field(default="", compare=False)
    places: dict[KeyPath, str] = field(default_factory=dict, compare=False)
    texts: dict[str, str] = field(default_factory=dict, compare=False)
    _lines: dict[str, dict[KeyPath, int]] = field(default_factory=dict, compare=False)

    def of(self, path: Sequence[str | int]) -> str:
        """File of a key, else of the nearest table around it."""
        for length in range(len(path), 0, -1):
            here = tuple(path[:length])
            single = here[:1] + here[2:] if length > 2 and isinstance(here[1], int) else here
            if (place := self.places.get(here) or self.places.get(single)) is not None:
                return place
        return self.main

    def problem(self, reason: str, fix: str, path: Sequence[str | int], key: str) -> Problem:
        file = self.of(path)
        if file not in self._lines:
            self._lines[file] = key_lines(self.texts.get(file, ""))
        return Problem(reason, fix, file, key, line_of(self._lines[file], tuple(path)))

    def note(self, path: KeyPath, value: Any, place: str, old: Any = None) -> None:
        """`value` at `path`, with all keys below, comes from `place` and replaces `old`."""
        if isinstance(old, dict):
            for key, inner in old.items():
                self.places.pop((*path, key), None)
                self.note((*path, key), None, place, inner)
        self.places[path] = place
        if isinstance(value, dict):
            for key, inner in value.items():
                self.note((*path, key), inner, place)


def displace(environment: dict[str, Any], named: set[str]) -> None:
    if PROGRAMS & named:
        for other in PROGRAMS - named:
            environment.pop(other, None)


def _replace_program(base: dict[str, Any], over: dict[str, Any]) -> None:
    named = PROGRAMS & over.keys()
    if named and not any(base.get(key) == over[key] for key in named):
        for key in (*PROGRAMS, *OF_PROGRAM):
            base.pop(key, None)


def cache_dir() -> Path:
    return Path(os.environ.get(CACHE) or platformdirs.user_cache_dir("atropos-tui"))


def shipped_profiles() -> dict[str, Path]:
    """Profiles of the package: beside the sources, or inside the wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "profiles", package.parent / "profiles"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return {}


def find_profile(name_or_path: str) -> Path:
    """File for PROFILE: a path, else the name of a shipped profile.

    Raises:
        UserError: there is neither.
    """
    path = expand_home(name_or_path)
    if _is_file(path):
        return path
    shipped = shipped_profiles()
    if name_or_path in shipped:
        return shipped[name_or_path]
    reason, fix = _not_found(path, name_or_path)
    name = printable(name_or_path)
    raise UserError(f"unknown profile: {name}", [Problem(reason, fix, file=name)])


def _is_file(path: Path) -> bool:
    # os.path never raises, whatever the name.
    return os.path.isfile(path)  # noqa: PTH113


def expand_home(text: str) -> Path:
    return Path(os.path.expanduser(text))  # noqa: PTH111


def _not_found(path: Path, name: str) -> tuple[str, str]:
    if os.path.isdir(path):  # noqa: PTH112
        return "is a directory", _files_there(
            path, ""
        ) or "give the profile's file, such as mine.toml"
    looks_like_path = os.sep in name or name.endswith(".toml")
    if looks_like_path and (near := _files_there(path.parent, path.name)):
        return "no such profile", near
    meant = did_you_mean(Path(name).stem, shipped_profiles(), MOST_NEAREST)
    shipped = f"the name of a shipped profile, such as {', '.join(EXAMPLES)}"
    return "no such profile", f"{meant}or give a path" if meant else f"give a path, or {shipped}"


def _files_there(folder: Path, name: str) -> str:
    """Fix that lists profiles in a folder: those similar to `name`, or the first ones."""
    try:
        files = sorted(each.stem for each in itertools.islice(folder.glob("*.toml"), MOST_FILES))
    except (OSError, ValueError):
        return ""
    if name:
        near = nearest_names(Path(name).stem, files, MOST_NEAREST)
        return (
            f"did you mean {printable(' or '.join(str(folder / f'{each}.toml') for each in near))}?"
            if near
            else ""
        )
    return (
        f"name a file in it: "
        f"{printable(', '.join(f'{each}.toml' for each in files[:MOST_NEAREST]))}"
        if files
        else ""
    )


def file_text(path: Path) -> str:
    return printable(os.path.normpath(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Raises:
    UserError: the file cannot be read, is too large, or is not TOML.
    """
    return _tables(_text_of(path), file_text(path))


def _text_of(path: Path) -> str:
    file = file_text(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_PROFILE_BYTES + 1)
        if len(content) > MAX_PROFILE_BYTES:
            raise _invalid(
                "larger than 1 MiB: not a profile", "check that this is the right file", file
            )
        return content.decode("utf-8-sig")  # Windows editors write a byte order mark
    except UnicodeDecodeError as error:
        raise _invalid(f"not UTF-8 text (byte {error.start})", "save it as UTF-8", file) from None
    except OSError as error:
        problem = Problem(str(error.strerror), "make it a readable file", file=file)
        raise UserError("unreadable profile", [problem]) from None


def _tables(text: str, file: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:  # TOMLDecodeError, and numbers of thousands of digits
        reason, fix, line = why_not_toml(text, error)
        raise _invalid(printable(reason), printable(fix), file, line=line) from None


def _invalid(reason: str, fix: str, file: str, key: str = "", line: int | None = None) -> UserError:
    return UserError("invalid profile", [Problem(reason, fix, file, key, line)])


def read_merged(path: Path) -> tuple[dict[str, Any], Origins]:
    """Read `path` and what it extends, merged.

    Raises:
        UserError: a file cannot be read, or the chain is circular or broken.
    """
    origins = Origins(file_text(path))
    chain: list[Path] = []
    layers: list[dict[str, Any]] = []
    wanted: Any = path
    while wanted is not None:
        chain.append(_extended(wanted, chain) if chain else path)
        file = file_text(chain[-1])
        origins.texts[file] = _text_of(chain[-1])
        layers.append(_tables(origins.texts[file], file))
        wanted = layers[-1].pop("extends", None)
    merged: dict[str, Any] = {}
    for source, layer in zip(reversed(chain), reversed(layers), strict=True):
        _nest_flags(layer)
        _merge(merged, layer, origins, file_text(source), ())
    return merged, origins


def _nest_flags(layer: dict[str, Any]) -> None:
    written = layer.get("env")
    for section in written if isinstance(written, list) else [written]:
        args = section.get("args") if isinstance(section, dict) else None
        if not isinstance(args, dict):
            continue
        for flag in [key for key in args if "." in key]:
            *tables, last = flag.split(".")
            node: Any = args
            for table in tables:
                node = node.setdefault(table, {}) if isinstance(node, dict) else None
            if isinstance(node, dict) and last not in node:
                node[last] = args.pop(flag)


def _extended(wanted: Any, chain: list[Path]) -> Path:
    file = file_text(chain[-1])
    if not isinstance(wanted, str) or not wanted:
        raise _invalid(
            f"must name one profile (got {value_text(wanted)})",
            'write extends = "base.toml", or a name',
            file,
            "extends",
        )
    path = chain[-1].parent / Path(wanted).expanduser()
    if not _is_file(path):
        path = shipped_profiles().get(wanted, path)
    links = " → ".join(file_text(link) for link in [*chain, path])
    if not _is_file(path):
        reason, fix = _not_found(path, wanted)
        raise _invalid(
            f"{reason}: {links}", f"{fix}; a path is relative to this file", file, "extends"
        )
    if any(path.samefile(link) for link in chain):
        raise _invalid(
            f"goes in a circle: {links}", "remove one of these `extends`", file, "extends"
        )
    return path


def _merge(
    base: dict[str, Any], over: dict[str, Any], origins: Origins, file: str, path: KeyPath
) -> None:
    if path == ("env",):
        _replace_program(base, over)
    for key, value in over.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value, origins, file, (*path, key))
        else:
            base[key] = value
            origins.note((*path, key), value, file, old)


def apply_sets(data: dict[str, Any], sets: Sequence[str], origins: Origins | None = None) -> None:
    """Apply overrides. `vllm.1.port=9002` reaches an entry by index, `vllm.port=9002` the first.

    Raises:
        UserError: not KEY=VALUE, or the key leads through a value that is no table.
    """
    for item in sets:
        key, separator, text = item.partition("=")
        if not separator or not key.strip():
            raise _invalid_set(
                f'"{printable(item)}" is not KEY=VALUE', "write e.g. --set trainer.lr=1e-4", ""
            )
        value, parts = toml_value(text), key.strip().split(".")
        if parts == ["extends"]:
            raise _invalid_set(
                "cannot be set: it is followed before --set applies",
                "write it in the profile",
                "extends",
            )
        path = _assign(data, parts, value, printable(key.strip()))
        if origins is not None:
            origins.note(path, value, SET)


def toml_value(text: str) -> Any:
    """`text` as a TOML value, or else itself: `8` is a number, `/models/m` a string."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except ValueError:  # TOMLDecodeError, and numbers of thousands of digits
        return text
    return parsed["v"] if len(parsed) == 1 else text


def _assign(data: dict[str, Any], parts: list[str], value: Any, key: str) -> KeyPath:
    node: Any = data
    path: KeyPath = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            index = int(part) if part.isdecimal() and len(part) < 10 else 0
            if index >= len(node):
                raise _invalid_set(f"there are only {len(node)} entries", "count them from 0", key)
            path += (index,)
            if part.isdecimal() and last:
                node[index] = value
                return path
            node = node[index]
            if part.isdecimal():
                continue
        if not isinstance(node, dict):
            raise _invalid_set(
                f"{printable('.'.join(parts[:depth]))} is not a table", "set a key of a table", key
            )
        if part == "0" and not last and parts[:depth] in [[section] for section in SECTION_LISTS]:
            continue  # [env] without an index is its own first entry
        path += (part,)
        if not last:
            node = node.setdefault(part, {})
    if path[0] == "env" and len(path) > 1 and all(isinstance(part, int) for part in path[1:-1]):
        displace(node, {parts[-1]})
    node[parts[-1]] = value
    return path


def _invalid_set(reason: str, fix: str, key: str) -> UserError:
    return UserError("invalid --set", [Problem(reason, fix, SET, key)])


# `tomllib` returns no positions: each statement is parsed alone, once a problem is reported.
MAX_STATEMENT_LINES = 200
"""Lines of one value; keys after a longer one get no line number."""
MOST_CHARACTERS = 1024 * 1024
MOST_DOTS = 1000
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
    """Raises:
    ValueError: not TOML, or larger than a profile.
    RecursionError: nested too deep.
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
