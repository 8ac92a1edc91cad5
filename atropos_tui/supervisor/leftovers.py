"""Processes that a run left behind: found by marker, session, group and descent; ended one by one, never by name.

The runner calls it before a start (what did a crashed supervisor leave?) and after every end (is nothing left?).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.guard import run_members
from atropos_tui.supervisor.journal import ProcessTable
from trainer_core.contracts.run_dir import ENV_COMPONENT


@dataclass(frozen=True)
class Leftover:
    """One live process of a run."""

    pid: int
    ticks: int
    """Start time in clock ticks after boot: with the pid, its name."""
    component: str
    """Empty when it cleaned its environment."""
    command: str


def sessions_of(table: ProcessTable | None) -> dict[int, int]:
    """Sessions that a run's `journal.json` names, if it is of this boot: session id -> start ticks of its leader."""
    boot = procfs.boot_id()
    entries = table.components.values() if table else ()
    return {entry.pgid: entry.ticks for entry in entries if entry.boot_id == boot}


def find(run_id: str, table: ProcessTable | None = None, *, exclude: set[int] | None = None) -> list[Leftover]:
    """Live processes of run `run_id`.

    Args:
        table: the run's `journal.json`, which finds those that cleaned their environment but not their session.
        exclude: pids never to name; the caller's own is always among them.
    """
    mine = {os.getpid()} | (exclude or set())
    members = run_members(run_id, sessions_of(table), mine)
    return [
        Leftover(row.pid, row.ticks, procfs.environ(row.pid).get(ENV_COMPONENT, ""), _command(row.pid))
        for row in members
    ]


def supervisor_alive(table: ProcessTable) -> bool:
    """Whether the supervisor that wrote `table` still runs."""
    entry = table.supervisor
    if entry is None or entry.boot_id != procfs.boot_id():
        return False
    row = procfs.read(entry.pid)
    return row is not None and row.alive and row.ticks == entry.ticks


def reap(run_id: str, table: ProcessTable | None = None, *, timeout_s: float = 10.0) -> list[Leftover]:
    """Kill what `find` finds until nothing is found; blocking. Returns what was found first."""
    first = found = find(run_id, table)
    deadline = time.monotonic() + timeout_s
    while found and time.monotonic() < deadline:
        for leftover in found:
            row = procfs.read(leftover.pid)
            if row is not None and row.ticks == leftover.ticks:
                procfs.send(row, signal.SIGKILL)
        time.sleep(0.01)
        found = find(run_id, table)
    return first


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
