"""Messages of the feed's loops, without a screen."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.message import Message

from atropos_common.protocol.trainer_records import (
    AlignmentRecord,
    RolloutRecord,
    StepRecord,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.run.run_files import RunInfo, read_info
from atropos_tui.ui import feed
from atropos_tui.ui.feed import Feed, RecordsArrived
from tests.atropos_tui.ui.conftest import cockpit, has_news
from tests.atropos_tui.ui.fakes import FakeControl
from tests.support.run_maker import T0, live_status, make_run, write_records

NOW = T0 + 31 + 0.33 * 37 + 0.4


@asynccontextmanager
async def following(run: RunDir) -> AsyncIterator[list[RecordsArrived]]:
    """Collect what `follow_files` posts."""
    posted: list[RecordsArrived] = []

    def post(message: Message) -> None:
        assert isinstance(message, RecordsArrived)
        posted.append(message)

    task = asyncio.create_task(Feed(run.root, FakeControl(), post).follow_files())
    yield posted
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.02)


def planned(run: RunDir, steps: int | None) -> None:
    command = ["--training-steps", str(steps)] if steps else []
    run.plan_json.write_text(
        json.dumps({"components": [{"name": "trainer", "role": "trainer", "command": command}]})
    )


async def test_bad_lines_alone_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    async with following(run) as posted:
        await until(lambda: posted and not posted[-1].behind)
        with run.telemetry_jsonl.open("a") as file:
            file.write("garbage\n" * 1000)
        await until(lambda: posted[-1].bad_lines == 1000)
        told = len(posted)
        await asyncio.sleep(1.2)
        assert len(posted) == told, "once"


async def test_a_plan_is_read_again_when_it_changes_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reads = RunDir(tmp_path), []

    def read(run: RunDir) -> RunInfo:
        reads.append(run)
        return read_info(run)

    monkeypatch.setattr(feed, "read_info", read)
    monkeypatch.setattr(feed, "INFO_S", 0.1)
    planned(run, None)
    async with following(run) as posted:
        await asyncio.sleep(1.2)
        assert len(reads) == 1
        planned(run, 10)
        await until(lambda: posted[-1].info.training_steps == 10)
        planned(run, 25)
        await until(lambda: posted[-1].info.training_steps == 25)
        assert len(reads) <= 5, "a write may be seen half done"


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 5e-324])
async def test_a_foreign_record_does_not_end_the_cockpit(tmp_path: Path, value: float) -> None:
    run = make_run(tmp_path / "run")
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        write_records(
            run.telemetry_jsonl,
            [
                AlignmentRecord(
                    step=at, time=NOW, logprob_diff_abs_mean=value, kl_k3=value, verdict="ok"
                )
                for at in (-5, 38, 2**62)
            ],
        )
        newest = json.loads(
            next(line for line in run.telemetry_jsonl.open() if '"kind":"step"' in line)
        )
        foreign = [
            StepRecord.model_validate(newest | {"step": at, "loss": value}) for at in (38, 2**62)
        ]
        write_records(run.telemetry_jsonl, list(foreign))
        await screen.until(lambda: screen.app.state.metric("loss").last == value)
        for key, words in (("1", "|diff|"), ("2", "Loss"), ("7", "KL")):
            await screen.press(key)
            await screen.shows(words)
            await screen.until(lambda: not has_news(screen.app))


async def test_half_a_surrogate_pair_in_a_rollout_is_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    half = RolloutRecord(
        step=37, time=NOW, prompt="odd \ud800 one", completion="x", reward=1.0, advantage=0.0
    )
    with run.telemetry_jsonl.open("a") as file:
        file.write(json.dumps(half.model_dump()) + "\n")
    async with cockpit(run, (160, 45), FakeControl(live_status(run, NOW)), lambda: NOW) as screen:
        await screen.shows("step 37/60")
        await screen.press("4")
        await screen.shows("1 line of the run's streams skipped")
        assert "odd" not in screen.text()
