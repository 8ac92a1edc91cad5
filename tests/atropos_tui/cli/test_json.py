"""`--json` of every command follows its schema, and docs/json.md comes from the same models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from atropos_tui.cli import main, schemas
from atropos_tui.errors import Exit
from tests.atropos_tui.cli.test_main import ended_run
from tests.support.own_places import own_places  # noqa: F401

DOCS = Path(__file__).parents[3] / "docs"
COMMANDS = {
    "bench": ["bench", "p-1", "p-1"],
    "doctor": ["doctor"],
    "events": ["events"],
    "init": ["init", "mine.toml", "--yes", "--env", "arithmetic"],
    "logs": ["logs"],
    "plan": ["plan", "demo", "--gpus", "2xH100"],
    "ps": ["ps"],
    "runs": ["runs"],
    "validate": ["validate", "demo", "--gpus", "2xH100"],
    "why": ["why"],
}
"""`compare` and `sweep` start stacks: the tests that do have this check, too."""


def check(command: str, text: str) -> None:
    """Assert that `text` follows the command's schema, and has no field that the schema lacks."""
    schema = schemas.answer_schema(command)
    validator = Draft202012Validator(json.loads(json.dumps(schema)))
    answers = (
        [json.loads(line) for line in text.splitlines()]
        if command in schemas.LINES
        else [json.loads(text)]
    )
    assert answers and text.isascii()
    for answer in answers:
        assert not list(validator.iter_errors(answer)), [
            error.message for error in validator.iter_errors(answer)
        ]
        if "properties" in schema:
            assert set(answer) <= set(schema["properties"])


@pytest.mark.usefixtures("own_places")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_printed_fits_the_schema(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_run(tmp_path)
    code = main.run([*COMMANDS[command], "--json"])
    assert code in ((0, Exit.USAGE) if command == "doctor" else (0,))
    check(command, capsys.readouterr().out)


@pytest.mark.usefixtures("own_places")
def test_why_says_in_json_what_it_says_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_run(tmp_path)
    assert main.run(["why", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["headline"] == "p-1 ended with code 3: vllm failed" and answer["exit_code"] == 3
    (engine,) = answer["components"]
    assert engine["name"] == "vllm" and engine["state"] == "failed"
    assert "fix: less" in engine["says"] and any("out of memory" in idea for idea in engine["says"])
    assert [found["title"] for found in answer["diagnoses"]] == ["out of memory"]


@pytest.mark.usefixtures("own_places")
def test_a_profile_that_is_not_valid_says_so_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["validate", "demo", "--set", "trainer.lrr=1", "--json"]) == Exit.USAGE
    text = capsys.readouterr().out
    check("validate", text)
    answer = json.loads(text)
    assert answer["valid"] is False and "did you mean lr?" in answer["problems"][0]["fix"]


@pytest.mark.usefixtures("own_places")
def test_a_questionnaire_is_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["init", "--json"]) == Exit.USAGE
    assert "add --yes" in capsys.readouterr().err and not Path("demo.toml").exists()


def test_the_schema_of_each_command_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for command in schemas.ANSWERS:
        assert main.run(["schema", command]) == 0
        Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))
    assert main.run(["schema", "rns"]) == Exit.USAGE
    assert "did you mean runs?" in capsys.readouterr().err


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "json.md").read_text() == schemas.page(), (
        "python -m atropos_tui.cli.schemas > docs/json.md"
    )
