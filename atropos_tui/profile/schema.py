"""The JSON Schema of a profile: for editors (`#:schema ./profile.schema.json`), and for the words of problems.

Built from the models, then brought to what a *file* may hold: `[env]` or `[[env]]`, `extends`, every field of
`TrainingConfig` that the plan does not derive, flags as tables, and no key besides.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from atropos_tui.profile.errors import SECTION_LISTS, Schema
from trainer_core.config import TrainingConfig

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest one that the usual TOML editors understand."""
TITLE = "atropos-tui profile"

_EXTENDS = {
    "type": "string",
    "minLength": 1,
    "description": "Another profile to start from: a path relative to this file, or the name of a shipped profile. "
    "Tables merge and this profile wins; a list replaces the whole list.",
}


def build_schema(profile: type[BaseModel], *, derived: Collection[str], words: Collection[str]) -> Schema:
    """The schema of `profile`, its trainer completed by TrainingConfig.

    Args:
        derived: fields of TrainingConfig that a profile must not set.
        words: fields of TrainingConfig that are lists and also read text.
    """
    schema = _plain(profile.model_json_schema())
    parts: dict[str, Schema] = schema["$defs"]
    trainer = parts["TrainerSection"]
    training = _plain(TrainingConfig.model_json_schema())["properties"]
    trainer["properties"] |= {name: node for name, node in training.items() if name not in derived}
    trainer["additionalProperties"] = False
    for name in words:
        _also_text(trainer["properties"][name])
    parts["EnvSection"]["properties"]["args"] |= {"additionalProperties": {"$ref": "#/$defs/Flag"}}
    parts["Flag"] = _flag(parts["EnvSection"]["properties"]["args"])
    for name in ("ExtraSection", "Probe"):
        parts[name].pop("required", None)  # the profile that this one extends may have them
    for name in (name for name in parts if name.endswith("Check")):
        parts[name]["required"] = ["kind", *parts[name].get("required", [])]
    schema["properties"]["component"]["additionalProperties"] = False  # beside the pattern of their names
    for name in SECTION_LISTS:
        _once_or_several(schema["properties"][name])
    needed = schema.pop("required")
    properties = {"extends": _EXTENDS} | schema.pop("properties")
    head = {"$schema": DIALECT, "title": TITLE, "description": schema.pop("description")}
    either = [{"required": ["extends"]}, {"required": needed}]
    return head | {"type": "object", "properties": properties, "anyOf": either} | schema


def _flag(args: Schema) -> Schema:
    """A flag of an environment: a value, a list of values, or a table of flags."""
    scalar = [{"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"type": "string"}]
    several = {"type": "array", "items": {"anyOf": scalar}}
    table = {"type": "object", "additionalProperties": {"$ref": "#/$defs/Flag"}}
    return {"description": args["description"], "anyOf": [*scalar, several, table]}


def _also_text(node: Schema) -> None:
    several = {key: node.pop(key) for key in ("type", "items", "minItems", "maxItems") if key in node}
    node["anyOf"] = [several, {"type": "string"}]


def _once_or_several(node: Schema) -> None:
    """Turn a list of sections into one section or a list of them."""
    several = {key: node.pop(key) for key in ("type", "items", "minItems") if key in node}
    node["anyOf"] = [several["items"], several]


def _plain(node: Any) -> Any:
    """Without pydantic's generated titles and null (TOML has none), and in words that draft 7 knows."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _plain(value) for key, value in node.items() if not _is_noise(key, value)}
    if "prefixItems" in plain:
        plain["items"] = plain.pop("prefixItems")[0]
    choices = [choice for choice in plain.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1 and "anyOf" in plain:
        plain |= choices[0] if "description" not in plain else {**choices[0], "description": plain["description"]}
        del plain["anyOf"]
    elif choices:
        plain["anyOf"] = choices
    return plain


def _is_noise(key: str, value: Any) -> bool:
    """Generated titles, defaults that say nothing (`null`) or repeat a section's own, and OpenAPI's discriminator."""
    whole = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
    return (
        key == "discriminator"
        or (key == "title" and isinstance(value, str))
        or (key == "default" and (value is None or whole))
    )
