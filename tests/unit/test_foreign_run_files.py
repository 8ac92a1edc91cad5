"""Files of a run that no supervisor wrote: pipes, garbage, times and codes that are none. A message, never a hang."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from atropos_common.files import open_regular, read_regular
from atropos_common.records import StateRecord
from atropos_common.run_dir import RunDir
from atropos_tui.cli import runs
from atropos_tui.monitor.run_files import RunFeed, load_run, status_from_files
from tests.ui.run_maker import make_run, write_records

pytestmark = pytest.mark.timeout(20)
HUGE = 10**400


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", steps=2)


def test_a_pipe_is_no_file(run: RunDir) -> None:
    for path in (run.telemetry_jsonl, run.run_json, run.result_json):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(run.telemetry_jsonl)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(run.root.parent)
    assert not [record for record in RunFeed(run).read().records if record.kind == "step"]
    assert runs.read_run(run.root) is None and runs.read_result(run) is None


def test_names_are_plain_before_they_reach_a_terminal(run: RunDir) -> None:
    evil = "\x1b]52;c;UFdORUQ=\x07v\ud800"
    for path in (run.profile_toml, run.result_json):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    plan = {"run_id": evil, "name": evil, "mode": evil, "components": [{"name": evil, "role": "trainer"}]}
    run.plan_json.write_text(json.dumps(plan))
    failed = StateRecord(component="\x1b]52;c;UFdO\x07", old="pending", new="failed")
    write_records(run.supervisor_jsonl, [failed], 99)
    info, state, _ = load_run(run.root)
    status = status_from_files(run, info, state)
    shown = [info.run_id, info.name, info.mode, *(row.name for row in status.components)]
    assert not [text for text in shown if "\x1b" in text or "\ud800" in text or "\x07" in text]
    assert len(status.components) > 1


@pytest.mark.parametrize(
    "text", ['{"reason": "x"}', '{"exit_code": null}', '{"exit_code": true}', '{"exit_code": 300}', "[" * 200_000, "3"]
)
def test_a_result_without_an_exit_code_is_none(run: RunDir, text: str) -> None:
    run.result_json.write_text(text)
    assert runs.read_result(run) is None
    run.result_json.write_text('{"exit_code": 3}')
    assert runs.read_result(run) == {"exit_code": 3}


@pytest.mark.parametrize("when", [None, "yesterday", HUGE, -1, True, [1]])
def test_a_run_of_no_known_time_is_the_oldest(run: RunDir, when: object) -> None:
    info = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps(info | {"started_at": when, "resumed_at": when}))
    entry = runs.read_run(run.root)
    assert entry is not None and entry.used_at == (1.0 if when is True else 0.0)
