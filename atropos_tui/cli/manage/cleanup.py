"""`clean`: show what dead runs left behind, ask, then end and remove it.

    atropos-tui clean [--dry-run] [--yes] [--run-dir DIR]

Live runs are never touched, nothing is chosen by name or port, and run directories stay. A run is
dead if no sign of a supervisor is left (`liveness.left_by`) and its journal is not locked.
Processes of another run directory are never touched: a copy has the id of its original.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_common.system.files import is_own, is_private
from atropos_common.system.run_dir import ENV_RUN_DIR, ENV_RUN_ID, RunDir
from atropos_tui.cli import show
from atropos_tui.cli.manage import runs
from atropos_tui.cluster.remote_launcher import far_entries, sweep_nodes
from atropos_tui.errors import Exit, Problem, UserError
from atropos_tui.monitor.format import counted, one_line
from atropos_tui.monitor.run.run_files import read_json
from atropos_tui.profile.ports import listens
from atropos_tui.supervisor import client
from atropos_tui.supervisor.journal import tracker
from atropos_tui.supervisor.journal.liveness import holding, left_by
from atropos_tui.supervisor.journal.run_lock import named
from atropos_tui.supervisor.journal.store import FarEntry, ProcessTable
from atropos_tui.supervisor.journal.tracker import Leftover
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.process import remove_files

COMMAND_COLUMNS = 80
SHARED_MEMORY = Path("/dev/shm")
SETTLED_S = 10.0
"""Seconds; a younger socket may belong to a supervisor that does not listen yet."""


def clean(options: argparse.Namespace) -> int:
    run = options.run or options.run_dir
    named = run is not None
    found = [_named(run)] if named else all_dead()
    chosen = [run for run in found if not run.is_clean]
    # Sockets of dead runs are listed with their run, all others below it.
    of_runs = {path for run in found for path in run.files}
    sockets = [] if named else [path for path in stale_sockets() if path not in of_runs]
    print(_report(chosen, sockets), flush=True)
    if not named and (unknown := unlisted()):
        print("processes of unlisted runs; name a run to end them:")
        for run in unknown:
            print(
                f"  atropos-tui clean --run-dir {run.root}   ({run.count_text} of {run.run_id})",
                flush=True,
            )
    if options.dry_run:
        return Exit.DONE
    if (chosen or sockets) and not options.yes and not _confirmed("end and remove these?"):
        chosen, sockets = [], []
    codes = [_clean_run(run) for run in chosen]
    for path in sockets:
        path.unlink(missing_ok=True)
        print(f"removed  {path}")
    return max(codes, default=Exit.DONE)


def _named(run_dir: Path) -> DeadRun:
    """Its folder may be gone while its processes still carry its marker."""
    try:
        entry = runs.pick_own(run_dir)
    except UserError:
        for run in unlisted():
            if run_dir.resolve() == run.root or str(run_dir) == run.run_id:
                return run
        raise
    found = find_dead(entry.dir.root, entry.info)
    if found is None:
        run_id, table = entry.info.get("run_id"), ProcessTable.load(entry.dir.journal_json)
        if left_by(entry.dir, str(run_id), table) is not None:  # no supervisor, and still locked
            problem = Problem(
                named(entry.dir.supervisor_jsonl), "wait for it, then run `clean` again"
            )
            raise UserError(f"the guard of {run_id} has not finished", [problem])
        problem = Problem("its supervisor runs", f"atropos-tui down --run-dir {run_dir}")
        raise UserError(f"{run_id} is live", [problem])
    return found


def _report(chosen: list[DeadRun], sockets: list[Path]) -> str:
    lines = []
    for run in chosen:
        lines += [f"{run.run_id}  {run.root}", *_contents(run)]
    if sockets:
        lines += ["sockets without a listener", *(f"  file     {path}" for path in sockets)]
    return "\n".join(lines) or "no run left anything behind"


def _contents(run: DeadRun) -> list[str]:
    rows = [
        ("  process ", str(p.pid), p.component or "?", one_line(p.command)[:COMMAND_COLUMNS])
        for p in run.processes
    ]
    lines = show.table(rows, right=(1,)).split("\n") if rows else []
    for far in run.elsewhere:
        lines.append(
            f"  elsewhere  {far.name} on node {far.node} ({far.host}); to be ended there by"
        )
        lines.append(f"             {one_line(shlex.join(far.command))}")
    lines += [f"  file     {path}" for path in run.files]
    return [*lines, f"  cgroup   {run.group}"] if run.group else lines


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        problem = Problem("there is no terminal to ask on", "check with --dry-run, then pass --yes")
        raise UserError("not confirmed", [problem])
    return show.confirmed(question)


def _clean_run(run: DeadRun) -> int:
    # A shell inside the run's own process tree would be killed with it.
    if mine := procfs.ancestors() & {process.pid for process in run.processes}:
        fix = "run it from another terminal"
        raise UserError(
            f"this shell is a process of {run.run_id}", [Problem(f"pid {min(mine)}", fix)]
        )
    with holding(RunDir(run.root).supervisor_jsonl) as free:
        if not free:
            print(f"{run.run_id}: a supervisor has started there in the meantime; not touched")
            return Exit.DONE
        # Shared memory is read off the processes before they end, and removed after, once nobody
        # maps it.
        shared = {path for process in run.processes for path in procfs.mapped_by(process.pid)}
        shared |= {str(path) for path in run.files if path.parent == SHARED_MEMORY}
        if run.processes or run.group:
            tracker.reap_leftovers(run.run_id, run.table, root=run.root)
        unreached = sweep_nodes(run.table)
        if (
            run.elsewhere and not unreached and run.table
        ):  # a later `clean` has no node left to visit
            run.table.model_copy(update={"components": {}}).write(RunDir(run.root).journal_json)
        procfs.remove_unused(shared)
        remove_files([path for path in run.files if path.parent != SHARED_MEMORY])
    left = {
        process.pid: process for process in tracker.find_leftovers(run.run_id, run.table, run.root)
    }
    for process in run.processes:
        if process.pid not in left:
            print(f"ended    {process.pid} {process.component}".rstrip())
    for far in run.elsewhere:
        problem = unreached.get(far.name)
        said = (
            f"ended    {far.name} on node {far.node}"
            if problem is None
            else f"{problem.evidence}\n  {problem.fix}"
        )
        print(said)
    for name in sorted({*map(str, run.files), *shared, run.group} - {""}):
        print(f"{'kept, in use' if os.path.lexists(name) else 'removed '} {name}")
    for process in left.values():
        print(
            f"pid {process.pid} ({process.component or '?'}) outlived SIGKILL: it waits for "
            f"its driver or disk"
        )
    return Exit.TIMEOUT if left or unreached else Exit.DONE


@dataclass
class DeadRun:
    """A run without a supervisor, and its remains."""

    run_id: str
    root: Path
    table: ProcessTable | None
    processes: list[Leftover] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    """Manifests, weights in shared memory, the socket and its link."""
    group: str = ""
    """Control group of the run."""

    @property
    def is_clean(self) -> bool:
        return not (self.processes or self.files or self.group or self.elsewhere)

    @property
    def elsewhere(self) -> list[FarEntry]:
        """Components on other nodes when the supervisor died; nobody has seen them end."""
        return [*far_entries(self.table)]

    @property
    def count_text(self) -> str:
        return counted(len(self.processes), "process")


def find_dead(root: Path, info: dict[str, Any]) -> DeadRun | None:
    """Remains of the run in `root`; None if it is live. `info` is its run.json."""
    run = RunDir(root)
    table = ProcessTable.load(run.journal_json)
    run_id = table.run_id if table else str(info.get("run_id", ""))
    # The lock comes last: while `_is_locked` holds it, a supervisor cannot start here.
    left = None if runs.RunEntry(run, info).is_live else left_by(run, run_id, table)
    if left is None or _is_locked(run):
        return None
    found = DeadRun(run_id, root, table, left)
    found.files = [*_clearable_files(run, table), *_socket_files(run)]
    found.group = table.group if table and procfs.is_group_of(table.group, run_id) else ""
    return found


def all_dead() -> list[DeadRun]:
    """Every known run with remains, newest first."""
    found = (find_dead(entry.dir.root, entry.info) for entry in runs.all_runs())
    return [run for run in found if run is not None and not run.is_clean]


def unlisted() -> list[DeadRun]:
    """Dead runs with processes whose folder was deleted, or that have another state folder."""
    return with_processes({entry.dir.root for entry in runs.all_runs()})


def with_processes(but: Collection[Path] = ()) -> list[DeadRun]:
    """Dead runs with processes, except those in `but`; one scan of the process table."""
    found: set[tuple[str, str]] = set()
    for pid in procfs.scan():
        env = procfs.environ(pid) if is_own(Path(f"/proc/{pid}")) else {}  # others' are unreadable
        if env.get(ENV_RUN_ID) and env.get(ENV_RUN_DIR):
            found.add((env[ENV_RUN_ID], os.path.realpath(env[ENV_RUN_DIR])))
    excluded = {os.path.realpath(root) for root in but}
    dead = (
        find_dead(Path(root), {"run_id": id_})
        for id_, root in sorted(found)
        if root not in excluded
    )
    return [run for run in dead if run is not None and run.processes]


def left_text(found: list[DeadRun]) -> str:
    """One line about the processes of dead runs."""
    count = sum(len(run.processes) for run in found)
    if not count:
        return ""
    left = f"{counted(count, 'process')} of {counted(len(found), 'dead run')}"
    return f"note: {left} still here: atropos-tui clean shows and ends what is left"


def stale_sockets() -> list[Path]:
    """Sockets of this user's supervisors on which nobody listens."""
    try:
        candidates = sorted(client.socket_folder().glob("*.sock"))
    except (OSError, client.SocketError):
        return []
    return [path for path in candidates if _is_stale(path)]


def _is_locked(run: RunDir) -> bool:
    """A supervisor, or the guard of a killed one, holds the journal's lock."""
    with holding(run.supervisor_jsonl) as free:
        return not free


def _clearable_files(run: RunDir, table: ProcessTable | None) -> list[Path]:
    """Files that must not outlive their component.

    Shared memory and temporary folders come from the journal only: a copied run may bring the plan
    of another machine.
    """
    parts = read_json(run.plan_json).get("components")
    planned = (
        [part.get("clears") or [] for part in parts if isinstance(part, dict)]
        if isinstance(parts, list)
        else []
    )
    noted = (
        {name for entry in table.components.values() for name in entry.clears} if table else set()
    )
    named = [name for paths in (*planned, sorted(noted)) for name in paths if isinstance(name, str)]
    found = []
    for path in map(Path, dict.fromkeys(named)):
        if not path.is_absolute() or ".." in path.parts:
            continue
        there = (
            path.parent.resolve()
        )  # a folder of a copied run may be a link to another folder of this user
        ours = there.is_relative_to(run.root.resolve()) or (
            path.parent == SHARED_MEMORY and str(path) in noted
        )
        # An engine's temporary folder; a folder that others can write to may hold their files.
        scratch = path.name.startswith(procfs.SCRATCH) and str(path) in noted and is_private(path)
        if scratch or (ours and path.is_file() and not path.is_symlink()):
            found.append(path)
    return found


def _socket_files(run: RunDir) -> list[Path]:
    # control.sock is a link into the user's socket folder, because a socket's path has at most 107
    # bytes. The target is removed only if it is the socket of this run: a copied run directory may
    # have any link.
    if not run.control_sock.is_symlink():
        return []
    target = run.control_sock.readlink()
    with contextlib.suppress(OSError, client.SocketError):
        if target == client.socket_path(run) and target.is_socket():
            return [run.control_sock, target]
    return [run.control_sock]


def _is_stale(path: Path) -> bool:
    try:
        return (
            time.time() - path.lstat().st_ctime > SETTLED_S
            and path.is_socket()
            and not listens(str(path))
        )
    except OSError:
        return False
