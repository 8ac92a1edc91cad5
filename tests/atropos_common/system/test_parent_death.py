"""A child that dies with its parent, with real processes and SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from atropos_common.system import parent_death

PROGRAM = [sys.executable, "-I", "-S", parent_death.__file__]
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen({PROGRAM!r} + [str(os.getpid()), "", "sleep", "60"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_parent_leaves_no_child() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 30
    while child.name() != "sleep" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert child.name() == "sleep", "it has become the command"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_whose_parent_is_gone_does_not_begin() -> None:
    assert subprocess.run([*PROGRAM, "1", "", "true"], check=False).returncode == 1


def test_what_cannot_be_executed_is_said_as_a_shell_says_it() -> None:
    mine = str(os.getpid())
    missing = subprocess.run(
        [*PROGRAM, mine, "", "/no/such/program"], check=False, capture_output=True, text=True
    )
    assert (
        missing.returncode == 127
        and missing.stderr == "atropos: command not found: /no/such/program\n"
    )
    folder = subprocess.run(
        [*PROGRAM, mine, "", "/tmp"], check=False, capture_output=True, text=True
    )
    assert folder.returncode == 126 and "cannot execute" in folder.stderr


def test_ignored_signals_are_heard_again() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = "import signal; raise SystemExit(signal.getsignal(signal.SIGHUP) != signal.SIG_DFL)"
        child = [*PROGRAM, str(os.getpid()), "", sys.executable, "-c", code]
        assert subprocess.run(child, check=False).returncode == 0
    finally:
        signal.signal(signal.SIGHUP, before)
