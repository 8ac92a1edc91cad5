"""`run_cockpit` in a real terminal: keys, signals, the terminal afterwards."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_tui.ui.terminal import CLOSE_TIMEOUT_S
from tests.support.run_maker import make_run
from tests.support.terminal import ALTERNATE_OFF, ALTERNATE_ON, Terminal

SCRIPT = (
    "import sys; from pathlib import Path; from atropos_tui.ui.app import run_cockpit; "
    "print('LEFT:' + run_cockpit(Path(sys.argv[1])))"
)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    run = make_run(tmp_path / "run")
    started = Terminal([sys.executable, "-c", SCRIPT, str(run.root)])
    yield started
    started.close()


def test_q_leaves_a_run_that_is_over(terminal: Terminal) -> None:
    terminal.until(lambda seen: b"37/60" in seen and b"no result" in seen)
    terminal.type(b"q")
    terminal.until(lambda seen: b"LEFT:ended" in seen)
    assert terminal.seen.index(ALTERNATE_ON) < terminal.seen.index(ALTERNATE_OFF)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_detach_and_give_the_terminal_back(
    terminal: Terminal, number: signal.Signals
) -> None:
    terminal.until(lambda seen: b"37/60" in seen)
    terminal.process.send_signal(number)
    terminal.until(lambda seen: b"LEFT:detach" in seen)
    assert ALTERNATE_OFF in terminal.seen
    assert terminal.process.wait(5) == 0


def test_a_terminal_that_vanishes_takes_the_screen_along(terminal: Terminal) -> None:
    terminal.until(lambda seen: b"37/60" in seen)
    terminal.vanish()
    terminal.process.wait(
        CLOSE_TIMEOUT_S + 3
    )  # else it would read the end of its input for ever, with a whole core


def test_a_crash_of_the_screen_is_one_line_and_its_traceback_is_in_a_file(tmp_path: Path) -> None:
    fault = (
        "import sys; from pathlib import Path; from atropos_common.system.run_dir import RunDir; "
        "from atropos_tui.cli.manage.control import open_screen; from atropos_tui.ui import app\n"
        "def broken(self):\n    rollouts_of_users = 'secret'; 1 / 0\n"
        "app.CockpitApp._refresh_panels = broken\n"
        "sys.exit(open_screen(RunDir(Path(sys.argv[1]))))"
    )
    run = make_run(tmp_path / "run").root
    started = Terminal([sys.executable, "-c", fault, str(run)])
    try:
        assert started.ends() == 1
        after = started.seen.rpartition(ALTERNATE_OFF)[2].decode()
        said = re.sub(r"\x1b\[[0-9;?<>=]*[a-zA-Z]", "", after).strip()
        report = tmp_path / "state" / "atropos-tui" / "screen-error.txt"
        assert (
            said
            == f"the screen failed, the run goes on: atropos-tui attach {run} (traceback: {report})"
        )
        assert "ZeroDivisionError" in report.read_text()
        assert "secret" not in report.read_text() and b"secret" not in started.seen, (
            "no local variables"
        )
        assert report.stat().st_mode & 0o077 == 0
    finally:
        started.close()


def _use_editor(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    editor = folder / "editor"
    editor.write_text(f"#!/bin/sh\n{script}\n")
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.delenv("VISUAL", raising=False)


def _open_log(started: Terminal) -> None:
    """Press `o` once the log is there."""
    started.until(lambda seen: b"37/60" in seen and b"no result" in seen)
    started.type(b"3")
    started.until(lambda seen: b"step  37" in seen)
    started.seen = b""
    started.type(b"o")


def test_o_opens_the_log_in_the_editor_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_editor(monkeypatch, tmp_path, f'echo "EDITING $1"\necho "$1" > {tmp_path}/opened')
    run = make_run(tmp_path / "run")
    started = Terminal([sys.executable, "-c", SCRIPT, str(run.root)])
    try:
        _open_log(started)
        started.until(lambda seen: b"EDITING" in seen and ALTERNATE_ON in seen)
        assert Path((tmp_path / "opened").read_text().strip()) == run.log("trainer", 1)
        started.type(b"q")
        started.until(lambda seen: b"LEFT:ended" in seen)
    finally:
        started.close()


def test_ctrl_c_in_the_editor_is_the_editor_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_editor(
        monkeypatch, tmp_path, "trap 'echo INTERRUPTED; exit' INT\necho EDITING\nsleep 20 & wait $!"
    )
    # so that its keys become signals
    owns = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    started = Terminal([sys.executable, "-c", owns + SCRIPT, str(make_run(tmp_path / "run").root)])
    try:
        _open_log(started)
        started.until(lambda seen: b"EDITING" in seen)
        started.type(b"\x03")
        started.until(lambda seen: b"INTERRUPTED" in seen and ALTERNATE_ON in seen)
        started.type(b"q")
        started.until(lambda seen: b"LEFT:ended" in seen)
        assert b"Traceback" not in started.seen
    finally:
        started.close()


def test_no_color_writes_no_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run = make_run(tmp_path / "run")
    started = Terminal([sys.executable, "-c", SCRIPT, str(run.root)])
    try:
        started.until(lambda seen: b"37/60" in seen and b"no result" in seen)
        started.type(b"q")
        started.until(lambda seen: b"LEFT:ended" in seen)
        colours = {
            tuple(map(int, found))
            for found in re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)", started.seen)
        }
        assert all(max(colour) - min(colour) <= 2 for colour in colours), "only greys"
    finally:
        started.close()
