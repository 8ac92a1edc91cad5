"""Evaluation records: numbers over restarts, torn lines, weight versions, destinations."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atropos_common.protocol.records import EvalRecord, parse_line
from atropos_envs.hosting.evaluation import EvalLog, Graded, component_name, eval_path


def read(path: Path) -> list[EvalRecord]:
    records = [parse_line(line) for line in path.read_text().splitlines()]
    assert all(isinstance(record, EvalRecord) for record in records)
    return records  # type: ignore[return-value]


def test_records_are_numbered_over_restarts_and_a_torn_line_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_RUN_ID", "run-7")
    path = tmp_path / "eval.sums.jsonl"
    first = EvalLog(path, "sums")
    first.append("held_out", [Graded(True, 3), Graded(False, 2)], policy_step=4)
    with path.open("a") as file:
        file.write('{"kind":"eval","seq":1,"tor')
    EvalLog(path, "sums").append("carries", [Graded(True), Graded(True, 2)], policy_step=None)
    held_out, carries = read(path)
    assert (held_out.run_id, held_out.env, held_out.split) == ("run-7", "sums", "held_out")
    assert (held_out.seq, held_out.accuracy, held_out.correct, held_out.questions) == (0, 0.5, 1, 2)
    assert (held_out.weight_version, held_out.policy_step) == (2, 4)
    assert (carries.seq, carries.accuracy) == (1, 1.0)
    assert carries.weight_version is None, "one answer of unknown weights makes the whole unknown"


def test_a_full_disk_leaves_records_out_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "eval.sums.jsonl"
    records, write = EvalLog(path, "sums"), os.write
    records.append("held_out", [Graded(True)], policy_step=1)
    # A full disk takes a part of a line.
    monkeypatch.setattr("os.write", lambda file, line: write(file, line[:5]))
    for step in (2, 3):
        records.append("held_out", [Graded(True)], policy_step=step)
    assert caplog.text.count("cannot be written") == 1
    monkeypatch.undo()
    records.append("held_out", [Graded(True)], policy_step=4)
    assert [(each.seq, each.policy_step) for each in read(path)] == [(0, 1), (1, 4)]


def test_nothing_graded_is_no_accuracy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held_out"):
        EvalLog(tmp_path / "eval.jsonl", "sums").append("held_out", [], None)
    assert not (tmp_path / "eval.jsonl").exists()


def test_without_a_run_records_go_to_the_folder_named_or_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATROPOS_RUN_DIR", raising=False)
    monkeypatch.delenv("ATROPOS_COMPONENT", raising=False)
    assert component_name("sums") == "sums"
    assert eval_path("sums", None) is None
    assert EvalLog(None, "sums").append("held_out", [Graded(True)], None).accuracy == 1.0
    assert eval_path("sums", str(tmp_path)) == tmp_path / "eval.sums.jsonl"
    monkeypatch.setenv("ATROPOS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("ATROPOS_COMPONENT", "env-2")
    assert eval_path(component_name("sums"), str(tmp_path)) == tmp_path / "run/eval.env-2.jsonl"
