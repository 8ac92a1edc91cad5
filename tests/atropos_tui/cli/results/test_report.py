"""`report`, `replay` and `bench` from the command line: files, exit codes, messages."""

from __future__ import annotations

import json
import os
import pty
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_common.system.run_dir import LONGEST_SOCKET, RunDir
from atropos_tui.cli import main
from tests.atropos_tui.cli.stand_in_stack import write_profile
from tests.support.own_places import own_places  # noqa: F401
from tests.support.run_maker import make_run, start_records, write_records

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def place(own_places: None, tmp_path: Path) -> RunDir:  # noqa: F811
    """A finished run in ./runs/one."""
    run = make_run(tmp_path / "runs" / "one", steps=8)
    run.run_json.write_text(
        json.dumps({"run_id": "demo-test", "name": "demo", "mode": "none", "started_at": 5.0})
    )
    run.result_json.write_text(json.dumps({"exit_code": 0, "reason": "trainer finished"}))
    return run


def test_report_writes_a_private_page_of_the_newest_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["report"]) == 0
    page = tmp_path / "one-report.html"
    assert capsys.readouterr().out.startswith("one-report.html  (")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "8 of 60" in text
    assert main.run(["report", "demo-test", "-o", "again.html"]) == 0
    assert (tmp_path / "again.html").exists()


def test_report_follows_a_link_to_a_file_and_says_what_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shared.html").write_text("old")
    (tmp_path / "link.html").symlink_to("shared.html")
    assert main.run(["report", "-o", "link.html"]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "shared.html").read_text() != "old"
    (tmp_path / "loop").symlink_to("loop")
    capsys.readouterr()
    monkeypatch.setattr(
        "atropos_tui.cli.results.report.render", lambda *_: "a page"
    )  # drawing one takes a second
    for name in ("runs", "nowhere/x.html", "/dev/null", "loop", "x" * 300):
        assert main.run(["report", "-o", name]) == 2
        assert "fix: choose another -o FILE" in capsys.readouterr().err
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_report_of_a_run_that_crashed_and_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "one" / "result.json").unlink()
    assert main.run(["report", "-o", "x.html"]) == 0
    assert "ended without a result" in (tmp_path / "x.html").read_text()
    capsys.readouterr()
    assert main.run(["report", "nowhere"]) == 5
    assert "no run in nowhere" in capsys.readouterr().err
    (tmp_path / "runs" / "one" / "run.json").write_bytes(b"\0" * 100)
    assert main.run(["report", "runs/one"]) == 5
    assert "its run.json cannot be read" in capsys.readouterr().err


def test_without_the_plot_library_it_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [
        name
        for name in sys.modules
        if name.startswith(("matplotlib", "atropos_tui.monitor.report"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main.run(["report"]) == 2
    assert "pip install '.[report]'" in capsys.readouterr().err


def test_a_loop_of_links_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for command in (["ps", "--run-dir", "a"], ["report", "a"], ["replay", "a"], ["bench", "a"]):
        assert main.run(command) == 5
        said = capsys.readouterr().err
        assert "no run in a" in said
        assert "atropos-tui runs" in said


def test_bench_compares_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "elsewhere" / "one", steps=4)
    assert main.run(["bench", "runs/one", "elsewhere/one"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["runs/one", "(shared_vllm)", "elsewhere/one", "(shared_vllm)"]
    assert any(row.split() == ["Steps", "8", "4", "(x0.50)"] for row in rows)
    assert main.run(["bench", "runs/one", "elsewhere/one", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["steps"], second["steps"], second["ratios"]["steps"]) == (8, 4, 0.5)


@pytest.mark.parametrize("speed", ["0", "-2", "nan", "inf", "1e9", "fast", ""])
def test_replay_refuses_what_is_no_speed(speed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main.run(["replay", f"--speed={speed}"])
    assert refused.value.code == 2
    assert "is not a speed" in capsys.readouterr().err


def test_replay_needs_a_terminal_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["replay", "runs/one"]) == 2
    assert "the screen needs one" in capsys.readouterr().err
    empty = RunDir(tmp_path / "runs" / "empty")
    empty.create()
    empty.run_json.write_text(json.dumps({"run_id": "empty", "started_at": 6.0}))
    assert main.run(["replay", "empty"]) == 2
    assert "nothing to replay" in capsys.readouterr().err


def test_replay_on_a_real_terminal_shows_the_end_and_leaves_by_q(place: RunDir) -> None:
    place.supervisor_jsonl.unlink()
    write_records(place.supervisor_jsonl, sorted(start_records(), key=lambda record: record.time))
    front, back = pty.openpty()
    command = [str(BIN / "atropos-tui"), "replay", "runs/one", "--speed", "64x"]
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=back, stdout=back, stderr=back, env=env, start_new_session=True
    )
    os.close(back)
    os.set_blocking(front, False)
    seen, deadline = b"", time.monotonic() + 60
    while b"done" not in seen or b"REPLAY" not in seen:
        assert time.monotonic() < deadline, seen[-2000:].decode(errors="replace")
        assert process.poll() is None, seen[-2000:].decode(errors="replace")
        try:
            seen += os.read(front, 65536)
        except BlockingIOError:
            time.sleep(0.05)
    os.write(front, b"q")
    while process.poll() is None:
        assert time.monotonic() < deadline
        try:
            os.read(front, 65536)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            break
    assert process.wait(10) == 0
    os.close(front)


def test_a_folder_too_long_for_a_socket_ends_in_a_clear_error(
    own_places: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from atropos_tui.supervisor import client, runner

    edge = (
        Path(os.environ["XDG_RUNTIME_DIR"]) / "e"
    )  # short: pytest's own folder may be too long by itself
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(client.SocketError, match=r"too long.*shorter folder, or unset it"):
        client.socket_path(RunDir(tmp_path / "run"))
    assert not list(long.iterdir())
    name = len(os.fsencode(edge)) + 1 + len("atropos-tui/") + client.NAME_BYTES + 1
    fits = edge / ("y" * (LONGEST_SOCKET - name))
    fits.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(fits))
    run = RunDir(tmp_path / "r")
    run.create()
    server, path = runner.listen(run)
    assert len(os.fsencode(path)) == LONGEST_SOCKET
    runner.unlisten(server, path, run)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(fits.parent / (fits.name + "y")))
    fits.rename(fits.parent / (fits.name + "y"))
    with pytest.raises(client.SocketError):
        client.socket_path(run)


@pytest.mark.parametrize("how", ["--headless", "--detach"])
def test_up_says_that_the_folder_is_too_long(tmp_path: Path, how: str) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    profile = write_profile(tmp_path, "p", ports=(_free_port(), _free_port()))
    env = os.environ | {"XDG_RUNTIME_DIR": str(long)}
    done = subprocess.run(
        [str(BIN / "atropos-tui"), "up", str(profile), how],
        capture_output=True,
        text=True,
        env=env,
        timeout=100,
    )
    assert done.returncode == 2, done.stderr
    assert "$XDG_RUNTIME_DIR is too long" in done.stderr
    assert "set it to a shorter folder, or unset it" in done.stderr
    assert "Traceback" not in done.stderr


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
