"""Records of start-up stages that our programs write."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from atropos_common.protocol import stages
from atropos_common.protocol.records import StageRecord, parse_line
from atropos_common.system.run_dir import RunDir


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a component that a supervisor started."""
    for name, value in {
        "RUN_DIR": str(tmp_path),
        "RUN_ID": "r-1",
        "COMPONENT": "trainer",
        "ATTEMPT": "3",
    }.items():
        monkeypatch.setenv(f"ATROPOS_{name}", value)
    return RunDir(tmp_path).stages_jsonl("trainer")


def test_each_call_is_one_private_record(started: Path) -> None:
    stages.reach(stages.REGISTERED)
    stages.reach(stages.REGISTERED)
    found = [parse_line(line) for line in started.read_bytes().splitlines()]
    assert all(isinstance(record, StageRecord) for record in found)
    assert [
        (each.run_id, each.stage, each.attempt) for each in found if isinstance(each, StageRecord)
    ] == [("r-1", "registered", 3)] * 2
    assert started.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("missing", ["ATROPOS_RUN_DIR", "ATROPOS_COMPONENT"])
def test_a_program_that_runs_alone_writes_nothing(
    started: Path, monkeypatch: pytest.MonkeyPatch, missing: str, tmp_path: Path
) -> None:
    monkeypatch.delenv(missing)
    stages.reach(stages.ATTACHED)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_tried_until_it_takes_it(
    started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "RETRY_S", 0.01)
    monkeypatch.setattr(
        stages.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    stages.reach(stages.ATTACHED)
    assert any(thread.name == "stage" for thread in threading.enumerate())
    monkeypatch.undo()
    give_up = time.monotonic() + 10
    while not started.read_bytes() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert b'"stage":"attached"' in started.read_bytes()
