"""Seeded disorder: deaths and commands at random moments, then a death for good; nothing is
left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from atropos_common.protocol.control import Action, CommandRequest
from atropos_tui.profile.spec import RestartPolicy
from atropos_tui.supervisor.client import ControlClient, NoSupervisor, Refused
from atropos_tui.supervisor.journal.store import RunResult
from tests.atropos_tui.supervisor.journal.test_death import Background, background
from tests.support.harness import check_records, part, python, ready, script, wait_until

ACTIONS: tuple[Action, ...] = ("start", "stop", "restart", "kill")
ENDS = ("kill-supervisor", "term-supervisor", "down", "impatient")


async def disturb(supervisor: Background, client: ControlClient, dice: random.Random) -> None:
    """One random act: a command, or SIGKILL to any process of the run."""
    if dice.random() < 0.5:
        request = CommandRequest(
            action=dice.choice(ACTIONS), component=dice.choice(supervisor.stack.components).name
        )
        with contextlib.suppress(Refused):
            await client.command(request)
    elif victims := supervisor.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(victims).pid, signal.SIGKILL)
    await asyncio.sleep(dice.choice([0.0, 0.01, 0.05, 0.2]))


async def chaos(tmp_path: Path, seed: int, acts: int) -> None:
    dice = random.Random(seed)
    end = ENDS[seed % len(ENDS)]
    always = RestartPolicy(policy="always", backoff_s=0.01, max_backoff_s=0.05, max_restarts=1000)
    parts = (
        part("api", restart=always, restart_with=["env"], probes=ready()),
        part(
            "env",
            script("escapes", tmp_path / "env", 600, "marked"),
            restart=always,
            depends_on={"api": "healthy"},
        ),
        part(
            "engine",
            script("stubborn", tmp_path / "engine"),
            restart=always,
            restart_with=["trainer"],
        ),
        part(
            "trainer",
            python("import os,time; os.fork(); time.sleep(600)"),
            restart=always,
            depends_on={"engine": "healthy"},
        ),
    )
    with background(tmp_path / "run", *parts) as supervisor:
        await wait_until(lambda: supervisor.run.control_sock.exists())
        client = ControlClient(supervisor.run.root)
        with contextlib.suppress(NoSupervisor):
            for _ in range(acts):
                await disturb(supervisor, client, dice)
        assert supervisor.process.poll() is None, "disorder among components is no reason to end"
        if end == "kill-supervisor":
            supervisor.process.kill()
            await wait_until(lambda: not supervisor.left(), 5)
        else:
            if end == "down":
                await client.command(CommandRequest(action="down"))
            else:
                supervisor.process.send_signal(signal.SIGTERM)
            if end == "impatient":
                await asyncio.sleep(0.05)
                supervisor.process.send_signal(signal.SIGTERM)
            assert await supervisor.end() == 130
            assert supervisor.left() == []
            result = RunResult.load(supervisor.run.result_json)
            assert result is not None
            assert result.exit_code == 130
        await client.close()
        check_records(supervisor.run)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
async def test_disorder(tmp_path: Path, seed: int) -> None:
    await chaos(tmp_path, seed, acts=15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
async def test_a_hundred_times(tmp_path: Path, seed: int) -> None:
    await chaos(tmp_path, seed, acts=random.Random(seed).randrange(25))
