"""`run_cockpit` in a real terminal: its keys, its signals, and the terminal as it was afterwards."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ui.run_maker import make_run

SCRIPT = (
    "import sys; from pathlib import Path; from atropos_tui.ui.app import run_cockpit; "
    "print('LEFT:' + run_cockpit(Path(sys.argv[1])))"
)
ALTERNATE_ON, ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A program on a pseudo terminal of 100 x 30."""

    def __init__(self, command: list[str]) -> None:
        self._fd, inner = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=os.environ | {"COLUMNS": "100", "LINES": "30", "TERM": "xterm-256color"},
        )
        os.close(inner)
        self.seen = b""

    def until(self, true: Callable[[bytes], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not true(self.seen):
            assert time.monotonic() < deadline, self.seen[-2000:]
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._fd, 65536)
                except OSError:
                    break
        assert true(self.seen), self.seen[-2000:]

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(5)
        os.close(self._fd)


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


def test_o_opens_the_log_in_the_editor_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    editor.write_text(f'#!/bin/sh\necho "EDITING $1"\necho "$1" > {tmp_path}/opened\n')
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.delenv("VISUAL", raising=False)
    run = make_run(tmp_path / "run")
    started = Terminal([sys.executable, "-c", SCRIPT, str(run.root)])
    try:
        started.until(lambda seen: b"37/60" in seen and b"no result" in seen)
        started.type(b"3")
        started.until(lambda seen: b"step  37" in seen)
        started.seen = b""
        started.type(b"o")
        started.until(lambda seen: b"EDITING" in seen and ALTERNATE_ON in seen)
        assert Path((tmp_path / "opened").read_text().strip()) == run.log("trainer", 1)
        started.type(b"q")
        started.until(lambda seen: b"LEFT:ended" in seen)
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
