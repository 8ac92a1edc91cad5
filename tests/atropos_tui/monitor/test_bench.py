"""The BENCHMARK SUMMARY: the trainer's own record or computed from its steps; ratios side by
side."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest

from atropos_common.protocol.control import Role
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import EnvCountsRecord, parse_line
from atropos_common.protocol.trainer_records import (
    BenchmarkRecord,
    StepRecord,
    SyncRecord,
    TimingRecord,
)
from atropos_tui.monitor.bench import (
    benchmark_run,
    benchmark_runs,
    benchmark_state,
    benchmarks_json,
    render_benchmarks,
    token_use,
)
from atropos_tui.monitor.run.run_files import PlannedComponent, RunInfo
from atropos_tui.monitor.run.state import RunState, ThrownAway
from tests.support.run_maker import make_run, step_records, write_records


def summary(**changes: object) -> BenchmarkRecord:
    fields: dict[str, object] = {
        "step": 10,
        "mode": "shared_vllm",
        "total_s": 168.65,
        "steps": 50,
        "avg_step_s": 11.95,
        "total_step_s": 59.76,
        "avg_sync_s": 0.0,
        "syncs": 0,
        "total_sync_s": 0.0,
        "avg_data_wait_s": 10.9,
        "total_data_wait_s": 54.52,
        "peak_bytes": 31_440_000_000,
        "avg_bytes": 18_880_000_000,
        "tokens_per_s": 1234.5,
    }
    return BenchmarkRecord.model_validate(fields | changes)


def test_the_guides_block_is_reproduced_from_the_trainers_record(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    write_records(run.telemetry_jsonl, [summary()])
    text = render_benchmarks([benchmark_run(run.root)])
    for line in (
        "BENCHMARK SUMMARY (shared_vllm)\n",
        "Total training time:     168.65s (2.81 min)",
        "Total steps:             50",
        "Avg step time:         11.95s",
        "Total step time:       59.76s",
        "(x0 syncs)",
        "Avg data fetch time:   10.90s",
        "Peak GPU memory:       31.44 GB",
        "Avg GPU memory:        18.88 GB",
    ):
        assert line in text


def test_an_unfinished_run_is_measured_from_its_records(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12)
    records = [parse_line(line) for line in run.telemetry_jsonl.read_text().splitlines()]
    timings = [record for record in records if isinstance(record, TimingRecord)]
    figures = benchmark_run(run.root)
    assert figures.source == "records"
    assert figures.steps == 12
    assert figures.syncs == 12
    assert figures.total_step_s == pytest.approx(sum(record.step_s for record in timings))
    assert figures.avg_data_wait_s == pytest.approx(
        sum(record.data_wait_s for record in timings) / 12
    )
    tokens = sum(record.tokens_per_s * record.step_s for record in timings)
    assert figures.tokens_per_s == pytest.approx(tokens / sum(record.step_s for record in timings))
    rewards = [record.reward_mean for record in records if isinstance(record, StepRecord)]
    assert figures.reward_last == pytest.approx(sum(rewards[-5:]) / 5)
    assert figures.peak_bytes is None
    text = render_benchmarks([figures])
    assert "12 steps, 1 attempt of the trainer" in text
    assert "Peak GPU memory:       no data" in text


def test_a_step_that_moves_nothing_to_the_engine_is_no_sync(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    extra = SyncRecord(
        step=3, mode="none", weight_version=4, seconds=100.0, phases={"write": 100.0}, moved=False
    )
    write_records(run.telemetry_jsonl, [extra])
    figures = benchmark_run(run.root)
    assert figures.syncs == 3
    assert figures.avg_sync_s is not None and figures.avg_sync_s < 10


def test_after_a_restart_the_last_attempts_summary_does_not_stand_for_the_run(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", steps=10)
    rng = random.Random(1)
    write_records(
        run.telemetry_jsonl,
        [r for step in range(8, 13) for r in step_records(step, rng, attempt=2)],
    )
    write_records(run.telemetry_jsonl, [summary(attempt=2, steps=5)])
    figures = benchmark_run(run.root)
    assert (figures.source, figures.attempts, figures.steps, figures.syncs) == (
        "records",
        2,
        12,
        12,
    )


def test_runs_are_compared_to_the_first(tmp_path: Path) -> None:
    for name, seconds in (("a", 2.0), ("b", 3.0)):
        run = make_run(tmp_path / name, steps=3)
        write_records(run.telemetry_jsonl, [summary(avg_step_s=seconds)])
    text = render_benchmarks([benchmark_run(tmp_path / "a"), benchmark_run(tmp_path / "b")])
    row = next(line for line in text.splitlines() if line.startswith("Avg step"))
    assert row.split() == ["Avg", "step", "2.00s", "3.00s", "(x1.50)"]


def test_runs_of_the_same_name_go_by_the_folder_above_too(tmp_path: Path) -> None:
    roots = [make_run(tmp_path / name / "run", steps=2).root for name in ("one", "two")]
    roots.append(make_run(tmp_path / "other", steps=2).root)
    assert [figures.run for figures in benchmark_runs(roots)] == ["one/run", "two/run", "other"]


def test_every_ratio_of_the_table_is_in_the_json(tmp_path: Path) -> None:
    for name, seconds in (("a", 2.0), ("b", 3.0)):
        run = make_run(tmp_path / name, steps=3)
        write_records(run.telemetry_jsonl, [summary(avg_step_s=seconds, avg_sync_s=0.0)])
    runs = benchmark_runs([tmp_path / "a", tmp_path / "b"])
    first, second = json.loads(benchmarks_json(runs))["runs"]
    assert "ratios" not in first
    assert second["ratios"]["avg_step_s"] == 1.5
    assert "avg_sync_s" not in second["ratios"]
    shown = [float(found) for found in re.findall(r"\(x(\S+)\)", render_benchmarks(runs))]
    assert shown == [round(value, 2) for value in second["ratios"].values()]


def test_held_out_accuracy_and_figures_beyond_reason_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    figures = benchmark_run(run.root)
    assert figures.held_out == pytest.approx(0.2 + 0.5 * (1 - math.exp(-1)))
    assert f"Accuracy held out:     {figures.held_out:.3f}" in render_benchmarks([figures])
    write_records(
        run.telemetry_jsonl,
        [summary(avg_step_s=float("nan"), total_s=1e300, avg_sync_s=float("inf"))],
    )
    text = render_benchmarks([benchmark_run(run.root)])
    for line in (
        "Avg step time:         NaN\n",
        "Total training time:     1.0e+300",
        "Avg sync time:         ∞",
    ):
        assert line in text


def test_an_empty_run_has_no_data_and_no_zeros(tmp_path: Path) -> None:
    figures = benchmark_run(tmp_path / "empty")
    assert (figures.avg_step_s, figures.tokens_per_s, figures.reward_last) == (None, None, None)
    assert "Avg step time:         no data" in render_benchmarks([figures])


def test_a_clock_that_was_set_back_leaves_no_negative_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    rng = random.Random(1)
    records = [record for step in range(1, 7) for record in step_records(step, rng)]
    write_records(
        run.telemetry_jsonl,
        [r.model_copy(update={"time": r.time - 100.0 * r.step}) for r in records],
    )
    figures = benchmark_run(run.root)
    assert (figures.source, figures.steps, figures.total_s) == ("records", 6, None)
    assert figures.total_step_s is not None and figures.total_step_s > 0
    assert "Total training time:     no data" in render_benchmarks([figures])


def test_a_negative_figure_of_the_trainer_is_no_data(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    write_records(
        run.telemetry_jsonl, [summary(total_s=-5.0, avg_data_wait_s=-0.2, tokens_per_s=-9.0)]
    )
    figures = benchmark_run(run.root)
    assert (figures.source, figures.total_s, figures.avg_data_wait_s) == ("trainer", None, None)
    assert figures.tokens_per_s is None and figures.avg_sync_s == 0.0
    assert "-" not in render_benchmarks([figures]).replace("---", "")


def test_json_is_strict(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    write_records(run.telemetry_jsonl, [summary(avg_step_s=float("nan"))])
    data = json.loads(
        benchmarks_json([benchmark_run(run.root)]), parse_constant=lambda name: pytest.fail(name)
    )
    assert data["runs"][0]["avg_step_s"] == "NaN"
    assert data["runs"][0]["run"] == "run"


def test_a_mode_that_would_command_the_terminal_is_made_plain(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    write_records(
        run.telemetry_jsonl,
        [summary(mode="\x1b]52;c;eA==\x07shared\nvllm\x1b[2J", peak_bytes=10**400)],
    )
    figures = [benchmark_run(run.root)] * 2
    for text in (render_benchmarks(figures[:1]), render_benchmarks(figures)):
        assert "\x1b" not in text and "(shared⏎vllm)" in text
    assert "Peak GPU memory:       ∞" in render_benchmarks(figures[:1])


def test_the_two_idle_shares_are_means_by_seconds(tmp_path: Path) -> None:
    """A step of 9 s counts nine times one of 1 s; a step that tells nothing counts not at all."""
    run = make_run(tmp_path / "run", steps=0)
    base = {"train_s": 0.1, "sync_s": 0.1, "checkpoint_s": 0.0, "tokens_per_s": 10.0}
    told = [(9.0, 8.0, 0.5), (1.0, 0.0, 1.0), (10.0, 2.0, None)]
    records = [
        TimingRecord(step=at, step_s=step_s, data_wait_s=wait_s, engine_idle_fraction=idle, **base)
        for at, (step_s, wait_s, idle) in enumerate(told, 1)
    ]
    write_records(run.telemetry_jsonl, records)
    figures = benchmark_run(run.root)
    assert figures.engine_idle_fraction == pytest.approx((9 * 0.5 + 1) / 10)
    (row,) = json.loads(benchmarks_json([figures]))["runs"]
    assert figures.waiting_share == row["waiting_share"] == pytest.approx(10 / 20)
    text = render_benchmarks([figures])
    assert "    Trainer waiting:       50%\n" in text and "    Engine idle:           55%\n" in text


def _counts(at: float, **tokens: int) -> EnvCountsRecord:
    return EnvCountsRecord(env="sums", time=at, sent=1, sent_tokens=0, left_out_tokens=tokens)


def _steps(count: int, *, accepted: float, generated: int | None, **lost: int) -> list[Record]:
    """Steps of two seconds, from second 2 on."""
    base = {"data_wait_s": 1.0, "train_s": 1.0, "sync_s": 0.0, "checkpoint_s": 0.0}
    records: list[Record] = []
    for step in range(1, count + 1):
        (made,) = [r for r in step_records(step, random.Random(1)) if isinstance(r, StepRecord)]
        records += [
            made.model_copy(update={"left_out_tokens": lost, "time": 2.0 * step}),
            TimingRecord(
                step=step,
                time=2.0 * step,
                step_s=2.0,
                tokens_per_s=1.0,
                accepted_tokens_per_s=accepted,
                generated_tokens=generated,
                **base,
            ),
        ]
    return records


def test_every_generated_token_is_accepted_or_thrown_away_for_a_reason() -> None:
    state = RunState()
    for record in [
        *_steps(10, accepted=200.0, generated=1000, too_old=50, malformed=10),
        _counts(0.0),
        _counts(20.0, flat=4000, none=100),
    ]:
        state.apply(record)
    use = token_use(state, 2)
    assert use is not None and use.unit == "tokens/s/GPU"
    assert use.accepted_per_s == 100.0 and use.accepted == pytest.approx(0.4)
    assert use.thrown_away == pytest.approx(
        {"flat": 0.4, "other": 0.13, "too_old": 0.05, "malformed": 0.01, "none": 0.01}
    )
    assert list(use.thrown_away)[:3] == ["flat", "other", "too_old"], "largest first"
    assert use.accepted + sum(use.thrown_away.values()) == pytest.approx(1.0)
    figures = benchmark_state(state, run="run", mode="none", gpus=2)
    assert figures.accepted_tokens_per_s == 200.0
    assert figures.accepted_tokens_per_s_per_gpu == 100.0
    text = render_benchmarks([figures])
    assert "  Accepted tokens/s/GPU:   100 (2 GPUs)\n" in text
    assert "  Thrown away:             60%: flat 40%, other 13%, too old 5%" in text
    assert "flat 40%" in render_benchmarks([figures, figures])
    on_cpu = benchmark_state(state, run="run", mode="none")
    assert on_cpu.accepted_tokens_per_s_per_gpu is None
    assert "  Accepted tokens/s:       200\n" in render_benchmarks([on_cpu])


def test_engines_that_do_not_count_leave_what_the_others_know() -> None:
    state = RunState()
    for record in [*_steps(5, accepted=300.0, generated=None, flat=200), _counts(3.0, none=1000)]:
        state.apply(record)
    use = token_use(state, 0)
    assert use is not None and use.unit == "tokens/s" and use.accepted_per_s == 300.0
    assert use.accepted == pytest.approx(3000 / 5000)
    assert use.thrown_away == pytest.approx({"flat": 0.2, "none": 0.2})
    assert token_use(RunState(), 1) is None


def test_the_newest_steps_have_the_newest_rate_of_the_environments() -> None:
    state = RunState()
    for record in _steps(20, accepted=100.0, generated=None):
        state.apply(record)
    for at in range(0, 41, 5):  # nothing at first, then 100 tokens a second
        state.apply(_counts(float(at), flat=max(0, at - 20) * 100))
    use, whole = token_use(state, 1, 5), token_use(state, 1)
    assert use is not None and use.accepted == pytest.approx(0.5)
    assert whole is not None and whole.accepted == pytest.approx(4000 / 6000)


def test_an_environment_that_restarts_counts_from_zero() -> None:
    away = ThrownAway()
    for at, tokens in enumerate([100, 200, 30, 60]):
        away.add(_counts(float(at), flat=tokens))
    assert away.total == {"flat": 260.0}
    assert away.between(1.0, 3.0) == {"flat": 60.0}
    assert away.between(2.5, 3.0) == {"flat": 15.0}
    assert away.between(10.0, 12.0) == {"flat": 60.0}, "at the last known rate"


def test_a_gpu_that_engine_and_trainer_share_counts_once() -> None:
    def info(*gpus: tuple[str, tuple[int, ...]]) -> RunInfo:
        parts = [
            PlannedComponent(name=str(at), role=Role.ENGINE, node=node, gpus=own)
            for at, (node, own) in enumerate(gpus)
        ]
        return RunInfo(components=parts)

    assert info(("", (0,)), ("", (0,)), ("", ())).gpu_count == 1
    assert info(("a", (0, 1)), ("b", (0,))).gpu_count == 3
    assert info().gpu_count == 0
