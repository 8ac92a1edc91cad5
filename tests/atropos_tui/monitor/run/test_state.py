"""`RunState.apply`, the pace derived from it, and the files of a run that is over."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from atropos_common.protocol.control import Phase, Role, State
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import (
    CommandRecord,
    DiagnosisRecord,
    EnvCountsRecord,
    EvalRecord,
    StateRecord,
    parse_line,
)
from atropos_common.protocol.trainer_records import (
    AlignmentRecord,
    BenchmarkRecord,
    CheckpointRecord,
    MemoryRecord,
    SyncRecord,
    TimingRecord,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.bench import pace
from atropos_tui.monitor.run.run_files import (
    RunFeed,
    RunInfo,
    flag,
    load_run,
    read_info,
    status_from_files,
)
from atropos_tui.monitor.run.state import ROLLOUTS_KEPT, RunState
from tests.support.run_maker import RUN_ID, T0, make_run, step_records, write_records


def fed(*records: Record) -> RunState:
    state = RunState()
    for record in records:
        state.apply(record)
    return state


def timing(
    step: int, *, time: float = 0.0, attempt: int = 1, step_s: float = 1.0, wait: float = 0.4
) -> TimingRecord:
    return TimingRecord(
        step=step,
        attempt=attempt,
        time=time,
        step_s=step_s,
        data_wait_s=wait,
        train_s=0.3,
        sync_s=0.1,
        checkpoint_s=0.0,
        tokens_per_s=100.0,
    )


def steps(numbers: range, attempt: int = 1) -> list[Record]:
    rng = random.Random(attempt)
    return [record for step in numbers for record in step_records(step, rng, attempt=attempt)]


def test_values_equal_those_in_the_records() -> None:
    records = steps(range(1, 6))
    state = fed(*records)
    rewards = [record.reward_mean for record in records if record.kind == "step"]  # type: ignore[attr-defined]
    assert list(state.metric("reward_mean").values) == rewards
    assert list(state.metric("reward_mean").steps) == [1, 2, 3, 4, 5]
    assert state.step == 5


def test_nan_is_kept_and_a_missing_value_is_no_point() -> None:
    line = AlignmentRecord(
        step=1, logprob_diff_abs_mean=math.nan, probe_diff_abs_mean=None
    ).to_line()
    state = fed(parse_line(line), MemoryRecord(step=1, rss_bytes=5, peak_bytes=None))
    assert math.isnan(state.metric("logprob_diff_abs_mean").values[0])
    assert len(state.metric("probe_diff_abs_mean")) == 0
    assert state.metric("probe_diff_abs_mean").last is None
    assert state.metric("peak_bytes").last is None
    assert state.metric("never heard of").last is None


def test_a_later_attempt_takes_over_from_its_first_step() -> None:
    first, second = steps(range(1, 11)), steps(range(7, 9), attempt=2)
    state = fed(*first, *second)
    rewards = {r.step: r.reward_mean for r in first + second if r.kind == "step"}  # type: ignore[attr-defined]
    assert list(state.metric("reward_mean").steps) == list(range(1, 9))
    assert list(state.metric("reward_mean").values) == [rewards[step] for step in range(1, 9)]
    assert state.step == 8
    assert {(r.attempt, r.step) for r in state.rollouts} == {(1, s) for s in range(1, 7)} | {
        (2, 7),
        (2, 8),
    }


def test_records_of_an_earlier_attempt_that_come_late_are_dropped() -> None:
    late = steps(range(3, 6))
    state = fed(*steps(range(1, 3)), *steps(range(4, 6), attempt=2), *late)
    own = {r.step: r.reward_mean for r in steps(range(4, 6), attempt=2) if r.kind == "step"}  # type: ignore[attr-defined]
    assert list(state.metric("reward_mean").steps) == [1, 2, 3, 4, 5]
    assert list(state.metric("reward_mean").values[3:]) == [own[4], own[5]]
    assert state.alignment is not None
    assert state.alignment.step in (3, 5)


def test_attaching_at_a_checkpoint_does_not_cut_the_step_that_it_holds() -> None:
    resumed = SyncRecord(step=6, attempt=2, mode="shared_vllm", weight_version=6, seconds=0.1)
    state = fed(*steps(range(1, 11)), resumed, *steps(range(7, 8), attempt=2))
    assert list(state.metric("loss").steps) == [1, 2, 3, 4, 5, 6, 7]


def test_the_summary_and_checkpoints_of_a_superseded_attempt_are_gone() -> None:
    summary = BenchmarkRecord(
        step=10,
        attempt=1,
        mode="m",
        total_s=1,
        steps=10,
        avg_step_s=1,
        total_step_s=1,
        avg_sync_s=0,
        syncs=0,
        total_sync_s=0,
        avg_data_wait_s=0,
        total_data_wait_s=0,
        tokens_per_s=1,
    )
    saved = [
        CheckpointRecord(step=step, path=f"step_{step}", seconds=1, bytes=1) for step in (5, 10)
    ]
    state = fed(*steps(range(1, 11)), *saved, summary, *steps(range(6, 7), attempt=2))
    assert state.benchmark is None
    assert [record.path for record in state.checkpoints] == ["step_5"]


def test_other_ranks_do_not_draw() -> None:
    state = fed(MemoryRecord(step=1, rss_bytes=10), MemoryRecord(step=1, rank=1, rss_bytes=99))
    assert list(state.metric("rss_bytes").values) == [10]


def test_text_is_bounded() -> None:
    state = fed(*steps(range(1, ROLLOUTS_KEPT)))
    assert len(state.rollouts) == ROLLOUTS_KEPT
    assert state.rollouts[-1].step == ROLLOUTS_KEPT - 1


def test_evaluations_stand_over_weight_versions() -> None:
    common = {"correct": 1, "questions": 2}
    state = fed(
        EvalRecord(env="a", accuracy=0.1, weight_version=0, policy_step=7, **common),
        EvalRecord(env="a", accuracy=0.5, weight_version=10, **common),
        EvalRecord(env="b", accuracy=0.2, policy_step=3, **common),
    )
    assert list(state.evals["a/held_out"].steps) == [0, 10]
    assert list(state.evals["b/held_out"].steps) == [3]


def test_supervisor_records_are_taken_once() -> None:
    moves = [StateRecord(seq=n, component="vllm", old="pending", new="starting") for n in range(3)]
    state = fed(*moves, *moves)
    assert [record.seq for record in state.transitions] == [0, 1, 2]


def test_a_command_is_open_until_it_is_over() -> None:
    def said(seq: int, status: str) -> CommandRecord:
        return CommandRecord(
            seq=seq, command_id="c", action="restart", status=status, component="vllm"
        )  # type: ignore[arg-type]

    assert [c.command_id for c in fed(said(0, "accepted")).open_commands()] == ["c"]
    assert [c.status for c in fed(said(0, "accepted"), said(1, "running")).open_commands()] == [
        "running"
    ]
    assert fed(said(0, "accepted"), said(1, "done")).open_commands() == []
    assert fed(said(0, "refused")).open_commands() == []


def test_unknown_kinds_are_counted() -> None:
    assert fed(Record(kind="hologram"), EnvCountsRecord(env="e", sent=1)).unknown == 1


def test_pace_splits_a_step_and_counts_down() -> None:
    state = fed(*(timing(step, time=100 + 2.0 * step) for step in range(1, 11)))
    state.step = 10
    now = pace(state, 60)
    assert now.step_s == 1.0
    assert now.parts == pytest.approx(
        {"wait": 0.4, "train": 0.3, "sync": 0.1, "checkpoint": 0.0, "other": 0.2}
    )
    assert now.eta_s == 50 * 2.0
    assert now.steps_per_hour == 1800
    assert now.tokens_per_s == 100


def test_pace_weighs_tokens_by_time_not_by_step() -> None:
    state = fed(
        timing(1, step_s=1.0),
        TimingRecord.model_validate(dict(timing(2, step_s=3.0)) | {"tokens_per_s": 20}),
    )
    assert pace(state, None).tokens_per_s == (100 * 1 + 20 * 3) / 4


def test_pace_without_data_is_no_data() -> None:
    now = pace(RunState(), 60)
    assert (now.step_s, now.tokens_per_s, now.steps_per_hour, now.eta_s) == (None, None, None, None)
    assert set(now.parts.values()) == {None}


def test_a_restart_is_not_a_slow_step() -> None:
    before = [timing(step, time=float(step)) for step in range(1, 11)]
    after = [timing(step, time=500.0 + step, attempt=2) for step in range(11, 14)]
    state = fed(*before, *after)
    state.step = 13
    assert pace(state, 23).eta_s == 10.0


def test_a_step_that_no_run_reaches_is_left_out() -> None:
    state = fed(timing(1), timing(2**53 + 1), timing(2**62))
    assert list(state.metric("step_s").steps) == [1]
    assert list(state.attempt_steps.values()) == [1]


def test_pace_shows_nan() -> None:
    state = fed(timing(1), timing(2, step_s=math.nan))
    assert math.isnan(pace(state, None).step_s or 0.0)


def test_the_feed_starts_over_when_a_stream_is_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    feed = RunFeed(run)
    while feed.read().behind:
        pass
    run.telemetry_jsonl.write_text("")
    batch = feed.read()
    assert batch.from_start
    assert batch.behind
    write_records(run.telemetry_jsonl, steps(range(1, 3)))
    again = fed(*feed.read().records)
    assert again.step == 2
    assert len(again.transitions) == 10


def test_bad_lines_count_once_though_the_feed_starts_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with run.supervisor_jsonl.open("a") as file:
        file.write("garbage\n")
    feed = RunFeed(run)
    feed.read()
    run.telemetry_jsonl.write_text("garbage\n" * 3)
    while feed.read().behind:
        pass
    assert feed.bad_lines == 4


def test_the_feed_leaves_out_what_a_state_would_forget(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2000)
    feed, tail, all_of_it, read = RunFeed(run), RecordTail(run.telemetry_jsonl), RunState(), 0
    while records := tail.read():
        for record in records:
            all_of_it.apply(record)
    state = RunState()
    while True:
        batch = feed.read()
        read += len(batch.records)
        for record in batch.records:
            state.apply(record)
        if not batch.behind:
            break
    assert list(state.rollouts) == list(all_of_it.rollouts) and len(state.rollouts) == ROLLOUTS_KEPT
    assert state.series == all_of_it.series
    assert read < 2000 * 5 + 2 * ROLLOUTS_KEPT < 2000 * 9, "most rollouts were not even parsed"


def test_what_a_run_is_comes_from_its_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", training_steps=77)
    info = read_info(run)
    assert (info.name, info.mode, info.training_steps) == ("demo", "shared_vllm", 77)
    assert [(part.name, part.role) for part in info.components][-1] == ("trainer", Role.TRAINER)
    run.plan_json.write_text('{"components": [3, {"name": 4}, {"name": "x", "role": "wizard"}]')
    assert read_info(run).training_steps is None
    run.plan_json.write_text('{"components": [3, {"name": 4}, {"name": "x", "role": "wizard"}]}')
    assert [(part.name, part.role) for part in read_info(run).components] == [("x", Role.OTHER)]
    assert read_info(RunDir(tmp_path / "nowhere")).name == "nowhere"


@pytest.mark.parametrize("steps", ["9" * 5000, "9" * 400, "9" * 16, "-3", "x", ""])
def test_a_number_of_steps_that_no_run_has_is_none(tmp_path: Path, steps: str) -> None:
    run = RunDir(tmp_path)
    parts = [
        {
            "name": "t",
            "role": "trainer",
            "command": ["--training-steps", steps],
            "port": 10**400,
            "start_timeout_s": 10**400,
        }
    ]
    run.plan_json.write_text(json.dumps({"components": parts}))
    info = read_info(run)
    assert (info.training_steps, info.components[0].port) == (None, None)


@pytest.mark.parametrize("started", [10**400, 1e300, -1, float("nan"), "x"])
def test_a_run_that_began_at_no_time_of_this_world_has_no_start(
    tmp_path: Path, started: object
) -> None:
    run = RunDir(tmp_path)
    run.run_json.write_text(json.dumps({"started_at": started}))
    assert status_from_files(run, RunInfo(), RunState()).started_at == 0.0


def test_flags_are_found_in_either_spelling() -> None:
    assert flag(["python", "--steps", "3"], "--steps") == "3"
    assert flag(["python", "--steps=4"], "--steps") == "4"
    assert flag(["python", "--steps"], "--steps") == ""


def test_the_end_of_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    write_records(
        run.supervisor_jsonl,
        [
            StateRecord(
                time=T0 + 50,
                component="vllm",
                role="engine",
                old="healthy",
                new="backoff",
                attempt=1,
                reason="killed",
                exit_code=-9,
            ),
            StateRecord(
                time=T0 + 60,
                component="vllm",
                role="engine",
                old="backoff",
                new="failed",
                attempt=2,
                reason="gave up",
            ),
            DiagnosisRecord(component="vllm", title="out of memory", fix="lower it"),
        ],
        start=10,
    )
    run.result_json.write_text(json.dumps({"exit_code": 3, "reason": "vllm failed"}))
    info, state, _ = load_run(run.root)
    status = status_from_files(run, info, state)
    rows = {row.name: row for row in status.components}
    assert (status.phase, status.exit_code, status.reason) == (Phase.ENDED, 3, "vllm failed")
    assert status.run_id == RUN_ID
    assert [row.name for row in status.components] == [
        "prepare",
        "run-api",
        "vllm",
        "env",
        "trainer",
    ]
    assert (rows["vllm"].state, rows["vllm"].restarts, rows["vllm"].exit_code) == (
        State.FAILED,
        1,
        -9,
    )
    assert (rows["vllm"].reason, rows["vllm"].diagnosis, rows["vllm"].pid) == (
        "gave up",
        "out of memory",
        None,
    )
    assert rows["trainer"].state is State.HEALTHY


def test_a_run_directory_without_files_is_an_empty_run(tmp_path: Path) -> None:
    info, state, _ = load_run(tmp_path / "nothing")
    status = status_from_files(RunDir(tmp_path / "nothing"), info, state)
    assert status.components == []
    assert status.exit_code is None


def test_once_there_is_a_summary_the_pace_covers_the_whole_run() -> None:
    state = fed(*(timing(step, step_s=9.0 if step == 1 else 1.0) for step in range(1, 41)))
    assert pace(state, None).step_s == 1.0
    state.apply(
        BenchmarkRecord(
            step=40,
            mode="m",
            total_s=1,
            steps=40,
            avg_step_s=1,
            total_step_s=1,
            avg_sync_s=0,
            syncs=0,
            total_sync_s=0,
            avg_data_wait_s=0,
            total_data_wait_s=0,
            tokens_per_s=1,
        )
    )
    assert pace(state, None).step_s == 48 / 40
