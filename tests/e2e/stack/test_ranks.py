"""Two real ranks over real vLLM, one of which is killed: the run names it and ends with it, and the
next attempt continues from the last checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from atropos_common.protocol.records import DiagnosisRecord
from tests.e2e.live_stack import LiveStack, read_records

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
NAMED_S = 10.0
EVERY, STEPS = 4, 16
"""Checkpoints, and all steps of the run."""
CAUSE = "rank {} of trainer was killed by SIGKILL"


def ranks_of(run: LiveStack) -> dict[int, psutil.Process]:
    """The ranks by their number, children of the trainer's launcher."""
    return {
        int(each.environ()["RANK"]): each
        for each in psutil.Process(run.pid_of("trainer")).children()
    }


def causes(run: LiveStack) -> list[str]:
    records = read_records(run.run.supervisor_jsonl)
    return [record.title for record in records if isinstance(record, DiagnosisRecord)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_by_name_and_the_next_attempt_goes_on(
    stack: Callable[..., LiveStack], victim: int
) -> None:
    run = stack(
        mode="broadcast",
        trainer__processes=2,
        trainer__training_steps=STEPS,
        trainer__checkpoint_interval=EVERY,
        trainer__restart__policy="never",
    )
    run.until_step(EVERY + 2, timeout=240)
    ranks = ranks_of(run)
    assert sorted(ranks) == [0, 1]
    ranks[victim].kill()
    killed = time.monotonic()
    run.until(lambda: CAUSE.format(victim) in causes(run), NAMED_S, "the killed rank is named")
    print(f"\nnamed {time.monotonic() - killed:.1f} s after the kill")
    code, output = run.wait(timeout=90)
    assert code == 3, output[-4000:]
    ended: dict[str, Any] = json.loads(run.run.result_json.read_text())
    assert CAUSE.format(victim) in ended["reason"], ended
    assert not any(
        rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks.values()
    )
    run.assert_nothing_left()

    saved = max(
        int(path.name.removeprefix("step_")) for path in run.root.rglob("step_*") if path.is_dir()
    )
    done = max(step.step for step in run.steps())
    assert EVERY <= saved <= done
    run.resume()
    code, output = run.wait(timeout=240)
    assert code == 0, output[-4000:]
    later = [step.step for step in run.telemetry("step") if step.attempt > 1]
    assert later == list(range(saved + 1, STEPS + 1)), (
        "from the step after the last checkpoint on, each once"
    )
    assert {record.verdict for record in run.telemetry("alignment")} == {"ok"}
    run.assert_nothing_left()
