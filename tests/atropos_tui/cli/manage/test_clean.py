"""`clean` and `runs` after real crashes: they end what is left, and nothing that lives or is
another user's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_common.system.run_dir import RunDir
from atropos_tui.cli import main
from atropos_tui.cli.manage import cleanup, runs
from atropos_tui.errors import Exit
from atropos_tui.profile.spec import ComponentSpec, LogCheck, Probe, Probes, StackSpec
from atropos_tui.supervisor import client
from atropos_tui.supervisor.journal import tracker
from atropos_tui.supervisor.journal.liveness import holding
from atropos_tui.supervisor.journal.store import ProcessTable
from atropos_tui.supervisor.processes import procfs
from benchmarks.support.nursery import ForkedProcess
from tests.support import nursery
from tests.support.other_user import needs_another_user
from tests.support.own_places import own_places  # noqa: F401

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
ESCAPE = """
import os, subprocess, sys, time
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
print("up", flush=True)
time.sleep(600)
"""


pytestmark = pytest.mark.usefixtures("own_places")


def make_run(tmp_path: Path, *, clears: list[str] | None = None) -> tuple[RunDir, str]:
    """The files of a run whose supervisor is gone, as far as `clean` reads them."""
    run_id = f"clean-{os.getpid()}-{time.monotonic_ns()}"
    run = RunDir(tmp_path / "runs" / run_id)
    run.create()
    run.run_json.write_text(
        json.dumps({"run_id": run_id, "name": "n", "mode": "none", "started_at": 1.0})
    )
    run.plan_json.write_text(json.dumps({"components": [{"name": "x", "clears": clears or []}]}))
    ProcessTable(run_id=run_id).write(run.journal_json)
    return run, run_id


@pytest.fixture
def plant() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Processes that no supervisor owns, each in a session of its own."""
    planted: list[subprocess.Popen[bytes]] = []

    def start(**env: str) -> subprocess.Popen[bytes]:
        planted.append(
            subprocess.Popen(
                SLEEP,
                env={"PATH": os.environ["PATH"]} | env,
                start_new_session=True,
                stdout=subprocess.PIPE,
            )
        )
        assert planted[-1].stdout is not None and planted[-1].stdout.readline() == b"up\n"
        return planted[-1]

    yield start
    for process in planted:
        process.kill()
        process.wait()


def marker(run: RunDir, run_id: str) -> dict[str, str]:
    return {"ATROPOS_RUN_ID": run_id, "ATROPOS_RUN_DIR": str(run.root), "ATROPOS_COMPONENT": "x"}


def lives(pid: int) -> bool:
    row = procfs.read(pid)
    return row is not None and row.alive


def wait_until(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def supervised(run: RunDir, run_id: str, file: Path) -> Iterator[ForkedProcess]:
    """A real supervisor over one component, which starts a child in a session of its own; its pid
    goes to `file`."""
    part = ComponentSpec(
        name="x",
        command=[sys.executable, "-I", "-S", "-c", ESCAPE, str(file)],
        probes=Probes(readiness=Probe(checks=[LogCheck(pattern="up")], interval_s=0.05)),
    )
    stack = StackSpec(
        run_id=run_id,
        name="n",
        mode="none",
        run_dir=str(run.root),
        components=[part],
    )
    process = nursery.supervisor(
        stack.model_dump_json(), Path(tempfile.mkdtemp(prefix="supervisor-"))
    )
    try:
        wait_until(lambda: file.exists() and file.read_text())
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        tracker.reap_leftovers(run_id, ProcessTable.load(run.journal_json))


def crash(supervisor: ForkedProcess) -> None:
    """Kill the supervisor and its guard, so that nobody sweeps."""
    (guard,) = [
        row.pid
        for row in procfs.scan().values()
        if row.ppid == supervisor.pid
        and b"launchers.guard" in Path(f"/proc/{row.pid}/cmdline").read_bytes()
    ]
    os.kill(guard, signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: not lives(guard))


def test_what_a_crash_left_is_listed_asked_for_and_ended(
    tmp_path: Path, plant: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, run_id = make_run(tmp_path)
    bystander = plant()
    with supervised(run, run_id, tmp_path / "pid") as supervisor:
        pid = int((tmp_path / "pid").read_text())
        crash(supervisor)
        assert lives(pid), "it is in a session of its own, and the guard is gone"
        assert main.run(["runs"]) == 0
        assert "crashed, 1 process left: atropos-tui clean" in capsys.readouterr().out
        assert main.run(["clean", "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert run_id in said and str(pid) in said and str(bystander.pid) not in said.split()
        assert main.run(["clean"]) == Exit.USAGE, "no terminal, no --yes"
        assert "--yes" in capsys.readouterr().err and lives(pid)
        assert main.run(["clean", "--yes"]) == 0
        assert f"ended    {pid} x" in capsys.readouterr().out and not lives(pid)
    assert main.run(["clean", "--yes"]) == 0
    assert "no run left anything behind" in capsys.readouterr().out
    assert main.run(["runs"]) == 0
    assert (
        "  crashed\n" in capsys.readouterr().out
        and bystander.poll() is None
        and run.run_json.exists()
    )


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped by SIGSTOP"])
def test_a_live_run_is_never_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopped: bool
) -> None:
    run, run_id = make_run(tmp_path)
    with supervised(run, run_id, tmp_path / "pid") as supervisor:
        pid = int((tmp_path / "pid").read_text())
        if stopped:
            supervisor.send_signal(signal.SIGSTOP)
        assert main.run(["clean", "--yes"]) == 0
        assert main.run(["clean", "--yes", "--run-dir", str(run.root)]) == Exit.USAGE
        assert "atropos-tui down" in capsys.readouterr().err
        assert lives(pid) and supervisor.poll() is None
        assert run.control_sock.is_symlink() and run.control_sock.readlink().exists()


def test_a_supervisor_without_socket_or_lock_still_counts(tmp_path: Path, plant: Any) -> None:
    """Each sign of life is enough: the journal names a live process; the lock is held; somebody
    listens."""
    run, run_id = make_run(tmp_path)
    orphan = plant(**marker(run, run_id))
    row = procfs.read(os.getpid())
    assert row
    entry = {
        "pid": row.pid,
        "create_time": 0.0,
        "ticks": row.ticks,
        "pgid": row.pid,
        "boot_id": procfs.boot_id(),
    }
    ProcessTable.model_validate({"run_id": run_id, "supervisor": entry}).write(run.journal_json)
    assert main.run(["clean", "--yes"]) == 0 and orphan.poll() is None
    ProcessTable(run_id=run_id).write(run.journal_json)
    run.supervisor_jsonl.touch()
    with holding(run.supervisor_jsonl) as held:
        assert held and cleanup.find_dead(run.root, {}) is None
        assert main.run(["clean", "--yes"]) == 0 and orphan.poll() is None
    with socket.socket(socket.AF_UNIX) as listening:
        address = client.socket_path(run)
        listening.bind(str(address))
        listening.listen()
        run.control_sock.symlink_to(address)
        assert main.run(["clean", "--yes"]) == 0 and orphan.poll() is None
    assert main.run(["clean", "--yes"]) == 0 and orphan.wait(5) == -signal.SIGKILL


def test_files_go_with_the_run_but_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = Path("/dev/shm") / f"atropos-test-{os.getpid()}"
    foreign = tmp_path / "precious"
    run, run_id = make_run(tmp_path, clears=[str(tmp_path / "runs"), str(foreign)])
    entry = {
        "pid": 2**22 + 1,
        "create_time": 0.0,
        "ticks": 1,
        "pgid": 2**22 + 1,
        "boot_id": procfs.boot_id(),
    }
    noted = {"x": entry | {"clears": [str(weights), str(foreign)]}}
    ProcessTable.model_validate({"run_id": run_id, "components": noted}).write(run.journal_json)
    manifest = run.bridge / "vllm_bridge_config.json"
    plan = json.loads(run.plan_json.read_text())
    plan["components"][0]["clears"] += [str(manifest), f"{run.root}/../../precious"]
    run.plan_json.write_text(json.dumps(plan))
    for path in (weights, foreign, manifest):
        path.write_text("x")
    try:
        assert main.run(["clean", "--yes"]) == 0
        assert not weights.exists() and not manifest.exists() and foreign.exists()
        assert str(weights) in capsys.readouterr().out
    finally:
        weights.unlink(missing_ok=True)


def test_stale_sockets_go_and_young_or_answering_ones_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "atropos-tui"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as answering:
        answering.bind(str(folder / "live.sock"))
        answering.listen()
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(folder / "dead.sock"))
        (folder / "file.sock").write_text("not a socket")
        assert main.run(["clean", "--yes"]) == 0
        assert "nothing" not in capsys.readouterr().err and (folder / "dead.sock").exists(), (
            "it may be a second old"
        )
        monkeypatch.setattr(cleanup, "SETTLED_S", -1.0)
        assert main.run(["clean", "--yes"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["file.sock", "live.sock"]


def read_component(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """Return the run and its component as `ps --json` prints them."""
    capsys.readouterr()
    assert main.run(["ps", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    return status["reason"], status["components"][0]


def say_the_plan(run: RunDir) -> None:
    plan = {"components": [{"name": "x", "role": "other"}, {"name": "late", "role": "env"}]}
    run.plan_json.write_text(json.dumps(plan))


@pytest.mark.parametrize("guard_too", [False, True], ids=["supervisor", "supervisor and guard"])
def test_readers_tell_the_truth_about_a_run_whose_supervisor_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], guard_too: bool
) -> None:
    run, run_id = make_run(tmp_path)
    say_the_plan(run)
    with supervised(run, run_id, tmp_path / "pid") as supervisor:
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda: "healthy" in run.supervisor_jsonl.read_text())
        if guard_too:
            crash(supervisor)
            reason, row = read_component(capsys)
            assert (row["state"], pid in row["pids"]) == ("unhealthy", True)
            assert (
                row["reason"] == "left without a supervisor"
                and "1 process left: atropos-tui clean" in reason
            )
            os.kill(pid, signal.SIGKILL)
        else:
            supervisor.kill()
            supervisor.wait()
        wait_until(lambda: not tracker.find_leftovers(run_id, ProcessTable.load(run.journal_json)))
        assert main.run(["ps"]) == 0
        head, _, _, *rows = capsys.readouterr().out.splitlines()
        assert head.split(maxsplit=1) == [
            run_id,
            "none  crashed  (its supervisor is gone and left no result)",
        ]
        assert [("stopped" in row, "healthy" in row) for row in rows] == [
            (True, False),
            (True, False),
        ]
        assert "gone with the supervisor" in rows[0] and "was never started" in rows[1]
        assert main.run(["why"]) == 0
        said = capsys.readouterr().out
        assert f"{run_id} crashed: its supervisor is gone" in said and "healthy" not in said
        for target in ("done", "ready"):
            assert main.run(["wait", "--for", target]) == Exit.COMPONENT_FAILED
            assert f"up --resume {run.root}" in capsys.readouterr().err


def test_a_supervisor_that_only_does_not_answer_is_not_called_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its socket was moved or removed: its process lives, and only a signal reaches it."""
    from atropos_tui.cli.manage.inspect import status_of

    run, run_id = make_run(tmp_path)
    with supervised(run, run_id, tmp_path / "pid") as supervisor:
        run.control_sock.unlink()
        (entry,) = runs.all_runs()
        status = asyncio.run(status_of(entry))
        assert (status.phase, status.supervisor_pid) == ("running", supervisor.pid)
        assert main.run(["wait", "--for", "done"]) == Exit.TIMEOUT
        assert f"kill {supervisor.pid} ends the run" in capsys.readouterr().err


def test_up_says_in_one_line_that_dead_runs_left_processes(
    tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = procfs.scan
    monkeypatch.setattr(
        procfs, "scan", lambda: {p.pid: p for p in everything().values() if p.ppid == os.getpid()}
    )
    run, run_id = make_run(tmp_path)
    wrong = ["up", "demo", "--headless", "--set", "mode=none", "--set", "model=/no/such/model"]
    assert main.run(wrong) == Exit.USAGE and "atropos-tui clean" not in capsys.readouterr().err
    plant(**marker(run, run_id))
    plant(**marker(run, run_id))
    assert main.run(wrong) == Exit.USAGE
    notes = [line for line in capsys.readouterr().err.splitlines() if "atropos-tui clean" in line]
    assert notes == [
        "note: 2 processes of 1 dead run still here: atropos-tui clean shows and ends what is left"
    ]
    assert cleanup.with_processes(but={run.root}) == [], (
        "a run that is resumed takes care of its own"
    )


@pytest.mark.parametrize(
    ("answer", "ended"), [("n\n", False), ("\n", False), ("\x04", False), ("y\n", True)]
)
def test_on_a_terminal_it_asks(tmp_path: Path, plant: Any, answer: str, ended: bool) -> None:
    run, run_id = make_run(tmp_path)
    orphan = plant(**marker(run, run_id))
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        done = subprocess.run(
            [sys.executable, "-m", "atropos_tui", "clean"],
            stdin=theirs,
            capture_output=True,
            timeout=60,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0 and b"[y/N]" in done.stdout
    time.sleep(0.1)
    assert (orphan.poll() is not None) is ended


def test_from_a_shell_inside_the_run_it_refuses(tmp_path: Path) -> None:
    run, run_id = make_run(tmp_path)
    command = f"{sys.executable} -m atropos_tui clean --yes --run-dir {run.root}; echo code $?"
    done = subprocess.run(
        ["sh", "-c", command], env=dict(os.environ) | marker(run, run_id), capture_output=True
    )
    assert done.stdout.endswith(b"code 2\n") and b"another terminal" in done.stderr


def test_processes_of_an_unknown_run_are_named_and_ended_by_its_name_alone(
    tmp_path: Path, plant: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, run_id = make_run(tmp_path)
    orphan = plant(**marker(run, run_id))
    shutil.rmtree(run.root)
    assert runs.all_runs() == []
    assert main.run(["clean", "--yes"]) == 0
    assert f"clean --run-dir {run.root}" in capsys.readouterr().out and orphan.poll() is None
    assert main.run(["clean", "--yes", "--run-dir", run_id]) == 0
    assert orphan.wait(5) == -signal.SIGKILL
    assert main.run(["clean", "--yes", "--run-dir", run_id]) == Exit.NO_RUN


def test_the_journal_of_a_folder_where_others_write_ends_nobody(
    tmp_path: Path,
    plant: Callable[..., subprocess.Popen[bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pid, start ticks and boot are known to every user: a run in a shared folder named a shell of
    the victim."""
    victim, shared = plant(), tmp_path / "weights"
    shared.touch()
    run, run_id = make_run(tmp_path, clears=[str(shared)])
    row = procfs.read(victim.pid)
    assert row
    entry = {
        "pid": row.pid,
        "create_time": 0.0,
        "ticks": row.ticks,
        "pgid": row.pid,
        "boot_id": procfs.boot_id(),
    }
    ProcessTable.model_validate({"run_id": run_id, "components": {"x": entry}}).write(
        run.journal_json
    )
    assert [
        found.pid for found in tracker.find_leftovers(run_id, ProcessTable.load(run.journal_json))
    ] == [victim.pid]
    run.root.chmod(0o777)
    assert ProcessTable.load(run.journal_json) is None
    assert cleanup.all_dead() == []
    assert main.run(["clean", "--yes", "--run-dir", str(run.root)]) == Exit.USAGE
    assert "writable by others" in capsys.readouterr().err
    assert main.run(["up", "--resume", str(run.root)]) == Exit.USAGE
    assert victim.poll() is None and shared.exists()


def test_a_run_id_that_leads_elsewhere_is_no_run(tmp_path: Path) -> None:
    """`up --resume` left a link to the run under that name, in the place of whatever stood
    there."""
    run, _ = make_run(tmp_path)
    run.run_json.write_text(json.dumps({"run_id": "../../../precious.txt"}))
    assert runs.read_run(run.root) is None


@needs_another_user
def test_a_run_of_another_user_is_neither_listed_nor_spoken_to(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "his.sock"))
    listening.listen()
    run.control_sock.symlink_to(tmp_path / "his.sock")
    assert [entry.dir.root for entry in runs.all_runs()] == [run.root]
    os.chown(run.root, 65534, 65534)
    os.chown(tmp_path / "his.sock", 65534, 65534)
    assert runs.all_runs() == []
    with pytest.raises(client.NoSupervisor, match="user 65534's"):
        asyncio.run(client.ControlClient(run.root).status())
    with pytest.raises(PermissionError, match="another user"):
        run.create()
    listening.close()
