"""Attacks by a run directory from elsewhere or a copy: no command acts on its contents."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_common.system.files import read_regular
from atropos_common.system.run_dir import RunDir, registry
from atropos_tui.cli import main
from atropos_tui.cli.doctor import machine
from atropos_tui.cli.manage import cleanup, runs
from atropos_tui.cli.start import up
from atropos_tui.errors import Exit, UserError
from atropos_tui.monitor import report
from atropos_tui.monitor.replay import Recording, Replay
from atropos_tui.profile.ports import listener
from atropos_tui.supervisor.journal.store import ProcessEntry, ProcessTable
from atropos_tui.supervisor.processes import procfs
from tests.atropos_tui.cli.manage.test_clean import crash, lives, make_run, supervised
from tests.support.other_user import NOBODY, as_another_user, needs_another_user
from tests.support.own_places import own_places  # noqa: F401
from tests.support.run_maker import make_run as make_recording

pytestmark = pytest.mark.usefixtures("own_places")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[RunDir, str, int]]:
    """A live run outside `./runs`: its directory, its id and the pid of a process of its
    component."""
    original, run_id = make_run(tmp_path / "elsewhere")
    with supervised(original, run_id, tmp_path / "pid") as supervisor:
        yield original, run_id, int((tmp_path / "pid").read_text())
        assert supervisor.poll() is None


def copy_of(original: RunDir, *names: str) -> RunDir:
    """A run directory below `./runs` with these files of `original`."""
    copy = RunDir(Path("runs/backup").absolute())
    copy.create()
    for name in names:
        shutil.copy2(original.root / name, copy.root / name, follow_symlinks=False)
    return copy


@pytest.mark.parametrize(
    "names", [["run.json"], ["run.json", "journal.json", "plan.json", "supervisor.jsonl"]]
)
def test_a_copy_of_a_live_run_ends_no_process_of_it(
    live: tuple[RunDir, str, int], names: list[str], capsys: Captured
) -> None:
    original, run_id, pid = live
    copy = copy_of(original, *names)
    assert [check.name for check in machine.leftovers() if check.name.startswith("run ")] == []
    assert main.run(["clean", "--yes"]) == 0
    assert main.run(["clean", "--yes", str(copy.root)]) == 0
    assert "ended" not in capsys.readouterr().out and lives(pid)
    for command in (["ps", str(copy.root)], ["why", "--run-dir", str(copy.root)]):
        assert main.run(command) == 0
        said = capsys.readouterr().out
        assert "atropos-tui clean" not in said
        assert f"this folder is a copy: {run_id} runs in {original.root}" in said
    assert main.run(["runs"]) == 0
    assert "left: atropos-tui clean" not in capsys.readouterr().out
    assert main.run(["up", "demo", "--resume", str(copy.root)]) == Exit.USAGE
    assert f"runs in {original.root}" in capsys.readouterr().err
    assert lives(pid)


def test_a_live_run_without_socket_link_and_journal_is_not_called_dead(
    live: tuple[RunDir, str, int], capsys: Captured
) -> None:
    original, _, pid = live
    for path in (original.control_sock, original.supervisor_jsonl, original.journal_json):
        path.unlink()
    assert main.run(["ps", str(original.root)]) == 0
    said = capsys.readouterr().out
    assert "its supervisor does not answer" in said and "atropos-tui clean" not in said
    assert main.run(["clean", "--yes", str(original.root)]) == Exit.USAGE
    assert main.run(["clean", "--yes"]) == 0
    assert lives(pid)


def test_what_the_original_left_is_not_ended_in_the_name_of_a_copy(
    tmp_path: Path, capsys: Captured
) -> None:
    original, run_id = make_run(tmp_path / "elsewhere")
    with supervised(original, run_id, tmp_path / "pid") as supervisor:
        pid = int((tmp_path / "pid").read_text())
        copy = copy_of(original, "run.json", "journal.json")
        crash(supervisor)
        assert main.run(["clean", "--yes", str(copy.root)]) == 0 and lives(pid)
        assert main.run(["clean", "--yes"]) == 0 and lives(pid)
        assert f"atropos-tui clean --run-dir {original.root}" in capsys.readouterr().out
        assert main.run(["clean", "--yes", str(original.root)]) == 0 and not lives(pid)


def test_a_plan_that_came_with_a_recording_removes_nothing_outside_of_it(tmp_path: Path) -> None:
    scratch = tmp_path / f"{procfs.SCRATCH}mine"
    scratch.mkdir(mode=0o700)
    weights = Path("/dev/shm") / f"atropos-test-{os.getpid()}"
    weights.touch()
    run, _ = make_run(tmp_path, clears=[str(scratch), str(weights)])
    run.journal_json.unlink()
    try:
        assert main.run(["clean", "--yes", str(run.root)]) == 0
        assert scratch.exists() and weights.exists()
    finally:
        weights.unlink()


def recorded_journal(run: RunDir, run_id: str, ran: Path) -> dict[str, object]:
    """A journal that names this boot, and a command that reaches another node."""
    far = {"name": "trainer", "node": "n1", "host": "h", "command": ["touch", str(ran)]}
    entry = {
        "pid": 2**22 + 1,
        "create_time": 0,
        "ticks": 1,
        "pgid": 2**22 + 1,
        "boot_id": procfs.boot_id(),
        "far": far,
    }
    table: dict[str, object] = {"run_id": run_id, "components": {"trainer": entry}}
    run.journal_json.write_text(json.dumps(table))
    run.journal_json.chmod(0o600)
    return table


def test_a_command_in_the_journal_of_a_recording_never_runs(
    tmp_path: Path, capsys: Captured
) -> None:
    run, run_id = make_run(tmp_path)
    ran = tmp_path / "ran"
    recorded_journal(run, run_id, ran)
    assert ProcessTable.load(run.journal_json) is None
    assert main.run(["clean", "--yes", str(run.root)]) == 0
    assert main.run(["clean", "--yes"]) == 0
    assert not ran.exists() and "elsewhere" not in capsys.readouterr().out


def test_a_sealed_journal_is_believed_only_as_written_and_where_written(
    tmp_path: Path, capsys: Captured
) -> None:
    run, run_id = make_run(tmp_path)
    table = ProcessTable.model_validate(recorded_journal(run, run_id, tmp_path / "ran"))
    table.write(run.journal_json)
    assert ProcessTable.load(run.journal_json) is not None
    assert main.run(["clean", "--dry-run", str(run.root)]) == 0
    said = capsys.readouterr().out
    assert "trainer on node n1" in said and f"touch {tmp_path / 'ran'}" in said, (
        "the command that would run"
    )
    sealed = run.journal_json.read_text()
    run.journal_json.write_text(sealed.replace("touch", "false"))
    assert ProcessTable.load(run.journal_json) is None, "changed"
    copy = copy_of(run)
    copy.journal_json.write_text(sealed)
    assert ProcessTable.load(copy.journal_json) is None, "another run directory"
    run.journal_json.write_text(sealed)
    assert ProcessTable.load(run.journal_json) is not None
    key = registry().parent / "seal.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    assert ProcessTable.load(run.journal_json) is None, "others may have read the key"
    table.write(run.journal_json)
    assert (
        ProcessTable.load(run.journal_json) is not None and key.stat().st_mode & 0o777 == 0o600
    ), "a new key"
    key.unlink()
    assert ProcessTable.load(run.journal_json) is None, "another installation"


def test_no_journal_is_believed_where_no_key_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run, run_id = make_run(tmp_path)
    assert json.loads(run.journal_json.read_text())["mac"] == ""
    assert ProcessTable.load(run.journal_json) is None
    supervisor = ProcessEntry(pid=7, create_time=1.0, ticks=100, pgid=7, boot_id="b")
    ProcessTable(run_id=run_id, supervisor=supervisor).write(run.journal_json)
    assert up._runs_by(7, run), "`up --detach` knows its own supervisor"


def test_a_bundle_names_no_boot_and_no_command_of_a_node(tmp_path: Path) -> None:
    run, run_id = make_run(tmp_path)
    ProcessTable.model_validate(recorded_journal(run, run_id, tmp_path / "ran")).write(
        run.journal_json
    )
    assert main.run(["bundle", str(run.root), "-o", "all.tar.gz"]) == 0
    with tarfile.open("all.tar.gz") as tar:
        texts = {Path(member.name).name: tar.extractfile(member) for member in tar}
        contents = {name: file.read().decode() for name, file in texts.items() if file}
    journal = json.loads(contents["journal.json"])
    assert journal["components"]["trainer"]["far"]["node"] == "n1" and "mac" not in journal
    for name, text in contents.items():
        assert procfs.boot_id() not in text and str(tmp_path / "ran") not in text, name


def test_a_socket_link_to_another_run_reaches_nobody(
    live: tuple[RunDir, str, int], capsys: Captured
) -> None:
    original, _, pid = live
    recording, _ = make_run(Path.cwd())
    recording.control_sock.symlink_to(original.control_sock.readlink())
    assert not runs.RunEntry(recording, {}).is_live
    assert main.run(["down", str(recording.root)]) == Exit.NO_RUN
    assert main.run(["restart", "x", "--yes", "--run-dir", str(recording.root)]) == Exit.NO_RUN
    capsys.readouterr()
    assert main.run(["ps", str(recording.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "ended"
    assert main.run(["bundle", str(recording.root), "-o", "all.tar.gz"]) == 0
    with tarfile.open("all.tar.gz") as tar:
        assert not [name for name in tar.getnames() if name.endswith("status.json")]
    assert main.run(["clean", "--yes", str(recording.root)]) == 0
    assert not recording.control_sock.is_symlink()
    assert lives(pid) and original.control_sock.readlink().is_socket()


def test_a_supervisor_takes_no_command_for_another_run(
    live: tuple[RunDir, str, int], capsys: Captured
) -> None:
    """A run directory was replaced under a living supervisor: path and socket are the same, the run
    is not."""
    original, _, pid = live
    meta = json.loads(original.run_json.read_text())
    original.run_json.write_text(json.dumps(meta | {"run_id": "another-run"}))
    for words in (["down"], ["restart", "x", "--yes", "--run-dir"]):
        assert main.run([*words, str(original.root)]) != 0
    original.run_json.write_text(json.dumps(meta))
    capsys.readouterr()
    assert main.run(["ps", str(original.root), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (
        status["phase"] in ("starting", "running")
        and status["components"][0]["attempt"] == 1
        and lives(pid)
    )


def test_somebody_who_listens_under_another_name_is_no_supervisor(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "other.sock"))
        server.listen()
        run.control_sock.symlink_to(folder / "other.sock")
        assert cleanup.find_dead(run.root, {}) is not None


SECRET = "ERROR: secret of another file"


def linked(run: RunDir, outside: Path, at: str) -> None:
    """Replace `at` in a run directory by a link to what lies outside."""
    path = run.root / at
    target = outside / path.name
    if path.is_dir():
        shutil.copytree(path, target, dirs_exist_ok=True)
        shutil.rmtree(path)
    else:
        target.write_bytes(path.read_bytes() if path.exists() else b"")
        path.unlink(missing_ok=True)
    for file in [target, *target.rglob("*")] if target.is_dir() else [target]:
        if file.suffix in (".log", ".jsonl"):
            words = file.read_text().replace("arithmetic", SECRET).replace("probe passed", SECRET)
            file.write_text(words + f"{SECRET}\n")
        elif file.is_file():
            file.write_text(file.read_text().replace("demo", SECRET))
    path.symlink_to(target)


LINKED = (
    "telemetry.jsonl",
    "supervisor.jsonl",
    "eval.arithmetic.jsonl",
    "plan.json",
    "profile.toml",
    "result.json",
    "logs",
    "logs/trainer",
    "logs/trainer/1.log",
)


@pytest.mark.parametrize("at", LINKED)
def test_no_command_follows_a_link_out_of_a_run_directory(
    tmp_path: Path, at: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        report, "draw", lambda chart, name: f"<svg id='{name}'/>"
    )  # words are what could leak
    run = make_recording(tmp_path / "sent", steps=2)
    run.result_json.write_text(json.dumps({"exit_code": 0, "reason": "demo"}))
    (tmp_path / "mine").mkdir()
    linked(run, tmp_path / "mine", at)
    assert main.run(["report", str(run.root), "-o", "page.html"]) == 0
    assert "secret" not in Path("page.html").read_text()
    for command in (["ps"], ["why"], ["events"], ["logs", "-n", "9999"]):
        main.run([*command, "--run-dir", str(run.root)])
    main.run(["bench", str(run.root)])
    said = "".join(capsys.readouterr())
    assert said and "secret" not in said
    assert main.run(["bundle", str(run.root), "-o", "all.tar.gz"]) == 0
    with tarfile.open("all.tar.gz") as tar:
        assert not [
            member.name
            for member in tar
            if b"secret" in (file.read() if (file := tar.extractfile(member)) else b"")
        ]
    recorded = Recording.load(run)
    player = Replay(recorded, ticks=lambda: 1e6)
    lines = [entry.text for name in ("trainer", "vllm") for entry in player.logs.read((name,))]
    texts = [record.to_line() for record in recorded.records]
    assert not [
        text
        for text in (*texts, *lines, recorded.info.name, recorded.final.reason)
        if "secret" in text
    ]


def test_a_file_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(tmp_path / "link")
    assert read_regular(tmp_path / "link", unlinked=0) == "words"


HUGE = 20 << 30


def stretched(path: Path) -> None:
    """Put a hole of 20 GB between the first and the second half of a file."""
    data = path.read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    with path.open("r+b") as file:
        file.truncate(half)
        file.seek(HUGE)
        file.write(b"\n" + data[half:])


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "at", ["telemetry.jsonl", "supervisor.jsonl", "eval.arithmetic.jsonl", "logs/trainer/1.log"]
)
def test_a_sparse_file_of_any_size_costs_no_command_time(
    tmp_path: Path, at: str, capsys: Captured
) -> None:
    run = make_recording(tmp_path / "sent", steps=40)
    before = Recording.load(run)
    stretched(run.root / at)
    where = ["--run-dir", str(run.root)]
    commands = [[name, *where] for name in ("ps", "why", "events", "logs")] + [
        ["bench", str(run.root)],
        ["runs"],
    ]
    for command in (*commands, ["logs", *where, "-n", "99999"], ["logs", *where, "--since", "1d"]):
        began = time.monotonic()
        assert main.run(command) == 0
        assert time.monotonic() - began < 8, command
    began = time.monotonic()
    assert len(Recording.load(run).records) >= len(before.records) - 1
    assert main.run(["bundle", str(run.root), "-o", "all.tar.gz"]) == 0
    assert time.monotonic() - began < 8


def test_a_run_directory_that_was_removed_names_its_supervisor(
    live: tuple[RunDir, str, int], capsys: Captured
) -> None:
    original, _, pid = live
    supervisor = listener(str(original.control_sock.readlink()))
    assert supervisor
    shutil.rmtree(original.root)
    for command in ("ps", "down", "clean"):
        assert main.run([command, str(original.root)]) == Exit.NO_RUN
        said = capsys.readouterr().err
        assert f"is alive (pid {supervisor})" in said and f"kill {supervisor} ends the run" in said
    assert lives(pid)


@needs_another_user
def test_a_run_directory_that_its_owner_cannot_read_is_words(tmp_path: Path) -> None:
    """A user without permission to read it got an internal error after `chmod 000`."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    base.chmod(0o755)
    run, _ = make_run(base)
    run.root.parent.chmod(0o755)
    os.chown(run.root, NOBODY, NOBODY)
    run.root.chmod(0)
    assert runs.find(Path("no-such-run")) is None  # what is imported late is imported now

    def ask() -> str:
        os.chdir("/")
        try:
            runs.pick(run.root)
        except UserError as error:
            return str(error)
        return ""

    try:
        said = as_another_user(ask)
    finally:
        shutil.rmtree(base)
    assert "cannot be reached: Permission denied" in said and "fix: chmod u+rwx" in said


def test_too_few_open_files_are_words_before_anything_starts() -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "atropos_tui",
        "up",
        "demo",
        "--headless",
        "--run-dir",
        "r",
    ]
    shell = ["bash", "-c", 'ulimit -n 40; exec "$@"', "bash", *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert done.returncode == Exit.USAGE and not Path("r").exists()
    assert "may open 40 files" in done.stderr and "fix: ulimit -n 4096" in done.stderr
