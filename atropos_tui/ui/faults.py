"""Internal errors of the screen: each traceback goes to one private file, the terminal gets a line that names it.

The file belongs to the user and not to the run: a screen may show a recording of somebody else.
"""

from __future__ import annotations

import contextlib
import platform
import shlex
import time
import traceback
from pathlib import Path

import platformdirs
import textual

from atropos_common.files import write_private
from atropos_tui import __version__
from atropos_tui.monitor.format import one_line

MOST = 20
"""Errors that one screen records; the later ones are usually consequences."""

_recorded: dict[str, str] = {}
"""Reports of this process, by place and error."""


def path() -> Path:
    """The file with the tracebacks of the last screen that had an internal error."""
    return Path(platformdirs.user_state_dir("atropos-tui")) / "screen-error.txt"


def record(error: BaseException, where: str) -> None:
    """Write the traceback of `error`, once; `where` names the part of the screen.

    The report has no local variables: they hold the run's whole history, rollouts included.
    """
    cause = getattr(error, "error", error)  # Textual wraps the error of a worker
    key = f"{where}: {type(cause).__name__}: {cause}"
    if key in _recorded or len(_recorded) >= MOST:
        return
    trace = "".join(traceback.format_exception(cause))
    _recorded[key] = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {where}\n{trace}"
    versions = f"atropos-tui {__version__}, Textual {textual.__version__}, Python {platform.python_version()}"
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path(), "\n".join([versions, *_recorded.values()]))


def recorded() -> list[str]:
    """Place, type and message of every error of this process."""
    return list(_recorded)


def forget() -> None:
    """Begin a new report."""
    _recorded.clear()


def crash_line(run: Path, *, command: str, is_over: bool) -> str:
    """The one line that is printed when the screen has failed; `command` opens it again."""
    again = f"atropos-tui {command} {shlex.quote(str(run))}"
    goes_on = f"the screen failed: {again}" if is_over else f"the screen failed, the run goes on: {again}"
    return one_line(f"{goes_on} (traceback: {path()})")
