"""Internal errors of the screen: tracebacks go to a private file, the terminal shows one line."""

from __future__ import annotations

import contextlib
import platform
import shlex
import time
import traceback
from pathlib import Path

import platformdirs
import textual

from atropos_common.system.files import write_private
from atropos_tui import __version__
from atropos_tui.monitor.format import one_line

MOST = 20  # errors of one screen; later ones are usually consequences

_recorded: dict[str, str] = {}


def path() -> Path:
    """Return the file with the tracebacks of the latest screen that failed."""
    # In the user's state directory, outside of the run directory: a replay may show another user's
    # run.
    return Path(platformdirs.user_state_dir("atropos-tui")) / "screen-error.txt"


def record(error: BaseException, where: str) -> None:
    """Write the traceback of `error` once; `where` names the part of the screen."""
    cause = getattr(error, "error", error)  # Textual wraps a worker's error
    key = f"{where}: {type(cause).__name__}: {cause}"
    if key in _recorded or len(_recorded) >= MOST:
        return
    # Without local variables: they hold the run's whole history, rollouts included.
    trace = "".join(traceback.format_exception(cause))
    _recorded[key] = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {where}\n{trace}"
    versions = (
        f"atropos-tui {__version__}, Textual {textual.__version__}, Python "
        f"{platform.python_version()}"
    )
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path(), "\n".join([versions, *_recorded.values()]))


def recorded() -> list[str]:
    """Return place, type and message of every error of this process."""
    return list(_recorded)


def forget() -> None:
    """Start a new report."""
    _recorded.clear()


def crash_line(run: Path, *, command: str, is_over: bool) -> str:
    """Return the line to print after a crash of the screen; `command` reopens it."""
    again = f"atropos-tui {command} {shlex.quote(str(run))}"
    what = (
        f"the screen failed: {again}" if is_over else f"the screen failed, the run goes on: {again}"
    )
    return one_line(f"{what} (traceback: {path()})")
