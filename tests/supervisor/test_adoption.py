"""`survive = true`: SIGKILL of the supervisor keeps the components, and the next supervisor goes on
with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_common.protocol.control import CommandRequest, ComponentStatus, Role, State
from atropos_common.protocol.record_tail import RecordTail
from atropos_common.protocol.records import StateRecord, parse_line
from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, ENV_TOKEN
from atropos_tui.profile import ports
from atropos_tui.profile.spec import ComponentSpec, RestartPolicy
from atropos_tui.supervisor.journal import tracker
from atropos_tui.supervisor.journal.store import ProcessTable, RunResult
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.runner import run_stack
from atropos_tui.supervisor.supervisor import Supervisor
from tests.supervisor.harness import QUICK, alive, part, python, ready, script, wait_until
from tests.supervisor.test_death import Background, background, plant

COUNT = (
    "import time\nprint('up')\nn = 0\nwhile True:\n    print('line', n, flush=True)\n    n += "
    "1\n    time.sleep({})"
)
WAITS = """
import os, sys, time
print("up", flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.005)
if sys.argv[2] == "KILL": os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[2]))
"""


def counting(name: str, pause_s: float = 0.002, **fields: Any) -> ComponentSpec:
    return part(name, python(COUNT.format(pause_s)), probes=ready(), **fields)


async def rows_of(supervisor: Background) -> dict[str, ComponentStatus]:
    client = await supervisor.ready()
    return {row.name: row for row in (await client.status()).components}


def kill(supervisor: Background) -> None:
    supervisor.process.kill()
    supervisor.process.wait()


def successor(first: Background, *parts: ComponentSpec, **fields: Any) -> Background:
    """The next supervisor of the same run; with other parts, if any are given. What it leaves is
    for the next one."""
    parts = parts or tuple(first.stack.components)
    return Background(
        first.run.root, *parts, run_id=first.stack.run_id, **{"survive": True} | fields
    )


@contextlib.contextmanager
def again(first: Background, *parts: ComponentSpec, **fields: Any) -> Iterator[Background]:
    """The next one, which leaves nothing when the test is over."""
    supervisor = successor(first, *parts, **fields)
    try:
        yield supervisor
    finally:
        supervisor.clean()


def same_processes(
    before: dict[str, ComponentStatus], after: dict[str, ComponentStatus], *names: str
) -> None:
    for name in names or before:
        assert (after[name].pid, after[name].attempt, after[name].restarts) == (
            before[name].pid,
            1,
            0,
        )


def check_counted(supervisor: Background, name: str) -> int:
    """Every line is in the log, once, in order; how many there are."""
    lines = supervisor.run.log(name, 1).read_text().splitlines()
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line")]
    assert lines[0] == "up"
    assert numbers == list(range(len(numbers))), "a line is missing, torn or there twice"
    assert len(lines) == len(numbers) + 1
    return len(numbers)


def steps(supervisor: Background, component: str) -> list[tuple[str, int, str]]:
    """New state, attempt and reason of everything that happened to `component`, under whichever
    supervisor."""
    records = list(
        RecordTail(supervisor.run.supervisor_jsonl).rest()
    )  # not a line that is just being written
    assert [record.seq for record in records] == list(range(len(records)))
    rows = [
        record
        for record in records
        if isinstance(record, StateRecord) and record.component == component
    ]
    return [(row.new, row.attempt, row.reason) for row in rows]


async def down(supervisor: Background) -> None:
    """A normal end leaves nothing, keepers included."""
    client = await supervisor.ready()
    await client.command(CommandRequest(action="down"))
    assert await supervisor.end() == 130
    assert supervisor.left() == []
    table = ProcessTable.load(supervisor.run.journal_json)
    assert table is not None
    assert not Path(table.group).is_dir() or not table.group


async def test_components_live_on_and_are_adopted(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest"
    parts = (
        counting("one"),
        counting("two", env={"X": "y"}, clears=[str(manifest)]),
        part("plain"),
    )
    with background(tmp_path / "run", *parts, survive=True) as first:
        before = await rows_of(first)
        manifest.touch()
        kill(first)
        await wait_until(lambda: not os.path.lexists(first.run.control_sock))
        written = check_counted(first, "one")
        await asyncio.sleep(0.5)
        assert check_counted(first, "one") > written + 50, (
            "it prints, and its log grows, while nobody supervises"
        )
        assert all(alive(row.pid or 0) for row in before.values())
        assert manifest.exists(), "it belongs to who lives"
        assert {one.component for one in first.left() if one.adoptable} == {"one", "two", "plain"}
        with again(first) as second:
            after = await rows_of(second)
            same_processes(before, after)
            assert [row.state for row in after.values()] == [State.HEALTHY] * 3
            assert after["one"].started_at == pytest.approx(before["one"].started_at, abs=0.05)
            assert [new for new, _, _ in steps(second, "one")] == ["starting", "healthy"] * 2
            assert steps(second, "one")[2] == ("starting", 1, "adopted, attempt 1")
            await down(second)
            assert steps(second, "one")[-1][0] == "stopped"
        assert not manifest.exists()
        assert not any(alive(row.pid or 0) for row in before.values())
        assert min(check_counted(first, name) for name in ("one", "two")) > written + 50


@pytest.mark.parametrize("when", ["meanwhile", "adopted"])
@pytest.mark.parametrize(
    ("said", "code", "run_code"), [("0", 0, 0), ("3", 3, 3), ("KILL", -signal.SIGKILL, 3)]
)
async def test_exit_codes_are_right(
    tmp_path: Path, when: str, said: str, code: int, run_code: int
) -> None:
    """Whether it ends while nobody supervises or under a supervisor that is not its parent."""
    go = tmp_path / "go"
    parts = (part("ends", python(WAITS, go, said), probes=ready(), ends_run=True), part("stays"))
    with background(tmp_path / "run", *parts, survive=True) as first:
        before = await rows_of(first)
        kill(first)
        if when == "meanwhile":
            go.touch()
            await wait_until(lambda: not alive(before["ends"].pid or 0))
        with again(first) as second:
            if when == "adopted":
                same_processes(before, await rows_of(second))
                go.touch()
            assert await second.end() == run_code
            result = RunResult.load(second.run.result_json)
            assert result is not None
            assert (result.exit_code, result.component) == (run_code, "ends")
            last = [
                line
                for line in second.run.supervisor_jsonl.read_text().splitlines()
                if '"ends"' in line
            ][-1]
            record = parse_line(last)
            assert isinstance(record, StateRecord)
            assert (record.new, record.exit_code, record.attempt) == (
                "failed" if run_code else "completed",
                code,
                1,
            )
            assert second.left() == []


async def test_who_died_meanwhile_takes_along_what_its_recipe_says(tmp_path: Path) -> None:
    parts = (
        part("engine", role=Role.ENGINE, restart=QUICK, probes=ready(), restart_with=["trainer"]),
        part("trainer", role=Role.TRAINER, depends_on={"engine": "healthy"}),
        counting("env"),
    )
    with background(tmp_path / "run", *parts, survive=True) as first:
        before = await rows_of(first)
        kill(first)
        os.kill(before["engine"].pid or 0, signal.SIGKILL)
        await wait_until(lambda: not alive(before["engine"].pid or 0))
        with again(first) as second:
            await wait_until(lambda: len(steps(second, "trainer")) >= 9)
            after = await rows_of(second)
            same_processes(before, after, "env")
            assert [
                (after[name].attempt, after[name].restarts) for name in ("engine", "trainer")
            ] == [(2, 1), (2, 0)]
            assert not alive(before["trainer"].pid or 0)
            assert "SIGKILL" in next(
                reason for new, _, reason in steps(second, "engine") if new == "backoff"
            )
            await down(second)


async def test_a_changed_plan_restarts_what_it_changes(tmp_path: Path) -> None:
    """Of three, one gets another command, one another environment; a part that the plan no longer
    has is ended."""
    parts = [
        counting("command"),
        counting("env", env={"GPU": "0"}),
        counting("same", env={"A": "b"}),
        part("gone"),
    ]
    with background(tmp_path / "run", *parts, survive=True) as first:
        before = await rows_of(first)
        kill(first)
        parts = [counting("command", 0.003), counting("env", env={"GPU": "1"}), parts[2]]
        with again(first, *parts) as second:
            await wait_until(lambda: len(steps(second, "env")) >= 8)
            after = await rows_of(second)
            same_processes(before, after, "same")
            assert [after[name].attempt for name in ("command", "env")] == [2, 2]
            await wait_until(lambda: procfs.environ(after["env"].pid or 0).get("GPU") == "1")
            assert not any(alive(before[name].pid or 0) for name in ("command", "env", "gone"))
            assert ("stopping", 1, "the plan of command, env has changed") in steps(second, "env")
            assert [row.restarts for row in after.values()] == [0, 0, 0], "nobody crashed"
            await down(second)


@pytest.mark.parametrize("exported", [False, True])
async def test_token_and_socket_stay(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    exported: bool,
) -> None:
    """Whatever the next supervisor's environment says: the components hold the old ones."""
    old, new = (tmp_path_factory.mktemp("r") for _ in range(2))  # a socket's path must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(old))
    parts = [part(name, role=Role.TRAINER) for name in ("one", "two")]
    with background(tmp_path / "run", *parts, survive=True) as first:
        pid = (await rows_of(first))["one"].pid or 0
        # Between fork and exec the process still has the environment of its parent.
        await wait_until(lambda: ENV_CONTROL_SOCKET in procfs.environ(pid))
        held = procfs.environ(pid)
        address = os.readlink(first.run.control_sock)  # noqa: PTH115
        assert held[ENV_CONTROL_SOCKET] == address
        kill(first)
        await wait_until(lambda: not Path(address).exists())
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(new))
        if exported:
            monkeypatch.setenv(ENV_TOKEN, "another")
        with again(first) as second:
            client = await second.ready()
            assert os.readlink(second.run.control_sock) == address  # noqa: PTH115
            await client.command(CommandRequest(action="restart", component="two"))
            await wait_until(lambda: ("starting", 2, "attempt 2") in steps(second, "two"))
            pid = (await rows_of(second))["two"].pid or 0
            await wait_until(lambda: ENV_TOKEN in procfs.environ(pid))
            given = procfs.environ(pid)
            assert (given[ENV_TOKEN], given[ENV_CONTROL_SOCKET]) == (held[ENV_TOKEN], address)
        files = [path for path in first.run.root.rglob("*") if path.is_file()]
        assert files
        assert not any(held[ENV_TOKEN].encode() in path.read_bytes() for path in files), (
            "no file holds the token"
        )


@pytest.mark.parametrize("end", ["down", "term", "failed", "killed while ending"])
async def test_a_run_that_ends_leaves_nothing(tmp_path: Path, end: str) -> None:
    """To survive is for supervisors that are killed, not for runs that end; once they do, nobody
    survives."""
    go = tmp_path / "go"
    parts = (
        part("deaf", script("stubborn", tmp_path / "pids"), stop={"grace_s": 1.0}),
        part("daemon", script("escapes", tmp_path / "daemon", 600, "marked")),
        part("ends", python(WAITS, go, "3"), restart=RestartPolicy(policy="never")),
    )
    with background(tmp_path / "run", *parts, survive=True) as supervisor:
        client = await supervisor.ready()
        await wait_until(
            lambda: len(supervisor.left()) >= 8
        )  # the detector must see them while they live
        if end == "failed":
            go.touch()
        elif end == "term":
            supervisor.process.terminate()
        else:
            await client.command(CommandRequest(action="down"))
        if end == "killed while ending":
            await asyncio.sleep(0.3)
            kill(supervisor)
        assert await supervisor.end() == {"failed": 3, "killed while ending": -signal.SIGKILL}.get(
            end, 130
        )
        await wait_until(lambda: not supervisor.left(), 3)


async def test_without_survive_the_next_supervisor_ends_them(tmp_path: Path) -> None:
    with background(tmp_path / "run", part("one"), survive=True) as first:
        before = await rows_of(first)
        kill(first)
        with again(first, survive=False) as second:
            after = await rows_of(second)
            assert after["one"].attempt == 2
            assert not alive(before["one"].pid or 0)
            kill(second)
            await wait_until(lambda: not second.left(), 3)


async def test_a_done_step_is_not_repeated_under_living_components(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1], 'a').write('x')"
    step = part("step", python(code, tmp_path / "often"), role=Role.PREPARE)
    parts = (step, part("one", depends_on={"step": "completed"}))
    with background(tmp_path / "run", *parts, survive=True) as first:
        await rows_of(first)
        kill(first)
        with again(first) as second:
            step_row, one_row = (await rows_of(second)).values()
            assert (step_row.state, step_row.attempt) == (State.COMPLETED, 1)
            assert (one_row.state, one_row.attempt) == (State.HEALTHY, 1)
            assert (tmp_path / "often").read_text() == "x"


async def test_after_a_reboot_there_is_nothing_to_adopt(tmp_path: Path) -> None:
    """The journal's pids belong to strangers now."""
    stranger = plant({"PATH": os.environ["PATH"]})
    try:
        with background(tmp_path / "run", part("one"), survive=True) as first:
            await first.ready()
            kill(first)
            table = ProcessTable.load(first.run.journal_json)
            assert table is not None
            assert first.left()
            tracker.reap_leftovers(first.stack.run_id, table)
            row = procfs.read(stranger.pid)
            assert row is not None
            changes = {
                "pid": row.pid,
                "pgid": row.pid,
                "ticks": row.ticks,
                "boot_id": "another boot",
            }
            entry = table.components["one"].model_copy(update=changes)
            table.model_copy(update={"components": {"one": entry}}).write(first.run.journal_json)
            with again(first) as second:
                after = await rows_of(second)
                assert (after["one"].attempt, after["one"].restarts) == (2, 0)
                await down(second)
            assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_fault_of_the_supervisor_keeps_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with background(tmp_path / "run", counting("one"), survive=True) as first:
        before = await rows_of(first)
        kill(first)

        def broken(_: object) -> None:
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(Supervisor, "_reconcile", broken)
            assert await run_stack(first.stack) == 1
        result = RunResult.load(first.run.result_json)
        assert result is not None
        assert "planted" in result.reason
        assert "up --resume" in result.reason
        # The supervisor that failed ran in this process, which lives on; a real one is gone.
        table = ProcessTable.load(first.run.journal_json)
        assert table is not None
        table.model_copy(update={"supervisor": None}).write(first.run.journal_json)
        with again(first) as second:
            same_processes(before, await rows_of(second))
            await down(second)


def test_ports_of_the_run_itself_are_not_taken(free_port: int) -> None:
    """Who resumes a run finds its ports held by what it is going to adopt."""
    env = {"ATROPOS_RUN_ID": "ports-run", "PATH": os.environ["PATH"]}
    code = (
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); "
        "print(1); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-uc", code, str(free_port)], env=env, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            assert not ports.is_free(free_port)
            holder = ports.holder(free_port)
            assert holder is not None and holder.run_id == "ports-run"
        finally:
            server.kill()
    assert ports.holder(free_port) is None


async def test_what_cannot_be_compared_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that the resuming shell does not have is a mistake to correct, no reason to end a
    week's run."""
    monkeypatch.setenv("SECRET_NAME", "value")
    one = counting("one", env={"KEY": "${SECRET_NAME}"})
    with background(tmp_path / "run", one, survive=True) as first:
        before = await rows_of(first)
        kill(first)
        monkeypatch.delenv("SECRET_NAME")
        second = successor(first)
        assert await second.end() == 2
        said = second.said.read_text()
        assert "SECRET_NAME is not set" in said
        assert "Traceback" not in said
        assert alive(before["one"].pid or 0)
        monkeypatch.setenv("SECRET_NAME", "value")
        with again(first) as third:
            same_processes(before, await rows_of(third))
            await down(third)
