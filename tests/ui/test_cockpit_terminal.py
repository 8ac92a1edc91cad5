"""`run_cockpit` in a real terminal: its keys, its signals, and the terminal as it was afterwards."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_tui.ui.terminal import LEAVE_S
from tests.ui.run_maker import make_run
from tests.ui.terminal import ALTERNATE_OFF, ALTERNATE_ON, Terminal

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
def test_signals_detach_and_give_the_terminal_back(terminal: Terminal, number: signal.Signals) -> None:
    terminal.until(lambda seen: b"37/60" in seen)
    terminal.process.send_signal(number)
    terminal.until(lambda seen: b"LEFT:detach" in seen)
    assert ALTERNATE_OFF in terminal.seen
    assert terminal.process.wait(5) == 0


def test_a_terminal_that_vanishes_takes_the_screen_along(terminal: Terminal) -> None:
    terminal.until(lambda seen: b"37/60" in seen)
    terminal.vanish()
    terminal.process.wait(LEAVE_S + 3)  # else it would read the end of its input for ever, with a whole core


def test_a_fault_of_the_screen_is_no_detaching(tmp_path: Path) -> None:
    fault = SCRIPT.replace(
        "import sys; ", "import sys; from atropos_tui.ui import app; app.CockpitApp._refresh_panels = lambda s: 1 / 0; "
    )
    started = Terminal([sys.executable, "-c", fault, str(make_run(tmp_path / "run").root)])
    try:
        started.until(lambda seen: b"LEFT:failed" in seen)
        assert b"ZeroDivisionError" in started.seen and ALTERNATE_OFF in started.seen
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


def test_o_opens_the_log_in_the_editor_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_ctrl_c_in_the_editor_is_the_editor_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use_editor(monkeypatch, tmp_path, "trap 'echo INTERRUPTED; exit' INT\necho EDITING\nsleep 20 & wait $!")
    owns = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "  # so that its keys become signals
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
        colours = {tuple(map(int, found)) for found in re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)", started.seen)}
        assert all(max(colour) - min(colour) <= 2 for colour in colours), "only greys"
    finally:
        started.close()
