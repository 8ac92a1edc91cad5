"""Delegated cgroup v2: a child that cleans its environment, double-forks and starts a session is
still caught.

Where it is not, for real (a private mount namespace hides it, or shows it read-only), all goes on
as without.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, State
from atropos_tui.supervisor.journal.store import ProcessTable
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.process import Ending, end_set, spawn
from tests.atropos_tui.supervisor.journal.test_death import Background, background, guard_of
from tests.support.harness import alive, part, pids_in, python, ready, script, wait_until

DELEGATED = procfs.describe_groups().startswith("cgroup v2 is delegated")
needs_delegation = pytest.mark.skipif(not DELEGATED, reason="cgroup v2 is not delegated here")
HOPS = """
import os, sys, time
print("up", flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", sys.argv[1]], {})
    os._exit(0)
time.sleep(600)
"""
FLEES = (
    "import os, time\nwhile True:\n    if os.fork(): os._exit(0)\n    os.setsid()\n    "
    "time.sleep(0.0005)"
)


def group_of(supervisor: Background) -> Path:
    table = ProcessTable.load(supervisor.run.journal_json)
    assert table is not None
    assert table.group
    return Path(table.group)


@pytest.fixture
def hidden(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A Python whose programs see no cgroup v2 ("gone"), or one that they cannot write to
    ("read-only")."""
    mount = next((line.split()[4] for line in _mounts() if " - cgroup2 " in line), "")
    act = {"gone": f"umount {mount}", "read-only": f"mount -o remount,ro,bind {mount}"}[
        request.param
    ]
    unshare = ["unshare", "--mount", "sh", "-c", f'{act} && exec "$@"', "sh"]
    if (
        not mount
        or shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("this machine does not allow a mount namespace")
    wrapper = tmp_path / "python"
    wrapper.write_text(
        f"""#!/bin/sh\nexec unshare --mount sh -c '{act} && exec "$@"' sh {sys.executable} "$@"\n"""
    )
    wrapper.chmod(0o755)
    said = subprocess.run(
        [
            str(wrapper),
            "-c",
            "from atropos_tui.supervisor.processes import procfs; print(procfs.describe_groups())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"gone": "no cgroup v2", "read-only": "Read-only file system"}[
        request.param
    ] in said.stdout
    return str(wrapper)


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def escaping(folder: Path, dress: str = "clean") -> Any:
    return part("escapes", script("escapes", folder / dress, 600, dress))


@needs_delegation
async def test_a_stop_catches_who_left_everything_else_behind(tmp_path: Path, launch: Any) -> None:
    """Between two looks at the process table: clean environment, a session of its own, no
    parent."""
    async with launch(escaping(tmp_path), part("other")) as running:
        leader, daemon = await pids_in(tmp_path / "clean")
        client = await running.answers()
        await running.until("other", State.HEALTHY)
        assert not procfs.environ(daemon)
        assert alive(daemon)
        await client.command(CommandRequest(action="restart", component="escapes"))
        await running.until("escapes", State.STOPPED)
        assert not alive(leader)
        assert not alive(daemon)
        await running.until("escapes", State.STARTING, 2)
        table = ProcessTable.load(running.run.journal_json)
        assert table is not None
        assert sorted(path.name for path in Path(table.group).iterdir() if path.is_dir()) == [
            "escapes.2",
            "other.1",
        ]
        await client.command(CommandRequest(action="down"))
        await running.end()
        assert not Path(table.group).exists()


@needs_delegation
@pytest.mark.parametrize("end", ["down", "crash", "supervisor", "supervisor and guard"])
async def test_nobody_and_no_empty_group_stays(tmp_path: Path, end: str) -> None:
    parts = [
        escaping(tmp_path),
        part("flees", python(HOPS, FLEES), probes=ready(), stop={"grace_s": 0.1}),
    ]
    if end == "crash":
        parts.append(part("ends", python("import time; time.sleep(1); raise SystemExit(3)")))
    with background(tmp_path / "run", *parts) as supervisor:
        client = await supervisor.ready()
        _, daemon = await pids_in(tmp_path / "clean")
        group = group_of(supervisor)
        assert daemon in procfs.group_pids(str(group))
        guard = guard_of(supervisor.process.pid)
        if end == "down":
            await client.command(CommandRequest(action="down"))
        elif end == "supervisor":
            supervisor.process.kill()
        elif end == "supervisor and guard":
            supervisor.process.send_signal(signal.SIGSTOP)  # it must not replace its guard
            os.kill(guard, signal.SIGKILL)
            supervisor.process.kill()
        await supervisor.end()
        if end == "supervisor and guard":
            assert alive(daemon), "nobody was left to end it"
            assert {one.pid for one in supervisor.left()} >= {daemon}
            with background(
                tmp_path / "run", part("one"), run_id=supervisor.stack.run_id
            ) as second:
                await second.ready()
                assert not alive(daemon), "the next supervisor ends it before it starts anything"
                second.process.terminate()
                await second.end()
        await wait_until(lambda: not alive(daemon) and not group.exists(), 5)


@needs_delegation
async def test_what_was_forked_since_the_look_dies_with_the_group(tmp_path: Path) -> None:
    """The look at the process table shows the leader alone, as if the daemon had been forked a
    moment later."""
    run_group = procfs.run_group(f"test-{os.getpid()}")
    group = procfs.part_group(run_group, "escapes", 1)
    child, pipe = spawn(
        script("escapes", tmp_path / "pids", 600, "clean"), dict(os.environ), None, group=group
    )
    try:
        leader, daemon = await pids_in(tmp_path / "pids")
        assert procfs.group_pids(run_group) == {leader, daemon}, "of the groups below, too"

        def look() -> list[procfs.Proc]:
            row = procfs.read(leader)
            return [row] if row is not None and row.alive else []

        told = list[object]()
        ending = Ending(signal.SIGKILL, 0, asyncio.Event(), look, told.append, told.append, group)
        assert await end_set(child, ending) == 1
        await wait_until(lambda: not alive(daemon), 1)
        assert told == []
        assert procfs.remove_group(run_group)
        assert not Path(run_group).exists()
    finally:
        os.close(pipe)
        procfs.kill_group(run_group)
        child.abandon()
        procfs.remove_group(run_group)


@pytest.mark.parametrize("hidden", ["gone", "read-only"], indirect=True)
@pytest.mark.parametrize("end", ["down", "kill"])
async def test_without_delegation_the_marker_does(tmp_path: Path, hidden: str, end: str) -> None:
    with background(tmp_path / "run", escaping(tmp_path, "marked"), python=hidden) as supervisor:
        client = await supervisor.ready()
        _, daemon = await pids_in(tmp_path / "marked")
        table = ProcessTable.load(supervisor.run.journal_json)
        assert table is not None
        assert table.group == table.components["escapes"].group == ""
        if end == "kill":
            supervisor.process.kill()
        else:
            await client.command(CommandRequest(action="down"))
        await supervisor.end()
        await wait_until(lambda: not alive(daemon), 5)


def test_where_the_own_group_lies() -> None:
    """Unified and hybrid layouts, a container that sees a part of the tree, and none."""
    unified = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    v1 = "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    hybrid = v1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    container = "50 40 0:26 /docker/ab\\040c /sys/fs/cgroup ro - cgroup2 cgroup ro\n"
    user = "/user.slice/user-1000.slice/user@1000.service/app.slice/run.scope"
    assert procfs._group_folder(user, unified) == f"/sys/fs/cgroup{user}"
    assert procfs._group_folder("/", hybrid) == "/sys/fs/cgroup/unified"
    assert procfs._group_folder("/docker/ab c/x", container) == "/sys/fs/cgroup/x"
    assert procfs._group_folder("/docker/ab cd", container) == "", "another container's"
    assert procfs._group_folder("/x", v1) == procfs._group_folder("", unified) == ""


def test_names_are_safe_and_distinct() -> None:
    names = ["a/b", "a_b", "a~b", "..", "a b", "ä", "a"]
    found = [procfs.group_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert not any("/" in name or " " in name for name in found)
    assert not procfs.is_group_of("/etc", "run"), "a path in a journal is not believed"
    assert not procfs.is_group_of("", "run")


@needs_delegation
def test_describe_says_how_components_are_kept_together() -> None:
    assert "cgroup v2 is delegated: each component gets a group below /" in procfs.describe_groups()
    assert not list(Path(procfs._own_group()).glob(f"{procfs.PREFIX}trial*"))
