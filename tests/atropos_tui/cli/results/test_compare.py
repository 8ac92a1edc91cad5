"""`compare`: stacks side by side without collisions, one line each, one table; stand-ins run as
programs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from atropos_common.protocol.records import StateRecord, parse_line
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.parser import build_parser
from atropos_tui.cli.results.compare import Board, ComparedStack, label_entries
from atropos_tui.errors import Exit, UserError
from atropos_tui.monitor.run.run_files import read_json
from atropos_tui.profile.checks.preflight import separate
from atropos_tui.profile.profile import Profile, load_profile
from atropos_tui.supervisor.journal import tracker
from tests.atropos_tui.cli.stand_in_stack import fork_supervisors, write_profile
from tests.atropos_tui.cli.test_json import check


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("ATROPOS_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    fork_supervisors(monkeypatch, tmp_path)


@pytest.fixture
def ports() -> tuple[int, int]:
    """Two ports with free ones above them."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def profile(**sections: object) -> Profile:
    fields = {"name": "p", "model": "owner/model", "env": {"module": "json"}} | sections
    return Profile.model_validate(fields)


def on_gpus(*gpus: int) -> Profile:
    return profile(vllm={"gpus": list(gpus)})


# What the stacks are given so that they fit beside one another.


def test_ports_that_collide_are_moved_to_the_next_free_ones() -> None:
    second = profile(vllm={"port": 8001})
    changes = separate(
        {"a": profile(), "b": second, "c": profile()}, 0, is_free=lambda port: port != 8003
    )
    assert changes.sets == {
        "a": [],
        "b": ["api.port=8002"],  # not 8001, which is its own
        "c": ["api.port=8004", "vllm.0.port=9002"],  # not 8003, which somebody has
    }
    assert changes.lines[0] == "b: api.port is 8002, since a uses 8000"
    assert not changes.problems


def test_gpus_that_collide_are_moved_to_ones_that_nobody_has(tmp_path: Path) -> None:
    """The guides' comparison: three modes, two GPUs each, on one machine with eight."""
    path = write_profile(tmp_path, "p", gpus=[0, 1], ports=(8000, 9001))
    three = {name: load_profile(str(path))[0] for name in "abc"}
    changes = separate(three, 8, is_free=lambda _: True)
    moved = [load_profile(str(path), changes.sets[name])[0] for name in "abc"]
    assert [found.vllm[0].gpus for found in moved] == [[0, 1], [2, 3], [4, 5]]
    assert [found.api.port for found in moved] == [8000, 8001, 8002]
    assert "b: GPUs 0 -> 2, 1 -> 3, since a uses the same" in changes.lines
    assert load_profile(str(path), changes.sets["a"])[0] == three["a"], "the first keeps everything"


@pytest.mark.parametrize(("count", "problems"), [(4, 0), (3, 1), (2, 1)])
def test_too_few_gpus_are_a_problem_with_a_way_out(count: int, problems: int) -> None:
    changes = separate({"a": on_gpus(0, 1), "b": on_gpus(0, 1)}, count, is_free=lambda _: True)
    assert len(changes.problems) == problems
    for problem in changes.problems:
        assert (
            f"b needs 2 more GPUs beside a, and {count - 2 or 'none'} of {count} is left"
            == problem.reason
        )
        assert "--sequential" in problem.fix


def test_a_stack_that_names_no_gpu_takes_the_first() -> None:
    unnamed, on_cpu = profile(), profile(trainer={"device": "cpu"})
    changes = separate(
        {"a": unnamed, "cpu": on_cpu, "b": unnamed, "c": on_gpus(1)}, 4, is_free=lambda _: True
    )
    assert [item for item in changes.sets["b"] if "gpus" in item] == ["vllm.0.gpus=[1]"]
    assert [item for item in changes.sets["c"] if "gpus" in item] == ["vllm.0.gpus=[2]"]
    assert not [item for item in changes.sets["cpu"] if "gpus" in item], "processors are shared"
    without = separate({"a": unnamed, "b": unnamed}, 0, is_free=lambda _: True)
    assert not any("gpus" in item for items in without.sets.values() for item in items)


def test_a_command_of_ones_own_is_never_rewritten() -> None:
    own = profile(api={"command": ["my-api", "--port", "8000"]})
    changes = separate({"a": own, "b": own}, 0, is_free=lambda _: True)
    assert [problem.key for problem in changes.problems] == ["api.port", "vllm.0.port"]
    assert (
        "api.command may name it" in changes.problems[0].reason
        and "--sequential" in changes.problems[0].fix
    )
    assert not separate(
        {"a": own, "b": profile(api={"port": 8500}, vllm={"port": 9500})}, 0
    ).problems


# Labels and overrides.


def entries(*arguments: str) -> list[ComparedStack]:
    return label_entries(build_parser().parse_args(["compare", *arguments]))


def test_labels_and_whose_override_it_is() -> None:
    found = entries(
        "demo",
        "x/demo.toml",
        "gsm 8k.toml",
        "--set",
        "seed=3",
        "--set",
        "demo-2:api.port=1",
        "--steps",
        "9",
    )
    assert {entry.label: entry.sets for entry in found} == {
        "demo": ["seed=3", "trainer.training_steps=9"],
        "demo-2": ["seed=3", "api.port=1", "trainer.training_steps=9"],
        "gsm-8k": ["seed=3", "trainer.training_steps=9"],
    }
    assert [entry.label for entry in entries("demo", "demo", "demo-2.toml")] == [
        "demo",
        "demo-2",
        "demo-2-2",
    ]
    assert entries("demo", "--set", "model=a:b")[0].sets == ["model=a:b"], "only a key has a label"
    with pytest.raises(UserError, match="one of: demo"):
        entries("demo", "--set", "demp:seed=1")


@pytest.mark.parametrize("sets", [[], ["--set", "seed=1", "--set", "p:seed=2"], ["--sequential"]])
def test_one_stack_is_no_comparison(
    tmp_path: Path, ports: tuple[int, int], capsys: pytest.CaptureFixture[str], sets: list[str]
) -> None:
    """However many keys are set: they are all of that one."""
    path = write_profile(tmp_path, "p", ports=ports)
    assert main.run(["compare", str(path), "--steps", "1", *sets]) == Exit.USAGE
    error = capsys.readouterr().err
    assert f"{path} is the only one" in error
    assert (
        f"atropos-tui compare {path} {path} --set p-2:trainer.lr=1e-5" in error
        and f"atropos-tui up {path}" in error
    )
    assert not (tmp_path / "runs").exists()


def test_every_problem_of_every_profile_before_anything_starts(
    tmp_path: Path, ports: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_profile(tmp_path, "p", ports=ports)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('name = "wrong"\nspeed = 3\n')
    arguments = ["compare", str(path), str(wrong), "nowhere", "--set", "trainer.lr=fast"]
    assert main.run(arguments) == Exit.USAGE
    error = capsys.readouterr().err
    for part in (
        "trainer.lr",
        "wrong.toml:2: speed",
        "wrong.toml: model",
        "nowhere: no such profile",
    ):
        assert part in error
    assert "Traceback" not in error and not (tmp_path / "runs").exists()


def test_a_port_that_is_taken_stops_the_comparison(
    tmp_path: Path, ports: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_profile(tmp_path, "p", ports=ports)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        taken.listen()
        assert main.run(["compare", str(path), str(path)]) == Exit.USAGE
    error = capsys.readouterr().err
    assert f"port {ports[0]} is taken by" in error and re.search(
        r"p\.toml:\d+ \(p\): api\.port", error
    )
    assert not (tmp_path / "runs").exists()


# Real stacks of small programs.


def states(root: Path) -> list[StateRecord]:
    records = [parse_line(line) for line in RunDir(root).supervisor_jsonl.read_bytes().splitlines()]
    return [record for record in records if isinstance(record, StateRecord)]


def nothing_is_left(base: Path) -> bool:
    return not any(
        tracker.find_leftovers(read_json(path)["run_id"]) for path in base.glob("*/run.json")
    )


def test_side_by_side_with_one_that_fails(
    tmp_path: Path, ports: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (write_profile(tmp_path, name, ports=ports) for name in ("one", "two"))
    base = tmp_path / "compared"
    arguments = [
        "compare",
        str(one),
        str(two),
        str(one),
        "--run-dir",
        str(base),
        "--set",
        "two:trainer.env.FAIL_AT='3'",
    ]
    arguments += ["--set", "two:trainer.restart.policy=never", "--steps", "5"]
    assert main.run(arguments) == Exit.COMPONENT_FAILED
    out = capsys.readouterr().out
    table = {line[:16].strip(): line[16:].split() for line in out.splitlines()}
    head = next(line for line in out.splitlines() if "one (shared_vllm)" in line)
    assert head.split()[::2] == ["one", "two", "one-2"]
    assert table["Exit code"] == ["0", "3", "0"]
    assert table["Steps"][0] == "5" and table["Steps"][1] == "2"
    assert table["Checkpoint size"][:2] == ["2.0", "GB"]
    assert table["Reward, last 5"][0] == "0.600"
    assert (
        f"two: api.port is {ports[0] + 1}, since one uses {ports[0]}" in out
        or "two: api.port is" in out
    )
    assert "two: run ended with code 3: trainer" in out and "the loss is not a number" in out
    plans = [
        json.loads((base / name / "plan.json").read_text()) for name in ("one", "two", "one-2")
    ]
    used = [part["port"] for plan in plans for part in plan["components"] if part["port"]]
    assert len(set(used)) == 6
    began = {name: states(base / name) for name in ("one", "two", "one-2")}
    made = [
        record
        for rows in began.values()
        for record in rows
        if record.component == "make" and record.new == "starting"
    ]
    assert len(made) == 1, "what all need is made once, by the first"
    assert nothing_is_left(base)
    assert main.run(["runs", "--json"]) == 0
    assert {Path(row["dir"]).name for row in json.loads(capsys.readouterr().out)} == {
        "one",
        "two",
        "one-2",
    }


def test_one_after_another_as_json(
    tmp_path: Path, ports: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_profile(tmp_path, "p", ports=ports)
    base = tmp_path / "compared"
    arguments = [
        "compare",
        str(path),
        str(path),
        "--sequential",
        "--json",
        "--steps",
        "3",
        "--run-dir",
        str(base),
    ]
    assert main.run([*arguments, "--set", "p-2:trainer.env.STEP_S='0.1'"]) == 0
    captured = capsys.readouterr()
    check("compare", captured.out)
    first, second = json.loads(captured.out)["runs"]
    assert (first["run"], second["run"]) == ("p", "p-2")
    assert second["avg_step_s"] == pytest.approx(2 * first["avg_step_s"])
    assert (first["exit_code"], first["checkpoint_bytes"]) == (0, 2_000_000_000)
    assert "p-2  step    3/3  reward  1.000    0.10 s/step  done" in captured.err
    ended, began = states(base / "p")[-1].time, states(base / "p-2")[0].time
    assert ended < began
    plans = [json.loads((base / name / "plan.json").read_text()) for name in ("p", "p-2")]
    assert [part["port"] for part in plans[0]["components"]] == [
        part["port"] for part in plans[1]["components"]
    ]
    assert main.run(arguments) == Exit.USAGE
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("sequential", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_interrupt_stops_every_stack(
    tmp_path: Path, ports: tuple[int, int], sequential: bool
) -> None:
    path = write_profile(tmp_path, "p", ports=ports)
    base = tmp_path / "compared"
    command = [
        sys.executable,
        "-m",
        "atropos_tui",
        "compare",
        *[str(path)] * (2 if sequential else 3),
    ]
    command += ["--run-dir", str(base), "--steps", "10000"]
    fails = ["--set", "p-3:trainer.env.FAIL_AT='1'", "--set", "p-3:trainer.restart.policy=never"]
    command += ["--sequential"] if sequential else fails
    running = ["p"] if sequential else ["p", "p-2"]
    give_up = time.monotonic() + 60
    awaited = [base / name / "telemetry.jsonl" for name in running]
    awaited += [] if sequential else [base / "p-3" / "result.json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not all(path.exists() for path in awaited):
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED, out
    assert "stopping every stack" in out
    assert nothing_is_left(base)
    assert [read_json(base / name / "result.json")["exit_code"] for name in running] == [130] * len(
        running
    )
    if sequential:
        assert "p-2: not started" in out and not (base / "p-2").exists()


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_lines_are_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    found = entries("demo", "demo")
    found[1].note = "\x1b]52;c;x\x07" + "long " * 20
    terminal = Terminal()
    board = Board(found, terminal)
    board.draw()
    board.draw()
    drawn = "\x1b[2Kdemo    waits for its turn\n\x1b[2Kdemo-2  long long long long l\n"
    assert terminal.getvalue() == drawn + "\x1b[2F" + drawn
    board.say("a word")
    board.draw()
    assert terminal.getvalue().endswith("a word\n" + drawn), (
        "above the lines, which begin anew below it"
    )
