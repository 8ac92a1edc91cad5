"""Children that resist a stop: afterwards no process of the set is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, State
from atropos_tui.profile.spec import LogCheck, RestartPolicy, StopPolicy
from atropos_tui.supervisor.processes import procfs
from tests.support.harness import alive, part, pids_in, python, ready, script, wait_until


@pytest.mark.launchers("direct", "remote")
async def test_ignores_term_is_killed_after_the_grace(launch: Any, tmp_path: Path) -> None:
    pidfile = tmp_path / "pids"
    deaf = part(
        "deaf",
        script("stubborn", pidfile),
        stop=StopPolicy(grace_s=0.4),
        probes=ready(_says("deaf")),
    )
    async with launch(deaf) as running:
        await running.until("deaf", State.HEALTHY)
        pids = await pids_in(pidfile)
        assert all(map(alive, pids))
        await running.client.command(CommandRequest(action="stop", component="deaf"))
        stopped = await running.until("deaf", State.STOPPED)
        assert not any(map(alive, pids))
        stopping = running.states("deaf")[-2]
        assert stopping.new == "stopping"
        assert 0.35 < stopped.time - stopping.time < 2
        assert stopped.exit_code == -9
        assert "2 killed after the grace" in stopped.reason
        await running.client.command(CommandRequest(action="down"))
        assert await running.end() == 130


@pytest.mark.launchers("direct", "remote")
async def test_what_a_dead_parent_leaves_is_ended_before_it_counts_as_gone(
    launch: Any, tmp_path: Path
) -> None:
    pidfile = tmp_path / "pids"
    async with launch(part("parent", script("forks_and_exits", pidfile, 7))) as running:
        assert await running.end() == 3
        assert not any(map(alive, await pids_in(pidfile)))
        assert running.path("parent") == ["starting", "healthy", "stopping", "failed"]
        assert "2 processes that it left" in running.states("parent")[2].reason
        assert running.states("parent")[3].exit_code == 7
        assert running.result().last_lines == ["last words"]


@pytest.mark.launchers("direct")
async def test_a_held_pipe_does_not_hold_the_supervisor(launch: Any, tmp_path: Path) -> None:
    """The leader goes at once; a child of it keeps stdout open and would for ten minutes."""
    began = time.monotonic()
    async with launch(
        part("parent", script("forks_and_exits", tmp_path / "pids", 0), ends_run=True)
    ) as running:
        assert await running.end() == 0
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("environment", ["marked", "clean"])
@pytest.mark.launchers("direct")
async def test_double_fork_into_a_new_session(
    launch: Any, tmp_path: Path, environment: str
) -> None:
    """Found by the marker; without the marker, because it is an orphan that only we can have
    adopted."""
    pidfile = tmp_path / "pids"
    daemon = part("daemon", script("escapes", pidfile, 600, environment))
    async with launch(daemon) as running:
        await running.until("daemon", State.HEALTHY)
        pids = await pids_in(pidfile)
        assert all(map(alive, pids))
        await running.answers()
        await running.client.command(CommandRequest(action="stop", component="daemon"))
        await running.until("daemon", State.STOPPED)
        if environment == "marked":
            assert not any(map(alive, pids))
        await running.client.command(CommandRequest(action="down"))
        assert await running.end() == 130
        assert not any(map(alive, pids))


async def test_once_seen_as_a_member_always_a_member(launch: Any, tmp_path: Path) -> None:
    """A grandchild that `ps` has listed cleans its environment, leaves the session, loses its
    parent, and is ended."""
    pidfile, flag = tmp_path / "pids", tmp_path / "flag"
    async with launch(part("parent", script("slips_away", pidfile, flag))) as running:
        client = await running.answers()
        leader, middle, grandchild = await pids_in(pidfile)
        assert set((await client.status()).components[0].pids) == {leader, middle, grandchild}
        flag.touch()
        await wait_until(
            lambda: (row := procfs.read(grandchild)) is not None and row.ppid == os.getpid()
        )
        assert not procfs.environ(grandchild)
        await client.command(CommandRequest(action="stop", component="parent"))
        await running.until("parent", State.STOPPED)
        assert not alive(grandchild)


@pytest.mark.launchers("direct")
async def test_exits_while_starting(launch: Any) -> None:
    async with launch(
        part("dies", python("raise SystemExit('no such thing')"), probes=ready())
    ) as running:
        assert await running.end() == 3
        assert running.path("dies") == ["starting", "failed"]
        result = running.result()
        assert (result.exit_code, result.component, result.last_lines) == (
            3,
            "dies",
            ["no such thing"],
        )


async def test_cannot_start(launch: Any) -> None:
    async with launch(part("ghost", ["no-such-program-here"]), part("other")) as running:
        assert await running.end() == 3
        assert running.path("ghost") == ["failed"]
        assert "no-such-program-here was not found on PATH" in running.result().reason
        assert running.path("other") in ([], ["stopped"])


async def test_missing_variable_and_missing_folder(launch: Any) -> None:
    async with launch(part("poor", env={"KEY": "${NOT_SET_ANYWHERE}"})) as running:
        assert await running.end() == 3
        assert (
            "environment variable NOT_SET_ANYWHERE is not set (used in poor: env.KEY)"
            in running.result().reason
        )
    (running.run.root / "supervisor.jsonl").unlink()
    async with launch(part("lost", cwd="/no/such/folder")) as running:
        assert await running.end() == 3
        assert "/no/such/folder does not exist" in running.result().reason


async def test_reports_the_kernels_view_of_a_crash(launch: Any) -> None:
    crash = part("crash", python("import os,signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    async with launch(crash) as running:
        assert await running.end() == 3
        assert running.states("crash")[-1].exit_code == -11
        assert "SIGSEGV" in running.result().reason


async def test_crash_is_noticed_at_once(launch: Any) -> None:
    """From SIGKILL to the journaled, published transition; several times, since another process may
    have the cores."""
    often = RestartPolicy(policy="always", backoff_s=0.02, max_backoff_s=0.05, max_restarts=10)
    took = []
    async with launch(part("victim", restart=often)) as running:
        for attempt in range(1, 6):
            pid = (await running.until("victim", State.HEALTHY, attempt=attempt)).pid
            assert pid
            began = time.time()
            os.kill(pid, signal.SIGKILL)
            took.append(
                (await running.until("victim", State.BACKOFF, attempt=attempt)).time - began
            )
    assert min(took) < 0.1, took  # usually 5-15 ms


@pytest.mark.launchers("direct")
async def test_quick_succession(launch: Any) -> None:
    """Thirty components that exit at once: each is reaped, none is mistaken for another."""
    before = _zombies()
    many = [part(f"q{number}", python("pass")) for number in range(30)]
    async with launch(*many) as running:
        assert await running.end() == 0
        assert all(running.path(f"q{number}")[-1] == "completed" for number in range(30))
    assert _zombies() <= before


def _zombies() -> set[int]:
    return {row.pid for row in procfs.scan().values() if row.ppid == os.getpid() and not row.alive}


def _says(pattern: str) -> Any:
    return LogCheck(pattern=pattern)
