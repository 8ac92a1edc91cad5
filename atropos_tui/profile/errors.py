"""Wording of a profile's problems. A user's text is escaped and cut, so that no value can forge a
line of a report."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from atropos_tui.errors import Problem, UserError
from atropos_tui.profile.redact import hide
from atropos_tui.profile.schema import (
    SECTION_LISTS,
    KeyPath,
    Schema,
    choices,
    forms_at,
    phrases,
    step_into,
)

MAX_SHOWN = 60
"""Shown characters of a value or key."""
MAX_LISTED = 200
MAX_CHOICES = 40
"""Known keys that a fix lists."""
_BARE_KEY = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_SHOWN}}}")


def refused(problems: list[Problem], title: str = "invalid profile") -> UserError:
    # A large wrong file may have thousands of problems.
    listed = problems[:MAX_LISTED]
    if more := problems[MAX_LISTED:]:
        listed.append(Problem(f"and {len(more):,} more problems", "fix these first"))
    return UserError(f"{title}: {counted(len(problems), 'problem')}", listed)


@contextmanager
def in_words(file: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except RecursionError:
        raise refused(
            [Problem("is nested too deep to be read", "remove some levels", file)]
        ) from None
    except Exception as error:
        reason = f"cannot be read as a profile ({type(error).__name__}: {printable(str(error))})"
        fix = "correct the named place, or create a new profile: atropos-tui init"
        raise refused([Problem(reason, fix, file)]) from error


def printable(text: str, limit: int = 400) -> str:
    """One line: unprintable characters escaped, the part beyond `limit` replaced by its length."""
    cut = text[:limit]  # cut before escaping: the text may be megabytes long
    # Control characters could move the cursor or forge lines of the report.
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return cut if len(text) <= limit else f"{cut}… ({len(text):,} characters)"


def counted(count: int, noun: str) -> str:
    if count != 1 and noun.endswith("try"):
        noun = f"{noun[:-1]}ies"
    elif count != 1:
        noun += "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun}"


def value_text(value: Any, key: str = "") -> str:
    """Roughly TOML; the value of a secret `key` is hidden."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(hide(key, value))
    if isinstance(value, dict):
        return "a table" if value else "an empty table"
    if isinstance(value, list | tuple):
        return f"a list of {counted(len(value), 'entry')}" if value else "an empty list"
    return printable(str(value), MAX_SHOWN)


def _quoted(text: str) -> str:
    escaped = printable(text[:MAX_SHOWN]).replace('"', '\\"')
    return f'"{escaped}"' if len(text) <= MAX_SHOWN else f'"{escaped}…" ({len(text):,} characters)'


def key_text(path: Sequence[str | int], data: Any) -> str:
    """The key as the user wrote it, in the form of `--set`.

    An index of `[[env]]` is shown only if there are several, with the entry's name.
    """
    text, note = "", ""
    node = data
    for depth, part in enumerate(path):
        if isinstance(part, str):
            word = part if _BARE_KEY.fullmatch(part) else _quoted(part)
            text += f".{word}" if text else word
        elif depth == 1 and path[0] in SECTION_LISTS:
            if isinstance(node, list) and len(node) > 1:
                name = (
                    node[part].get("name")
                    if part < len(node) and isinstance(node[part], dict)
                    else None
                )
                text += f".{part}"
                note = (
                    f" ([[{path[0]}]] "
                    f"{value_text(name) if isinstance(name, str) else f'number {part + 1}'})"
                )
        else:
            text += f"[{part}]"
        node = step_into(node, part)
    return text + note


OTHER_NAMES = {"learning_rate": "lr", "max_steps": "training_steps", "steps": "training_steps"}
"""Names in other trainers -> ours."""


FLAGS_OF = {"env": "the environment", "vllm": "vLLM"}


def did_you_mean(word: str, known: Collection[str], most: int = 1) -> str:
    """A question with up to `most` names, or an empty string."""
    if (meant := OTHER_NAMES.get(word)) in known:
        return f"did you mean {meant}? "
    near = nearest_names(word, known, most)
    return f"did you mean {' or '.join(near)}? " if near else ""


REMOVED_SURVIVE = (
    "no such key any more: components end with their supervisor",
    "remove it; after a supervisor has died, continue its run with atropos-tui up --resume RUN",
    "",
)

_BARE_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")


def in_braces(path: str) -> str:
    braced = _BARE_VARIABLE.sub(r"${\1}", path)
    return f"put the variable in braces: {braced}" if braced != path else ""


def nearest_names(
    word: str, known: Collection[str], most: int = 1, cutoff: float = 0.6
) -> list[str]:
    return difflib.get_close_matches(word[:100], known, n=most, cutoff=cutoff)


def gpu_named_twice(gpus: list[int], key: str) -> Problem:
    return Problem(f"names a GPU twice: {gpus}", "name each GPU once", key=key)


def one_engine_fed(engines: int, fix: str, key: str) -> Problem:
    reason = f"{engines} engines, and the trainer feeds one in this mode"
    return Problem(reason, fix, key=key)


def _in_other_tables(path: KeyPath, schema: Schema) -> str:
    word = str(path[-1])
    names = {word, OTHER_NAMES.get(word, word)}
    found = [
        f"{table}.{name}"
        for table in schema["properties"]
        if (table,) != path[:-1]
        for form in forms_at(schema, (table, 0) if table in SECTION_LISTS else (table,), {})
        for name in sorted(names & form.get("properties", {}).keys())
    ]
    found += sorted(names & schema["properties"].keys()) if len(path) > 1 else []
    return f"did you mean {' or '.join(dict.fromkeys(found))}? " if found else ""


def problems_of(
    errors: Iterable[Any],
    data: dict[str, Any],
    schema: Schema,
    problem: Callable[[str, str, KeyPath, str], Problem],
    below: KeyPath = (),
) -> list[Problem]:
    """One problem for each key, in pydantic's order.

    Args:
        problem: factory from reason, fix, path and key.
        below: table that was validated, if not the whole profile.
    """
    items: dict[KeyPath, dict[str, Any]] = {}
    for item in errors:
        # pydantic reports one error for each alternative of a union; the user made one mistake.
        path = _path((*below, *item["loc"]), data, missing=item["type"] == "missing")
        items.setdefault(path, dict(item))
    deeper = {path[:length] for path in items for length in range(1, len(path))}
    return [
        problem(reason, fix, path, key_text(path, data) + suffix)
        for path, item in items.items()
        if path not in deeper  # a list whose entry fails is reported at the entry alone
        for reason, fix, suffix in _explained(path, item, data, schema)
    ]


def _path(location: tuple[str | int, ...], data: Any, *, missing: bool) -> KeyPath:
    """pydantic's location as a path in the data: no type names, no index for `[env]`."""
    path: KeyPath = ()
    node = data
    for depth, part in enumerate(location):
        steps = _steps(node, part, flags=bool(path) and path[-1] == "args")
        if steps is None:
            if missing and depth == len(location) - 1:
                path += (part,)
            continue
        for step in steps:
            node = node[step]
        path += steps
    return path


def _steps(node: Any, part: str | int, *, flags: bool) -> KeyPath | None:
    """Keys from `node` to `part`; None if `part` is pydantic's name of an alternative."""
    if isinstance(node, list):
        return (part,) if isinstance(part, int) and part < len(node) else None
    if not isinstance(node, dict) or not isinstance(part, str):
        return None
    if part in node:
        return (part,)
    # `args` are flattened before validation: pydantic says "env.group_size", the data has env ->
    # group_size.
    for dot in (match.start() for match in re.finditer(r"\.", part) if flags):
        rest = _steps(node.get(part[:dot]), part[dot + 1 :], flags=True)
        if rest is not None:
            return (part[:dot], *rest)
    return None


def _explained(
    path: KeyPath, item: dict[str, Any], data: Any, schema: Schema
) -> Iterator[tuple[str, str, str]]:
    kind, context = str(item["type"]), item.get("ctx", {})
    # Our own validators already have reason and fix (sections.mistake).
    if kind == "mistake":
        yield context["reason"], context["fix"], f".{context['at']}" if context["at"] else ""
    elif kind == "extra_forbidden":
        known = sorted(
            {
                key
                for form in forms_at(schema, path[:-1], data)
                for key in form.get("properties", ())
            }
        )
        if path == ("survive",):
            yield REMOVED_SURVIVE
        else:
            yield "unknown key", _fix_of_unknown_key(path, known, schema), ""
    elif kind == "value_error":
        for line in str(item["msg"]).removeprefix("Value error, ").splitlines():
            reason, _, fix = as_keys(line).partition("; ")
            yield printable(reason), fix or "change one of the named keys", ""
    else:
        yield (*_reason_and_fix(path, item, data, schema), "")


def as_keys(message: str) -> str:
    """Replace the trainer's flags (`--batch-size`) by keys of a profile (`batch_size`)."""
    return re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), message)


def _fix_of_unknown_key(path: KeyPath, known: list[str], schema: Schema) -> str:
    word, section = str(path[-1]), path[0]
    if section == "ui":
        # Keys that start programs come from the user alone.
        return "move it to ~/.config/atropos-tui/keys.toml: a profile cannot bind keys"
    near = did_you_mean(word, known)
    # An environment has flags of any name, so a key in [env] is more likely a flag.
    elsewhere = "" if section == "env" else _in_other_tables(path, schema)
    if meant := elsewhere or near:
        return meant.strip()
    if section in FLAGS_OF and section not in path[1:]:
        flag = f"env.{word}" if section == "env" else word
        return (
            f"a flag of {FLAGS_OF[str(section)]} goes below [{section}.args]: "
            f"{printable(flag, MAX_SHOWN)} = ..."
        )
    return f"remove it; known here: {', '.join(known[:MAX_CHOICES])}"


def _reason_and_fix(
    path: KeyPath, item: dict[str, Any], data: Any, schema: Schema
) -> tuple[str, str]:
    forms = forms_at(schema, path, data)
    description = str(forms[0].get("description", "")) if forms else ""
    if item["type"] == "missing":
        if isinstance(path[-1], int):
            return "is missing", f"give {phrases(forms_at(schema, path[:-1], data), schema)}"
        return "is missing", f"add it: {_first_sentence(description)}" if description else "add it"
    value = item.get("input")
    # A check of a probe without a valid `kind`.
    if item["type"].startswith("union_tag"):
        tag = value_text(value["kind"]) if isinstance(value, dict) and "kind" in value else "none"
        kinds = [
            form["properties"]["kind"]["const"]
            for form in forms
            if "kind" in form.get("properties", {})
        ]
        return f"needs a kind (got {tag})", f"set kind to one of: {', '.join(kinds)}"
    got = f"(got {value_text(value, str(path[-1]) if path else '')})"
    known = [str(choice) for form in forms for choice in choices(form)]
    if known and isinstance(value, str):
        # A word or a number, such as per_gpu: `known` has the words alone.
        others = any(form.get("type") in ("integer", "number") for form in forms)
        choice = (
            f"give {phrases(forms, schema)}" if others else f"choose one of: {', '.join(known)}"
        )
        return f"unknown value {got}", f"{did_you_mean(value, known)}{choice}"
    reason = _reason(item["type"])
    reason = "wrong type" if known and reason != "out of range" else reason
    if path and path[-1] == "depends_on":
        names = [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
        entries = ", ".join(f'{printable(name, 40)} = "healthy"' for name in names[:5] or ["api"])
        return f"{reason} {got}", f"write it as a table: depends_on = {{ {entries} }}"
    if bare := _unquoted(value, forms):
        return f"{reason} {got}", f"write it without quotes: {bare}"
    if quoted := _as_text(value, forms):
        key = ".".join(map(str, path))
        fix = f"write it in quotes: {quoted} (in a shell: --set '{printable(key)}={quoted}')"
        return f"{reason} {got}", fix
    fix = phrases(forms, schema)
    if any("pattern" in form for form in forms) and description:
        fix += f": {_first_sentence(description)}"
    return f"{reason} {got}", f"give {fix}"


def _unquoted(value: Any, forms: list[Schema]) -> str:
    """Text of a quoted number or boolean whose key needs it without quotes."""
    if not isinstance(value, str) or len(value) > MAX_SHOWN:
        return ""
    try:
        bare = tomllib.loads(f"v = {value}").get("v")
    except ValueError:
        return ""
    kind = {bool: "boolean", int: "integer", float: "number"}.get(type(bare), "")
    wanted = {form.get("type") for form in forms}
    fits = kind in wanted or (kind == "integer" and "number" in wanted)
    return value.strip() if fits else ""


def _as_text(value: Any, forms: list[Schema]) -> str:
    """Return a number in quotes if its key needs text."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f'"{value}"' if is_number and {form.get("type") for form in forms} == {"string"} else ""


def _reason(kind: str) -> str:
    if kind.endswith(("_type", "_parsing", "is_instance_of", "_from_float")):
        return "wrong type"
    if kind.startswith(("greater", "less")):
        return "out of range"
    if kind == "finite_number":
        return "must be finite"
    return "wrong length" if kind.endswith(("too_short", "too_long")) else "does not fit"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[^.])\.\s", " ".join(text.split()), maxsplit=1)[0].removesuffix(".")
