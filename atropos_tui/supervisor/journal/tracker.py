"""Membership of processes in components, and leftovers of a run. Never by name or port.

Signs are control group, session, process group, environment marker and descent. A member once stays
one, by pid and start time. Files in /dev/shm belong to the run if its processes had them mapped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_common.system.run_dir import ENV_COMPONENT, ENV_RUN_DIR, ENV_RUN_ID
from atropos_tui.supervisor.processes import procfs

if TYPE_CHECKING:  # pydantic would slow down the start of a node agent
    from atropos_tui.supervisor.journal.store import ProcessTable

REAP_S = 10.0
SAME_MOMENT_S = 2.0
"""Seconds after the table was written in which a new process may belong to a component."""


@dataclass
class _Tracked:
    """One component: session, control group, and members at the last survey."""

    leader: int
    group: str
    known: set[tuple[int, int]] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)


class Tracker:
    """Members of each component. Thread-safe."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._run = f"{ENV_RUN_ID}={run_id}".encode()
        self._tracked: dict[str, _Tracked] = {}
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._looked = 0.0
        self._table: dict[int, procfs.Proc] = {}
        self._children: dict[int, list[int]] = {}

    def add(self, name: str, leader: int, group: str = "") -> None:
        self._tracked[name] = _Tracked(leader, group)

    def remove(self, name: str) -> None:
        self._tracked.pop(name, None)

    def note_shared_memory(self, found: dict[str, list[procfs.Proc]]) -> None:
        for name, rows in found.items():
            # Read while they live: /proc/PID/maps of a killed process is gone.
            files = {path for row in rows for path in procfs.mapped_by(row.pid)}
            with self._lock:
                if name in self._tracked:
                    self._tracked[name].shared |= files

    def shared_files(self, name: str) -> set[str]:
        """Files in /dev/shm that members had mapped when surveyed."""
        with self._lock:
            one = self._tracked.get(name)
            return set(one.shared) if one else set()

    def members(self, name: str) -> list[procfs.Proc]:
        """Live processes of one component."""
        return self.survey([name])[name]

    def survey(self, names: Iterable[str] | None = None) -> dict[str, list[procfs.Proc]]:
        """Live processes of each component, from one scan."""
        asked = time.monotonic()
        with self._looking:  # threads that waited here share one newer scan
            if self._looked < asked:
                self._looked = time.monotonic()
                self._table = procfs.scan()
                self._children = procfs.children_of(self._table)
                procfs.reap_adopted(self._table)
            table, children = dict(self._table), self._children
        with self._lock:
            seeds = self._seeds(list(self._tracked if names is None else names), table)
            return {name: self._of(name, table, found, children) for name, found in seeds.items()}

    def _seeds(self, names: Iterable[str], table: dict[int, procfs.Proc]) -> dict[str, set[int]]:
        """Pids of each component with a sign of their own, without descent."""
        seeds: dict[str, set[int]] = {}
        claims: dict[object, list[str]] = {}
        for name in names:
            one = self._tracked.get(name)
            seeds[name] = procfs.grouped(table, one.group) if one else set()
            # A sign is a session or group id (int) or a (pid, start ticks) key.
            for sign in (one.leader, *one.known) if one else ():
                claims.setdefault(sign, []).append(name)
        for row in table.values():
            owners = [
                name for sign in {row.session, row.pgrp, row.key} for name in claims.get(sign, ())
            ]
            # Reading the environment is slow, so only processes without another sign reach it.
            for name in owners or [procfs.component_of(row.pid, self._run)]:
                if name in seeds:
                    seeds[name].add(row.pid)
        return seeds

    def _of(
        self,
        name: str,
        table: dict[int, procfs.Proc],
        seeds: set[int],
        children: dict[int, list[int]],
    ) -> list[procfs.Proc]:
        one = self._tracked.get(name)
        if one is None:
            return []
        pids = (procfs.with_descendants(table, seeds, children) & table.keys()) - {os.getpid()}
        alive = [table[pid] for pid in pids if table[pid].alive]
        one.known = {row.key for row in alive}
        return alive

    def strays(self, since_ticks: int) -> list[procfs.Proc]:
        """Adopted processes that no component claims: they left their session and cleaned their
        environment."""
        table = procfs.scan()
        mine, session = os.getpid(), os.getsid(0)
        adopted = {
            row.pid
            for row in table.values()
            # A subreaper adopts orphans of its components, so a stray is always its child.
            if row.ppid == mine
            and row.session != session
            and row.pid not in procfs.SPAWNED
            and row.ticks >= since_ticks
            and procfs.environ(row.pid).get(ENV_RUN_ID, self._run_id) == self._run_id
        }
        return [table[pid] for pid in procfs.with_descendants(table, adopted) if table[pid].alive]


class UseMeter:
    """CPU and memory of components between two readings."""

    def __init__(self) -> None:
        self._cpu: dict[tuple[int, int], int] = {}
        self._looked = 0.0

    def read(self, members: Mapping[str, list[procfs.Proc]]) -> dict[str, dict[str, Any]]:
        """`pids`, `memory_bytes` and `cpu_percent` (of one core) of each component."""
        now = time.monotonic()
        elapsed_s, self._looked = now - self._looked, now
        found = {name: self._of(rows, elapsed_s) for name, rows in members.items()}
        self._cpu = {row.key: row.cpu_ticks for rows in members.values() for row in rows}
        return found

    def _of(self, rows: list[procfs.Proc], elapsed_s: float) -> dict[str, Any]:
        memory = [size for size in (procfs.resident(row.pid) for row in rows) if size is not None]
        # A pid may be reused, so ticks are compared by (pid, start ticks).
        known = [row.cpu_ticks - self._cpu[row.key] for row in rows if row.key in self._cpu]
        return {
            "pids": sorted(row.pid for row in rows),
            "cpu_percent": 100 * sum(known) / procfs.TICKS_PER_SECOND / elapsed_s
            if elapsed_s and known
            else None,
            "memory_bytes": sum(memory) if memory else None,
        }


@dataclass(frozen=True)
class Leftover:
    pid: int
    ticks: int
    """Start time in clock ticks; with the pid it identifies the process."""
    component: str
    command: str


def find_leftovers(
    run_id: str, table: ProcessTable | None = None, root: Path | None = None
) -> list[Leftover]:
    """Return the live processes of run `run_id`, except the caller.

    Args:
        table: the run's `journal.json`, for processes that cleaned their environment.
        root: only processes started in this run directory: a copied directory has the original's
            id.
    """
    # Pids and ticks of an earlier boot mean nothing now.
    boot = procfs.boot_id()
    known = table.components.values() if table else ()
    entries = [entry for entry in known if entry.boot_id == boot]
    sessions: dict[int, int] = {}
    for entry in entries:
        sessions |= {entry.pgid: entry.ticks}
    found = []
    # Session ids of the table may have been reused by later processes.
    known_until = (
        procfs.ticks_at(table.written_at + SAME_MOMENT_S) if table and table.written_at else None
    )
    counts = None if root is None else (lambda pid: is_at(root, procfs.environ(pid)))
    for row in procfs.run_members(
        run_id, sessions, {os.getpid()}, _group(run_id, table), known_until, counts
    ):
        name = procfs.environ(row.pid).get(ENV_COMPONENT, "")
        found.append(Leftover(row.pid, row.ticks, name, _command(row.pid)))
    return found


def is_at(root: Path, env: Mapping[str, str]) -> bool:
    """True if the process was started in `root`, or in a directory that no longer exists."""
    there = env.get(ENV_RUN_DIR, "")
    return not os.path.isdir(there) or os.path.realpath(there) == os.path.realpath(root)  # noqa: PTH112


def supervisor_alive(table: ProcessTable) -> bool:
    """True if the supervisor that wrote `table` still runs."""
    entry = table.supervisor
    return (
        entry is not None
        and entry.boot_id == procfs.boot_id()
        and procfs.lives(entry.pid, entry.ticks)
    )


def reap_leftovers(
    run_id: str, table: ProcessTable | None = None, *, root: Path | None = None
) -> list[Leftover]:
    """Kill the processes of `find_leftovers` until none is found; blocks up to `REAP_S` seconds.

    Returns:
        The processes of the first scan.
    """
    group = _group(run_id, table)
    first = found = find_leftovers(run_id, table, root)
    deadline = time.monotonic() + REAP_S
    while found and time.monotonic() < deadline:
        for leftover in found:
            row = procfs.read(leftover.pid)
            # Never signal a process that has reused the pid.
            if row is not None and row.ticks == leftover.ticks:
                procfs.send(row, signal.SIGKILL)
        if group:
            procfs.kill_group(group)  # includes children forked since the scan
        time.sleep(0.01)
        found = find_leftovers(run_id, table, root)
    procfs.remove_group(group)
    return first


def _group(run_id: str, table: ProcessTable | None) -> str:
    """The run's control group; "" if the table's name is not the one that this run must have."""
    return table.group if table is not None and procfs.is_group_of(table.group, run_id) else ""


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""
