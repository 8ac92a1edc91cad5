"""ssh: a run over three hosts ends as on one; a fault is named within 10 s, with its fix."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.cluster.profiles import light, ssh_tables
from tests.cluster.ssh_nodes import SshNodes
from tests.cluster.stacks import Observed, User
from tests.cluster.table import Table

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture
def run(ssh: SshNodes, user: User) -> Iterator[Observed]:
    """A run of stand-ins whose components are all up."""
    started = user.begins(
        "up", str(light(user.folder, ssh_tables(ssh.config))), "--headless", "--run-dir", "run"
    )
    seen = Observed(user.folder / "run")
    try:
        seen.until("trainer", "healthy")
        yield seen
    finally:
        started.terminate()
        started.wait(timeout=60)
    seen.until_nothing_is_left()


def end_of_line(run: Observed, program: str) -> psutil.Process:
    """The process called `program` that carries the engine's line."""
    return next(p for p in run.processes() if p.name() == program and "n2" in p.cmdline())


def test_a_run_over_three_hosts(ssh: SshNodes, user: User) -> None:
    profile = light(user.folder, ssh_tables(ssh.config), steps=5)
    done = user.gives("up", str(profile), "--headless", "--run-dir", "run")
    assert done.returncode == 0 and "trainer finished" in done.stdout, done.stdout + done.stderr
    seen = Observed(user.folder / "run")
    assert seen.steps() == [1, 2, 3, 4, 5]
    seen.until_nothing_is_left()


def test_a_killed_ssh_is_named_and_its_component_comes_back(run: Observed, table: Table) -> None:
    end_of_line(run, "ssh").kill()
    seconds = run.until_said("n2")
    table.row("SIGKILL of ssh", run.said()[-1], seconds)
    assert seconds < 10
    steps = len(run.steps())
    run.until("vllm", "healthy")
    run.until("trainer", "healthy")
    assert len(run.steps()) >= steps


def test_a_killed_supervisor_leaves_nothing(run: Observed, table: Table) -> None:
    run.supervisor().kill()
    seconds = run.until_nothing_is_left()
    table.row("SIGKILL of the supervisor (ssh)", "every component ends", seconds)
    assert seconds < 15


@pytest.mark.parametrize(("fault", "words"), [("silence", "n2"), ("host key", "host key")])
def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(
    ssh: SshNodes, user: User, table: Table, fault: str, words: str
) -> None:
    profile = light(user.folder, ssh_tables(ssh.config))
    ssh.silence("n2") if fault == "silence" else ssh.know("n2", "host_n3")
    began = time.monotonic()
    try:
        done = user.gives("up", str(profile), "--headless", "--run-dir", "run")
    finally:
        ssh.wake("n2") if fault == "silence" else ssh.know("n2")
    seconds = time.monotonic() - began
    assert done.returncode == 2 and words in done.stderr.lower() and "fix:" in done.stderr, (
        done.stderr
    )
    assert not (user.folder / "run").exists(), "nothing has begun"
    said = next(line for line in done.stderr.splitlines() if "n2" in line).strip()
    table.row(
        {"silence": "a host takes connections and says nothing", "host key": "its key has changed"}[
            fault
        ],
        said,
        seconds,
    )
    assert seconds < 25
