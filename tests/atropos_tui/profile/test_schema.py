"""The JSON Schema of profiles: current, strict, described, and in agreement with `validate`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from atropos_tui.cli import main
from atropos_tui.cli.start.init import SCHEMA_FILE
from atropos_tui.cli.start.profiles import schema_text
from atropos_tui.errors import Exit
from atropos_tui.profile.load import shipped_profiles
from atropos_tui.profile.profile import DERIVED_TRAINER_KEYS, profile_schema
from atropos_tui.profile.schema import resolve
from trainer_core.config import TrainingConfig

KEPT = Path(__file__).parents[3] / "profiles" / SCHEMA_FILE
MINIMAL: dict[str, Any] = {"name": "p", "model": "m", "env": {"module": "json"}}


def accepts(data: dict[str, Any]) -> bool:
    return jsonschema.Draft7Validator(profile_schema()).is_valid(data)


def test_the_kept_file_is_current() -> None:
    assert KEPT.read_text() == schema_text(), f"atropos-tui schema -o profiles/{SCHEMA_FILE}"
    jsonschema.Draft7Validator.check_schema(json.loads(KEPT.read_text()))


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_shipped_profiles_agree_with_it(name: str) -> None:
    data = tomllib.loads(shipped_profiles()[name].read_text())
    jsonschema.validate(data, profile_schema(), jsonschema.Draft7Validator)


def objects(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict):
            yield path, node
        for key, value in node.items():
            yield from objects(value, f"{path}/{key}")
    elif isinstance(node, list):
        for item in node:
            yield from objects(item, path)


def test_every_table_is_strict_and_every_key_described() -> None:
    schema = profile_schema()
    found = dict(objects(schema))
    assert len(found) > 15
    for path, table in found.items():
        assert table["additionalProperties"] is False, path
        for key, node in table["properties"].items():
            assert len(resolve(schema, node).get("description", "")) > 8, f"{path}/{key}"


def test_the_trainer_s_fields_are_there_but_for_derived_ones() -> None:
    section = profile_schema()["$defs"]["TrainerSection"]["properties"]
    for name, field in TrainingConfig.model_fields.items():
        if name in DERIVED_TRAINER_KEYS:
            assert name not in section
            continue
        assert section[name]["description"] == field.description
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        assert section[name].get("default") == default
    assert section["lr"]["minimum"] == 0 and section["optimizer"]["enum"] == [
        "adamw",
        "adamw_8bit",
        "adafactor",
    ]


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({}, True),
        ({"env": [{"module": "a"}, {"script": "b"}]}, True),
        ({"env": {"module": "a", "args": {"env": {"group_size": 8}, "words": ["a", 1]}}}, True),
        ({"trainer": {"lora_layer_indices": "20-31", "betas": [0.9, 0.95], "gpus": [0]}}, True),
        ({"vllm": {"startup": {"checks": [{"kind": "tcp", "port": 1}]}}}, True),
        ({"component": {"x": {"command": ["true"]}}}, True),
        ({"trainer": {"model_name": "m"}}, False),
        ({"trainer": {"lrr": 1}}, False),
        ({"vllm": {"startup": {"checks": [{"port": 1}]}}}, False),
        ({"component": {"a/b": {"command": ["true"]}}}, False),
        ({"env": []}, False),
        ({"env": {"module": "a", "args": {"x": [[1]]}}}, False),
        ({"notify": {"on": ["never"]}}, False),
        ({"prepare": [{"creates": "x"}]}, False),
        ({"nmae": "p"}, False),
    ],
)
def test_what_editors_accept(change: dict[str, Any], accepted: bool) -> None:
    assert accepts(MINIMAL | change) is accepted


def test_a_profile_that_extends_another_may_leave_out_anything() -> None:
    assert not accepts({"model": "m"})
    assert accepts(
        {
            "extends": "base.toml",
            "component": {"x": {"port": 9}},
            "vllm": {"startup": {"interval_s": 1}},
        }
    )
    assert not accepts({"extends": "base.toml", "sede": 1})


def test_schema_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()
    assert main.run(["schema", "-o", str(tmp_path / "s.json")]) == 0
    assert (tmp_path / "s.json").read_text() == schema_text() and capsys.readouterr().out == ""
    assert main.run(["schema", "-o", str(tmp_path / "no/s.json")]) == Exit.USAGE
    assert "fix: " in capsys.readouterr().err
