"""JSON Schema of the output of `--json`, and the page docs/json.md made from it.

atropos-tui schema ps
python -m atropos_tui.cli.schemas > docs/json.md
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from typing import Any, Union

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DataclassSchema, FloatSchema, ModelSchema

from atropos_common.protocol.audit import Audit
from atropos_common.protocol.control import RunStatus
from atropos_common.protocol.records import RECORD_TYPES, ComponentRecord
from atropos_tui.cli import answers
from atropos_tui.cli.show import ascii_json
from atropos_tui.monitor.rollout_export import RolloutRow
from atropos_tui.monitor.run_list import RunRow

EVENTS: Any = Union[  # noqa: UP007
    tuple(kind for kind in RECORD_TYPES.values() if issubclass(kind, ComponentRecord))
]
ANSWERS: dict[str, Any] = {
    "audit": Audit,
    "bench": answers.Benchmarks,
    "compare": answers.Benchmarks,
    "doctor": answers.Doctor,
    "events": EVENTS,
    "init": answers.Written,
    "logs": answers.LogRow,
    "plan": answers.Plan,
    "ps": RunStatus,
    "rollouts": RolloutRow,
    "runs": list[RunRow],
    "sweep": answers.Sweep,
    "validate": answers.Validated,
    "why": answers.Why,
}
"""Command -> model of its output; those of `LINES` print one object a line."""
LINES = ("events", "logs", "rollouts")

HEAD = """\
# JSON for programs

Every command that shows a run or a check takes `--json`. `atropos-tui schema COMMAND` prints the
JSON Schema of its output. The tables below are generated from the same models
(`python -m atropos_tui.cli.schemas`), and a test compares them. Fields may be added; none is
renamed or removed. A number that is not finite is the string `"NaN"`, `"Infinity"` or
`"-Infinity"`; an unknown value is null. Everything beyond ASCII is escaped. Errors are text on
stderr, with the exit codes of `atropos-tui --help`; only `validate` also reports its problems as
JSON, with exit code 2.

```bash
atropos-tui runs --json | jq -r '.[] | select(.state == "live") | .run'
atropos-tui events -f --json | jq -r 'select(.kind == "diagnosis") | .title'
```
"""


class _Schema(GenerateJsonSchema):
    """Adds the string below each field as its description, and strings for numbers that JSON
    lacks."""

    def float_schema(self, schema: FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"enum": ["NaN", "Infinity", "-Infinity"]}]}

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        return _documented(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        return _documented(super().dataclass_schema(schema), schema["cls"])


def _documented(found: JsonSchemaValue, of: type) -> JsonSchemaValue:
    said: dict[str, str] = {}
    for base in reversed(of.__mro__[:-1]):  # a subclass overrides the texts of its bases
        said |= _class_texts(base)
    found["description"] = _in_json(of.__doc__ or "")
    for name, field in found.get("properties", {}).items():
        field.pop("title", None)
        if name in said:
            field["description"] = _in_json(said[name])
    return found


def _in_json(text: str) -> str:
    """One line, with JSON's `null` for None."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split()))


@cache
def _class_texts(of: type) -> dict[str, str]:
    if not of.__module__.startswith("atropos_"):
        return {}
    # Python keeps no docstring of a field, so its text is taken from the source.
    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(of))).body
    assert isinstance(tree, ast.ClassDef)
    return field_texts(tree)


def field_texts(tree: ast.ClassDef) -> dict[str, str]:
    """Strings below the fields of a class, each as one line."""
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def answer_schema(command: str) -> dict[str, Any]:
    schema = TypeAdapter(ANSWERS[command]).json_schema(
        mode="serialization", schema_generator=_Schema
    )
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": f"atropos-tui {command} --json",
    } | schema


def answer_json(command: str, answer: Any) -> str:
    """ASCII only, because a terminal obeys some other characters."""
    return ascii_json(TypeAdapter(ANSWERS[command]).dump_json(answer, indent=2).decode())


def page() -> str:
    parts, described = [HEAD], set()
    for command in ANSWERS:
        schema = answer_schema(command)
        parts.append(f"## {command}\n\n{_begin(command, schema)}\n")
        if "properties" in schema:
            parts.append(_rows(schema))
        # A model that several commands share is described once, at the first of them.
        for name, part in schema.get("$defs", {}).items():
            if "properties" in part and name not in described:
                described.add(name)
                parts.append(f"**{name}**: {part['description']}\n\n{_rows(part)}")
    return "\n".join(parts)


def _begin(command: str, schema: dict[str, Any]) -> str:
    if command in LINES:
        return "One object a line" + ("." if "properties" in schema else f": {type_words(schema)}.")
    return str(schema["description"]) if "properties" in schema else f"{type_words(schema)}."


def _rows(schema: dict[str, Any]) -> str:
    rows = ["| field | type | |", "|---|---|---|"]
    for name, field in schema["properties"].items():
        text = field.get("description", "")
        rows.append(f"| `{name}` | {type_words(field)} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def type_words(field: dict[str, Any]) -> str:
    """Type of a field of a JSON Schema in words, such as `number or null`."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        # The alternative of `float_schema` is not shown: the page's introduction explains these
        # strings.
        return (
            "number"
            if field["enum"][0] == "NaN"
            else ", ".join(f"`{value}`" for value in field["enum"])
        )
    if "const" in field:
        return f"`{field['const']}`"
    if forms := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(map(type_words, forms)))
    if field.get("type") == "array":
        return f"list of {type_words(field.get('items', {}))}"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"object of {type_words(field['additionalProperties'])}"
    return str(field.get("type", "any"))


if __name__ == "__main__":
    print(page(), end="")
