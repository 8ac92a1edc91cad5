"""A component whose next start is prepared: a process of it waits, becomes the next attempt, or is
never heard of."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, State
from atropos_tui.profile.spec import ComponentSpec
from tests.supervisor.harness import QUICK, Running, alive, part, python, ready, wait_until

ENGINE = """
import os, sys, time
waits = os.environ.pop("ATROPOS_WAIT_FOR_GO", "") == "1"
with open(sys.argv[1], "a") as file:
    print(os.getpid(), os.environ["ATROPOS_ATTEMPT"], waits, file=file)
if waits:
    print("prepared", flush=True)
    if sys.stdin.readline() != "go\\n":
        raise SystemExit(0)
print("up", flush=True)
time.sleep(600)
"""
Begun = list[tuple[int, int, bool]]


@pytest.fixture
def engine(tmp_path: Path) -> ComponentSpec:
    return part(
        "engine", python(ENGINE, tmp_path / "begun"), probes=ready(), restart=QUICK, standby=True
    )


async def begun(tmp_path: Path, count: int) -> Begun:
    """Pid, attempt and whether it waited, of the first `count` processes."""
    path = tmp_path / "begun"
    await wait_until(lambda: path.exists() and path.read_text().count("\n") >= count)
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(int(pid), int(attempt), waits == "True") for pid, attempt, waits in rows]


async def restart(running: Running) -> None:
    await (await running.answers()).command(CommandRequest(action="restart", component="engine"))


async def test_a_restart_takes_the_one_that_waits(
    launch: Any, tmp_path: Path, engine: ComponentSpec
) -> None:
    async with launch(engine, part("other")) as running:
        await running.until("engine", State.HEALTHY)
        first, second = await begun(tmp_path, 2)
        assert (first[1:], second[1:]) == ((1, False), (2, True))
        assert not running.run.log("engine", 2).exists(), (
            "the latest log is that of the attempt that runs"
        )
        status = await (await running.answers()).status()
        assert next((row.name, row.pid) for row in status.components) == ("engine", first[0])
        await restart(running)
        again = await running.until("engine", State.HEALTHY, attempt=2)
        assert again.pid == second[0] and not alive(first[0])
        started = next(
            row for row in running.states("engine") if row.new == "starting" and row.attempt == 2
        )
        assert started.reason == "attempt 2, from the standby process"
        assert running.run.log("engine", 2).read_text().split() == ["prepared", "up"]
        third = (await begun(tmp_path, 3))[2]
        assert third[1:] == (3, True)
        await (await running.answers()).command(CommandRequest(action="down"))
        assert await running.end() == 130
    assert not alive(third[0])


async def test_so_does_the_start_after_a_crash(
    launch: Any, tmp_path: Path, engine: ComponentSpec
) -> None:
    async with launch(engine, part("other")) as running:
        await running.until("engine", State.HEALTHY)
        first, second = await begun(tmp_path, 2)
        os.kill(first[0], signal.SIGKILL)
        assert (await running.until("engine", State.HEALTHY, attempt=2)).pid == second[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_that_has_died_or_hangs(
    launch: Any, tmp_path: Path, engine: ComponentSpec, number: signal.Signals
) -> None:
    """A dead one is replaced at the start; one that hangs is a start like any other, which a
    restart ends."""
    async with launch(engine, part("other")) as running:
        await running.until("engine", State.HEALTHY)
        second = (await begun(tmp_path, 2))[1]
        os.kill(second[0], number)
        if number == signal.SIGKILL:
            await wait_until(lambda: not alive(second[0]))
        await restart(running)
        if number == signal.SIGSTOP:
            assert (await running.until("engine", State.STARTING, attempt=2)).pid == second[0]
            os.kill(second[0], signal.SIGKILL)
        again = await running.until(
            "engine", State.HEALTHY, attempt=3 if number == signal.SIGSTOP else 2
        )
        assert again.pid != second[0] and not alive(second[0])


async def test_nobody_waits_for_a_component_that_is_stopped(
    launch: Any, tmp_path: Path, engine: ComponentSpec
) -> None:
    async with launch(engine, part("other")) as running:
        await running.until("engine", State.HEALTHY)
        second = (await begun(tmp_path, 2))[1]
        client = await running.answers()
        await client.command(CommandRequest(action="stop", component="engine"))
        await running.until("engine", State.STOPPED)
        await wait_until(lambda: not alive(second[0]))
        await client.command(CommandRequest(action="start", component="engine"))
        assert (await running.until("engine", State.HEALTHY, attempt=2)).pid != second[0]


async def test_nobody_waits_below_a_keeper(
    launch: Any, tmp_path: Path, engine: ComponentSpec
) -> None:
    async with launch(engine, part("other"), survive=True) as running:
        await running.until("engine", State.HEALTHY)
        await asyncio.sleep(0.3)
        assert len(await begun(tmp_path, 1)) == 1
