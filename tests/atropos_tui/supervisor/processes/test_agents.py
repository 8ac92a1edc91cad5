"""Programs of `[env] agent` do not outlive their environment."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from atropos_tui.supervisor.client import ControlClient
from tests.atropos_tui.supervisor.journal.test_death import background
from tests.support.harness import alive, part, pids_in, wait_until

AGENT = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getppid()} {os.getpid()} {child.pid}\\n")
time.sleep(600)
"""
ENVIRONMENT = """
import asyncio, sys
from atropos_envs.recording.programs import run_program
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
asyncio.run(run_program(command, env={}, given=b"", timeout_s=600))
"""


async def test_a_killed_environment_leaves_no_agent(tmp_path: Path) -> None:
    """The agent has a process group of its own, and its child another session."""
    command = [sys.executable, "-c", ENVIRONMENT, AGENT, str(tmp_path / "pids")]
    with background(tmp_path / "run", part("env", command), part("other")) as supervisor:
        client = await supervisor.ready()
        assert isinstance(client, ControlClient)
        environment, *agents = await pids_in(tmp_path / "pids", 60)
        assert alive(environment) and all(map(alive, agents))
        os.kill(environment, signal.SIGKILL)
        await wait_until(lambda: not any(map(alive, agents)), 10)
        assert supervisor.process.poll() is None, "the stack goes on"
