"""Processes that a run left behind: found by control group, marker, session and descent; never by name or port.

The runner calls it before a start (what did a crashed supervisor leave?) and after every end (is nothing left?);
`clean` and `doctor` call it for people.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atropos_common.run_dir import ENV_COMPONENT
from atropos_tui.supervisor import cgroup, procfs
from atropos_tui.supervisor.guard import run_members
from atropos_tui.supervisor.store import ProcessEntry, ProcessTable


@dataclass(frozen=True)
class Leftover:
    """One live process of a run."""

    pid: int
    ticks: int
    """Start time in clock ticks after boot: with the pid, its name."""
    component: str
    """Also for its keeper; empty when it cleaned its environment."""
    command: str
    adoptable: bool = False
    """Its component has a keeper: `up --resume` goes on with it."""


def sessions_of(table: ProcessTable | None) -> dict[int, int]:
    """Sessions that a run's `journal.json` names, if it is of this boot: session id -> start ticks of its leader."""
    found: dict[int, int] = {}
    for entry in _entries(table).values():
        found |= entry.sessions | {entry.pgid: entry.ticks}
    return found


def find(run_id: str, table: ProcessTable | None = None, *, exclude: set[int] | None = None) -> list[Leftover]:
    """Live processes of run `run_id`.

    Args:
        table: the run's `journal.json`, which finds those that cleaned their environment but not their session or
            control group.
        exclude: pids never to name; the caller's own is always among them.
    """
    mine = {os.getpid()} | (exclude or set())
    kept = {name: entry for name, entry in _entries(table).items() if _is_kept(entry)}
    names = {entry.keeper_pid: name for name, entry in kept.items()}
    found = []
    for row in run_members(run_id, sessions_of(table), mine, _group(run_id, table)):
        name = names.get(row.pid) or procfs.environ(row.pid).get(ENV_COMPONENT, "")
        command = f"keeper of {name}" if row.pid in names else _command(row.pid)
        found.append(Leftover(row.pid, row.ticks, name, command, name in kept))
    return found


def supervisor_alive(table: ProcessTable) -> bool:
    """Whether the supervisor that wrote `table` still runs."""
    entry = table.supervisor
    if entry is None or entry.boot_id != procfs.boot_id():
        return False
    row = procfs.read(entry.pid)
    return row is not None and row.alive and row.ticks == entry.ticks


def reap(
    run_id: str,
    table: ProcessTable | None = None,
    *,
    timeout_s: float = 10.0,
    spared: Callable[[], set[int]] | None = None,
) -> list[Leftover]:
    """Kill what `find` finds until nothing is found, and remove the control groups; blocking.

    Args:
        spared: asked after every look: pids that shall live.

    Returns:
        What was found first.
    """
    group = _group(run_id, table)
    first = found = _but(find(run_id, table), spared)
    deadline = time.monotonic() + timeout_s
    while found and time.monotonic() < deadline:
        for leftover in found:
            row = procfs.read(leftover.pid)
            if row is not None and row.ticks == leftover.ticks:
                procfs.send(row, signal.SIGKILL)
        if group and spared is None:
            cgroup.kill(group)  # and what they have forked since the look
        time.sleep(0.01)
        found = _but(find(run_id, table), spared)
    if spared is None:
        cgroup.remove(group)
    return first


def _but(found: list[Leftover], spared: Callable[[], set[int]] | None) -> list[Leftover]:
    spare = spared() if spared and found else set()
    return [one for one in found if one.pid not in spare]


def _entries(table: ProcessTable | None) -> dict[str, ProcessEntry]:
    boot = procfs.boot_id()
    return {name: entry for name, entry in table.components.items() if entry.boot_id == boot} if table else {}


def _is_kept(entry: ProcessEntry) -> bool:
    row = procfs.read(entry.keeper_pid) if entry.keeper else None
    return row is not None and row.alive and row.ticks == entry.keeper_ticks


def _group(run_id: str, table: ProcessTable | None) -> str:
    """The run's control group; a name in a file is believed only if it is the one that this run must have."""
    return table.group if table is not None and cgroup.is_of(table.group, run_id) else ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
