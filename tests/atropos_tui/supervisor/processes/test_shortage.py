"""A machine without descriptors, memory or processes for a while: starts wait, and the supervisor
lives."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from atropos_common.protocol.control import ComponentStatus, State
from atropos_tui.supervisor import component
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.supervisor.launchers import launcher
from atropos_tui.supervisor.processes.process import LaunchError, make_scratch, spawn
from tests.atropos_tui.supervisor.journal.test_death import background
from tests.support.harness import QUICK, part, ready


def failing(times: int, number: int) -> Callable[..., Any]:
    left = iter(range(times))

    def start(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        return spawn(*arguments, **options)

    return start


async def _waiting(client: ControlClient) -> ComponentStatus:
    """The only component, once it waits for something."""
    async with asyncio.timeout(5.0):
        while not (row := (await client.status()).components[0]).waiting_for:
            await asyncio.sleep(0.01)
    return row


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOSPC])
async def test_a_start_waits_for_the_machine(
    launch: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It was final: a shortage of a moment ended the run with exit code 3."""
    monkeypatch.setattr(launcher, "spawn", failing(2, number))
    async with launch(part("one")) as running:
        client = await running.answers()
        row = await _waiting(client)
        assert (row.state, row.waiting_for) == (
            State.PENDING,
            f"the machine: {os.strerror(number)}",
        )
        await running.until("one", State.HEALTHY)
        assert running.states("one")[-1].attempt == 1


async def test_a_start_waits_for_a_network_disk(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an internal error, which ended the run."""
    from atropos_tui.supervisor.processes import launch as checks

    check, answers = checks._check_here, [False, True]

    def stale(*args: Any) -> None:
        if answers and not answers.pop(0):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/net/venv/bin/python")
        check(*args)

    monkeypatch.setattr(checks, "_check_here", stale)
    async with launch(part("one")) as running:
        row = await _waiting(await running.answers())
        assert row.waiting_for == f"the machine: {os.strerror(errno.ESTALE)}"
        await running.until("one", State.HEALTHY)


async def test_a_start_does_not_wait_for_ever(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "spawn", failing(10**6, errno.EMFILE))
    monkeypatch.setattr(component, "RESOURCE_PATIENCE_S", 0.5)
    async with launch(part("one")) as running:
        assert await running.end() == 3
        assert "cannot start one for 0.5 s: Too many open files" in running.result().reason


async def test_without_memory_for_a_thread_the_supervisor_lives(tmp_path: Path) -> None:
    """An end needs a thread: it was a fault of the supervisor, and the run ended with exit code
    1."""
    parts = [part(f"part{number}", probes=ready(), restart=QUICK) for number in range(8)]
    with background(tmp_path / "run", *parts) as supervisor:
        client = await supervisor.ready()
        rows = (await client.status()).components
        process = psutil.Process(supervisor.process.pid)
        usual = process.rlimit(resource.RLIMIT_AS)
        process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms + (1 << 20), usual[1]))
        for row in rows:
            assert row.pid
            os.kill(row.pid, signal.SIGKILL)
        await asyncio.sleep(2)
        process.rlimit(resource.RLIMIT_AS, usual)
        assert (await client.wait("ready", 30)).outcome == "reached"
        assert {(row.state, row.attempt) for row in (await client.status()).components} == {
            (State.HEALTHY, 2)
        }


async def test_a_run_directory_that_cannot_be_written_is_named(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that became read-only: the fix was to look at the component's command."""
    run_dir = tmp_path / "run"

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{run_dir}/logs/one/1.log")

    monkeypatch.setattr(launcher, "spawn", refuse)
    async with launch(part("one")) as running:
        assert await running.end() == 3
        assert "Read-only file system" in running.result().reason
        told = (run_dir / "supervisor.jsonl").read_text() + running.result().model_dump_json()
        assert (
            f"make {run_dir} readable and writable again" in told
            and "check its command" not in told
        )


def test_a_folder_for_temporary_files_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"no folder {tmp_path}/none") as caught:
        make_scratch(tmp_path / "none/scratch")
    assert "set TMPDIR" in caught.value.fix
