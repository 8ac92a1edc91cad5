"""A hundred seeded SIGKILLs of supervisors, components and grandchildren, in each component state.
CI runs every pair of state and victim once, `make test-all` four times.

Nothing may be left, the states must be right, and so must the exit codes. The check for leftovers
is shown to see: a planted orphan in a session of its own makes it fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from atropos_common.protocol.control import CommandRequest, ComponentStatus, Role, State
from atropos_tui.profile.spec import ComponentSpec, FileCheck, LogCheck, RestartPolicy, StopPolicy
from atropos_tui.supervisor.client import ControlClient, NoSupervisor
from atropos_tui.supervisor.journal.store import RunResult
from atropos_tui.supervisor.processes import procfs
from tests.atropos_tui.supervisor.journal.test_death import Background, background, plant
from tests.support.harness import check_records, part, python, ready, script, wait_until

Victim = Literal["supervisor", "leader", "grandchild"]
VICTIMS: tuple[Victim, ...] = ("supervisor", "leader", "grandchild")
ENDS = ("down", "term", "impatient", "kill")
AT_ONCE = 4
LOOK_S = 0.04
"""Between two looks: each costs a walk through the process table, here or in the supervisor."""
PAIR = "import os, time; pid = os.fork(); pid and print('up', flush=True); time.sleep(600)"
QUICK = RestartPolicy(policy="always", backoff_s=0.02, max_backoff_s=0.05, max_restarts=100)
ALIVE = (State.STARTING, State.HEALTHY, State.UNHEALTHY, State.STOPPING)


@dataclass(frozen=True)
class Case:
    """One kill: who, while component `x` is in which state, and how the run is ended afterwards."""

    state: State
    victim: Victim
    end: str


def cases(rounds: int, seed: int) -> list[Case]:
    """Every pair of state and victim, `rounds` times, in an order and with ends that the seed
    decides."""
    dice = random.Random(seed)
    found = [
        Case(state, victim, dice.choice(ENDS))
        for state in State
        for victim in VICTIMS
        for _ in range(rounds)
    ]
    dice.shuffle(found)
    return found


def stack_for(state: State, folder: Path) -> tuple[ComponentSpec, ComponentSpec]:
    """`x`, which can be caught in `state`, and `other`, which lives beside it; both have a child of
    their own."""
    other = part("other", python(PAIR), restart=QUICK, probes=ready(), stop=StopPolicy(grace_s=1.0))
    if state is State.FAILED:
        deaf = script("stubborn", folder / "other")
        other = part(
            "other",
            deaf,
            restart=QUICK,
            probes=ready(LogCheck(pattern="deaf")),
            stop=StopPolicy(grace_s=1.5),
        )
    pair = {"command": python(PAIR), "restart": QUICK}
    once = RestartPolicy(policy="always", backoff_s=60, max_backoff_s=60)
    fields = {
        State.PENDING: pair | {"depends_on": {"other": "completed"}},
        State.STARTING: pair | {"probes": ready(LogCheck(pattern="never"))},
        State.HEALTHY: pair | {"probes": ready()},
        State.UNHEALTHY: pair
        | {"probes": ready(FileCheck(path=str(folder / "fit")), failure_threshold=1)},
        State.STOPPING: {
            "command": script("stubborn", folder / "x"),
            "stop": StopPolicy(grace_s=1.0),
        },
        State.STOPPED: pair,
        State.BACKOFF: {"command": python("raise SystemExit(1)"), "restart": once},
        State.FAILED: {
            "command": python("raise SystemExit(9)"),
            "depends_on": {"other": "healthy"},
        },
        State.COMPLETED: {"command": python(""), "role": Role.PREPARE},
    }
    return other, part("x", **fields[state])


async def look(client: ControlClient) -> dict[str, ComponentStatus]:
    return {row.name: row for row in (await client.status()).components}


async def bring_to(state: State, client: ControlClient, folder: Path) -> dict[str, ComponentStatus]:
    """Wait until `x` is in `state`, seeing to it where it does not go there by itself; the rows as
    they are then."""
    if state is State.UNHEALTHY:
        (folder / "fit").touch()
        await until(client, lambda rows: rows["x"].state is State.HEALTHY)
        (folder / "fit").unlink()
    if state in (State.STOPPING, State.STOPPED):
        await until(
            client,
            lambda rows: (
                rows["x"].state is State.HEALTHY and (folder / "x").exists() | (state == "stopped")
            ),
        )
        await client.command(CommandRequest(action="stop", component="x"))
    settled = (State.HEALTHY,) if state is not State.FAILED else (State.STOPPING, State.HEALTHY)
    return await until(
        client, lambda rows: rows["x"].state is state and rows["other"].state in settled
    )


async def until(
    client: ControlClient, condition, timeout_s: float = 20.0
) -> dict[str, ComponentStatus]:  # type: ignore[no-untyped-def]
    rows: dict[str, ComponentStatus] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not condition(rows := await look(client)):
                await asyncio.sleep(LOOK_S)
            return rows
    raise AssertionError(
        f"it did not happen: {[(row.name, row.state, row.reason) for row in rows.values()]}"
    )


def child_of(pid: int) -> int:
    """The one child of a leader, once it has forked."""
    return next((row.pid for row in procfs.scan().values() if row.ppid == pid and row.alive), 0)


async def kill(case: Case, supervisor: Background, rows: dict[str, ComponentStatus]) -> str:
    """Kill the victim; the component that it belonged to."""
    if case.victim == "supervisor":
        supervisor.process.kill()
        return ""
    name = "x" if case.state in ALIVE else "other"
    leader = rows[name].pid
    assert leader is not None
    await wait_until(lambda: child_of(leader) != 0, every_s=LOOK_S)
    os.kill(leader if case.victim == "leader" else child_of(leader), signal.SIGKILL)
    return name


async def check_states(
    case: Case, client: ControlClient, name: str, before: dict[str, ComponentStatus]
) -> None:
    """Assert the effects that the kill must and must not have."""
    if case.state is State.STOPPING:
        await until(client, lambda rows: rows["x"].state is State.STOPPED)
        return
    if case.victim == "leader":
        rows = await until(
            client, lambda rows: rows[name].attempt == before[name].attempt + 1 and rows[name].pid
        )
        assert rows[name].restarts == before[name].restarts + 1
    else:
        await asyncio.sleep(0.1)
        rows = await look(client)
        assert (rows[name].pid, rows[name].attempt) == (before[name].pid, before[name].attempt)
    if name == "other":
        assert rows["x"].state is case.state, "what happens to others must not move it"


async def end(case: Case, supervisor: Background, client: ControlClient) -> int:
    """End the run as the case says; the exit code that it must have."""
    if case.victim == "supervisor":
        return -signal.SIGKILL
    if case.state is State.FAILED:
        return 3
    if case.end == "kill":
        supervisor.process.kill()
        return -signal.SIGKILL
    if case.end == "down":
        await client.command(CommandRequest(action="down"))
        return 130
    supervisor.process.send_signal(signal.SIGTERM)
    if case.end == "impatient":
        await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            supervisor.process.send_signal(signal.SIGTERM)
    return 130


async def nothing_left(supervisor: Background) -> None:
    """No process of the run is there any more; the guard of a killed supervisor gets three
    seconds."""
    await wait_until(lambda: not supervisor.left(), 3, every_s=LOOK_S)


async def run_case(folder: Path, case: Case) -> None:
    folder.mkdir()
    with background(folder / "run", *stack_for(case.state, folder)) as supervisor:
        await wait_until(lambda: supervisor.run.control_sock.exists(), 60)
        client = ControlClient(supervisor.run.root)
        rows = await bring_to(case.state, client, folder)
        name = await kill(case, supervisor, rows)
        if name and case.state is not State.FAILED:
            await check_states(case, client, name, rows)
        wanted = await end(case, supervisor, client)
        assert await supervisor.end() == wanted
        await nothing_left(supervisor)
        result = RunResult.load(supervisor.run.result_json)
        assert (result.exit_code if result else -signal.SIGKILL) == wanted
        with contextlib.suppress(NoSupervisor):
            await client.close()
        check_records(supervisor.run)


async def run_all(folder: Path, chosen: list[Case]) -> Counter[tuple[State, Victim]]:
    """Run the cases, a few at once; how often each pair was done."""
    done: Counter[tuple[State, Victim]] = Counter()
    free = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, case: Case) -> None:
        async with free:
            try:
                await run_case(folder / f"case{index}", case)
            except BaseException as error:
                error.add_note(f"case {index}: {case}")
                raise
            done[case.state, case.victim] += 1

    async with asyncio.TaskGroup() as group:
        for index, case in enumerate(chosen):
            group.create_task(one(index, case))
    return done


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.slow)])
async def test_kills_in_every_state_leave_nothing(tmp_path: Path, rounds: int) -> None:
    done = await run_all(tmp_path, cases(rounds, seed=20261121))
    assert done == {(state, victim): rounds for state in State for victim in VICTIMS}


async def test_the_check_sees_a_planted_orphan(tmp_path: Path) -> None:
    """The last check of every case fails when there is something to see; nobody else would, once
    the guard has left."""
    with background(tmp_path / "run", part("one")) as supervisor:
        await supervisor.ready()
        supervisor.process.terminate()
        assert await supervisor.end() == 130
        await nothing_left(supervisor)
        orphan = plant({"ATROPOS_RUN_ID": supervisor.stack.run_id, "PATH": os.environ["PATH"]})
        try:
            with pytest.raises(AssertionError, match="did not happen in time"):
                await nothing_left(supervisor)
        finally:
            orphan.kill()
            orphan.wait()
        await nothing_left(supervisor)
