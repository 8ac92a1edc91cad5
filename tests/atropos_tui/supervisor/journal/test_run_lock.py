"""One supervisor in a run directory, and one `up` that prepares it: a second one is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from atropos_common.protocol.control import CommandRequest
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli.main import run
from atropos_tui.cli.manage import control
from atropos_tui.cli.manage.runs import is_used
from atropos_tui.cli.start import up
from atropos_tui.profile.ports import free_port
from atropos_tui.supervisor import client
from atropos_tui.supervisor.journal import run_lock
from atropos_tui.supervisor.journal.run_lock import lock_run
from atropos_tui.supervisor.journal.store import ProcessTable, RunInUseError, locked
from atropos_tui.supervisor.processes import procfs
from tests.atropos_tui.cli.stand_in_stack import write_profile
from tests.atropos_tui.supervisor.journal.test_death import background
from tests.support.harness import alive, part, wait_until


@pytest.mark.parametrize("stays", [True, False])
def test_the_loser_of_two_ups_in_one_directory_writes_nothing(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """run.json and profile.toml were those of the loser, and `up --resume` went on with another
    profile than ran."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    profile = write_profile(tmp_path, "p", ports=(free_port(), free_port()))
    kept: list[int] = []
    monkeypatch.setattr(up, "spawn_supervisor", lambda run, stack, lock: kept.append(lock))
    looked = up._check_nodes
    words = ["up", str(profile), "--detach", "--run-dir", "r", "--set"]

    def look(*args: object, **more: object) -> None:
        monkeypatch.setattr(up, "_check_nodes", looked)
        assert run([*words, "name='winner'"]) == 0, "while the first still looks at the machine"
        if not stays:
            os.close(kept.pop())

    monkeypatch.setattr(up, "_check_nodes", look)
    code = run([*words, "name='loser'"])
    for lock in kept:
        os.close(lock)
    assert json.loads((tmp_path / "r/run.json").read_text())["name"] == "winner"
    assert 'name = "winner"' in (tmp_path / "r/profile.toml").read_text()
    said = capsys.readouterr().err
    assert code == 2 and ("another supervisor runs here" if stays else "is not empty") in said


async def test_a_supervisor_whose_files_were_removed_gets_no_second_beside_it(
    tmp_path: Path,
) -> None:
    """`up --resume` began a second one, and each ended the components of the other."""
    with background(tmp_path / "run", part("a")) as supervisor:
        await supervisor.ready()
        supervisor.run.supervisor_jsonl.unlink()
        supervisor.run.control_sock.unlink()
        with pytest.raises(RunInUseError, match=f"pid {supervisor.process.pid}"):
            lock_run(supervisor.run)


async def test_a_stopped_guard_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up --resume` waited a minute in silence, then said "attach to it", where nobody was."""
    with background(tmp_path / "run", part("a")) as supervisor:
        await supervisor.ready()
        guards = [
            pid
            for pid in run_lock.holders(supervisor.run.supervisor_jsonl)
            if pid != supervisor.process.pid
        ]
        assert len(guards) == 1
        os.kill(guards[0], signal.SIGSTOP)
        try:
            supervisor.process.kill()
            supervisor.process.wait()
            monkeypatch.setattr(run_lock, "TELL_S", 0.1)
            with pytest.raises(
                RunInUseError, match=f"pid {guards[0]} .* is stopped: kill -CONT {guards[0]}"
            ):
                await asyncio.to_thread(lock_run, supervisor.run, patience_s=0.5)
            assert f"waiting for the run directory: pid {guards[0]}" in capsys.readouterr().err
            info = {"run_id": supervisor.stack.run_id, "name": "t", "started_at": 1}
            supervisor.run.run_json.write_text(json.dumps(info))
            assert await asyncio.to_thread(run, ["clean", str(supervisor.run.root), "--yes"]) == 2
            assert f"is stopped: kill -CONT {guards[0]}" in capsys.readouterr().err
        finally:
            os.kill(guards[0], signal.SIGCONT)
        os.close(await asyncio.to_thread(lock_run, supervisor.run))


async def test_a_stopped_supervisor_is_told_in_seconds(tmp_path: Path) -> None:
    """`ps` took 31 s."""
    with background(tmp_path / "run", part("a")) as supervisor:
        await supervisor.ready()
        supervisor.process.send_signal(signal.SIGSTOP)
        await wait_until(lambda: procfs.is_stopped(supervisor.process.pid))
        began = time.monotonic()
        with pytest.raises(client.NotAnswering, match=rf"kill -CONT {supervisor.process.pid}\b"):
            await client.ControlClient(supervisor.run.root).status()
        assert time.monotonic() - began < 8
        # No command waits for it, to come when it goes on.
        began, stopped = time.monotonic(), rf"kill -CONT {supervisor.process.pid}\b"
        socket = client.ControlClient(supervisor.run.root)
        with pytest.raises(client.NotAnswering, match=stopped):
            await socket.wait("done", timeout=3)
        with pytest.raises(client.NotAnswering, match=stopped):
            await socket.command(CommandRequest(action="down"))
        assert time.monotonic() - began < 2
        supervisor.process.send_signal(signal.SIGCONT)


async def test_the_lock_goes_from_up_to_its_supervisor(tmp_path: Path) -> None:
    """Between the two nobody else comes in."""
    directory = RunDir(tmp_path / "run")
    directory.create()
    lock = lock_run(directory)
    from atropos_tui.profile.spec import StackSpec

    stack = StackSpec(
        run_id="t-lock", name="t", mode="none", run_dir=str(directory.root), components=[part("a")]
    )
    try:
        await asyncio.to_thread(up.spawn_supervisor, directory, stack, lock)
        with pytest.raises(RunInUseError):
            locked(directory.supervisor_jsonl)
    finally:
        await control.bring_down(directory.root, 10)
    table = ProcessTable.load(directory.journal_json)
    assert table and table.supervisor
    await wait_until(lambda: not alive(table.supervisor.pid))  # type: ignore[union-attr]
    os.close(locked(directory.supervisor_jsonl))


def test_an_up_that_got_no_further_than_its_lock_leaves_a_usable_directory(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    os.close(locked(directory.supervisor_jsonl))
    assert not is_used(tmp_path)
    directory.supervisor_jsonl.write_text("a record")
    assert is_used(tmp_path)
