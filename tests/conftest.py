"""A temporary folder for each test process, removed with everything in it at the end of the
session.

Its path is short, since sockets are bound in it. What pytest keeps of a test (`tmp_path`) lies
where it always does. Once tests are collected, what that has imported is looked at, and frozen.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from atropos_common.system.files import scratch_below


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--launcher-prefix",
        help="run tests of `launchers` below this command (srun ..., ssh ...) only",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A worker has its folder in that of the process that started it."""
    # A shell starts `pytest &` with SIGINT ignored, and every child would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = getattr(config, "workerinput", None)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    name = worker["workerid"] if worker else f"at-{secrets.token_hex(4)}"
    folder, environment = scratch_below(os.environ, name)
    folder.mkdir(mode=0o700)
    os.environ.update(environment | {"XDG_STATE_HOME": str(folder / "state")})
    tempfile.tempdir = None  # of the environment before
    atexit.register(
        _remove, folder, os.getpid()
    )  # the last: what tests have registered ends processes


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests are to wait and not to compute (`make test-waiting`), each process would pay for
    a heavy import."""
    if (heavy := os.environ.get("ATROPOS_TESTS_WITHOUT")) and heavy in sys.modules:
        raise pytest.UsageError(
            f"a test file imports {heavy}: it belongs in a folder of MODEL_TESTS in the Makefile"
        )
    # what was imported and collected stays to the end, and is not looked through for garbage any
    # more
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the first failure of each test that a second try passed: without it a race that shows
    once in twenty runs stays unknown."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter._outrep_summary(report)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has the same functions to call
        shutil.rmtree(folder, ignore_errors=True)
