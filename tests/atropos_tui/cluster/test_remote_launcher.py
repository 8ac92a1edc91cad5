"""Components on other nodes: the protocol, errors of a broken connection, and that nothing is left
there.

The prefix leads nowhere here (`conftest.PLAIN`), or where `--launcher-prefix` says.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, State
from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.cluster import remote_launcher
from atropos_tui.cluster.frames import Connection
from atropos_tui.cluster.outbox import Heartbeats, Outbox
from atropos_tui.cluster.remote_launcher import StartedThere, sweep_there
from atropos_tui.profile.spec import Place
from atropos_tui.supervisor.journal.store import FarEntry, ProcessTable
from atropos_tui.supervisor.processes import procfs
from tests.atropos_tui.supervisor.conftest import far
from tests.atropos_tui.supervisor.journal.test_death import background
from tests.support.harness import (
    QUICK,
    Running,
    alive,
    part,
    pids_in,
    python,
    ready,
    script,
    wait_until,
)

remote = pytest.mark.launchers("remote")
LINES = 200_000
FLOOD = (
    f"for i in range({LINES}): print('line', i)\nprint('up', flush=True)\nimport time; "
    f"time.sleep(600)"
)
ASK = """
import http.client, json, os, socket
class Way(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["ATROPOS_CONTROL_SOCKET"])
way = Way("localhost")
for route in ("/status", "/recipe?action=restart&component=one"):
    way.request("GET", route)
    print(json.dumps(json.loads(way.getresponse().read())), flush=True)
"""


def far_of(running: Running, name: str) -> FarEntry:
    """The journal's word on where `name` is."""
    table = ProcessTable.load(running.run.journal_json)
    assert table is not None and table.components[name].far is not None
    return table.components[name].far


async def there(running: Running, name: str) -> int:
    """The pid of component `name` on its node, once it is known here."""

    def known() -> bool:
        table = ProcessTable.load(running.run.journal_json)
        return table is not None and name in table.components and far_of(running, name).pid > 0

    await wait_until(known)
    return far_of(running, name).pid


def prefix_of(running: Running, name: str) -> int:
    """The pid of the prefix here."""
    table = ProcessTable.load(running.run.journal_json)
    assert table is not None
    return table.components[name].pid


def node_agent_of(running: Running, name: str) -> int:
    """The pid of the node agent, as the parent of the component."""
    row = procfs.read(far_of(running, name).pid)
    assert row is not None
    return row.ppid


@remote
async def test_a_flood_comes_whole_and_what_srun_says_too(launch: Callable[..., Any]) -> None:
    async with launch(part("one", python(FLOOD), probes=ready())) as running:
        await running.until("one", State.HEALTHY)
        lines = running.run.log("one", 1).read_text().splitlines()
        assert [line for line in lines if line.startswith("line")] == [
            f"line {i}" for i in range(LINES)
        ]
        row = (await running.client.status()).components[0]
        assert (row.node, row.pid) == ("far", await there(running, "one"))
        assert running.states("one")[-1].node == "far"


@remote
async def test_it_asks_the_supervisor_through_the_line(launch: Callable[..., Any]) -> None:
    async with launch(part("one"), part("two", python(ASK))) as running:
        await running.until("two", State.COMPLETED)
        lines = running.run.log("two", 1).read_text().splitlines()
        status, recipe = (json.loads(line) for line in lines if line.startswith("{"))
        assert [row["name"] for row in status["components"]] == ["one", "two"]
        assert recipe["start"] == ["one"]


@remote
async def test_a_stop_has_its_signal_and_its_grace_there(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    code = (
        "import signal, sys, time\n"
        "def saved(*_): print('saved', flush=True); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, saved)\n"
        "print('up', flush=True); time.sleep(600)"
    )
    stubborn = part("stubborn", script("stubborn", tmp_path / "pids"))
    async with launch(part("one", python(code), probes=ready()), stubborn) as running:
        await running.until("one", State.HEALTHY)
        pids = await pids_in(tmp_path / "pids")
        client = await running.answers()
        await client.command(CommandRequest(action="stop", component="one"))
        assert (await running.until("one", State.STOPPED)).exit_code == 3
        assert "saved" in running.run.log("one", 1).read_text()
        await client.command(CommandRequest(action="stop", component="stubborn"))
        assert "killed after the grace" in (await running.until("stubborn", State.STOPPED)).reason
        assert not any(map(alive, pids))


@remote
async def test_nothing_secret_is_on_a_command_line_or_in_a_file(
    launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not-for-an-engine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("SLURM_STEP_ID", "41")
    code = (
        "import json, os; print(json.dumps(dict(os.environ)), flush=True)\n"
        + "import time; time.sleep(600)"
    )
    one = part(
        "one",
        python(code),
        role="engine",
        env={"HF_TOKEN": "${SECRET}", "SHOWN": "yes"},
        scratch=True,
    )
    async with launch(one, variables={"SECRET": "hush-hush"}) as running:
        await running.until("one", State.HEALTHY)
        log = running.run.log("one", 1)
        await wait_until(lambda: log.exists() and "SHOWN" in log.read_text())
        env = json.loads(
            next(line for line in log.read_text().splitlines() if line.startswith("{"))
        )
        assert (env["HF_TOKEN"], env["SHOWN"], env["ATROPOS_COMPONENT"]) == (
            "hush-hush",
            "yes",
            "one",
        )
        assert "WANDB_API_KEY" not in env, "not even by way of the prefix's own environment"
        assert Path(env["TMPDIR"]).name.startswith(procfs.SCRATCH)
        assert Path(env["ATROPOS_CONTROL_SOCKET"]).parent.stat().st_mode & 0o777 == 0o700
        job = running.run.journal_json.read_text()
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (prefix_of(running, "one"),)]
        assert "hush-hush" not in job and b"hush-hush" not in b"".join(lines)
        await running.client.command(CommandRequest(action="stop", component="one"))
        await running.until("one", State.STOPPED)
        assert not Path(env["TMPDIR"]).exists()
        assert not Path(env["ATROPOS_CONTROL_SOCKET"]).parent.exists()


def test_what_belongs_to_a_machine_stays_there() -> None:
    """PATH, HOME, the GPUs and the step of the far node win over the supervisor's, but not over the
    plan's."""
    from atropos_tui.cluster.node_agent import environment

    here = {
        "PATH": "/far/bin:/usr/bin",
        "HOME": "/far",
        "CUDA_VISIBLE_DEVICES": "1",
        "SLURM_STEP_ID": "7",
    }
    job = {"env": {"LANG": "C"}, "path": "/venv/bin:/usr/bin", "role": "api"}
    env = environment(job, here | {"AWS_SECRET": "x", "ATROPOS_COMPONENT": "other"})
    assert env == here | {"LANG": "C", "PATH": "/venv/bin:/usr/bin:/far/bin"}
    names = [
        "PATH",
        "HOME",
        "CUDA_VISIBLE_DEVICES",
        "SLURM_STEP_ID",
        "TMPDIR",
        "SSH_CONNECTION",
        "_",
        "PMIX_RANK",
    ]
    assert all(remote_launcher.OF_THIS_HOST.fullmatch(name) for name in names)
    assert not any(
        remote_launcher.OF_THIS_HOST.fullmatch(name)
        for name in ("LANG", "HF_HOME", "NCCL_SOCKET_IFNAME")
    )


@remote
async def test_what_cannot_be_started_there_is_said(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    async with launch(part("one", cwd=str(tmp_path / "absent"), restart=QUICK)) as running:
        assert await running.end() == 3
        assert "absent" in running.result().reason + "".join(running.result().last_lines)
        assert running.path("one").count("starting") == 1, "not tried again"


@remote
@pytest.mark.parametrize("victim", ["prefix", "node agent"])
async def test_a_lost_node_is_a_crash_in_words_and_nothing_is_left(
    launch: Callable[..., Any], tmp_path: Path, victim: str
) -> None:
    one = part("one", script("escapes", tmp_path / "pids", 600, "marked"), restart=QUICK)
    async with launch(one) as running:
        await running.until("one", State.HEALTHY)
        pids = await pids_in(tmp_path / "pids")
        first = await there(running, "one")
        killed = prefix_of(running, "one") if victim == "prefix" else node_agent_of(running, "one")
        os.kill(killed, signal.SIGKILL)
        crash = await running.until("one", State.BACKOFF)
        assert "node far (host-7): lost by" in crash.reason
        assert not alive(first) and not any(map(alive, pids))
        said = [record for record in running.records if isinstance(record, DiagnosisRecord)]
        assert [(record.rule, record.title) for record in said] == [
            ("node_lost", "node far (host-7) was lost, or could not be reached")
        ]
        await running.until("one", State.HEALTHY, attempt=2)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("ssh: connect to host n2 port 22: No route to host", "ssh -v HOST true"),
        ("Host key verification failed.", "ssh-keygen -R HOST"),
        (
            "srun: error: Unable to create step for job 7: Job/step already completing or "
            "completed",
            "squeue",
        ),
        ("/usr/bin/python9: No such file or directory", "[cluster] python"),
        ("ModuleNotFoundError: No module named 'atropos_tui'", "share it"),
    ],
)
async def test_a_node_that_is_not_reached_is_explained_by_what_the_launcher_said(
    launch: Callable[..., Any], words: str, fix: str
) -> None:
    one = far(part("one", restart=QUICK), ["/bin/sh", "-c", f'echo "{words}" >&2; exit 255', "--"])
    async with launch(one) as running:
        assert await running.end() == 3
        last = next(record for record in running.records if isinstance(record, DiagnosisRecord))
        assert (last.rule, last.component) == ("node_lost", "one")
        assert (
            "not reached by sh: it ended with exit code 255" in last.evidence
            and words in last.evidence
        )
        assert fix in last.fix
        assert words in running.run.log("one", 1).read_text()


@remote
async def test_a_node_that_goes_silent_is_named_and_then_given_up(
    launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node agent hangs, as it would on a node that does; so does the component, until it is
    ended."""
    monkeypatch.setattr(remote_launcher, "NODE_SILENT_S", 3.0)
    monkeypatch.setattr(remote_launcher, "LOST_S", 6.0)
    async with launch(part("one", restart=QUICK)) as running:
        await running.until("one", State.HEALTHY)
        pid, end = await there(running, "one"), node_agent_of(running, "one")
        os.kill(end, signal.SIGSTOP)
        await wait_until(
            lambda: "node_silent" in [getattr(record, "rule", "") for record in running.records]
        )
        assert running.states("one")[-1].new == "healthy", "named before it is given up"
        crash = await running.until("one", State.BACKOFF)
        assert "nothing was heard from there" in crash.reason
        assert not alive(pid) and not alive(end)
        await running.until("one", State.HEALTHY, attempt=2)


@remote
async def test_a_stop_while_it_is_not_reached_yet(launch: Callable[..., Any]) -> None:
    one = far(part("one"), ["/bin/sh", "-c", "sleep 600", "--"])
    async with launch(one, part("two")) as running:
        await running.until("two", State.HEALTHY)
        client = await running.answers()
        await client.command(CommandRequest(action="stop", component="one"))
        await running.until("one", State.STOPPED)


@remote
async def test_all_of_a_fate_group_are_ended_and_come_back_together(
    launch: Callable[..., Any],
) -> None:
    """A trainer over several nodes is several components: they name each other in
    `restart_with`."""
    names = ("t1", "t2", "t3")
    parts = [
        part(name, probes=ready(), restart=QUICK, restart_with=[o for o in names if o != name])
        for name in names
    ]
    async with launch(*parts) as running:
        for name in names:
            await running.until(name, State.HEALTHY)
        os.kill(await there(running, "t2"), signal.SIGKILL)
        for name in names:
            await running.until(name, State.HEALTHY, attempt=2)
        assert running.states("t1")[-1].attempt == running.states("t3")[-1].attempt == 2


@remote
async def test_what_it_uses_comes_over_the_line(launch: Callable[..., Any]) -> None:
    async with launch(
        part("one", python("print('up', flush=True)\nwhile True: pass"), probes=ready())
    ) as running:
        await running.until("one", State.HEALTHY)
        client = await running.answers()
        row = (await client.status()).components[0]
        assert row.memory_bytes and row.memory_bytes > 1_000_000
        assert row.pids == [await there(running, "one")]
        while not row.cpu_percent:
            await asyncio.sleep(0.5)
            row = (await client.status()).components[0]


@pytest.mark.parametrize(
    "said",
    [
        b"output -1000000\n",
        b"output 99999999999999\n",
        b"exit 3\nno!",
        b"usage 2\n{}",
        b"data 1\n0",
    ],
)
async def test_another_machine_that_says_anything_is_lost_and_nothing_else_is(
    launch: Callable[..., Any], said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that somebody else owns by now; the first of these kept the supervisor busy for
    ever."""
    monkeypatch.setattr(
        remote_launcher, "SWEEP_TIMEOUT_S", 1.0
    )  # by the same prefix, which never answers
    code = f"import os, time; os.write(1, {remote_launcher.MAGIC + said!r}); time.sleep(600)"
    async with launch(far(part("one"), [sys.executable, "-c", code]), part("two")) as running:
        await running.until("two", State.HEALTHY)
        await running.until("one", State.FAILED)


def test_what_another_machine_has_started_is_numbers() -> None:
    said = (
        b'{"pid": 7, "ticks": 1, "end_pid": 6, "end_ticks": 1, "command": ["touch", "x"], '
        b'"clears": ["/x"]}'
    )
    assert StartedThere.model_validate_json(said).model_dump() == {
        "pid": 7,
        "ticks": 1,
        "end_pid": 6,
        "end_ticks": 1,
    }


@remote
async def test_a_killed_supervisor_leaves_nothing_there_and_the_next_one_ends_what_it_did(
    tmp_path: Path, prefix: list[str]
) -> None:
    one = far(part("one", script("escapes", tmp_path / "pids", 600, "marked")), prefix)
    with background(tmp_path / "run", one, launcher="slurm") as supervisor:
        pids = await pids_in(tmp_path / "pids")
        supervisor.process.kill()
        await wait_until(lambda: not any(map(alive, pids)))


@remote
async def test_a_sweep_ends_what_a_killed_node_agent_has_left(
    tmp_path: Path, prefix: list[str]
) -> None:
    """Only what bears this run's and this component's names; the files that go with it, too."""
    child = script("escapes", tmp_path / "pids", 600, "marked")
    env = {"ATROPOS_RUN_ID": "swept", "ATROPOS_COMPONENT": "one"}
    left = await asyncio.create_subprocess_exec(*child, env={**os.environ, **env})
    other = await asyncio.create_subprocess_exec(
        *child[:-3],
        tmp_path / "others",
        "600",
        "marked",
        env={**os.environ, **env, "ATROPOS_COMPONENT": "two"},
    )
    pids = await pids_in(tmp_path / "pids")
    others = await pids_in(tmp_path / "others")
    (tmp_path / "manifest").touch()
    place = Place(node="far", host="h", address="127.0.0.1", prefix=prefix, python=sys.executable)
    command = place.command(place.python, *remote_launcher.ARGUMENTS)
    entry = FarEntry(
        name="one", node="far", host="h", command=command, clears=[str(tmp_path / "manifest")]
    )
    try:
        assert await asyncio.to_thread(sweep_there, entry, "swept") == ""
        assert not any(map(alive, pids)) and all(map(alive, others))
        assert not (tmp_path / "manifest").exists()
    finally:
        for pid in {*others, *pids, other.pid, left.pid}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
    broken = entry.model_copy(update={"command": ["/bin/sh", "-c", "echo no route >&2; exit 255"]})
    assert await asyncio.to_thread(sweep_there, broken, "swept") == "no route"


async def test_beats_go_on_while_the_event_loop_waits_for_a_disk() -> None:
    """The loop stands still in here, as in a write to a folder that hangs; no frame is cut by a
    heartbeat."""
    reading, writing = os.pipe()
    outbox, line = Outbox(writing), Connection(reading, -1)
    heartbeats = Heartbeats(0.02, lambda: [outbox])
    try:
        assert [line.receive(5) for _ in range(3)] == [("heartbeat", b"")] * 3
        outbox.send("output", b"x" * 300_000)  # more than the pipe holds
        while (found := await asyncio.to_thread(line.receive, 5)) == ("heartbeat", b""):
            pass
        assert found == ("output", b"x" * 300_000)
    finally:
        heartbeats.close()
        outbox.close()
        line.close()


async def test_a_sweep_waits_until_the_node_agent_listens(tmp_path: Path) -> None:
    """A .bashrc that reads its standard input took what was sent before, and nothing was ended."""
    env = {**os.environ, "ATROPOS_RUN_ID": "swept-late", "ATROPOS_COMPONENT": "one"}
    left = await asyncio.create_subprocess_exec(*python("import time; time.sleep(600)"), env=env)
    prefix = ["bash", "-c", 'read -r -t 0.3 line; exec "$@"', "--"]
    place = Place(node="far", host="h", address="127.0.0.1", prefix=prefix, python=sys.executable)
    command = place.command(place.python, *remote_launcher.ARGUMENTS)
    try:
        assert (
            await asyncio.to_thread(
                sweep_there,
                FarEntry(name="one", node="far", host="h", command=command),
                "swept-late",
            )
            == ""
        )
        await wait_until(lambda: not alive(left.pid))
    finally:
        if alive(left.pid):
            left.kill()
        await left.wait()
