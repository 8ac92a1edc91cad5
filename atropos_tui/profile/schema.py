"""JSON Schema of a profile, for editors and for the wording of problems.

Built from the models, then adapted to what a *file* may contain: `[env]` or `[[env]]`, `extends`,
trainer fields, flags as tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

KeyPath = tuple[str | int, ...]
Schema = dict[str, Any]
SECTION_LISTS = ("env", "vllm", "prepare", "node")
"""Sections written once as `[env]` or several times as `[[env]]`."""
PROGRAM_KEYS = ("module", "script", "verifiers", "openenv", "agent", "command")
"""Keys that name an environment's program."""

DIALECT = "http://json-schema.org/draft-07/schema#"
"""Newest draft that common TOML editors understand."""
TITLE = "atropos-tui profile"

_EXTENDS = {
    "type": "string",
    "minLength": 1,
    "description": "Profile to extend: a path relative to this file, or the name of a shipped "
    "profile. Tables merge, and this profile has priority; a list replaces the whole list.",
}


def build_schema(
    profile: type[BaseModel],
    config: type[BaseModel],
    *,
    derived: Collection[str],
    words: Collection[str],
) -> Schema:
    """Schema of `profile`, with the trainer's `config` fields in its trainer section.

    Args:
        derived: fields that a profile must not set.
        words: list fields that also accept text.
    """
    schema = _plain(profile.model_json_schema())
    parts: dict[str, Schema] = schema["$defs"]
    trainer = parts["TrainerSection"]
    training = _plain(config.model_json_schema())["properties"]
    trainer["properties"] |= {name: node for name, node in training.items() if name not in derived}
    trainer["additionalProperties"] = False
    for name in words:
        _also_text(trainer["properties"][name])
    parts["EnvSection"]["properties"]["args"] |= {"additionalProperties": {"$ref": "#/$defs/Flag"}}
    parts["Flag"] = _flag(parts["EnvSection"]["properties"]["args"])
    for name in ("ExtraSection", "Probe"):
        parts[name].pop("required", None)  # an extended profile may contain the required keys
    # pydantic gives `kind` a default, but the union of checks needs it.
    for name in (name for name in parts if name.endswith("Check")):
        parts[name]["required"] = ["kind", *parts[name].get("required", [])]
    # Only names that match the pattern.
    schema["properties"]["component"]["additionalProperties"] = False
    for name in SECTION_LISTS:
        _once_or_several(schema["properties"][name])
    needed = schema.pop("required")
    properties = {"extends": _EXTENDS} | schema.pop("properties")
    head = {"$schema": DIALECT, "title": TITLE, "description": schema.pop("description")}
    # A profile that extends another one need not repeat the required keys.
    either = [{"required": ["extends"]}, {"required": needed}]
    return head | {"type": "object", "properties": properties, "anyOf": either} | schema


def _flag(args: Schema) -> Schema:
    """A value, a list of values, or a table of flags."""
    scalar = [{"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"type": "string"}]
    several = {"type": "array", "items": {"anyOf": scalar}}
    table = {"type": "object", "additionalProperties": {"$ref": "#/$defs/Flag"}}
    return {"description": args["description"], "anyOf": [*scalar, several, table]}


def _also_text(node: Schema) -> None:
    keys = ("type", "items", "minItems", "maxItems")
    node["anyOf"] = [{key: node.pop(key) for key in keys if key in node}, {"type": "string"}]


def _once_or_several(node: Schema) -> None:
    several = {key: node.pop(key) for key in ("type", "items", "minItems") if key in node}
    node["anyOf"] = [several["items"], several]


def _plain(node: Any) -> Any:
    """Remove generated titles and JSON's null; translate newer keywords to draft 7."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _plain(value) for key, value in node.items() if not _is_noise(key, value)}
    # Draft 7 has no prefixItems; all our tuples have entries of one type.
    if "prefixItems" in plain:
        plain["items"] = plain.pop("prefixItems")[0]
    # Optional fields are "type or null" in pydantic's schema; TOML has no null.
    choices = [choice for choice in plain.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1 and "anyOf" in plain:
        own = {key: plain[key] for key in ("description",) if key in plain}
        plain |= choices[0] | own
        del plain["anyOf"]
    elif choices:
        plain["anyOf"] = choices
    return plain


def _is_noise(key: str, value: Any) -> bool:
    """Generated titles, defaults that add nothing, and OpenAPI's discriminator."""
    whole = isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict) for item in value)
    )
    return (
        key == "discriminator"
        or (key == "title" and isinstance(value, str))
        or (key == "default" and (value is None or whole))
    )


def resolve(schema: Schema, node: Schema) -> Schema:
    """Follow the `$ref`; the node's own keywords win."""
    while "$ref" in node:
        name = str(node["$ref"]).removeprefix("#/$defs/")
        node = schema["$defs"][name] | {key: value for key, value in node.items() if key != "$ref"}
    return node


def _forms(schema: Schema, node: Schema) -> list[Schema]:
    node = resolve(schema, node)
    if isinstance(node.get("type"), list):
        return [node | {"type": kind} for kind in node["type"]]
    several = [*node.get("anyOf", ()), *node.get("oneOf", ())] if "properties" not in node else []
    return [form for choice in several for form in _forms(schema, choice)] if several else [node]


def forms_at(schema: Schema, path: KeyPath, data: Any) -> list[Schema]:
    """Schemas allowed at `path`.

    Args:
        data: the profile; a check is recognized by its `kind`.
    """
    forms = [schema]
    for part in path:
        data = step_into(data, part)
        below = [inner for form in forms if (inner := _below(form, part)) is not None]
        forms = [form for node in below for form in _forms(schema, node)]
        # An unknown `kind` excludes all alternatives, and then none is excluded.
        forms = [form for form in forms if _fits(form, data)] or forms
    return forms


def _below(form: Schema, part: str | int) -> Schema | None:
    if isinstance(part, int):
        inner = form.get("items")
    else:
        free = next(
            iter(form.get("patternProperties", {}).values()), form.get("additionalProperties")
        )
        inner = form.get("properties", {}).get(part, free)
    return inner if isinstance(inner, dict) else None


def _fits(form: Schema, data: Any) -> bool:
    kind = form.get("properties", {}).get("kind", {}).get("const")
    return kind is None or not isinstance(data, Mapping) or data.get("kind") in (kind, None)


def choices(form: Schema) -> list[Any]:
    return list(form.get("enum", [form["const"]] if "const" in form else []))


def phrases(forms: list[Schema], schema: Schema) -> str:
    """Describe the values that any of several schemas allows."""
    if len(forms) > 2:  # environment flags: too many alternatives to describe the entries of lists
        forms = [form if form.get("type") != "array" else {"type": "array"} for form in forms]
    nouns = list(dict.fromkeys(_phrase(form, schema) for form in forms))
    if "a number" in nouns and "a whole number" in nouns:
        nouns.remove("a whole number")
    return f"{', '.join(nouns[:-1])} or {nouns[-1]}" if len(nouns) > 1 else "".join(nouns)


def _phrase(form: Schema, schema: Schema) -> str:
    """A noun phrase such as "a whole number from 1 to 65535"."""
    if known := choices(form):
        return f"one of: {', '.join(map(str, known))}"
    kind = form.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(form)
    if kind == "array":
        inner = phrases(_forms(schema, form["items"]), schema) if "items" in form else ""
        least, most = form.get("minItems"), form.get("maxItems")
        count = f" with at least {least} entry" if least else ""
        count = f" with {least} entries" if least and least == most else count
        return f"a list{count}, each {inner}" if inner else f"a list{count}"
    if kind == "string":
        return "text in quotes" + (", not empty" if form.get("minLength") else "")
    return {"boolean": "true or false", "object": "a table"}.get(str(kind), "another value")


def _bounds(form: Schema) -> str:
    least, above = form.get("minimum"), form.get("exclusiveMinimum")
    most, below = form.get("maximum"), form.get("exclusiveMaximum")
    if least is not None and most is not None:
        return f" from {least:g} to {most}" if least != most else f": only {least}"
    low = f" above {above:g}" if above is not None else ""
    high = f" below {below:g}" if below is not None else ""
    low = f" of at least {least:g}" if least is not None else low
    high = f" of at most {most}" if most is not None else high
    return f"{low} and{high}" if low and high else low or high


def step_into(node: Any, part: str | int) -> Any:
    if isinstance(node, Mapping):
        return node.get(part)
    is_entry = isinstance(node, list) and isinstance(part, int) and part < len(node)
    return node[part] if is_entry else None
