"""SLURM's signal before a job's time limit, and a requested end: only the limit queues the job
again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from atropos_common.protocol.control import CommandRequest
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.spec import LogPolicy, StackSpec, StopPolicy
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.supervisor.journal.store import RunResult
from tests.support.harness import part, python, ready, wait_until

SAVES = r"""
import os, signal, sys, time
def save(*_):
    os.write(1, b'saving\n')
    time.sleep(1.5)
    open(sys.argv[1], 'w').write('saved')
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.write(1, b'up\n')
time.sleep(600)
"""
HEADLESS = """
import sys
from pathlib import Path
from atropos_common.system.run_dir import RunDir
from atropos_tui.cluster import slurm; from atropos_tui.cli.start import up
from atropos_tui.profile.spec import StackSpec
slurm.COMMAND_TIMEOUT_S = 1.0
stack = StackSpec.model_validate_json(sys.stdin.read())
up.last_figures = lambda run: type('Figures', (), {'step': up.steps.pop()})
up.steps = [5, 0]
sys.exit(up._headless(RunDir(Path(stack.run_dir)), stack, goes_on=True))
"""


@pytest.mark.parametrize(
    ("asked", "again"),
    [
        ("USR1", True),
        ("down USR1", False),
        ("USR1 down", False),
        ("TERM USR1", False),
        ("USR1 USR1", True),
    ],
)
async def test_only_a_run_that_its_time_limit_ended_is_queued_again(
    asked: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `down` during which the signal came was undone: the job was queued again, and ran a whole
    further turn."""
    run, saved, requeued = RunDir(tmp_path / "run"), tmp_path / "saved", tmp_path / "requeued"
    saver = part("trainer", python(SAVES, saved), probes=ready(), stop=StopPolicy(grace_s=20))
    stack = StackSpec(
        run_id="test-limit",
        name="t",
        mode="none",
        run_dir=str(run.root),
        components=[saver],
        logs=LogPolicy(),
    )
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {requeued}\n')
    (tmp_path / "scontrol").chmod(0o755)
    env = os.environ | {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run.create()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HEADLESS, stdin=asyncio.subprocess.PIPE, env=env
    )
    assert process.stdin is not None
    process.stdin.write(stack.model_dump_json().encode())
    process.stdin.close()
    log = run.log("trainer", 1)
    try:
        await wait_until(lambda: log.exists() and "up" in log.read_text(), 30)
        for word in asked.split():
            if word == "down":
                async with ControlClient(run.root) as client:
                    await client.command(CommandRequest(action="down"))
            else:
                process.send_signal(getattr(signal, f"SIG{word}"))
            await wait_until(lambda: "saving" in log.read_text())
            await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            assert await process.wait() == 130
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert saved.exists(), "a signal that only announces the limit hurries nothing"
    result = RunResult.load(run.result_json)
    assert result is not None and (result.ended_by == "time_limit") is again
    assert requeued.exists() is again
