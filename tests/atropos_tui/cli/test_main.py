"""The command line without a stack: exit codes, clear errors, no traceback, no heavy imports."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.manage import runs
from atropos_tui.cli.parser import build_parser
from atropos_tui.cli.start import up
from atropos_tui.cli.start.profiles import Checked
from atropos_tui.errors import Exit
from atropos_tui.profile.budget.inventory import Hardware
from atropos_tui.profile.budget.memory import Inventory
from atropos_tui.profile.plan import stack_of
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.site import Site, make_site
from tests.support.cpu_time import cpu_seconds


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def write_profile(tmp_path: Path, **top: Any) -> str:
    settings = {"name": "p", "model": str(model(tmp_path))} | top
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    path = tmp_path / "p.toml"
    path.write_text("\n".join([*lines, '[env]\nmodule = "json"\n']))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["up", "nowhere"], "unknown profile"),
        (["validate", "nowhere"], "unknown profile"),
        (["up", "demo", "--set", "modde=x"], "unknown key"),
        (["up", "demo", "--set", "model=/no/such/model"], "no such model directory"),
        (["up", "demo", "--set", "mode=lora"], "did you mean lora_only?"),
        (["up", "demo", "--set", "trainer.lr=fast"], "trainer.lr"),
    ],
)
def test_mistakes_exit_2_with_a_way_out(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == Exit.USAGE
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error
    assert not Path("runs").exists(), "nothing is created for a run that cannot start"


def test_taken_port_names_its_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main.run(["up", write_profile(tmp_path), "--set", f"api.port={port}"]) == Exit.USAGE
    error = capsys.readouterr().err
    assert f"port {port} is taken by" in error and f"pid {os.getpid()}" in error


def test_missing_vllm_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a)
    )
    assert main.run(["up", write_profile(tmp_path)]) == Exit.USAGE
    error = capsys.readouterr().err
    assert "'vllm' is not installed" in error and "make install" in error


def test_used_run_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "keep.txt").write_text("precious")
    assert (
        main.run(["up", write_profile(tmp_path), "--headless", "--run-dir", str(used)])
        == Exit.USAGE
    )
    assert "--resume" in capsys.readouterr().err
    assert [path.name for path in used.iterdir()] == ["keep.txt"]


@pytest.mark.parametrize(
    "command",
    [["ps"], ["down"], ["why"], ["logs", "vllm"], ["events"], ["attach"], ["restart", "vllm"]],
)
def test_no_run_exits_5(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(command) == Exit.NO_RUN
    assert "atropos-tui" in capsys.readouterr().err


@pytest.mark.parametrize(
    "place",
    [
        "/dev/null/x",
        "/proc/x/y",
        "a" * 300,
        "p.toml/x",
        "loop/x",
        "e\x1b]0;pwn\x07",
        "a\nb",
        "not\udcffutf8",
    ],
)
def test_an_impossible_run_directory_is_a_mistake(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def passed(profile: Profile, _: Path, site: Site, machine: bool, resumed: bool) -> Checked:
        stack = stack_of(make_site(profile, site.run.root, run_id=site.run_id))
        return Checked(site, stack, Inventory(Hardware((), None), {"vllm": "unknown"}), "")

    monkeypatch.setattr(up, "checked", passed)
    (tmp_path / "loop").symlink_to("loop")
    assert main.run(["up", write_profile(tmp_path), "--detach", "--run-dir", place]) == Exit.USAGE
    error = capfd.readouterr().err
    assert "--run-dir: " in error and "fix: " in error, error
    assert "Traceback" not in error and "fault" not in error and not set(error) & set("\x1b\x07"), (
        error
    )
    assert {path.name for path in tmp_path.iterdir()} <= {"loop", "p.toml", "model"}


def test_runs_shows_odd_names_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "runs" / "a\n\x1b]0;pwn\x07b")
    run.root.mkdir(parents=True)
    run.run_json.write_text(json.dumps({"run_id": "x", "mode": "m\n\x1b[31m"}))
    run.result_json.write_text(json.dumps({"exit_code": 0}))
    assert main.run(["runs"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 2 and text.rstrip("\n").replace("\n", "").isprintable(), text


@pytest.mark.parametrize(
    "words",
    [
        *(["logs", "-n", number] for number in ("-4", "1.5", "x")),
        *(["wait", "--for", "done", "--timeout", seconds] for seconds in ("-1", "nan", "inf", "x")),
        *(["down", "--timeout", seconds] for seconds in ("-0.1", "nan", "inf")),
    ],
)
def test_impossible_numbers_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main.run(words)
    assert caught.value.code == Exit.USAGE
    assert f"{words[-1]!r} is no" in capsys.readouterr().err


def test_unknown_command_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["levitate"]) == Exit.USAGE
    assert "--help lists the commands" in capsys.readouterr().err
    assert main.run(["rpelay"]) == Exit.USAGE
    assert "did you mean replay?" in capsys.readouterr().err
    assert main.run([write_profile(tmp_path)]) == Exit.USAGE
    assert f"atropos-tui up {tmp_path / 'p.toml'} starts it" in capsys.readouterr().err


def test_the_bare_name_shows_help_and_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 0
    text = capsys.readouterr().out
    assert "exit codes:" in text and "atropos-tui up demo" in text.partition("next:")[2]


def test_fault_of_ours_leaves_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "all_runs", lambda: 1 / 0)
    assert main.run(["runs"]) == Exit.FAULT
    error = capsys.readouterr().err
    path = Path(error.split("The report is in ")[1].split(";")[0])
    assert "ZeroDivisionError" in path.read_text()
    path.unlink()


@pytest.mark.parametrize("place", ["a" * 300, "/dev/null/x", "no/such"])
def test_a_fault_is_reported_even_where_the_run_directory_is_impossible(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "pick", lambda _: 1 / 0)
    assert main.run(["why", "--run-dir", place]) == Exit.FAULT
    path = Path(capsys.readouterr().err.split("The report is in ")[1].split(";")[0])
    assert "ZeroDivisionError" in path.read_text()
    path.unlink()


def test_a_fault_is_told_where_no_file_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "pick", lambda _: 1 / 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no" / "such"))
    assert main.run(["why"]) == Exit.FAULT
    error = capsys.readouterr().err
    assert (
        "cannot be written" in error
        and "ZeroDivisionError" in error
        and "arguments: ['why']" in error
    )


def ended_run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "p-1")
    run.create()
    run.run_json.write_text(
        json.dumps({"run_id": "p-1", "name": "p", "mode": "shared_vllm", "started_at": 5.0})
    )
    run.plan_json.write_text(
        json.dumps({"components": [{"name": "vllm", "role": "engine", "port": 9001}]})
    )
    run.result_json.write_text(
        json.dumps({"exit_code": 3, "reason": "vllm failed", "component": "vllm"})
    )
    engine = {"component": "vllm", "role": "engine", "attempt": 1}
    lines = [
        {"kind": "state", "seq": 0, "old": "pending", "new": "starting", **engine},
        {"kind": "state", "seq": 1, "old": "starting", "new": "failed", "exit_code": 1, **engine},
        {
            "kind": "diagnosis",
            "seq": 2,
            "title": "out of memory",
            "evidence": "\x1b]52;c;x\x07",
            "fix": "less",
            **engine,
        },
    ]
    run.supervisor_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    log = run.log("vllm", 1)
    log.parent.mkdir()
    log.write_text("one\ntwo \x1b[31mred\x1b[0m\nthree\n")
    return run


def test_an_ended_run_answers_from_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_run(tmp_path)
    assert main.run(["ps"]) == 0
    assert "✖ failed" in capsys.readouterr().out
    assert main.run(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["components"][0]["exit_code"] == 1
    assert main.run(["why"]) == 0
    text = capsys.readouterr().out
    assert "out of memory" in text and "fix: less" in text and "\x1b" not in text
    assert main.run(["events"]) == 0
    assert "starting → failed" in capsys.readouterr().out
    assert main.run(["logs", "vllm", "-n", "2", "--grep", "t"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "three" and "one" not in text and "\x1b" not in text
    assert main.run(["wait", "--for", "done"]) == 3
    assert main.run(["runs"]) == 0
    assert "ended 3" in capsys.readouterr().out
    assert main.run(["restart", "vllm"]) == Exit.NO_RUN
    assert main.run(["logs", "nobody"]) == Exit.USAGE


def test_why_after_a_stop_still_tells_what_was_wrong_and_takes_a_run_s_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended_run(tmp_path)
    part = {"component": "vllm", "role": "engine", "attempt": 1}
    lines = [
        {"kind": "state", "seq": 0, "time": 10, "old": "starting", "new": "healthy", **part},
        {
            "kind": "diagnosis",
            "seq": 1,
            "time": 20,
            "title": "it refuses all",
            "evidence": "400",
            "fix": "top_p",
            **part,
        },
        {"kind": "state", "seq": 2, "time": 30, "old": "healthy", "new": "stopping", **part},
        {
            "kind": "state",
            "seq": 3,
            "time": 31,
            "old": "stopping",
            "new": "stopped",
            "reason": "with the stack",
            **part,
        },
    ]
    run.supervisor_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    newer = RunDir(tmp_path / "runs" / "p-2")
    newer.create()
    newer.run_json.write_text(
        json.dumps({"run_id": "p-2", "name": "p", "mode": "none", "started_at": 50.0})
    )
    newer.plan_json.write_text(run.plan_json.read_text())
    for named in ("p-1", str(run.root)):
        assert main.run(["why", named]) == 0
        text = capsys.readouterr().out
        assert "p-1 ended with code 3" in text and "with the stack" in text
        assert all(words in text for words in (": it refuses all", "evidence: 400", "fix: top_p"))
    assert main.run(["why", "vllm"]) == 0
    assert "it refuses all" not in capsys.readouterr().out, "a component is of the newest run"
    assert main.run(["why", "nobody"]) == Exit.USAGE
    assert "one of: vllm" in capsys.readouterr().err


def test_states_and_the_sentence_have_their_colours_on_a_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_run(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def printed(command: str, *, is_terminal: bool) -> str:
        monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
        assert main.run([command]) == 0
        return capsys.readouterr().out

    for command in ("ps", "why"):
        plain, shown = (printed(command, is_terminal=is_terminal) for is_terminal in (False, True))
        assert "\x1b" not in plain and "\x1b[31m✖ failed\x1b[0m" in shown
        assert shown.count("\x1b[31m") == 2, "the state, and the sentence about the run"
        assert " ".join(re.sub("\x1b.*?m", "", shown).split()) == " ".join(plain.split()), (
            "only colours are more"
        )
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b" not in printed(command, is_terminal=True)
        monkeypatch.delenv("NO_COLOR")


def test_a_closed_terminal_is_a_detach(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    ours, theirs = os.openpty()
    leaves = "import sys; from atropos_tui.ui import app; from atropos_tui.cli import main; "
    leaves += (
        "app.run_cockpit = lambda *_, **__: (print('open', flush=True), input(), 'detach')[-1]; "
    )
    leaves += "sys.exit(main.run(sys.argv[1:]))"
    ignores = [
        sys.executable,
        "-c",
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); " + leaves,
    ]
    with subprocess.Popen(
        [*ignores, "attach", "--run-dir", str(run.root)],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as client:
        os.close(theirs)
        with os.fdopen(ours, "rb") as screen:
            assert screen.readline() == b"open\r\n"
        _, error = client.communicate(b"\n", timeout=60)
    assert (client.returncode, error) == (Exit.DONE, b"")


def test_help_is_quick() -> None:
    assert cpu_seconds("-m", "atropos_tui", "--help") < 0.5, "0.1 s when the machine is idle"


def test_every_command_resolves() -> None:
    """A handler that does not exist would only show when a user calls it."""
    for action in build_parser()._actions:
        for command in (getattr(action, "choices", None) or {}).values():
            module, _, name = command.get_default("handler").partition(":")
            assert callable(getattr(importlib.import_module(f"atropos_tui.cli.{module}"), name))
