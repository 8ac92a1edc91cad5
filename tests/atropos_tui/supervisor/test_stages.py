"""Stages of the present attempt, from records or log lines: published, shown live and from the
files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from atropos_common.protocol.control import CommandRequest, ComponentStatus, State
from atropos_common.protocol.records import StageRecord
from atropos_tui.monitor.run.run_files import load_run, status_from_files
from atropos_tui.monitor.why import Explanation
from atropos_tui.profile.spec import Probe, Probes, RestartPolicy, Stage, StageCheck
from tests.support.harness import QUICK, Running, part, python, ready

STAGES = [
    Stage(name="registered", pattern=r"^Registered as \d+", usually="run-api is busy"),
    Stage(name="first batch", pattern=r"^step 1\b", usually="rollouts are slow"),
]
TRAINER = """
import pathlib, sys, time
print('up', flush=True)
print('not Registered as 7', flush=True)
for number, line in enumerate(['Registered as 7', 'step 1 of 9']):
    while not pathlib.Path(sys.argv[1] + str(number)).exists(): time.sleep(.01)
    print(line, flush=True)
time.sleep(600)
"""


def trainer(folder: Path, **fields: Any) -> Any:
    return part("trainer", python(TRAINER, folder / "go"), probes=ready(), stages=STAGES, **fields)


def let(folder: Path, number: int) -> None:
    (folder / f"go{number}").touch()


async def row(running: Running) -> ComponentStatus:
    return (await running.client.status()).components[0]


async def reached(running: Running, count: int) -> list[StageRecord]:
    async with asyncio.timeout(5):
        while len(found := [r for r in running.records if isinstance(r, StageRecord)]) < count:
            await asyncio.sleep(0.01)
    return found


async def test_stages_are_reached_one_by_one_and_told(launch: Any, tmp_path: Path) -> None:
    async with launch(trainer(tmp_path)) as running:
        await running.until("trainer", State.HEALTHY)
        stream = running.client.events(after=running.records[-1].seq)
        await anext(stream)
        before = await row(running)
        assert [(stage.name, stage.reached_at) for stage in before.stages] == [
            ("registered", None),
            ("first batch", None),
        ]
        assert before.stages[1].usually == "rollouts are slow"
        began = time.time()
        let(tmp_path, 0)
        told = await anext(stream)
        assert isinstance(told, StageRecord)
        assert (told.component, told.stage, told.attempt) == ("trainer", "registered", 1)
        first, second = (await row(running)).stages
        assert first.reached_at is not None and began <= first.reached_at < began + 2
        assert second.reached_at is None
        let(tmp_path, 1)
        assert [record.stage for record in await reached(running, 2)] == [
            "registered",
            "first batch",
        ]
        await stream.aclose()


RECORDS = """
import os, sys, time
from atropos_common.protocol.stages import reach
reach('attached')
time.sleep(float(sys.argv[1]))
sys.exit(1)
"""
ATTACHED = Probes(
    startup=Probe(checks=[StageCheck(stage="attached")], interval_s=0.02, failure_threshold=10**6)
)


async def test_a_recorded_stage_is_health_whatever_the_program_prints(launch: Any) -> None:
    stages = [Stage(name="registered"), Stage(name="attached")]
    trainer = part(
        "trainer", [sys.executable, "-c", RECORDS, "600"], probes=ATTACHED, stages=stages
    )
    async with launch(trainer) as running:
        await running.until("trainer", State.HEALTHY)
        registered, attached = (await row(running)).stages
        assert (registered.reached_at, attached.reached_at is None) == (None, False)
        assert [(found.stage, found.attempt) for found in await reached(running, 1)] == [
            ("attached", 1)
        ]


async def test_a_record_of_an_earlier_attempt_is_not_health(launch: Any) -> None:
    once = RECORDS.replace(
        "reach('attached')", "os.environ['ATROPOS_ATTEMPT'] == '1' and reach('attached')"
    )
    async with launch(
        part("trainer", [sys.executable, "-c", once, "0.5"], probes=ATTACHED, restart=QUICK)
    ) as running:
        await running.until("trainer", State.HEALTHY)
        await running.until("trainer", State.STARTING, attempt=2)
        await asyncio.sleep(0.3)
        assert running.path("trainer").count("healthy") == 1


async def test_a_new_attempt_begins_without_stages(launch: Any, tmp_path: Path) -> None:
    let(tmp_path, 0)
    async with launch(trainer(tmp_path, restart=QUICK)) as running:
        await reached(running, 1)
        (tmp_path / "go0").unlink()
        pid = (await row(running)).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        await running.until("trainer", State.HEALTHY, attempt=2)
        assert [stage.reached_at for stage in (await row(running)).stages] == [None, None]
        let(tmp_path, 0)
        assert [record.attempt for record in await reached(running, 2)] == [1, 2]


async def test_a_line_printed_just_before_the_end_counts(launch: Any) -> None:
    last = part(
        "last", python("print('Registered as 1'); print('step 1')"), stages=STAGES, ends_run=True
    )
    async with launch(last) as running:
        assert await running.end() == 0
        assert [record.stage for record in await reached(running, 2)] == [
            "registered",
            "first batch",
        ]
        kinds = [(record.kind, getattr(record, "new", "")) for record in running.records]
        assert kinds.index(("stage", "")) < kinds.index(("state", "completed"))


async def test_a_pattern_that_is_none_and_a_flood_do_no_harm(launch: Any) -> None:
    broken = [Stage(name="broken", pattern="("), *STAGES]
    loud = (
        "import time\nprint('x' * 200000)\nprint('Registered as 3', flush=True)\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    async with launch(part("loud", python(loud), probes=ready(), stages=broken)) as running:
        assert [record.stage for record in await reached(running, 1)] == ["registered"]
        assert [stage.reached_at is not None for stage in (await row(running)).stages] == [
            False,
            True,
            False,
        ]


async def test_after_the_end_the_files_tell_the_stages(launch: Any, tmp_path: Path) -> None:
    let(tmp_path, 0)
    async with launch(trainer(tmp_path)) as running:
        await reached(running, 1)
        running.run.plan_json.write_text(json.dumps(running.stack.model_dump(mode="json")))
        at = (await row(running)).stages[0].reached_at
        await running.client.command(CommandRequest(action="down"))
        assert await running.end() == 130
    info, state, _ = load_run(running.run.root)
    status = status_from_files(running.run, info, state)
    first, second = status.components[0].stages
    assert at is not None and first.reached_at is not None and abs(first.reached_at - at) < 0.05
    assert (first.usually, second.name, second.reached_at) == (
        "run-api is busy",
        "first batch",
        None,
    )
    lines = Explanation(status, info, state, time.time()).lines()
    assert lines[0].endswith("ended with code 130: stopped by command")
    assert "stopped with the stack" in lines[2]


async def test_why_speaks_of_each_state_as_it_is(launch: Any, tmp_path: Path) -> None:
    """One live run: a gate that waits, a probe that fails, a stage to come, a backoff, a stop by
    hand."""
    slow = RestartPolicy(backoff_s=60, max_restarts=5)
    parts = (
        trainer(tmp_path),
        part("late", python("import time; time.sleep(600)"), probes=ready()),
        part("after", depends_on={"late": "healthy"}),
        part("crash", python("raise SystemExit(3)"), restart=slow),
        part("idle"),
    )
    let(tmp_path, 0)
    async with launch(*parts) as running:
        await reached(running, 1)
        running.run.plan_json.write_text(json.dumps(running.stack.model_dump(mode="json")))
        await running.until("crash", State.BACKOFF)
        await running.client.command(CommandRequest(action="stop", component="idle"))
        await running.until("idle", State.STOPPED)
        status = await running.client.status()
        picture = Explanation(status, *load_run(running.run.root)[:2], time.time() + 60)
        text = "\n".join(picture.lines())
        head = text.splitlines()[0]
        assert head.startswith(
            f"{running.stack.run_id} is starting; it waits for late, which is starting for 1:0"
        )
        assert head.endswith(", at most 10:00, and for crash")
        assert "its readiness check has not passed: no line 'up' yet" in text
        assert "waits for late to be healthy: it is starting for 1:0" in text
        assert "registered 1:0" in text and "ago; waiting for: first batch for 1:0" in text
        assert "usually: rollouts are slow" in text
        assert (
            "crashed: exit code 3" in text and "crash 1 within 10:00; crash 6 is the last" in text
        )
        assert "stopped by hand" in text and "atropos-tui start idle brings it back" in text
        assert picture.lines("after")[0].startswith(
            "after  ○ pending    waits for late to be healthy"
        )
        assert len(picture.lines("after")) == 1
        soon = Explanation(status, *load_run(running.run.root)[:2], time.time()).lines("crash")
        assert any(line.strip().startswith("next start in ") for line in soon)
