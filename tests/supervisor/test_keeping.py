"""Keepers: no byte is lost and no exit forgotten, whoever is killed when: supervisors, guards,
keepers themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_common.protocol.control import CommandRequest
from atropos_common.system.run_dir import RunDir
from atropos_tui.cluster.frames import Connection, ConnectionClosedError
from atropos_tui.profile.spec import LogPolicy, RestartPolicy, Stage
from atropos_tui.supervisor.journal import tracker
from atropos_tui.supervisor.journal.store import ProcessTable
from atropos_tui.supervisor.launchers import keeper_launcher
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.logs import last_lines
from benchmarks.faults import keeper_of
from tests.supervisor.harness import QUICK, alive, part, python, ready, script, wait_until
from tests.supervisor.test_adoption import (
    COUNT,
    again,
    check_counted,
    counting,
    down,
    kill,
    rows_of,
    same_processes,
    steps,
    successor,
)
from tests.supervisor.test_chaos import disturb
from tests.supervisor.test_death import Background, background, guard_of

FLOOD = """
import sys, time
print("up")
n = 0
while True:
    sys.stdout.write("".join(f"line {i}\\n" for i in range(n, n + 200)))
    sys.stdout.flush()
    n += 200
    time.sleep(0.001)
"""


async def test_a_flood_is_not_lost_whoever_is_killed_when(tmp_path: Path) -> None:
    """Supervisors die one after the other, some while they adopt; every line is there once."""
    with background(
        tmp_path / "run", part("one", python(FLOOD), probes=ready()), survive=True
    ) as first:
        before = await rows_of(first)
        kill(first)
        for delay_s in (0.05, 0.2, 0.3, 0.35, 0.4, 0.45, 0.6):
            between = successor(first)
            await asyncio.sleep(delay_s)
            kill(between)
        with again(first) as last:
            same_processes(before, await rows_of(last))
            await down(last)
        assert check_counted(first, "one") > 10_000


async def test_lines_that_rotation_dropped_are_remembered(tmp_path: Path) -> None:
    """The probe's line and the stage's are long gone from the log when the next supervisor
    comes."""
    talk = part(
        "talk",
        python(COUNT.format(0)),
        probes=ready(),
        stages=[Stage(name="first", pattern="^line 3$")],
    )
    with background(
        tmp_path / "run", talk, survive=True, logs=LogPolicy(max_bytes=20_000)
    ) as first:
        before = await rows_of(first)
        log = first.run.log("talk", 1)
        await wait_until(lambda: any("dropped" in line for line in last_lines(log, 10_000)))
        client = await first.ready()
        while (stage := (await client.status()).components[0].stages[0]).reached_at is None:
            await asyncio.sleep(0.02)
        await wait_until(lambda: str(stage.reached_at) in first.run.journal_json.read_text())
        kill(first)
        with again(first, logs=LogPolicy(max_bytes=20_000)) as second:
            same_processes(before, await rows_of(second))
            assert steps(second, "talk")[-1][0] == "healthy"
            await asyncio.sleep(1.0)  # the adopted log has been looked through by then
            assert (await rows_of(second))["talk"].stages == [stage], "reached when it was reached"
            await down(second)
        assert b"up\n" not in log.with_name("1.log.1").read_bytes() + log.read_bytes()


async def test_the_guard_dies_with_the_supervisor(tmp_path: Path) -> None:
    """The keepers need neither: nothing is lost, what is left is found, adopted or ended."""
    with background(tmp_path / "run", counting("one"), survive=True) as first:
        before = await rows_of(first)
        guard = guard_of(first.process.pid)
        first.process.send_signal(signal.SIGSTOP)  # it must not replace its guard
        os.kill(guard, signal.SIGKILL)
        kill(first)
        assert os.path.lexists(first.run.control_sock), "nobody was left to remove it"
        written = check_counted(first, "one")
        await wait_until(lambda: check_counted(first, "one") > written + 50)
        second = successor(first)
        same_processes(before, await rows_of(second))
        kill(second)
        await wait_until(
            lambda: {(one.component, one.adoptable) for one in first.left()} == {("one", True)}
        )
        assert before["one"].pid in {one.pid for one in first.left()}
        tracker.reap_leftovers(first.stack.run_id, ProcessTable.load(first.run.journal_json))
        assert first.left() == []
        assert not alive(before["one"].pid or 0)


async def test_a_killed_keeper_is_a_crash_of_its_component(tmp_path: Path) -> None:
    with background(
        tmp_path / "run", part("one", restart=QUICK), part("two"), survive=True
    ) as first:
        before = await rows_of(first)
        keeper = procfs.read(before["one"].pid or 0)
        assert keeper is not None
        assert keeper_of(before["one"].pid) == keeper.ppid and keeper_of(os.getpid()) is None
        os.kill(keeper.ppid, signal.SIGKILL)
        await wait_until(lambda: ("starting", 2, "attempt 2") in steps(first, "one"))
        assert not alive(before["one"].pid or 0)
        await wait_until(
            lambda: journaled(first, "one") == 2
        )  # the next one can only know what is written
        kill(first)
        for one in first.left():
            if one.component == "one":
                os.kill(one.pid, signal.SIGKILL)
        with again(first) as second:
            await wait_until(lambda: ("starting", 3, "attempt 3") in steps(second, "one"))
            after = await rows_of(second)
            same_processes(before, after, "two")
            assert after["one"].restarts == 1
            assert "adopted; it has no health check" not in [
                reason for _, _, reason in steps(second, "one")
            ]
            await down(second)


def journaled(supervisor: Background, name: str) -> int:
    """The attempt of a component that the journal knows; 0: of none."""
    table = ProcessTable.load(supervisor.run.journal_json)
    entry = table.components.get(name) if table else None
    return entry.attempt if entry else 0


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
async def test_disorder_under_one_supervisor_after_the_other(tmp_path: Path, seed: int) -> None:
    """Commands and SIGKILLs, of keepers too; then of the supervisor, in whatever state all is; then
    the next one."""
    dice = random.Random(seed)
    always = RestartPolicy(policy="always", backoff_s=0.01, max_backoff_s=0.05, max_restarts=1000)
    parts = (
        part(
            "engine",
            script("stubborn", tmp_path / "engine"),
            restart=always,
            restart_with=["trainer"],
        ),
        part("trainer", restart=always, depends_on={"engine": "healthy"}, probes=ready()),
        part("env", script("escapes", tmp_path / "env", 600, "marked"), restart=always),
    )
    with (
        background(tmp_path / "run", *parts, survive=True) as first,
        contextlib.ExitStack() as at_the_end,
    ):
        supervisor = first
        for _ in range(4):
            client = await supervisor.answers()
            for _ in range(6):
                await disturb(supervisor, client, dice)
            assert supervisor.process.poll() is None
            kill(supervisor)
            supervisor = successor(first)
            at_the_end.callback(supervisor.clean)
        rows = await rows_of(supervisor)
        assert all(alive(row.pid or 0) for row in rows.values())
        await down(supervisor)


async def test_the_last_words_are_in_the_log(tmp_path: Path) -> None:
    """It prints more than any pipe holds, and is gone before that was read; then its keeper is
    gone, too."""
    code = "for i in range(300_000): print('line', i)\nprint('up')"
    with background(
        tmp_path / "run", part("talks", python(code)), part("stays"), survive=True
    ) as supervisor:
        await supervisor.answers()
        await wait_until(
            lambda: [new for new, _, _ in steps(supervisor, "talks")][-1:] == ["completed"], 30
        )
        lines = supervisor.run.log("talks", 1).read_text().splitlines()
        assert lines == [*(f"line {number}" for number in range(300_000)), "up"]
        assert {one.component for one in supervisor.left() if one.adoptable} == {"stays"}
        spares = [one for one in supervisor.left() if not one.component]
        assert len(spares) == 1, "no keeper is left over"
        await down(supervisor)


async def test_killed_spares_are_replaced(tmp_path: Path) -> None:
    """Keepers wait ready for the next start; whoever kills those has killed no component."""
    with background(tmp_path / "run", part("one"), part("two"), survive=True) as supervisor:
        await rows_of(supervisor)
        client = await supervisor.ready()
        for attempt in (2, 3):
            await wait_until(
                lambda: len([one for one in supervisor.left() if not one.component]) == 1
            )
            (spare,) = (one for one in supervisor.left() if not one.component)
            os.kill(spare.pid, signal.SIGKILL)
            await client.command(CommandRequest(action="restart", component="one"))
            await wait_until(
                lambda: (
                    ("healthy", attempt, "started; it has no health check")  # noqa: B023
                    in steps(supervisor, "one")
                )
            )
        await down(supervisor)


async def test_a_keeper_serves_the_last_who_greets_it(tmp_path: Path) -> None:
    """One that says something else is turned away; a new supervisor takes the place of one that
    still hangs about."""
    run = RunDir(tmp_path / "run")
    run.create()
    notes = {"token": "t", "socket": "s"}
    code = "import os; print(sorted(os.listdir('/proc/self/fd')))\n" + COUNT.format(0.01)
    job = keeper_launcher.KeeperJob(python(code), {}, "/", "", str(run.log("one", 1)), 10**6, notes)
    first = keeper_launcher.Spare(run, "keeper-test").start(job)
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{first.address}")
            socket.send_fds(stranger, [b"hello\n"], [stranger.fileno()])
            assert stranger.recv(64) == b"", "closed without a word"
        printed = b"".join(
            payload for kind, payload in first.rest if kind == "output"
        )  # came with the greeting
        while printed.count(b"\n") < 3:
            printed += first.line.receive(5)[1]
        assert printed.startswith(b"['0', '1', '2', '3']\nup\nline 0\n"), (
            "it inherits nothing (3 lists the folder)"
        )
        second = keeper_launcher.attach(first.address)
        assert (second.pid, second.ticks, second.notes) == (first.pid, first.ticks, notes)
        with pytest.raises(ConnectionClosedError):  # the first is let go
            while first.line.receive(5)[0] == "output":
                pass
        assert second.line.receive(5)[1].startswith(b"line ")
        second.line.send("finish")
        assert first.popen is not None
        assert first.popen.wait(5) == 0
        second.close()
    finally:
        first.close()
        tracker.reap_leftovers("keeper-test")
    await wait_until(lambda: not alive(first.pid))


def test_the_line_needs_no_socket(tmp_path: Path) -> None:
    """Two pipes will do, as ssh gives them: start, output and the exit code come through."""
    there, ours = os.pipe(), os.pipe()
    program = (
        "import socket, sys\n"
        "from atropos_tui.supervisor.launchers import keeper\n"
        "from atropos_tui.cluster.frames import Connection\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind('')\n"
        "listener.listen()\n"
        "keeper.begin(Connection(*map(int, sys.argv[1:])), listener)"
    )
    command = [sys.executable, "-c", program, str(there[0]), str(ours[1])]
    keeper = subprocess.Popen(
        command, pass_fds=(there[0], ours[1]), env={"ATROPOS_RUN_ID": "line-test"}
    )
    os.close(there[0])
    os.close(ours[1])
    line = Connection(ours[0], there[1])
    code = "print('x' * 2_000_000, flush=True); raise SystemExit(7)"
    job = keeper_launcher.KeeperJob(python(code), {}, "/", "", str(tmp_path / "1.log"), 10**7, {})
    frames: list[tuple[str, bytes]] = []
    try:
        line.send("start", keeper_launcher.packed(job))
        while not frames or frames[-1][0] != "exit":
            frames.append(line.receive(20))
        line.send("finish")
        with contextlib.suppress(ConnectionClosedError):
            while True:
                frames.append(line.receive(5))
        assert keeper.wait(5) == 0
    finally:
        line.close()
        keeper.kill()
        tracker.reap_leftovers("line-test")
    assert [kind for kind, _ in frames if kind != "output"] == ["kept", "notes", "ready", "exit"]
    assert dict(frames)["exit"] == b"7"
    assert (
        b"".join(payload for kind, payload in frames if kind == "output")
        == b"x" * 2_000_000 + b"\n"
    )
    assert (tmp_path / "1.log").read_bytes() == b"x" * 2_000_000 + b"\n"
