"""The note and the tags of a run: written by `note`, shown by the list, JSON and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.errors import Exit
from atropos_tui.monitor.run.notes import Notes, notes_of, read_notes, write_notes
from tests.atropos_tui.cli.manage.test_runs import make_run
from tests.support.own_places import own_places  # noqa: F401

pytestmark = pytest.mark.usefixtures("own_places")


def test_a_note_is_written_shown_changed_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("math-1-aa", name="math", exit_code=0)

    def said(*words: str) -> str:
        assert main.run(["note", "math", *words]) == Exit.DONE
        return capsys.readouterr().out

    assert "atropos-tui note math-1-aa TEXT" in said()
    assert said("twice the\nrate", "--tag", "sweep", "--tag", "#best") == (
        "#sweep #best twice the rate\n"
    )
    assert said() == "#sweep #best twice the rate\n"
    assert main.run(["runs", "--json"]) == Exit.DONE
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["note"], row["tags"]) == ("twice the rate", ["sweep", "best"])
    assert main.run(["runs"]) == Exit.DONE
    head, line = capsys.readouterr().out.splitlines()
    assert head.endswith("NOTE") and line.endswith("#sweep #best twice the rate")
    assert said("--untag", "sweep") == "#best twice the rate\n"
    assert said("", "--untag", "best") == "no note any more\n"
    assert not run.notes_json.exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--tag", "a b"], "'a b' is not a tag"), (["x" * 3000], "the note has 3,000 characters")],
)
def test_what_cannot_be_kept_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("math-1-aa", name="math")
    assert main.run(["note", "math", *words]) == Exit.USAGE
    assert reason in capsys.readouterr().err
    assert not run.notes_json.exists()


@pytest.mark.parametrize("data", ["[]", '{"text": 3, "tags": [1, "a b", "ok"]}', "no JSON"])
def test_a_broken_file_has_no_notes(tmp_path: Path, data: str) -> None:
    run = RunDir(tmp_path)
    run.notes_json.write_text(data)
    assert read_notes(run) in (Notes(), Notes("", ("ok",)))


def test_control_characters_never_reach_a_terminal(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_notes(run, notes_of("red \x1b[31m", []))
    assert "\x1b" not in read_notes(run).line
