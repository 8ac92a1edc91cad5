"""The line for each optimizer step of a headless run: newest steps, at a limited rate, none of an
earlier start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_common.protocol.record_base import Record
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import show
from atropos_tui.cli.show import StepLines


def write(run: RunDir, *records: Record) -> None:
    with run.telemetry_jsonl.open("a") as file:
        file.writelines(record.to_line() for record in records)


def step(number: int, *, rank: int = 0, at: float | None = None) -> list[Record]:
    common = {"step": number, "rank": rank, "time": time.time() if at is None else at}
    return [
        StepRecord(
            loss=-0.0123,
            reward_mean=0.5,
            reward_std=0.1,
            lr=1e-4,
            grad_norm=1.0,
            ratio_mean=1.0,
            clip_fraction=0.0,
            tokens=100,
            sequences=8,
            weight_version=number,
            **common,
        ),
        TimingRecord(
            step_s=2.5,
            data_wait_s=0.1,
            train_s=0.2,
            sync_s=0.3,
            checkpoint_s=0.0,
            tokens_per_s=5120.0,
            **common,
        ),
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.create()
    return found


def test_a_line_says_what_matters(run: RunDir) -> None:
    said: list[str] = []
    lines = StepLines(run, 60, said.append)
    write(run, *step(7))
    lines.look()
    clock, rest = said[0].split("  ", 1)
    assert len(clock.split(":")) == 3
    words = "trainer step 7/60 reward 0.500 loss -0.012 2.50 s/step 5,120 tok/s"
    assert rest.split() == words.split()


def test_fast_steps_are_told_now_and_then_and_the_last_in_any_case(run: RunDir) -> None:
    said: list[str] = []
    lines = StepLines(run, None, said.append)
    for number in range(1, 51):
        write(run, *step(number))
        lines.look()
    assert [line.split("step ")[1].split()[0] for line in said] == ["1"]
    lines.finish()
    lines.finish()
    assert [line.split("step ")[1].split()[0] for line in said] == ["1", "50"]


def test_slow_steps_are_told_one_by_one(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "STEP_LINE_EVERY_S", 0.0)
    said: list[str] = []
    lines = StepLines(run, None, said.append)
    for number in range(1, 6):
        write(run, *step(number), *step(number + 100, rank=1))
        lines.look()
    assert [line.split("step ")[1].split()[0] for line in said] == ["1", "2", "3", "4", "5"]


def test_what_was_there_before_is_not_told_again(run: RunDir) -> None:
    write(run, *step(1), *step(2, at=time.time() + 60))
    said: list[str] = []
    lines = StepLines(run, None, said.append)
    write(run, *step(3, at=5.0))
    lines.finish()
    assert said == []
    run.telemetry_jsonl.unlink()
    write(run, *step(1, at=6.0), *step(4))
    lines.finish()
    assert ["step 4" in line for line in said] == [True]


async def test_beside_a_run_and_whatever_its_end(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "READ_EVERY_S", 0.01)
    said: list[str] = []

    async def work() -> int:
        write(run, *step(1))
        while not said:
            await asyncio.sleep(0.01)
        write(run, *step(2))
        raise ValueError("the stack broke")

    with pytest.raises(ValueError, match="the stack broke"):
        await StepLines(run, None, said.append).beside(work())
    assert ["step 1" in said[0], "step 2" in said[-1]] == [True, True]


@pytest.mark.parametrize("reads", [False, True])
def test_the_end_waits_a_while_for_a_reader_that_stands_still(reads: bool) -> None:
    code = (
        "import sys\n"
        "from atropos_tui.cli import show\n"
        "with show.Printer() as printer:\n"
        "    for _ in range(2000): printer.say('a line ' * 20)\n"
        "with show.exit_if_blocked(7, patience_s=float(sys.argv[1])):\n"
        "    print('the end', flush=True)\n"
        "sys.exit(3)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "60" if reads else "0.2"], stdout=subprocess.PIPE
    )
    try:
        if reads:
            assert child.communicate(timeout=60)[0].endswith(b"the end\n") and child.returncode == 3
        else:
            assert child.wait(timeout=60) == 7, "left with the run's code"
    finally:
        child.kill()
        child.communicate()
