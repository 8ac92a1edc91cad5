"""Bad input by machine: every value of a valid profile replaced, every key misspelt, and noise."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atropos_tui.errors import Exit
from atropos_tui.profile.profile import profile_schema
from tests.atropos_tui.profile.support import (
    COMMANDS,
    ONE_IN_CI,
    ask,
    assert_readable,
    assert_refused,
    make_folder,
    valid,
    write,
)
from tests.support.thorough import THOROUGH, examples


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and entry, tables and lists included."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, key))


def replaced(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    node: Any = changed
    for part in path[:-1]:
        node = node[part]
    if isinstance(node, dict) and isinstance(path[-1], int):
        raise KeyError(path)  # an earlier change put a table where the list was
    node[path[-1]] = value
    return changed


HOSTILE = (
    "\x1b]52;c;aGk=\x07\x1b[2J",
    "a\nb: forged\n    fix: forged",
    "\u202egpj.exe",
    "[red]x[/red]",
    "\0",
)
WRONG = (
    True,
    0,
    -1,
    10**30,
    70_000,
    2.5,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    "word",
    " ",
    "${X}",
    "..",
    date(2024, 1, 1),
    [],
    [[]],
    [1],
    [True, "x"],
    {},
    {"a": 1},
    {"x": {"y": {"z": 1}}},
    *HOSTILE,
)
PATHS = list(leaves(valid(Path("/x"))))


@cache
def oracle() -> jsonschema.protocols.Validator:
    """Says independently of pydantic what may stand where."""
    return jsonschema.Draft7Validator(profile_schema())


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_every_value_replaced_by_every_wrong_one(folder: Path, path: tuple[Any, ...]) -> None:
    """Validation and schema agree on every value, and nothing is ever an internal error."""
    data = valid(folder)
    for number, wrong in enumerate(WRONG):
        if not THOROUGH and number % 2 != PATHS.index(path) % 2:
            continue
        changed = replaced(data, path, wrong)
        file = write(folder, changed)
        code, text = ask(["validate"], file)
        assert code in (Exit.DONE, Exit.USAGE), f"{path} = {wrong!r}\n{text[:2000]}"
        if code == Exit.USAGE:
            assert_readable(text)
            if (
                number % 6 == len(path) % 6
            ):  # the other commands say the same; all of it would take minutes
                assert_refused(["up", "--headless"], file)
        elif not isinstance(wrong, date):  # JSON has none
            assert oracle().is_valid(changed), (
                f"{path} = {wrong!r} is accepted, and the schema refuses it"
            )


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_every_key_misspelt(folder: Path, path: tuple[Any, ...]) -> None:
    """At every level an unknown key is named, with the key that was meant."""
    key = path[-1]
    data = valid(folder)
    node: Any = data
    for part in path[:-1]:
        node = node[part]
    if (
        isinstance(key, int)
        or path[:-1] == ("component",)
        or {"env", "args", "depends_on"} & set(path[1:-1])
    ):
        return  # no key, or one of the user's own
    node[f"{key}x"] = node.pop(key)
    text = assert_refused(["validate"], write(folder, data))
    if path[-1] == "kind":
        assert "needs a kind" in text
    else:
        assert (
            re.search(rf"{key}x( \(\[\[env\]\] .*\))?: unknown key", text)
            and f"did you mean {key}?" in text
        )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("hostile", HOSTILE, ids=["escape", "newline", "bidi", "markup", "nul"])
def test_hostile_text_everywhere(folder: Path, command: list[str], hostile: str) -> None:
    _refused_everywhere(folder, command, hostile)


@pytest.mark.parametrize("command", ONE_IN_CI, ids=lambda command: command[0])
def test_a_megabyte_everywhere(folder: Path, command: list[str]) -> None:
    _refused_everywhere(folder, command, "z" * 900_000)


def _refused_everywhere(folder: Path, command: list[str], hostile: str) -> None:
    data = valid(folder)
    for path in (
        ("name",),
        ("mode",),
        ("seed",),
        ("trainer", "device"),
        ("api", "stop", "signal"),
        ("notify", "on"),
    ):
        assert_refused(command, write(folder, replaced(data, path, hostile)))
    assert_refused(command, write(folder, data | {hostile: 1}))
    assert_refused(
        command, write(folder, replaced(data, ("component",), {hostile: {"command": ["true"]}}))
    )
    assert_refused(command, write(folder, data), "--set", f"{hostile}=1".replace("\0", ""))
    assert_refused(command, write(folder, data), "--set", f"mode={hostile}".replace("\0", ""))


# By category: which characters a codec has, hypothesis finds out for seconds.
CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXT = st.text(CHARACTERS, max_size=20) | st.sampled_from(
    [*HOSTILE, "shared_vllm", "http://x", "${A}"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.dates()
KEYS = (
    st.sampled_from(sorted({part for path in PATHS for part in path if isinstance(part, str)}))
    | TEXT
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)


def without_none(value: Any) -> Any:
    """TOML has no `None`."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return (
        [without_none(inner) for inner in value if inner is not None]
        if isinstance(value, list)
        else value
    )


FUZZ = settings(max_examples=examples(120), deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@example(
    changes=[
        (("component", "extra", "command"), None),
        (("component", "extra", "command", 0), None),
    ]
)
@given(changes=st.lists(st.tuples(st.sampled_from(PATHS), VALUES), min_size=1, max_size=4))
def test_fuzzed_values(folder: Path, changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    data = valid(folder)
    for path, value in changes:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            data = replaced(data, path, without_none(value) if value is not None else {})
    code, text = ask(["validate"], write(folder, data))
    assert code in (Exit.DONE, Exit.USAGE), text
    if code:
        assert_readable(text)
        assert_refused(["up", "--headless"], folder / "p.toml")


@FUZZ
@given(data=st.dictionaries(KEYS, VALUES, max_size=8))
def test_fuzzed_tables(folder: Path, data: dict[str, Any]) -> None:
    assert_refused(["plan"], write(folder, without_none(data)))


@FUZZ
@given(
    content=st.binary(max_size=300)
    | st.text(alphabet="[]{}=.'\"#\n ab1-_é\x00", max_size=200).map(str.encode)
)
def test_fuzzed_bytes(folder: Path, content: bytes) -> None:
    assert_refused(["validate"], write(folder, content))
