"""`sweep`: a grid of settings in real stacks of stand-ins; finished runs are not repeated."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.results import sweep
from atropos_tui.cli.results.sweep import Cell, Grid, labels_of, slots_of, values_of
from atropos_tui.errors import Exit, UserError
from atropos_tui.monitor.run.run_files import read_json
from atropos_tui.profile.budget.inventory import Hardware, named_machine
from atropos_tui.profile.profile import Profile
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
def path(tmp_path: Path) -> Path:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    return write_profile(tmp_path, "p", ports=ports)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,1e-6", ["1e-5", "1e-6"]),
        ("0..3", ["0", "1", "2", "3"]),
        ("-1..1", ["-1", "0", "1"]),
        ("4", ["4"]),
        ("[0,1],[2,3]", ["[0,1]", "[2,3]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("{a=1,b=2}", ["{a=1,b=2}"]),
        ("a, b", ["a", "b"]),
        ("", [""]),
    ],
)
def test_values_of_one_key(text: str, values: list[str]) -> None:
    assert values_of(text) == values


def test_cells_are_every_combination_with_short_names() -> None:
    grid = Grid(
        profile="demo",
        sets=["trainer.lr=1e-5,1e-6", "seed=0..1", "trainer.training_steps=3"],
        digest="",
    )
    cells = grid.cells()
    assert [cell.label for cell in cells] == [
        "lr-1e-5_seed-0",
        "lr-1e-5_seed-1",
        "lr-1e-6_seed-0",
        "lr-1e-6_seed-1",
    ]
    assert cells[1].sets == ["trainer.lr=1e-5", "seed=1", "trainer.training_steps=3"]
    assert cells[1].settings == {"trainer.lr": "1e-5", "seed": "1"}
    assert labels_of([{"a.x": "1", "b.x": "/m"}, {"a.x": "2", "b.x": "/m"}]) == [
        "a.x-1_b.x--m",
        "a.x-2_b.x--m",
    ]
    assert labels_of([{"model": "/" + "m" * 60}, {"model": "/n"}]) == ["cell-1", "cell-2"]
    assert labels_of([{"model": "a/b"}, {"model": "a:b"}]) == ["cell-1", "cell-2"], (
        "alike once they are safe"
    )


@pytest.mark.parametrize(
    "sets",
    [[], ["seed=1"], ["seed=0..99", "api.port=1..99"], ["seed=3..1"], ["seed=0,1", "seed=5"]],
)
def test_what_is_no_grid_is_refused(sets: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["sweep", "demo", *(f"--set={item}" for item in sets)]) == Exit.USAGE
    assert "no grid of settings" in capsys.readouterr().err and not Path("runs").exists()


def cells_of(*profiles: dict[str, object]) -> list[Cell]:
    cells = [Cell(str(at), "p") for at in range(len(profiles))]
    for cell, sections in zip(cells, profiles, strict=True):
        cell.profile = Profile.model_validate(
            {"name": "p", "model": "owner/model", "env": {"module": "json"}} | sections
        )
    return cells


@pytest.mark.parametrize(
    ("gpus", "wanted", "places"), [("4xH100", 4, 2), ("8xH100", 3, 3), ("2xH100", 4, 1)]
)
def test_as_many_at_a_time_as_the_gpus_allow(
    gpus: str, wanted: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "read_machine", lambda: named_machine(gpus))
    cells = cells_of(*[{"mode": "broadcast", "vllm": {"gpus": [0]}, "trainer": {"gpus": [1]}}] * 5)
    slots, said = slots_of(cells, wanted)
    assert len(slots) == places and slots[0] == []
    taken = [
        item for sets in slots for item in sets if item.startswith(("vllm.0.gpus", "trainer.gpus"))
    ]
    assert len(set(taken)) == len(taken) == 2 * (places - 1)
    assert said


def test_cells_that_differ_in_their_gpus_do_not_run_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "read_machine", lambda: Hardware(named_machine("8xH100").gpus, None))
    cells = cells_of({"vllm": {"gpus": [0]}}, {"vllm": {"gpus": [0, 1], "tensor_parallel": 2}})
    assert slots_of(cells, 1) == ([[]], [])
    with pytest.raises(UserError, match="cannot run side by side"):
        slots_of(cells, 2)


@pytest.mark.parametrize(
    "sections", [{"inference_gpus": 2}, {"inference_gpus": 4, "vllm": {"tensor_parallel": 2}}]
)
def test_cells_that_divide_the_whole_machine_go_one_after_another(
    sections: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "read_machine", lambda: named_machine("8xH100"))
    slots, said = slots_of(cells_of(*[{"mode": "broadcast"} | sections] * 3), 2)
    assert slots == [[]] and "one after another" in said[0]


def test_a_place_that_nothing_can_be_planned_for_takes_no_cell(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = sweep.compare.plan

    def refuse(entry: Cell, *, resumed_id: str | None = None) -> None:
        if any(item.startswith("api.port=") for item in entry.sets):
            raise UserError("no room in place 2")
        plan(entry, resumed_id=resumed_id)

    monkeypatch.setattr(sweep.compare, "plan", refuse)
    words = ["sweep", str(path), "--set", "seed=0..2", "--steps", "2", "--parallel", "2"]
    assert main.run([*words, "--run-dir", str(tmp_path / "swept")]) == 0
    assert "one slot less: no room in place 2" in capsys.readouterr().out
    assert set(attempts(tmp_path / "swept").values()) == {1}


def attempts(base: Path) -> dict[str, int]:
    """How often the trainer of each cell was started."""
    found = {}
    for run in sorted(base.glob("*/run.json")):
        lines = RunDir(run.parent).supervisor_jsonl.read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row.get("component") == "trainer"]
        found[run.parent.name] = sum(row.get("new") == "starting" for row in rows)
    return found


def test_a_cell_that_fails_ends_nothing_else_and_is_tried_again(
    tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "swept"
    sets = ['trainer.env.FAIL_AT="9","2"', "seed=0..1", "trainer.restart.policy=never"]
    words = [
        "sweep",
        str(path),
        *(f"--set={item}" for item in sets),
        "--steps",
        "3",
        "--parallel",
        "2",
    ]
    assert main.run([*words, "--run-dir", str(base)]) == Exit.COMPONENT_FAILED
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith('"')][:4]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ('"9"', "0", "3", "done"),
        ('"9"', "1", "3", "done"),
        ('"2"', "0", "1", "3"),
        ('"2"', "1", "1", "3"),
    ]
    assert "FAIL_AT-2_seed-0: run ended with code 3" in out and "the loss is not a number" in out
    assert "2 runs   1.000 (1.000 to 1.000)" in out, "over the seeds of those that are done"
    assert "</html>" in (base / "overlay.html").read_text()
    assert f"atropos-tui sweep --resume {base}" in out
    assert set(attempts(base).values()) == {1}
    assert not any(
        tracker.find_leftovers(read_json(file)["run_id"]) for file in base.glob("*/run.json")
    )
    used = [
        {part["port"] for part in read_json(file)["components"] if part["port"]}
        for file in base.glob("*/plan.json")
    ]
    assert len(set.union(*used)) == 4, "two places, two ports each"

    assert main.run(["sweep", "--resume", str(base), "--json"]) == Exit.COMPONENT_FAILED
    text = capsys.readouterr().out
    check("sweep", text)
    cells = json.loads(text)["cells"]
    assert [cell["exit_code"] for cell in cells] == [0, 0, 3, 3]
    assert [cell["benchmark"]["steps"] for cell in cells] == [3, 3, 1, 1]
    assert sorted(attempts(base).values()) == [1, 1, 2, 2], "what is done is not run again"


def swept(path: Path, base: Path) -> subprocess.Popen[str]:
    """A sweep over two seeds whose first run trains."""
    command = [
        sys.executable,
        "-m",
        "atropos_tui",
        "sweep",
        str(path),
        "--set",
        "seed=0..1",
        "--steps",
        "30",
    ]
    give_up = time.monotonic() + 60
    process = subprocess.Popen(
        [*command, "--run-dir", str(base)], stdout=subprocess.PIPE, text=True
    )
    while not (base / "seed-0" / "telemetry.jsonl").exists():
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_runs_of_a_sweep_that_was_killed_go_on_and_are_followed_first(
    tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "swept"
    with swept(path, base) as process:
        process.kill()
    assert main.run(["sweep", "--resume", str(base)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line[:2] in ("0 ", "1 ")] == [
        "done"
    ] * 2
    assert attempts(base) == {"seed-0": 1, "seed-1": 1}, (
        "what went on by itself was not begun again"
    )


def test_ctrl_c_stops_all_and_the_rest_is_done_later(
    tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "swept"
    process = swept(path, base)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED, out
    assert "seed-1: not started" in out and f"sweep --resume {base}" in out
    assert not (base / "seed-1").exists()
    assert read_json(base / "seed-0" / "result.json")["exit_code"] == 130
    began = read_json(base / "seed-0" / "run.json")["run_id"]
    assert main.run(["sweep", "--resume", str(base)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line[:2] in ("0 ", "1 ")] == [
        "done"
    ] * 2
    assert read_json(base / "seed-0" / "run.json")["run_id"] == began, (
        "it went on, and was not begun anew"
    )
    assert "--resume" not in out


def test_a_sweep_goes_on_only_as_it_was(
    tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["sweep", "--resume", str(tmp_path)]) == Exit.NO_RUN
    base = tmp_path / "swept"
    base.mkdir()
    (base / "sweep.json").write_text(
        Grid(profile=str(path), sets=["seed=0..1"], digest="other").model_dump_json()
    )
    assert main.run(["sweep", "--resume", str(base)]) == Exit.USAGE
    assert "the profile has changed" in capsys.readouterr().err
    assert (
        main.run(["sweep", str(path), "--set", "seed=0..1", "--run-dir", str(base)]) == Exit.USAGE
    )
    assert f"--resume {base}" in capsys.readouterr().err
    assert main.run(["sweep", "--resume", str(base), "--steps", "3"]) == Exit.USAGE
    assert main.run(["sweep"]) == Exit.USAGE
