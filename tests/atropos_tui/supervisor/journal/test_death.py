"""Deaths: SIGKILL of the supervisor, signals, leftovers of a crashed supervisor, a killed guard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_common.protocol.control import State
from atropos_common.system.run_dir import RunDir
from atropos_tui.cli.manage import control
from atropos_tui.cli.start import up
from atropos_tui.errors import Exit, UserError
from atropos_tui.profile.spec import ComponentSpec, StackSpec
from atropos_tui.supervisor import runner
from atropos_tui.supervisor.client import ControlClient, NoSupervisor
from atropos_tui.supervisor.journal import tracker
from atropos_tui.supervisor.journal.store import ProcessTable, RunResult
from atropos_tui.supervisor.launchers.launcher import Host
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.launch import scratch_name
from atropos_tui.supervisor.supervisor import SURVEY_EVERY_S
from tests.support import nursery
from tests.support.harness import alive, part, pids_in, python, script, wait_until


class Background:
    """A supervisor in a process of its own, as `up --detach` starts it; forked, unless an
    interpreter is named."""

    def __init__(
        self,
        run_dir: Path,
        *components: ComponentSpec,
        run_id: str = "",
        python: str = "",
        **fields: Any,
    ) -> None:
        self.run = RunDir(run_dir)
        self.stack = StackSpec(
            run_id=run_id or f"bg-{os.getpid()}-{time.monotonic_ns()}",
            name="t",
            mode="none",
            run_dir=str(run_dir),
            components=list(components),
            **fields,
        )
        stack = self.stack.model_dump_json()
        folder = Path(tempfile.mkdtemp(prefix="supervisor-", dir=run_dir.parent))
        self.said = folder / "said"
        if python:
            command = [python, "-m", "atropos_tui.supervisor"]
            with self.said.open("wb") as said:
                self.process: Any = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=said, stderr=said
                )
            self.process.stdin.write(stack.encode())
            self.process.stdin.close()
        else:
            self.process = nursery.supervisor(stack, folder)

    async def answers(self) -> ControlClient:
        """A client, once the supervisor has answered it."""
        client = ControlClient(self.run.root)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(NoSupervisor):
                    await client.status()
                    return client
                assert self.process.poll() is None, "it has ended"
                await asyncio.sleep(0.02)

    async def ready(self) -> ControlClient:
        """Every component is up."""
        client = await self.answers()
        assert (await client.wait("ready", timeout=60)).outcome == "reached"
        return client

    async def end(self) -> int:
        await wait_until(lambda: self.process.poll() is not None, 20)
        return self.process.returncode

    def left(self) -> list[tracker.Leftover]:
        return tracker.find_leftovers(self.stack.run_id, ProcessTable.load(self.run.journal_json))

    def clean(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        tracker.reap_leftovers(self.stack.run_id, ProcessTable.load(self.run.journal_json))


def plant(env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that no supervisor started, in a session of its own."""
    return subprocess.Popen(python("import time; time.sleep(600)"), env=env, start_new_session=True)


@contextlib.contextmanager
def background(run_dir: Path, *components: ComponentSpec, **fields: Any) -> Any:
    supervisor = Background(run_dir, *components, **fields)
    try:
        yield supervisor
    finally:
        supervisor.clean()


async def test_sigkill_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """Direct children, their children in the group, and daemons in sessions of their own; nothing
    by luck of timing."""
    files = [tmp_path / name for name in ("deaf", "marked", "stays")]
    shared = tmp_path / "weights in memory"
    note = f"open({str(tmp_path / 'folder')!r}, 'w').write(tempfile.mkdtemp())"
    parts = (
        part("deaf", script("stubborn", files[0]), clears=[str(shared)]),
        part("marked", script("escapes", files[1], 600, "marked")),
        part("stays", script("slips_away", files[2], tmp_path / "never")),
        part("untidy", python(f"import tempfile,time; {note}; time.sleep(600)"), scratch=True),
    )
    with background(tmp_path / "run", *parts) as supervisor:
        await supervisor.ready()
        pids = [pid for file in files for pid in await pids_in(file)]
        assert all(map(alive, pids))
        assert len(supervisor.left()) >= len(pids), "the detector must see them while they live"
        shared.touch()
        folder = tmp_path / "folder"
        await wait_until(lambda: folder.exists() and folder.read_text())
        scratch = Path(folder.read_text()).parent
        assert scratch.is_dir() and scratch != Path(tempfile.gettempdir())
        address = supervisor.run.control_sock.readlink()
        assert address.exists()
        supervisor.process.kill()
        took = await wait_until(lambda: not any(map(alive, pids)), 5)
        assert took < 3
        await wait_until(lambda: not supervisor.left(), 3)
        await wait_until(lambda: not (shared.exists() or address.exists() or scratch.exists()), 3)


async def test_the_detector_sees_a_planted_orphan(tmp_path: Path) -> None:
    """A foreign process with the run's marker, in a session of its own: found, named, ended; one
    without is not touched."""
    env = {
        "ATROPOS_RUN_ID": "planted-run",
        "ATROPOS_COMPONENT": "ghost",
        "PATH": os.environ["PATH"],
    }
    orphan = plant(env)
    foreign = plant(env | {"ATROPOS_RUN_ID": "planted-run-2"})
    try:
        await wait_until(
            lambda: procfs.environ(orphan.pid) != {} and procfs.environ(foreign.pid) != {}
        )
        assert [(one.pid, one.component) for one in tracker.find_leftovers("planted-run")] == [
            (orphan.pid, "ghost")
        ]
        assert [one.pid for one in tracker.reap_leftovers("planted-run")] == [orphan.pid]
        assert orphan.wait(5) == -signal.SIGKILL
        assert tracker.find_leftovers("planted-run") == []
        assert foreign.poll() is None
    finally:
        for process in (orphan, foreign):
            process.kill()
            process.wait()


async def test_what_a_crashed_supervisor_left_goes_before_the_next_start(
    tmp_path: Path, launch: Any
) -> None:
    """The journal of the run directory names the earlier run's sessions; without it the marker
    finds them."""
    env = {"ATROPOS_RUN_ID": "earlier-run", "PATH": os.environ["PATH"]}
    orphan = plant(env)
    run = RunDir(tmp_path / "run")
    run.create()
    ProcessTable(run_id="earlier-run").write(run.journal_json)
    try:
        async with launch(part("one")) as running:
            await running.until("one", State.HEALTHY)
            assert orphan.wait(5) == -signal.SIGKILL
    finally:
        orphan.kill()
        orphan.wait()


def test_leftovers_ignore_a_reused_pid_and_another_boot(tmp_path: Path) -> None:
    """A live process of ours whose number stands in an old journal is not touched."""
    bystander = subprocess.Popen(python("import time; time.sleep(600)"), start_new_session=True)
    try:
        row = procfs.read(bystander.pid)
        assert row
        for ticks, boot in ((row.ticks - 1, procfs.boot_id()), (row.ticks, "another boot")):
            entry = {
                "pid": row.pid,
                "create_time": 0.0,
                "ticks": ticks,
                "pgid": row.pid,
                "boot_id": boot,
            }
            table = ProcessTable.model_validate({"run_id": "old", "components": {"x": entry}})
            assert tracker.find_leftovers("old", table) == []
        entry |= {"ticks": row.ticks, "boot_id": procfs.boot_id()}
        table = ProcessTable.model_validate({"run_id": "old", "components": {"x": entry}})
        assert [one.pid for one in tracker.find_leftovers("old", table)] == [row.pid]
        assert not procfs.send(_with_ticks(row, row.ticks + 1), signal.SIGKILL)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_session_without_its_leader_is_ours_only_as_long_as_the_journal_is_fresh(
    tmp_path: Path,
) -> None:
    """The number of a dead session comes back: a daemon of this user's had it when `clean` ended
    it."""
    code = (
        "import os,sys,time\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True); "
        "time.sleep(600)"
    )
    leader = subprocess.Popen(python(code), stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout
    daemon = int(leader.stdout.readline())
    leader.wait()
    path = tmp_path / "journal.json"
    entry = {
        "pid": leader.pid,
        "create_time": 0.0,
        "ticks": 123,
        "pgid": leader.pid,
        "boot_id": procfs.boot_id(),
    }
    try:
        ProcessTable.model_validate({"run_id": "old", "components": {"x": entry}}).write(path)
        assert [one.pid for one in tracker.find_leftovers("old", ProcessTable.load(path))] == [
            daemon
        ]
        then = time.time() - 60
        os.utime(path, (then, then))
        assert tracker.find_leftovers("old", ProcessTable.load(path)) == []
    finally:
        os.kill(daemon, signal.SIGKILL)


def _with_ticks(row: procfs.Proc, ticks: int) -> procfs.Proc:
    row.ticks = ticks
    return row


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_stack_cleanly(tmp_path: Path, number: int) -> None:
    with background(tmp_path / "run", part("one"), part("two")) as supervisor:
        await supervisor.ready()
        supervisor.process.send_signal(signal.SIGHUP)  # a closed terminal is nothing
        await asyncio.sleep(0.1)
        supervisor.process.send_signal(number)
        assert await supervisor.end() == 130
        result = RunResult.load(supervisor.run.result_json)
        assert result
        assert result.exit_code == 130
        assert signal.Signals(number).name in result.reason
        assert supervisor.left() == []
        assert not supervisor.run.control_sock.is_symlink()


@pytest.mark.parametrize("ignored", [False, True])
async def test_a_closed_terminal_stops_a_run_in_the_foreground(ignored: bool) -> None:
    """Not with `nohup`."""
    heard: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with runner._Signals() as signals:
            signals.attach(SimpleNamespace(interrupt=heard.append))  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == ([] if ignored else ["SIGHUP"])


async def test_the_second_signal_kills(tmp_path: Path) -> None:
    deaf = part("deaf", script("stubborn", tmp_path / "pids"), stop={"grace_s": 60})
    with background(tmp_path / "run", deaf) as supervisor:
        await supervisor.ready()
        pids = await pids_in(tmp_path / "pids")
        supervisor.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        assert supervisor.process.poll() is None
        supervisor.process.send_signal(signal.SIGINT)
        assert await supervisor.end() == 130
        assert not any(map(alive, pids))


async def test_the_next_supervisor_waits_for_the_guard_of_the_last(tmp_path: Path) -> None:
    """Both have the same run id: a guard that still sweeps would end what the next supervisor has
    just started."""
    with background(tmp_path / "run", part("one")) as first:
        await first.ready()
        guard = guard_of(first.process.pid)
        os.kill(guard, signal.SIGSTOP)
        first.process.kill()
        first.process.wait()
        with background(tmp_path / "run", part("one"), run_id=first.stack.run_id) as second:
            await asyncio.sleep(1.5)
            assert not second.left(), "it must not have started anything"
            assert second.process.poll() is None
            os.kill(guard, signal.SIGCONT)
            client = await second.ready()
            await asyncio.sleep(0.3)
            (row,) = (await client.status()).components
            assert (row.state, row.attempt) == (State.HEALTHY, 2)


async def test_a_killed_guard_is_replaced(tmp_path: Path) -> None:
    with background(
        tmp_path / "run", part("one", script("escapes", tmp_path / "pids", 600, "marked"))
    ) as supervisor:
        await supervisor.ready()
        pids = await pids_in(tmp_path / "pids")
        first = guard_of(supervisor.process.pid)
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: guard_of(supervisor.process.pid) not in (0, first))
        await asyncio.sleep(0.2)
        supervisor.process.kill()
        await wait_until(lambda: not any(map(alive, pids)), 5)


async def test_the_guard_removes_what_the_dead_left_in_shared_memory(tmp_path: Path) -> None:
    """As semaphores and tensors of libraries are left; a file that another process still has mapped
    stays."""
    maps = (
        "import mmap, os, sys, time\n"
        "f = open(sys.argv[1], 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)\n"
        "open(sys.argv[2], 'w').close(); time.sleep(600)"
    )
    left, kept = (Path(f"/dev/shm/atropos-test-{os.getpid()}-{name}") for name in ("left", "kept"))
    foreign = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-I", "-S", "-c", maps, str(kept), str(tmp_path / "kept")]
    )
    both = (
        f"kept = open({str(kept)!r}, 'rb'); k = mmap.mmap(kept.fileno(), 4096, "
        f"prot=mmap.PROT_READ)\n"
    )
    first, _, rest = maps.partition("f = ")
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"{first}{both}f = {rest}",
        str(left),
        str(tmp_path / "left"),
    ]
    try:
        await wait_until((tmp_path / "kept").exists)
        with background(tmp_path / "run", part("one", command)) as supervisor:
            await supervisor.ready()
            await wait_until((tmp_path / "left").exists)
            await asyncio.sleep(
                2 * SURVEY_EVERY_S + 1
            )  # the supervisor has looked since, and told its guard
            supervisor.process.kill()
            await wait_until(lambda: not left.exists(), 20)
            assert kept.exists()
    finally:
        foreign.kill()
        foreign.wait()
        for path in (left, kept):
            path.unlink(missing_ok=True)


def guard_of(supervisor: int) -> int:
    for row in procfs.scan().values():
        if row.ppid == supervisor and row.alive:
            with contextlib.suppress(OSError):
                if b"launchers.guard" in Path(f"/proc/{row.pid}/cmdline").read_bytes():
                    return row.pid
    return 0


def test_bad_input_on_stdin_is_exit_2_without_a_traceback(tmp_path: Path) -> None:
    given, said = tmp_path / "given", tmp_path / "said"
    for text in (b"", b"{}", b"\xff\x00", b'{"run_id": 1}'):
        given.write_bytes(text)
        done = nursery.forked(
            nursery.SUPERVISOR, "tests.support.nursery:be_supervisor", [], said, stdin=given
        )
        assert done.wait(20) == 2
        assert b"atropos_tui.supervisor: " in said.read_bytes()
        assert b"Traceback" not in said.read_bytes()


async def test_a_component_that_goes_while_its_processes_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop removes the component's remains while a thread still reads them."""
    members = tracker.Tracker("a-run")
    members.add("api", os.getpid())
    looked = members.note_shared_memory

    def note(found: dict[str, list[procfs.Proc]]) -> None:
        looked(found)
        members.remove("api")

    monkeypatch.setattr(members, "note_shared_memory", note)
    told: list[set[str]] = []
    guard = SimpleNamespace(note_shared_memory=told.append, remember=lambda *_: None)
    await Host.survey(SimpleNamespace(tracker=members, guard=guard, _gpus_of={}))  # type: ignore[arg-type]
    assert told == [set()]


async def test_of_two_that_begin_at_once_one_is_told(tmp_path: Path) -> None:
    """Neither takes the socket away from the other, and each says what became of it."""
    run = RunDir(tmp_path / "run")
    run.create()
    stack = StackSpec(
        run_id=f"two-{time.monotonic_ns()}",
        name="t",
        mode="none",
        run_dir=str(run.root),
        components=[part("a")],
    )
    begun = [asyncio.to_thread(up.spawn_supervisor, run, stack) for _ in range(2)]
    told = [
        each for each in await asyncio.gather(*begun, return_exceptions=True) if each is not None
    ]
    try:
        assert len(told) == 1 and isinstance(told[0], UserError), told
        assert any(
            "another supervisor runs here" in problem.reason for problem in told[0].problems
        ), told[0].problems
        assert (await ControlClient(run.root).wait("ready", timeout=60)).outcome == "reached"
    finally:
        await control.bring_down(run.root, 10)


async def test_a_socket_that_was_moved_is_no_end(tmp_path: Path) -> None:
    with background(tmp_path / "run", part("a")) as supervisor:
        await supervisor.ready()
        sock = supervisor.run.control_sock
        sock.rename(sock.with_name("away"))
        told = control.not_live(supervisor.run.root)
        assert told.exit_code == Exit.TIMEOUT
        assert told.problems[0].reason.startswith(
            f"it runs (pid {supervisor.process.pid}), but its socket {sock} was moved or removed"
        )
        sock.with_name("away").rename(sock)
        await control.bring_down(supervisor.run.root, 10)
        assert control.not_live(supervisor.run.root).exit_code == Exit.NO_RUN


def test_vllms_sockets_fit_below_a_temporary_folder_of_42_characters() -> None:
    """It names them by a UUID, and a socket's path has 107 at most."""
    name = scratch_name("a" * 40, "vllm", 12)
    assert len(f"/{'t' * 41}/{name}/{uuid.uuid4()}") == 107
    assert name != scratch_name("a" * 40, "vllm", 13) and "/" not in name
