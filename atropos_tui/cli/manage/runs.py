"""Lookup of runs: by directory, id, name or a prefix of the id, or the latest live one.

Every run leaves a symlink to its directory in the user's state folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_common.system.files import is_own, read_regular
from atropos_common.system.run_dir import LATEST_TIME, RunDir, is_safe_name, registry
from atropos_tui.cluster import slurm
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.profile.ports import has_supervisor, listener

MOST_NAMED = 5
"""Runs that a message lists."""


@dataclass(frozen=True)
class RunEntry:
    dir: RunDir
    info: dict[str, Any]

    @property
    def run_id(self) -> str:
        return str(self.info.get("run_id") or "")

    @property
    def is_own(self) -> bool:
        """Only this user can have written the run's files."""
        return is_own(self.dir.root)

    @property
    def started_at(self) -> float:
        return _seconds(self.info.get("started_at"))

    @property
    def used_at(self) -> float:
        """Last start or resume, in Unix seconds."""
        return _seconds(self.info.get("resumed_at")) or self.started_at

    @property
    def is_live(self) -> bool:
        """A process listens on the run's socket, or its SLURM job runs on another node."""
        return has_supervisor(self.dir) or slurm.runs_elsewhere(self.dir)


def _seconds(value: object) -> float:
    """Unix seconds; 0 for any other value."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= LATEST_TIME else 0.0


def new_run_id(name: str) -> str:
    """NAME-TIME-ID: sorts by time, safe in paths."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def remember(run: RunDir, run_id: str) -> None:
    """Add a symlink to the registry. Errors are ignored."""
    try:
        registry().mkdir(parents=True, exist_ok=True, mode=0o700)
        link = registry() / run_id
        link.unlink(missing_ok=True)
        link.symlink_to(run.root.resolve())
    except OSError:
        return


def all_runs() -> list[RunEntry]:
    """Every run of this user on disk, newest first."""
    # Runs below the current folder count as well: the registry may be of another machine or HOME.
    roots = [path.parent.resolve() for path in Path("runs").glob("*/run.json")]
    with contextlib.suppress(OSError):
        for link in registry().iterdir():
            if link.exists():
                roots.append(link.resolve())
            elif link.is_symlink():  # its run directory was deleted
                link.unlink(missing_ok=True)
    found = [
        entry
        for root in dict.fromkeys(roots)
        if (entry := read_run(root)) is not None and entry.is_own
    ]
    return sorted(found, key=lambda entry: entry.used_at, reverse=True)


def read_run(root: Path) -> RunEntry | None:
    """None without a readable run.json, or if its id is not a safe name."""
    info = _read_object(root / "run.json")
    if info is None or not is_safe_name(str(info.get("run_id", "none"))):
        return None
    return RunEntry(RunDir(root), info)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):  # RecursionError: JSON nested thousands deep
        return None
    return data if isinstance(data, dict) else None


def pick_own(run_dir: Path | None) -> RunEntry:
    """For a command that acts on what the run's files say.

    Raises:
        UserError: exit code 5, no such run; 2, other users may have written there.
    """
    entry = pick(run_dir)
    if not entry.is_own:
        reason = (
            f"{entry.dir.root} belongs to another user or is writable by others, so its files "
            f"are not trusted"
        )
        raise UserError(
            "not a run of this user",
            [Problem(reason, "run chmod go-w on it, or work as its owner")],
        )
    return entry


def pick(run_dir: Path | None) -> RunEntry:
    """The named run, or the default.

    Raises:
        UserError: exit code 5, no such run.
    """
    if run_dir is not None:
        if (entry := find(run_dir)) is None:
            raise _no_run(run_dir)
        return entry
    if (entry := _newest()) is None:
        raise UserError(
            "no runs yet",
            [Problem("no run was ever started", "atropos-tui up PROFILE")],
            Exit.NO_RUN,
        )
    return entry


def _newest() -> RunEntry | None:
    known = all_runs()
    return next((entry for entry in known if entry.is_live), next(iter(known), None))


def of(options: argparse.Namespace) -> RunEntry:
    """The run of a command with `[RUN]` or `--run-dir`; see `pick`."""
    return pick(options.run or options.run_dir)


def acted_on(options: argparse.Namespace) -> RunEntry:
    """The run of a command that starts or stops something.

    Raises:
        UserError: exit code 5, no such run; 2, several are live and none is named.
    """
    live = (
        []
        if options.run or options.run_dir
        else [entry.run_id for entry in all_runs() if entry.is_live]
    )
    if len(live) > 1:
        problem = Problem(", ".join(live[:MOST_NAMED]), "name one by its id or name")
        raise UserError(f"{len(live)} runs are live", [problem])
    return of(options)


def with_components(words: Sequence[str], run_dir: Path | None) -> tuple[RunEntry, list[str]]:
    """Split words that are a run and components in any order; a component's name is never a run.

    Raises:
        UserError: exit code 5, no such run.
    """
    left = list(words)
    if run_dir is None:
        # Components of the default run come first: `logs vllm` means its vllm, even beside a folder
        # `vllm`.
        known = component_names(_newest())
        for word in left:
            if word not in known and (entry := find(Path(word))) is not None:
                left.remove(word)
                return entry, left
    return pick(run_dir), left


def component_names(entry: RunEntry | None) -> dict[str, str]:
    """Component -> role."""
    try:
        plan = (_read_object(entry.dir.plan_json) if entry else None) or {}
        parts = [(part["name"], str(part.get("role", ""))) for part in plan["components"]]
        return {name: role for name, role in parts if isinstance(name, str)}
    except (KeyError, TypeError, AttributeError):
        return {}


def find(run: Path) -> RunEntry | None:
    """The run in a folder, or a listed run by id, name or a prefix of its id. Of several with one
    name the live one is taken, otherwise the latest.

    Raises:
        UserError: exit code 5, the path cannot be resolved; 2, several runs fit.
    """
    try:
        here = read_run(run.resolve())
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: a loop of links; ValueError: a NUL
        reason = getattr(error, "strerror", None) or str(error)
        fix = "name the run's own folder; `atropos-tui runs` lists the runs"
        raise UserError(f"no run in {run}", [Problem(reason, fix)], Exit.NO_RUN) from None
    return here or _by_id_or_name(str(run))


def _by_id_or_name(text: str) -> RunEntry | None:
    known = all_runs()
    # Order of preference: the full id, a live run of that name, the latest of that name, a prefix
    # of an id.
    named = [entry for entry in known if entry.info.get("name") == text]
    live = [entry for entry in named if entry.is_live]
    fitting = (
        [entry for entry in known if entry.run_id == text][:1]
        or live
        or named[:1]
        or [entry for entry in known if entry.run_id.startswith(text)]
    )
    if len(fitting) > 1:
        listed = ", ".join(entry.run_id for entry in fitting[:MOST_NAMED])
        more = f" and {len(fitting) - MOST_NAMED} more" if len(fitting) > MOST_NAMED else ""
        kind = "live runs are called" if live else "runs begin with"
        raise UserError(
            f"{len(fitting)} {kind} {text}",
            [Problem(listed + more, "give a longer prefix, or the id")],
        )
    return next(iter(fitting), None)


def _no_run(named: Path) -> UserError:
    from atropos_tui.profile.errors import did_you_mean
    from atropos_tui.profile.load import shipped_profiles

    text = str(named)
    if (named.suffix == ".toml" and named.is_file()) or text in shipped_profiles():
        problem = Problem("no run has this name", f"atropos-tui up {text} starts one")
        return UserError(f"{text} is a profile", [problem], Exit.NO_RUN)
    known = [name for entry in all_runs() for name in (entry.run_id, str(entry.info.get("name")))]
    fix = f"{did_you_mean(text, known)}`atropos-tui runs` lists the runs"
    return UserError(f"no run in {named}", [_missing(RunDir(named), fix)], Exit.NO_RUN)


def _missing(run: RunDir, fix: str) -> Problem:
    from atropos_tui.supervisor.client import SocketError, socket_path

    try:
        run.run_json.lstat()  # `lstat`: a dangling link counts as present
    except (FileNotFoundError, NotADirectoryError):
        with contextlib.suppress(OSError, SocketError):
            if pid := listener(str(socket_path(run))):
                what = (
                    f"the supervisor of this directory is alive (pid {pid}), but run.json is "
                    f"missing"
                )
                return Problem(what, f"kill {pid} ends the run as `down` does")
        return Problem("not a run directory (no run.json), and no run has this id or name", fix)
    except OSError as error:
        return Problem(
            f"its run.json cannot be reached: {error.strerror}",
            f"chmod u+rwx {shlex.quote(str(run.root))}",
        )
    return Problem("its run.json cannot be read", fix)


def read_result(run: RunDir) -> dict[str, Any] | None:
    """None if it is missing or invalid."""
    data = _read_object(run.result_json) or {}
    code = data.get("exit_code")
    return (
        data if type(code) is int and 0 <= code < 256 else None
    )  # `type`: True is an int for isinstance


def is_used(root: Path) -> bool:
    """The directory holds more than the empty lock file of an `up` that failed early."""
    if not root.is_dir():
        return root.exists()
    return any(
        entry.name != "supervisor.jsonl" or entry.stat().st_size for entry in os.scandir(root)
    )
