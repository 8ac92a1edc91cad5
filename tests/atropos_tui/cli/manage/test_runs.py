"""RUN as a directory, id, name or prefix of an id, for every command; and the table of all runs."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.errors import Exit
from atropos_tui.supervisor.client import socket_path
from tests.support.own_places import own_places  # noqa: F401

pytestmark = pytest.mark.usefixtures("own_places")


def make_run(run_id: str, *, name: str = "p", began: float = 5.0, **result: Any) -> RunDir:
    """A run with one component, in ./runs; ended where `result` says so."""
    run = RunDir(Path("runs").resolve() / run_id)
    run.create()
    run.run_json.write_text(
        json.dumps({"run_id": run_id, "name": name, "mode": "none", "started_at": began})
    )
    plan = {
        "name": name,
        "components": [{"name": "vllm", "role": "engine"}, {"name": "trainer", "role": "trainer"}],
    }
    run.plan_json.write_text(json.dumps(plan))
    if result:
        run.result_json.write_text(json.dumps({"reason": "", **result}))
    log = run.log("vllm", 1)
    log.parent.mkdir()
    log.write_text(f"a line of {run_id}\n")
    return run


@pytest.fixture
def two_runs() -> None:
    """`math-2` is the newer one."""
    make_run("math-1-aa", name="math", began=1.0, exit_code=0)
    make_run("add-1-bb", name="add", began=2.0, exit_code=3)
    make_run("math-2-cc", name="math", began=3.0, exit_code=0)


NAMED = {
    "math-1-aa": "math-1-aa",
    "math-1": "math-1-aa",
    "add": "add-1-bb",
    "a": "add-1-bb",
    "math": "math-2-cc",
}


@pytest.mark.parametrize("command", [["ps", "--json"], ["why", "--json"]])
def test_by_id_name_and_beginning(
    two_runs: None, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for word, run_id in NAMED.items():
        for form in ([word], ["--run-dir", word]):
            assert main.run([*command, *form]) == 0
            assert json.loads(capsys.readouterr().out)["run_id"] == run_id, form


def test_commands_with_components_take_a_run_too(
    two_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["add"],
        ["add", "vllm"],
        ["vllm", "add"],
        ["vllm", "runs/add-1-bb"],
        ["--run-dir", "add", "vllm"],
    ):
        assert main.run(["logs", "--no-prefix", *words]) == 0
        assert capsys.readouterr().out == "a line of add-1-bb\n", words
    assert main.run(["why", "add", "trainer"]) == 0
    assert capsys.readouterr().out.startswith("trainer ")
    assert main.run(["logs", "vlm"]) == Exit.USAGE
    assert "did you mean vllm?" in capsys.readouterr().err
    assert main.run(["why", "trainr"]) == Exit.USAGE
    assert "did you mean trainer?" in capsys.readouterr().err


def test_commands_that_act_take_a_run_too(
    two_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["restart", "vllm", "add"], ["down", "add"], ["wait", "add", "--for", "ready"]):
        assert main.run(words) == Exit.NO_RUN
        assert "add-1-bb is not running" in capsys.readouterr().err, words
    assert main.run(["wait", "add", "--for", "done"]) == 3, "its own code"
    capsys.readouterr()
    assert main.run(["wait", "add", "--for", "vlm"]) == Exit.USAGE
    assert "did you mean vllm?" in capsys.readouterr().err
    assert main.run(["clean", "add", "--dry-run"]) == 0
    with pytest.raises(SystemExit):
        main.run(["ps", "add", "--run-dir", "math"])


def test_a_beginning_of_several_is_refused_with_their_names(
    two_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["ps", "math-"]) == Exit.USAGE
    error = capsys.readouterr().err
    assert "2 runs begin with math-" in error and "math-2-cc, math-1-aa" in error


def test_of_one_name_the_live_run_is_meant(
    two_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    listening = []
    for run_id in ("math-1-aa", "math-2-cc"):
        run = RunDir(Path("runs") / run_id)
        listening.append(socket.socket(socket.AF_UNIX))
        listening[-1].bind(str(socket_path(run)))
        listening[-1].listen()
        run.control_sock.symlink_to(socket_path(run))
        if run_id == "math-1-aa":
            assert main.run(["logs", "math"]) == 0
            assert "a line of math-1-aa" in capsys.readouterr().out
    assert main.run(["logs", "math"]) == Exit.USAGE
    assert "2 live runs are called math" in capsys.readouterr().err
    for words in (["down"], ["restart", "vllm", "--dry-run"]):
        assert main.run(words) == Exit.USAGE, "which of them may be somebody's long run"
        error = capsys.readouterr().err
        assert "2 runs are live" in error and "math-2-cc, math-1-aa" in error
    for server in listening:
        server.close()


def test_what_is_no_run_says_what_it_is(
    two_runs: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").touch()
    for word, said in (
        ("mine.toml", "atropos-tui up mine.toml starts one"),
        ("demo", "atropos-tui up demo starts one"),
        ("mth", "did you mean math?"),
    ):
        for command in ("replay", "ps", "down"):
            assert main.run([command, word]) == Exit.NO_RUN
            assert said in capsys.readouterr().err, (command, word)


def test_events_that_are_none_are_said_to_be_none(
    two_runs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["events", "add", "--kind", "diagnosis"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "add-1-bb has no matching event" in said.err
    assert main.run(["events", "--kind", "diagnoses"]) == Exit.USAGE
    assert "did you mean diagnosis?" in capsys.readouterr().err


def test_the_table_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    run = make_run(
        "add-1", name="add", began=now - 7260, exit_code=0, reason="done", ended_at=now - 7260 + 314
    )
    run.profile_toml.write_text("[trainer]\ntraining_steps = 300\n")
    step = {
        "kind": "step",
        "loss": 0,
        "reward_std": 0,
        "lr": 0,
        "grad_norm": 0,
        "ratio_mean": 1,
        "clip_fraction": 0,
    }
    step |= {"tokens": 1, "sequences": 1, "weight_version": 1, "attempt": 1}
    lines = [step | {"step": at, "reward_mean": 0.0 if at <= 280 else 0.73} for at in range(1, 301)]
    run.telemetry_jsonl.write_text(
        "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines) + '{"to'
    )
    evals = [
        {"kind": "eval", "env": "add", "split": split, "accuracy": value + more}
        for value in (0.04, 0.92)
        for split, more in (("held_out", 0.0), ("carries", 0.06))
    ]
    (run.root / "eval.add.jsonl").write_text(
        "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in evals)
    )
    make_run("old", began=5.0, exit_code=130, reason="interrupted by SIGTERM")
    assert main.run(["runs"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "RUN",
        "MODE",
        "STARTED",
        "TOOK",
        "STEPS",
        "REWARD",
        "HELD",
        "OUT",
        "STATE",
    ]
    assert " ".join(first.split()) == "add-1 none 2 h ago 5:14 300/300 0.730 92.0 % ended 0"
    assert second.endswith("ended 130: interrupted by SIGTERM") and "old" in second
    assert main.run(["runs", "--limit", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 older run: --limit 0 shows all"
    assert main.run(["runs", "--json"]) == 0
    newest, oldest = json.loads(capsys.readouterr().out)
    assert (newest["run"], newest["step"], newest["training_steps"], newest["dir"]) == (
        "add-1",
        300,
        300,
        str(run.root),
    )
    assert newest["reward"] == pytest.approx(0.73) and newest["held_out"] == 0.92
    assert newest["duration_s"] == pytest.approx(314) and oldest["duration_s"] is None
