"""A trainer of two real ranks under the supervisor: a stop, and a killed rank."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from atropos_common.protocol.control import CommandRequest, Role
from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.profile.builders.trainer import ranked
from atropos_tui.profile.spec import LogCheck, StopPolicy
from tests.support.harness import Running, part, ready
from tests.trainer_core.offline_runs import group_of, offline_config, write_lines

NAMED_S = 10.0
"""In this time a killed rank is named."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from atropos_envs.tiny_model import build_tiny_model, save_model

    return save_model(build_tiny_model(), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def trainer(base: Path, tmp_path: Path) -> Any:
    """The component, as a plan has it, with more to do than any test waits for."""
    lines = [{"batch": [group_of(2 * i), group_of(2 * i + 1)]} for i in range(4)] * 1000
    rollouts = write_lines(tmp_path / "rollouts.jsonl", lines)
    config = offline_config(base, tmp_path, rollouts=str(rollouts), training_steps=4000)
    return part(
        "trainer",
        [*ranked(2), *config.to_args()],
        role=Role.TRAINER,
        env={"OMP_NUM_THREADS": "1"},
        scratch=True,
        probes=ready(LogCheck(pattern="^step 1/")),
        stop=StopPolicy(grace_s=60),
        start_timeout_s=120,
    )


async def training(running: Running) -> dict[int, psutil.Process]:
    """The ranks, once the first step is done."""
    async with asyncio.timeout(120):
        while not any(row.new == "healthy" for row in running.states("trainer")):
            assert not running.task.done(), running.result()
            await asyncio.sleep(0.05)
    pid = next(row.pid for row in running.states("trainer") if row.pid)
    return {int(each.environ()["RANK"]): each for each in psutil.Process(pid).children()}


@pytest.mark.slow
async def test_a_stop_saves_once_and_is_a_stop(
    launch: Callable[..., Any], trainer: Any, tmp_path: Path
) -> None:
    async with launch(trainer) as running:
        await training(running)
        await (await running.answers()).command(CommandRequest(action="stop", component="trainer"))
        async with asyncio.timeout(60):
            while running.path("trainer")[-1] != "stopped":
                await asyncio.sleep(0.05)
        assert running.states("trainer")[-1].exit_code == 128 + signal.SIGTERM
    assert len(list((tmp_path / "offline").glob("step_*"))) == 1


@pytest.mark.slow
async def test_a_killed_rank_is_named(
    launch: Callable[..., Any], trainer: Any, tmp_path: Path
) -> None:
    """And is what the run ends with; what the ranks did is in the stream."""
    async with launch(trainer) as running:
        ranks = await training(running)
        ranks[1].send_signal(signal.SIGKILL)
        async with asyncio.timeout(NAMED_S):
            while not (
                said := [each for each in running.records if isinstance(each, DiagnosisRecord)]
            ):
                await asyncio.sleep(0.05)
        assert (
            said[0].title == "rank 1 of trainer was killed by SIGKILL"
            and said[0].rule == "rank_killed"
        )
        assert await running.end() == 3 and said[0].title in running.result().reason
        assert not ranks[0].is_running()
    records = map(json.loads, (running.run.telemetry_jsonl).read_text().splitlines())
    told = next(record for record in records if record["kind"] == "ranks")
    assert [use["rank"] for use in told["ranks"]] == [0, 1] and min(
        use["tokens"] for use in told["ranks"]
    ) > 0
