"""`ps -f`: a line for each change of state, none for numbers that change."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from atropos_common.protocol.control import State
from atropos_tui.cli.manage import runs
from atropos_tui.cli.manage.inspect import NewLines, follow
from atropos_tui.monitor.run.run_files import RunInfo
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.verdict import Verdict, verdict
from tests.support.run_maker import T0, gauges, live_status, make_run, step_records


def test_a_change_is_a_line_and_a_number_that_moves_is_none(tmp_path: Path) -> None:
    run, state, info = make_run(tmp_path / "run"), RunState(), RunInfo(training_steps=60)
    changes, rng = NewLines(), random.Random(0)

    def told(now: float, said: Verdict | None = None, **states: State) -> list[str]:
        status = live_status(run, now, **states)
        return list(
            changes.lines(status, info, state, said or verdict(status, info, state, now), now)
        )

    for step in range(1, 6):
        for record in step_records(step, rng, time=T0 + step):
            state.apply(record)
    state.apply(gauges(T0 + 5))
    reward = state.metric("reward_mean").last
    assert told(T0 + 5) == [f"step 5 of 60, reward {reward:.3f}"]
    for record in step_records(6, rng, time=T0 + 6):
        state.apply(record)
    assert told(T0 + 6) == [], "another ETA, and a step a second later"
    lines = told(T0 + 7, env=State.UNHEALTHY)
    assert lines[0].startswith("env is unhealthy")
    assert lines[1].startswith("alarm: env does not answer")
    assert told(T0 + 8, env=State.UNHEALTHY) == []
    assert told(T0 + 9)[1].startswith("healthy: ")


async def test_it_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    run.result_json.write_text('{"exit_code": 0, "reason": "trainer finished"}')
    await follow(runs.pick(run.root))
    out = capsys.readouterr().out
    assert "■ done: 37 steps, reward 0.59 → 0.91 (means of 5 steps), held-out 20% → 59%" in out
    assert "\x1b" not in out and "COMPONENT" in out
