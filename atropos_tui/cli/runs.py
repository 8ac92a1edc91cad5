"""Finding runs: by directory, or the newest live one.

Every run leaves a symlink to its directory in the user's state folder, so that commands find it from anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from atropos_common.files import is_own, read_regular
from atropos_common.run_dir import LATEST_TIME, RunDir, is_safe_name
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.profile.ports import listens


@dataclass(frozen=True)
class RunEntry:
    """A run on disk, as far as its files tell."""

    dir: RunDir
    info: dict[str, Any]

    @property
    def is_own(self) -> bool:
        """Whether nobody else could have written what its files say."""
        return is_own(self.dir.root)

    @property
    def started_at(self) -> float:
        return _seconds(self.info.get("started_at"))

    @property
    def used_at(self) -> float:
        """When it was last started or resumed."""
        return _seconds(self.info.get("resumed_at")) or self.started_at

    @property
    def is_live(self) -> bool:
        """Whether its supervisor runs: somebody listens on its socket (a killed one leaves only the file)."""
        try:
            return listens(os.readlink(self.dir.control_sock))  # noqa: PTH115  (its own path may be too long to connect to)
        except OSError:
            return False


def _seconds(value: object) -> float:
    """Unix seconds; 0 for what is no such time."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= LATEST_TIME else 0.0


def new_run_id(name: str) -> str:
    """NAME-TIME-ID, sortable and safe in paths."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def registry() -> Path:
    return Path(platformdirs.user_state_dir("atropos-tui")) / "runs"


def remember(run: RunDir, run_id: str) -> None:
    """Leave a symlink in the registry; a registry that cannot be written only costs convenience."""
    try:
        registry().mkdir(parents=True, exist_ok=True, mode=0o700)
        link = registry() / run_id
        link.unlink(missing_ok=True)
        link.symlink_to(run.root.resolve())
    except OSError:
        return


def all_runs() -> list[RunEntry]:
    """Every run of this user's that is still on disk, newest first; others are there for who names them."""
    roots = [path.parent.resolve() for path in Path("runs").glob("*/run.json")]
    with contextlib.suppress(OSError):
        for link in registry().iterdir():
            if link.exists():
                roots.append(link.resolve())
            elif link.is_symlink():
                link.unlink(missing_ok=True)
    found = [entry for root in dict.fromkeys(roots) if (entry := read_run(root)) is not None and entry.is_own]
    return sorted(found, key=lambda entry: entry.used_at, reverse=True)


def read_run(root: Path) -> RunEntry | None:
    """The run in `root`, or None when it holds no readable run.json, or one whose id no run of ours can have."""
    try:
        info = json.loads(read_regular(root / "run.json"))
    except (OSError, ValueError, RecursionError):
        return None
    fits = isinstance(info, dict) and is_safe_name(str(info.get("run_id", "none")))
    return RunEntry(RunDir(root), info) if fits else None


def pick_own(run_dir: Path | None) -> RunEntry:
    """The run that a command means which acts by what its files say.

    Raises:
        UserError: exit code 5, no such run; 2, others may have written there.
    """
    entry = pick(run_dir)
    if not entry.is_own:
        reason = f"{entry.dir.root} is another user's, or others may write there: what it says is not acted upon"
        raise UserError("not a run of this user", [Problem(reason, "chmod go-w it, or work as its owner")])
    return entry


def pick(run_dir: Path | None) -> RunEntry:
    """The run that a command means.

    Raises:
        UserError: exit code 5, no such run.
    """
    if run_dir is not None:
        if (entry := find(run_dir)) is None:
            what = "its run.json cannot be read" if RunDir(run_dir).run_json.exists() else "no run.json there"
            problem = Problem(what, "`atropos-tui runs` lists the runs")
            raise UserError(f"no run in {run_dir}", [problem], Exit.NO_RUN)
        return entry
    if not (runs := all_runs()):
        raise UserError("no run yet", [Problem("nothing was started", "atropos-tui up PROFILE")], Exit.NO_RUN)
    return next((entry for entry in runs if entry.is_live), runs[0])


def find(run: Path) -> RunEntry | None:
    """The run in a folder, or with an id that `runs` lists; None where there is none.

    Raises:
        UserError: exit code 5, the name leads nowhere.
    """
    try:
        here = read_run(run.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL
        reason = getattr(error, "strerror", None) or str(error)
        fix = "name the run's own folder; `atropos-tui runs` lists the runs"
        raise UserError(f"no run in {run}", [Problem(reason, fix)], Exit.NO_RUN) from None
    return here or next((entry for entry in all_runs() if entry.info.get("run_id") == str(run)), None)


def read_result(run: RunDir) -> dict[str, Any] | None:
    """result.json of an ended run; None where it is not there, or not one that a supervisor wrote."""
    try:
        data = json.loads(read_regular(run.result_json))
    except (OSError, ValueError, RecursionError):
        return None
    code = data.get("exit_code") if isinstance(data, dict) else None
    return data if type(code) is int and 0 <= code < 256 else None


def is_used(root: Path) -> bool:
    """Whether a run must not be started in this directory: it holds anything at all."""
    return root.exists() and (not root.is_dir() or any(os.scandir(root)))
