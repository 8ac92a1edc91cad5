"""Replay: records, states and log lines follow the recording's clock, forward and back."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import pytest

from atropos_common.protocol.control import CommandRequest, Phase, State
from atropos_common.protocol.records import StateRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.replay import LINES_AT_ONCE, Recording, Replay, ReplayClock
from atropos_tui.monitor.run.run_files import load_run
from atropos_tui.monitor.run.state import RunState
from atropos_tui.supervisor.client import Refused
from atropos_tui.supervisor.processes.logs import TimesWriter
from tests.support.run_maker import T0, make_run, start_records, step_records, write_records


class Ticks:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


def play(run: RunDir, ticks: Ticks, speed: float = 1.0) -> Replay:
    return Replay(Recording.load(run), speed, ticks)


def read_all(replay: Replay, state: RunState) -> RunState:
    while True:
        batch = replay.feed.read()
        if batch.from_start:
            state = RunState()
        for record in batch.records:
            state.apply(record)
        if not batch.behind:
            return state


def ended(run: RunDir, code: int = 0) -> RunDir:
    """The run as a supervisor leaves it: its journal in order of time, and a result."""
    records = sorted(start_records(), key=lambda record: record.time)
    run.supervisor_jsonl.unlink()
    write_records(run.supervisor_jsonl, records)
    run.result_json.write_text(json.dumps({"exit_code": code, "reason": "trainer finished"}))
    return run


def test_the_clock_runs_stands_and_jumps_within_its_ends(ticks: Ticks) -> None:
    clock = ReplayClock(1000.0, 1100.0, 2.0, ticks)
    ticks.at += 5
    assert clock.now() == 1010.0
    clock.toggle()
    ticks.at += 50
    assert (clock.paused, clock.now()) == (True, 1010.0)
    clock.toggle()
    clock.faster(4)
    ticks.at += 1
    assert (clock.speed, clock.now()) == (8.0, 1018.0)
    clock.skip(-1)
    assert clock.now() == 1016.0
    clock.seek(1e9)
    assert clock.at_end
    ticks.at += 1
    assert clock.now() == 1100.0
    clock.toggle()
    assert (clock.now(), clock.paused) == (1000.0, False)
    for _ in range(40):
        clock.faster(0.5)
    ticks.at += 16
    assert clock.now() == 1001.0


def test_records_come_when_they_are_due_and_the_end_equals_the_file(
    tmp_path: Path, ticks: Ticks
) -> None:
    run = ended(make_run(tmp_path / "run", steps=30))
    replay = play(run, ticks)
    state = read_all(replay, RunState())
    assert state.step == 0
    for second in range(1, 43):
        ticks.at = 100.0 + second
        state = read_all(replay, state)
        now = replay.clock.now()
        assert all(at <= now for at in state.metric("loss").times)
        assert state.step == sum(T0 + 31 + 0.33 * step <= now for step in range(1, 31))
    _, whole, _ = load_run(run.root)
    assert state.metric("loss").values == whole.metric("loss").values
    assert state.evals["arithmetic/held_out"].values == whole.evals["arithmetic/held_out"].values
    assert list(state.transitions) == list(whole.transitions)
    assert list(state.rollouts) == list(whole.rollouts)


def test_the_status_is_that_of_the_moment(tmp_path: Path, ticks: Ticks) -> None:
    run = ended(make_run(tmp_path / "run", steps=30), code=3)
    replay = play(run, ticks)

    def states() -> dict[str, str]:
        replay.feed.read()
        return {
            row.name: row.state.value for row in asyncio.run(replay.control.status()).components
        }

    replay.clock.seek(T0 + 10)
    assert states() == {
        "prepare": "completed",
        "run-api": "healthy",
        "vllm": "starting",
        "env": "healthy",
        "trainer": "starting",
    }
    assert replay.feed.status.phase is Phase.STARTING
    replay.clock.seek(T0 + 33)
    assert set(states().values()) == {"completed", "healthy"}
    assert (replay.feed.status.phase, replay.feed.status.exit_code) == (Phase.RUNNING, None)
    replay.clock.seek(T0 + 999)
    states()
    assert (replay.feed.status.phase, replay.feed.status.exit_code) == (Phase.ENDED, 3)
    replay.clock.seek(T0 + 10)
    assert states()["vllm"] == "starting"


def test_a_jump_back_begins_anew_and_ends_where_a_straight_run_would(
    tmp_path: Path, ticks: Ticks
) -> None:
    run = ended(make_run(tmp_path / "run", steps=30))
    replay = play(run, ticks)
    replay.clock.seek(replay.clock.last)
    state = read_all(replay, RunState())
    assert state.step == 30
    replay.clock.seek(T0 + 31 + 0.33 * 12 + 0.01)
    state = read_all(replay, state)
    assert state.step == 12
    straight = read_all_at(run, replay.clock.now())
    assert state.metric("reward_mean").values == straight.metric("reward_mean").values
    assert state.supervisor_seq == straight.supervisor_seq


def read_all_at(run: RunDir, at: float) -> RunState:
    ticks = Ticks()
    replay = play(run, ticks)
    replay.clock.seek(at)
    return read_all(replay, RunState())


def test_a_clock_set_back_and_foreign_times_keep_the_order_of_the_file(
    tmp_path: Path, ticks: Ticks
) -> None:
    run = ended(make_run(tmp_path / "run", steps=0))
    rng = random.Random(1)
    steps = [
        r
        for step in range(1, 7)
        for r in step_records(step, rng, time=T0 + (40 if step < 4 else 20) + step)
    ]
    write_records(run.telemetry_jsonl, steps)
    odd = [
        StateRecord(time=at, component="vllm", old="healthy", new=new)
        for at, new in (
            (0.0, "unhealthy"),
            (0.0, "backoff"),
            (0.0, "starting"),
            (T0 + 60, "healthy"),
        )
    ]
    write_records(run.supervisor_jsonl, list(odd), start=50)
    recording = Recording.load(run)
    assert recording.times == sorted(recording.times)
    assert (recording.times[0], recording.times[-1]) == (T0, T0 + 60)
    order = [record.step for record in recording.records if getattr(record, "step", 0)]
    assert order == sorted(order)
    replay = Replay(recording, 1.0, ticks)
    replay.clock.seek(recording.times[-1])
    state = read_all(replay, RunState())
    assert [record.new for record in state.transitions if record.component == "vllm"][-4:] == [
        "unhealthy",
        "backoff",
        "starting",
        "healthy",
    ]


def test_lines_that_are_no_records_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    with run.telemetry_jsonl.open("ab") as file:
        file.write(b'\xff\n{"kind": "step"}\n{"kind": "new", "time": 5}\n{"kind": "st')
    recording = Recording.load(run)
    assert recording.bad_lines == 2
    assert recording.records
    empty = RunDir(tmp_path / "none")
    assert Recording.load(empty).records == []


def test_every_command_is_refused_with_the_way_out(tmp_path: Path, ticks: Ticks) -> None:
    replay = play(make_run(tmp_path / "run", steps=3), ticks)
    with pytest.raises(Refused, match="this is a replay"):
        asyncio.run(replay.control.recipe("restart", "vllm"))
    with pytest.raises(Refused, match="attach"):
        asyncio.run(replay.control.command(CommandRequest(action="down")))


def timed_log(path: Path, lines: list[tuple[float, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A log as the supervisor writes it, with the time of each line beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = TimesWriter(path)
    with path.open("wb", buffering=0) as file:
        writer.begin(file.fileno())
        for at, text in lines:
            monkeypatch.setattr("time.time", lambda at=at: at)
            writer.mark(file.tell())
            file.write(text.encode() + b"\n")
    writer.close()
    monkeypatch.undo()


def test_log_lines_come_when_they_were_printed_and_merge(
    tmp_path: Path, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended(make_run(tmp_path / "run", steps=30))
    timed_log(
        run.log("vllm", 1), [(T0 + at, f"vllm at {at}") for at in range(0, 40, 2)], monkeypatch
    )
    timed_log(run.log("env", 1), [(T0 + at, f"env at {at}") for at in (1, 3)], monkeypatch)
    timed_log(
        run.log("env", 2),
        [(T0 + at, f"env again \x1b[31mat\x1b[0m {at}") for at in (5, 35)],
        monkeypatch,
    )
    replay = play(run, ticks)
    ticks.at += 4.5
    assert [entry.text for entry in replay.logs.read(("vllm",))] == [
        "vllm at 0",
        "vllm at 2",
        "vllm at 4",
    ]
    assert replay.logs.read(("vllm",)) == []
    assert replay.logs.path("vllm") == run.log("vllm", 1)
    ticks.at += 2
    assert [entry.text for entry in replay.logs.read(("vllm",))] == ["vllm at 6"]
    merged = [entry.text for entry in replay.logs.read(("vllm", "env"))]
    assert merged == [
        "vllm at 0",
        "env at 1",
        "vllm at 2",
        "env at 3",
        "vllm at 4",
        "── attempt 2 of env ──",
        "env again at 5",
        "vllm at 6",
    ]
    replay.clock.seek(T0 + 2.5)
    assert [entry.text for entry in replay.logs.read(("vllm",))] == ["vllm at 0", "vllm at 2"]


def test_a_flood_is_shown_by_its_end_and_says_what_it_left_out(
    tmp_path: Path, ticks: Ticks
) -> None:
    run = ended(make_run(tmp_path / "run", steps=30))
    log = run.log("vllm", 1)
    log.write_text("".join(f"line {at}\n" for at in range(5_000)))
    os.utime(log, (T0 + 5, T0 + 5))
    replay = play(run, ticks)
    assert replay.logs.read(("vllm",)) == []
    ticks.at += 6
    entries = replay.logs.read(("vllm",))
    assert len(entries) == LINES_AT_ONCE + 1
    assert entries[0].kind == "note"
    assert "4,500 lines passed over" in entries[0].text
    assert entries[-1].text == "line 4999"


def test_states_of_the_recording_are_known_states(tmp_path: Path, ticks: Ticks) -> None:
    """A newer supervisor may know more: such a transition is passed over."""
    run = make_run(tmp_path / "run", steps=3)
    odd = [StateRecord(time=T0 + 2, component="vllm", old="starting", new="hibernating")]
    write_records(run.supervisor_jsonl, list(odd), start=50)
    replay = play(run, ticks)
    replay.clock.seek(T0 + 31)
    replay.feed.read()
    assert all(row.state in State for row in replay.feed.status.components)
