"""Run files that no supervisor wrote (pipes, garbage, wrong times and codes) give a message, never
a hang."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
from pathlib import Path

import psutil
import pytest

from atropos_common.protocol import record_tail
from atropos_common.protocol.records import StateRecord
from atropos_common.system.files import LARGEST, open_regular, read_regular
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.manage import runs
from atropos_tui.monitor import report
from atropos_tui.monitor.run.run_files import RunFeed, load_run, status_from_files
from tests.support.run_maker import make_run, write_records

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


def test_logs_wait_for_no_pipe(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do they where the times of the lines should be."""
    log = next(run.logs.glob("*/1.log"))
    for name in ("1.times", "1.times.1"):
        log.with_name(name).unlink(missing_ok=True)
        os.mkfifo(log.with_name(name))
    assert main.run(["logs", "--run-dir", str(run.root), log.parent.name]) == 0
    assert capsys.readouterr().out.count("\n") == log.read_text().count("\n") > 0


def test_names_are_plain_before_they_reach_a_terminal(run: RunDir) -> None:
    evil = "\x1b]52;c;UFdORUQ=\x07v\ud800"
    for path in (run.profile_toml, run.result_json):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    plan = {
        "run_id": evil,
        "name": evil,
        "mode": evil,
        "components": [{"name": evil, "role": "trainer"}],
    }
    run.plan_json.write_text(json.dumps(plan))
    failed = StateRecord(component="\x1b]52;c;UFdO\x07", old="pending", new="failed")
    write_records(run.supervisor_jsonl, [failed], 99)
    info, state, _ = load_run(run.root)
    status = status_from_files(run, info, state)
    shown = [info.run_id, info.name, info.mode, *(row.name for row in status.components)]
    assert not [text for text in shown if "\x1b" in text or "\ud800" in text or "\x07" in text]
    assert len(status.components) > 1


@pytest.mark.parametrize(
    "text",
    [
        '{"reason": "x"}',
        '{"exit_code": null}',
        '{"exit_code": true}',
        '{"exit_code": 300}',
        "[" * 200_000,
        "3",
    ],
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


PATHS = (
    "run.json",
    "plan.json",
    "profile.toml",
    "result.json",
    "journal.json",
    "supervisor.jsonl",
    ".env",
)
COMMANDS = (
    ["ps"],
    ["events"],
    ["bench"],
    ["report", "-o", "page.html"],
    ["bundle", "-o", "all.tar.gz"],
    ["clean", "--yes"],
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        pytest.param(shape, name, marks=[pytest.mark.slow] * (at % 3 != shift))
        for shift, shape in enumerate(("pipe", "endless", "huge"))
        for at, name in enumerate(PATHS)
    ],
)
def test_no_command_waits_for_a_pipe_or_reads_without_end(
    run: RunDir, shape: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own with bounded memory, so that one which reads on and on ends here.
    What a report reads it has read once it draws, so no picture is drawn: that is nearly all of
    what these commands cost."""
    monkeypatch.setattr(report, "draw", lambda chart, name: f"<svg id='{name}'/>")
    for module in ("atropos_tui.cli.results.bundle", "matplotlib.figure"):
        importlib.import_module(module)  # here, once, and not in each of them
    path = run.root / name
    path.unlink(missing_ok=True)
    if shape == "pipe":
        os.mkfifo(path)
    elif shape == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, LARGEST + 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own = psutil.Process().memory_info().vms
    for command in COMMANDS:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                resource.setrlimit(resource.RLIMIT_AS, (own + (1 << 30), own + (1 << 30)))
                code = main.run([*command, str(run.root)])
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, 2, 5), command


def test_a_line_without_an_end_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_tail, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "lines"
    path.write_bytes(
        b"one\n" + b"x" * 999 + b"\n" + b"x" * 1000 + b"\n" + b"x" * 5000 + b"\ntwo\n" + b"x" * 1000
    )
    with open_regular(path) as file:
        assert list(record_tail.whole_lines(file)) == [b"one\n", b"x" * 999 + b"\n", b"two\n"]


@pytest.mark.timeout(120)
def test_metadata_commands_no_terminal(
    run: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Every field of a recording that any command shows: clipboard, title, colours, C1, text that
    runs backwards."""
    evil = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202e\u2066\u061c\U000e0041v"
    meta = json.loads(run.run_json.read_text()) if run.run_json.exists() else {}
    meta |= {"run_id": "demo-test"} | dict.fromkeys(
        ("name", "mode", "host", "argv", "started_by"), evil
    )
    run.run_json.write_text(json.dumps(meta | {"versions": {evil: evil}, "started_at": 5.0}))
    plan = {
        "run_id": evil,
        "name": evil,
        "mode": evil,
        "components": [{"name": evil, "role": evil}],
    }
    run.plan_json.write_text(json.dumps(plan))
    told = dict.fromkeys(
        ("component", "role", "node", "old", "new", "reason", "title", "evidence", "fix"), evil
    )
    told |= dict.fromkeys(
        ("action", "initiator", "detail", "command_id", "stage", "status", "severity"), evil
    )
    lines = [json.loads(line) for line in run.supervisor_jsonl.read_text().splitlines()]
    strange = [line | {key: words for key, words in told.items() if key in line} for line in lines]
    run.supervisor_jsonl.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *strange]))
    run.result_json.write_text(
        json.dumps({"exit_code": 3, "reason": evil, "component": evil, "cause": evil})
    )
    run.log("vllm", 1).parent.mkdir(parents=True, exist_ok=True)
    run.log("vllm", 1).write_text(f"{evil}\n")
    (run.logs / "\x1b]0;evil\x07").mkdir()
    packed = ["bundle", "-o", str(tmp_path / "all.tar.gz")]
    for command in (["ps"], ["why"], ["events"], ["bench"], ["logs"], ["runs"], packed):
        where = [] if command == ["runs"] else [str(run.root)]
        main.run(
            [*command, *where] if command[0] != "logs" else ["logs", "--run-dir", str(run.root)]
        )
        said = "".join(capsys.readouterr())
        assert said, command
        assert not set(said) & set("\x1b\x07\x9b\u202e\u2066\u061c\U000e0041"), command
    main.run(["up", "--resume", str(run.root), "--headless", "--set", "nothing=1"])
    assert not set("".join(capsys.readouterr())) & set("\x1b\x07\x9b\u202e\u2066\u061c\U000e0041")


@pytest.mark.parametrize("number", [-(10**20), 10**20, -1e308, 1e308])
def test_numbers_that_no_clock_and_no_counter_shows(run: RunDir, number: float) -> None:
    for path in (run.telemetry_jsonl, run.supervisor_jsonl):
        text = re.sub(r'"(time|step|seq)":[0-9.]+', rf'"\1":{json.dumps(number)}', path.read_text())
        path.write_text(text)
    for command in ("ps", "why", "events", "bench"):
        assert main.run([command, str(run.root)]) in (0, 5), command


def test_a_recording_s_folder_that_leads_elsewhere_is_not_cleared(
    run: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary/mine.txt").write_text("precious")
    (run.root / "out").symlink_to(tmp_path / "diary")
    plan = json.loads(run.plan_json.read_text())
    plan["components"][0]["clears"] = [str(run.root / "out/mine.txt"), str(run.root / "left.json")]
    run.plan_json.write_text(json.dumps(plan))
    (run.root / "left.json").touch()
    assert main.run(["clean", "--yes", str(run.root)]) == 0
    assert (tmp_path / "diary/mine.txt").exists() and not (run.root / "left.json").exists()
