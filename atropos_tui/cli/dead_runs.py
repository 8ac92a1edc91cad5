"""What runs left behind whose supervisor is gone: processes, manifests, weights in /dev/shm, sockets, control groups.

A run counts as dead only when nobody listens on its socket, nobody holds the lock of its journal (a guard that is
still sweeping does) and the supervisor that its journal names is not alive. Used by `clean`, `doctor` and `runs`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_common.run_dir import ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_RUN_ID, RunDir
from atropos_tui.cli import runs
from atropos_tui.monitor.format import counted
from atropos_tui.monitor.run_files import read_json
from atropos_tui.supervisor import cgroup, leftovers, procfs, sockets
from atropos_tui.supervisor.leftovers import Leftover
from atropos_tui.supervisor.store import ProcessTable

SHARED_MEMORY = Path("/dev/shm")
SETTLED_S = 10.0
"""A younger socket may belong to a supervisor that does not listen yet."""


@dataclass
class DeadRun:
    """One run without a supervisor, and what is left of it."""

    run_id: str
    root: Path
    table: ProcessTable | None
    processes: list[Leftover] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    """Manifests, weights in shared memory, the socket and the link to it."""
    group: str = ""
    """Its control group, if that still exists."""

    @property
    def is_clean(self) -> bool:
        return not (self.processes or self.files or self.group)

    @property
    def count_text(self) -> str:
        return counted(len(self.processes), "process")

    @property
    def is_adoptable(self) -> bool:
        """Whether it keeps components for the next supervisor (`survive = true`)."""
        return any(process.adoptable for process in self.processes)


def find_dead(root: Path, info: dict[str, Any]) -> DeadRun | None:
    """What the run in `root` left; None when it lives. `info` is its run.json."""
    run = RunDir(root)
    table = ProcessTable.load(run.journal_json)
    if runs.RunEntry(run, info).is_live or _is_held(run) or (table and leftovers.supervisor_alive(table)):
        return None
    run_id = table.run_id if table else str(info.get("run_id", ""))
    found = DeadRun(run_id, root, table, leftovers.find(run_id, table) if run_id else [])
    found.files = [*_clearable_files(run, table), *_socket_files(run)]
    found.group = table.group if table and cgroup.is_of(table.group, run_id) else ""
    return found


def all_dead() -> list[DeadRun]:
    """Every known run that left something behind, newest first."""
    found = (find_dead(entry.dir.root, entry.info) for entry in runs.all_runs())
    return [run for run in found if run is not None and not run.is_clean]


def strangers() -> list[DeadRun]:
    """Processes of this user that carry a run's marker, but whose run is not in the list of runs (its folder was
    deleted, or it was started with another state folder) and has no supervisor."""
    return with_processes({str(entry.info.get("run_id")) for entry in runs.all_runs()})


def with_processes(but: Collection[str] = ()) -> list[DeadRun]:
    """Dead runs, other than those with an id in `but`, that left processes of this user; one look at the process table,
    so its cost does not grow with the number of runs."""
    found: dict[str, dict[str, str]] = {}
    for pid in procfs.scan():
        env = procfs.environ(pid) if _owner(pid) == os.getuid() else {}
        if env.get(ENV_RUN_ID, "") not in {"", *but} and env.get(ENV_RUN_DIR):
            found[env[ENV_RUN_ID]] = env
    unsupervised = {id_: env for id_, env in found.items() if not runs.listens(env.get(ENV_CONTROL_SOCKET, ""))}
    dead = (find_dead(Path(env[ENV_RUN_DIR]), {"run_id": id_}) for id_, env in unsupervised.items())
    return [run for run in dead if run is not None and run.processes]


def left_text(found: list[DeadRun]) -> str:
    """One line about the processes of dead runs; empty when there are none."""
    count = sum(len(run.processes) for run in found)
    if not count:
        return ""
    left = f"{counted(count, 'process')} of {counted(len(found), 'dead run')}"
    return f"note: {left} still here: atropos-tui clean shows and ends what is left"


def stale_sockets() -> list[Path]:
    """Sockets of this user's supervisors on which nobody listens."""
    try:
        candidates = sorted(sockets.socket_folder().glob("*.sock"))
    except (OSError, sockets.SocketError):
        return []
    return [path for path in candidates if _is_stale(path)]


@contextlib.contextmanager
def holding(run: RunDir) -> Iterator[bool]:
    """Keep every supervisor out of this run directory meanwhile; False when one is there."""
    try:
        descriptor = os.open(run.supervisor_jsonl, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True  # no journal, or no folder any more: nobody can hold it
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def ancestors() -> set[int]:
    """This process and those it comes from: a shell inside a component carries the marker, too."""
    found, pid = set(), os.getpid()
    while pid and pid not in found:
        found.add(pid)
        row = procfs.read(pid)
        pid = row.ppid if row else 0
    return found


def _is_held(run: RunDir) -> bool:
    with holding(run) as free:
        return not free


def _clearable_files(run: RunDir, table: ProcessTable | None) -> list[Path]:
    """What must not outlive its component, by plan and journal, as far as it lies in the run or in shared memory."""
    parts = read_json(run.plan_json).get("components")
    planned = [part.get("clears") or [] for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    noted = [entry.clears for entry in table.components.values()] if table else []
    named = [path for paths in (*planned, *noted) for path in paths]
    found = []
    for path in (Path(name) for name in dict.fromkeys(named) if isinstance(name, str)):
        ours = path.is_relative_to(run.root) or path.parent == SHARED_MEMORY
        if path.is_absolute() and ".." not in path.parts and ours and path.is_file() and not path.is_symlink():
            found.append(path)
    return found


def _socket_files(run: RunDir) -> list[Path]:
    """The link to a socket that nobody listens on, and the socket."""
    if not run.control_sock.is_symlink():
        return []
    target = run.control_sock.readlink()
    with contextlib.suppress(OSError, sockets.SocketError):
        if target == sockets.socket_path(run) and target.is_socket():
            return [run.control_sock, target]
    return [run.control_sock]


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_ctime > SETTLED_S and path.is_socket() and not runs.listens(str(path))
    except OSError:
        return False


def _owner(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1
