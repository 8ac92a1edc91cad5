"""Files in the user's own directories: choices, and the last internal error."""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs
import textual

from atropos_common.system.files import write_private
from atropos_tui import __version__
from atropos_tui.monitor.charts import Along, Lens
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.run.run_files import read_json
from atropos_tui.monitor.run.state import MOST_CURVES


@dataclass(frozen=True)
class Charts:
    """Extra curves, and the settings of all charts."""

    metrics: tuple[str, ...] = ()
    smoothing: int = Lens.smoothing
    along: Along = Lens.along
    cuts_outliers: bool = Lens.cuts_outliers
    hidden: tuple[str, ...] = ()
    """Names of charts that are not shown."""

    def lens(self) -> Lens:
        return Lens(along=self.along, smoothing=self.smoothing, cuts_outliers=self.cuts_outliers)

    def through(self, lens: Lens) -> Charts:
        return replace(
            self, smoothing=lens.smoothing, along=lens.along, cuts_outliers=lens.cuts_outliers
        )


def choices_file() -> Path:
    return Path(platformdirs.user_config_dir("atropos-tui")) / "screen.json"


def key_file() -> Path:
    """Return the file with the user's keys and commands."""
    return choices_file().with_name("keys.toml")


def is_folded() -> bool:
    """Return True if the table of components is folded."""
    return read_json(choices_file()).get("folded") is True


def theme() -> str:
    """Return the chosen theme, if any."""
    return str(read_json(choices_file()).get("theme") or "")


def charts() -> Charts:
    """Return the chosen chart settings; defaults replace invalid values."""
    known = read_json(choices_file()).get("charts")
    data = known if isinstance(known, dict) else {}
    metrics, smoothing, along = data.get("metrics"), data.get("smoothing"), data.get("along")
    return Charts(
        _names(metrics),
        # `type`, because JSON's `true` is an `int` for isinstance.
        smoothing if type(smoothing) is int and 0 <= smoothing <= 10_000 else Lens.smoothing,
        # An axis that a newer version added falls back to the default.
        Along(along) if along in list(Along) else Lens.along,
        data.get("cuts_outliers") is not False,
        _names(data.get("hidden")),
    )


def _names(value: object) -> tuple[str, ...]:
    names = [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
    return tuple(names[:MOST_CURVES])


def keep(
    *, theme: str | None = None, charts: Charts | None = None, folded: bool | None = None
) -> None:
    """Store a choice for later screens."""
    # Read first: another screen may have written the other keys.
    chosen = read_json(choices_file())
    if theme is not None:
        chosen["theme"] = theme
    if charts is not None:
        chosen["charts"] = asdict(charts)
    if folded is not None:
        chosen["folded"] = folded
    with contextlib.suppress(OSError):
        choices_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(choices_file(), json.dumps(chosen, indent=2) + "\n")


# Internal errors: tracebacks go to a private file, the terminal shows one line.

MOST_ERRORS = 20  # errors of one screen; later ones are usually consequences

_recorded: dict[str, str] = {}


def error_file() -> Path:
    """Return the file with the tracebacks of the latest screen that failed."""
    # In the user's state directory, outside of the run directory: a replay may show another user's
    # run.
    return Path(platformdirs.user_state_dir("atropos-tui")) / "screen-error.txt"


def record_error(error: BaseException, where: str) -> None:
    """Write the traceback of `error` once; `where` names the part of the screen."""
    cause = getattr(error, "error", error)  # Textual wraps a worker's error
    key = f"{where}: {type(cause).__name__}: {cause}"
    if key in _recorded or len(_recorded) >= MOST_ERRORS:
        return
    # Without local variables: they hold the run's whole history, rollouts included.
    trace = "".join(traceback.format_exception(cause))
    _recorded[key] = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {where}\n{trace}"
    versions = (
        f"atropos-tui {__version__}, Textual {textual.__version__}, Python "
        f"{platform.python_version()}"
    )
    with contextlib.suppress(OSError):
        error_file().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(error_file(), "\n".join([versions, *_recorded.values()]))


def crash_line(run: Path, *, command: str, is_over: bool) -> str:
    """Return the line to print after a crash; `command` reopens the screen."""
    again = f"atropos-tui {command} {shlex.quote(str(run))}"
    what = (
        f"the screen failed: {again}" if is_over else f"the screen failed, the run goes on: {again}"
    )
    return one_line(f"{what} (traceback: {error_file()})")
