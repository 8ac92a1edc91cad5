"""Decisions of the long benchmarks: order of faults, repeated steps, growth of a value."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import plan, table, wrong_steps
from benchmarks.runs.demo_stack import engine_processes, lost_steps
from benchmarks.runs.faults import FAULTS
from benchmarks.runs.long_run import Line, fit


def test_a_fault_depends_on_seed_mode_and_number_alone() -> None:
    offered = list(FAULTS)
    told = [plan(number, 1, "none", offered)[1:] for number in range(200)]
    assert told == [plan(number, 1, "none", offered)[1:] for number in range(200)]
    assert told != [plan(number, 2, "none", offered)[1:] for number in range(200)]
    assert told != [plan(number, 1, "broadcast", offered)[1:] for number in range(200)]
    assert {fault.name for (fault,) in told} == {fault.name for fault in FAULTS}


def test_faults_in_turn_come_equally_often() -> None:
    offered = list(FAULTS)
    told = [plan(number, 1, "none", offered, in_turn=True)[1:] for number in range(2 * len(FAULTS))]
    assert [fault.name for (fault,) in told] == [fault.name for fault in FAULTS] * 2


def test_steps_that_come_again_are_counted() -> None:
    steps = [(float(number), step) for number, step in enumerate([1, 2, 3, 4, 5, 4, 5, 6, 3, 4])]
    assert lost_steps(steps, 5) == 2 + 4
    assert lost_steps(steps, 8) == 4
    assert lost_steps(steps[:5], 3) == lost_steps([], 0) == 0


def test_an_attempt_begins_where_a_checkpoint_ends() -> None:
    def step(attempt: int, number: int) -> dict[str, object]:
        return {"kind": "step", "attempt": attempt, "step": number}

    saved = {"kind": "checkpoint", "step": 2}
    good = [step(1, 1), step(1, 2), saved, step(1, 3), step(2, 3), step(2, 4), step(3, 1)]
    assert wrong_steps(good, {}) == []
    assert wrong_steps([*good, step(4, 5)], {4: 4}) == [
        "attempt 4 begins with step 5; checkpoints: [0, 2]"
    ]
    killed = [*good, step(3, 2), step(4, 3)]
    assert wrong_steps(killed, {4: 2}) == [], (
        "the checkpoint was whole, and the trainer killed before it told of it"
    )
    assert wrong_steps([step(1, 1), step(1, 2), step(2, 3)], {}) != []
    assert wrong_steps([step(1, 1), step(1, 2), step(1, 3), step(2, 3)], {2: 2}) != [], (
        "it had gone on after it"
    )
    assert wrong_steps([{"kind": "alignment", "step": 7, "verdict": "mismatch"}], {}) == [
        "step 7 is a mismatch"
    ]


LIKE_AN_ENGINE = """
import multiprocessing, sys, time
import setproctitle

def work(titles, began):
    if titles[0]:
        setproctitle.setproctitle(titles[0])
    if titles[1:]:
        multiprocessing.Process(target=work, args=(titles[1:], began)).start()
    else:
        began.set()
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    from multiprocessing import resource_tracker
    resource_tracker.ensure_running()
    began = multiprocessing.Event()
    multiprocessing.Process(target=work, args=(sys.argv[2:], began)).start()
    began.wait()
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("titles", "kinds"),
    [
        (["VLLM::EngineCore", "VLLM::Worker_TP0"], ["core", "server", "worker"]),
        (["VLLM::EngineCore"], ["core", "server"]),
        (["", ""], ["core", "server", "worker"]),
        (["VLLM::EngineCore_DP0", ""], ["core", "server", "worker"]),
    ],
)
def test_an_engine_s_processes_are_found_with_and_without_titles(
    start: str, titles: list[str], kinds: list[str], tmp_path: Path
) -> None:
    """On a GPU they are spawned and have titles; on a CPU the core is forked and looks like its
    server."""
    (tmp_path / "engine.py").write_text(LIKE_AN_ENGINE)
    command = [sys.executable, str(tmp_path / "engine.py"), start, *titles]
    server = psutil.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert server.stdout.readline() == b"up\n"
        found = engine_processes(server.pid)
        assert sorted(found) == kinds
        assert found["server"].pid == server.pid == found["core"].ppid()
        if "worker" in found:
            assert found["worker"].ppid() == found["core"].pid
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        server.stdout.close()


def test_the_table_has_a_cell_for_each_kill_of_each_mode() -> None:
    row = {"fault": "SIGKILL trainer", "target": "trainer", "wrong": [], "load": 3.0, "lost": 2}
    rows = [row | {"mode": "none", "next_step_s": seconds} for seconds in (4.0, 6.0, 11.0)]
    rows += [row | {"mode": "broadcast", "wrong": ["it does not train"]}]
    shown = table(rows).splitlines()
    assert "| SIGKILL trainer | 4 | 6 (11), 3 | 8 | 1 |" in shown
    assert "| killed | broadcast | none |" in shown and "| trainer | - | 6 (11), 3 |" in shown


def test_growth_is_told_from_noise() -> None:
    steps = [float(step) for step in range(0, 1000, 10)]
    noise = [(-1) ** index * 5000.0 for index in range(100)]
    flat = fit(steps, [1e8 + each for each in noise])
    leak = fit(steps, [1e8 + 500 * step + each for step, each in zip(steps, noise, strict=True)])
    assert not flat.grows and leak.grows
    assert leak.slope == pytest.approx(500, abs=3 * leak.error) and leak.error < 10
    assert not Line(1e8, 1e8, 50.0, 1.0).grows, (
        "half a percent in ten thousand steps is not worth a name"
    )
    with pytest.raises(ValueError, match="three samples"):
        fit([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])
