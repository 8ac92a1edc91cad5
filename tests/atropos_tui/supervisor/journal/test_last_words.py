"""A run ends properly on a full disk, a guard that cannot live is reported, a socket always has a
folder."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import Role, State
from atropos_common.protocol.records import DiagnosisRecord, StateRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.run.run_files import load_run, status_from_files
from atropos_tui.supervisor import client
from atropos_tui.supervisor.journal import store
from atropos_tui.supervisor.journal.store import Journal, RunResult, reserve
from atropos_tui.supervisor.launchers import guard
from atropos_tui.supervisor.launchers.guard import Guard
from tests.support.harness import part, python, ready, wait_until
from tests.support.tmpfs import mounted


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("reason", ["trainer: exit code 7", "x" * 100_000])
def test_a_result_has_its_room_from_the_start(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RunDir(tmp_path).result_json
    reserve(path)
    assert not path.exists()
    monkeypatch.setattr(store, "write_private", full)
    RunResult(exit_code=3, reason=reason, component="trainer", last_lines=["y" * 5000] * 40).write(
        path
    )
    result = RunResult.load(path)
    assert result is not None and (result.exit_code, result.component) == (3, "trainer")
    assert result.reason[:10] == reason[:10] and [file.name for file in tmp_path.iterdir()] == [
        "result.json"
    ]


async def test_a_run_that_ends_on_a_full_disk_has_an_end(tmp_path: Path, launch: Any) -> None:
    """`ps` said that it had crashed, whatever its exit code, component and cause."""
    with mounted(tmp_path / "run", "size=400k"):
        fails = part(
            "trainer",
            python("import time; print('up', flush=True); time.sleep(1.5); raise SystemExit(7)"),
            probes=ready(),
        )
        async with launch(fails) as running:
            await running.until("trainer", State.HEALTHY)
            with (
                pytest.raises(OSError, match="No space left"),
                (tmp_path / "run/fill").open("wb") as file,
            ):
                while True:
                    file.write(bytes(512))
                    file.flush()
            assert await running.end() == 3
            result = running.result()
            assert (result.exit_code, result.component) == (3, "trainer")
            (tmp_path / "run/fill").unlink()
            running.run.supervisor_jsonl.unlink()  # it is torn: the harness looks at whole ones
            running.records.clear()
            running.run.supervisor_jsonl.touch()


@pytest.mark.parametrize(
    ("role", "new", "said"),
    [
        (Role.ENGINE, "failed", "vllm had failed: exit code 3"),
        (Role.TRAINER, "completed", "the trainer had finished"),
    ],
)
def test_without_a_result_the_journal_tells_the_end(
    role: Role, new: str, said: str, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    run.plan_json.write_text(
        json.dumps({"components": [{"name": "vllm", "role": role.value, "command": ["x"]}]})
    )
    run.run_json.write_text('{"run_id": "r-1", "name": "r", "started_at": 1}')
    journal = Journal(run.supervisor_jsonl, "r-1")
    for old, state in (("pending", "starting"), ("starting", new)):
        journal.append(
            StateRecord(component="vllm", role=role.value, old=old, new=state, reason="exit code 3")
        )
    journal.close()
    info, state, _ = load_run(run.root)
    assert said in status_from_files(run, info, state).reason


async def test_a_guard_that_cannot_live_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After six deaths nobody said that there was none any more."""
    monkeypatch.setattr(guard, "AGAIN_S", 0.3)
    told: list[str] = []
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    found = Guard("a-run-of-tests", lock, on_trouble=told.append)
    for _ in range(guard.MAX_DEATHS + 1):
        pid = found._popen.pid
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda pid=pid: found._popen.pid != pid or bool(told))  # type: ignore[misc]
    assert told == [f"the guard of the run died {guard.MAX_DEATHS + 1} times"]
    await wait_until(lambda: told[-1] == "")
    assert found._popen.poll() is None
    await found.close()
    os.close(lock)


async def test_a_stopped_guard_loses_no_note(tmp_path: Path) -> None:
    kept = tmp_path / "clears"
    kept.touch()
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    found = Guard("a-run-of-tests", lock)
    os.kill(found._popen.pid, signal.SIGSTOP)
    found.clear(Path(f"/nowhere/{'x' * 200}/{number}") for number in range(2000))
    found.clear([kept])
    assert found._unsent, "more than a pipe holds"
    os.kill(found._popen.pid, signal.SIGCONT)
    await wait_until(lambda: not found._unsent)
    await found.close()
    os.close(lock)
    assert not kept.exists()


async def test_the_diagnosis_of_a_guard_that_dies(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "AGAIN_S", 0.2)
    monkeypatch.setattr(guard, "MAX_DEATHS", 0)
    made: list[Guard] = []
    start = Guard._start
    monkeypatch.setattr(Guard, "_start", lambda self: (made.append(self), start(self))[1])
    async with launch(part("a", probes=ready())) as running:
        await running.until("a", State.HEALTHY)
        os.kill(made[0]._popen.pid, signal.SIGKILL)
        found = [record for record in running.records if isinstance(record, DiagnosisRecord)]
        async with asyncio.timeout(10):
            while len(found) < 2:
                await asyncio.sleep(0.02)
                found = [
                    record for record in running.records if isinstance(record, DiagnosisRecord)
                ]
        assert [(record.rule, record.over) for record in found] == [
            ("guard_dies", False),
            ("guard_dies", True),
        ]


def test_another_user_who_made_the_folder_of_sockets_does_not_keep_runs_from_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ "remove it", the error said, which the sticky bit of /tmp forbids."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", f"/tmp/at-{os.getpid()}")
    shared = Path(f"/tmp/at-{os.getpid()}/t")  # short: a socket's path has a limit
    monkeypatch.setattr(client, "SHARED_TEMPORARY", shared)
    shared.mkdir(parents=True)
    theirs = shared / f"atropos-tui-{os.getuid()}"
    theirs.mkdir(mode=0o777)
    theirs.chmod(0o777)
    try:
        folder = client.socket_folder()
        assert (
            folder == Path(f"/tmp/at-{os.getpid()}/atropos-tui/sockets")
            and folder.stat().st_mode & 0o777 == 0o700
        )
    finally:
        shutil.rmtree(f"/tmp/at-{os.getpid()}")
