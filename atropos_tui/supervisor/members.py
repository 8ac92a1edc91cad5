"""Which processes belong to which component: by control group, session, process group, marker and descent.

What was once seen as a member stays one (by pid and start time), even if it cleans its environment, starts a session
and loses its parent afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from atropos_common.run_dir import ENV_COMPONENT, ENV_RUN_ID
from atropos_tui.supervisor import procfs, shared_memory
from atropos_tui.supervisor.process import SPAWNED, reap_adopted

Key = tuple[int, int]


class Tracker:
    """Members of each component of one run. Methods may be called from any thread."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._run = f"{ENV_RUN_ID}={run_id}".encode()
        self._leaders: dict[str, int] = {}
        self._groups: dict[str, str] = {}
        self._known: dict[str, set[Key]] = {}
        self._led: dict[str, dict[int, int]] = {}
        self._shared: dict[str, set[str]] = {}
        self._aside: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, leader: int, group: str = "", known: Iterable[Key] = ()) -> None:
        """Component `name` was spawned as session `leader`, in control group `group` if that is not "".

        Args:
            known: further members, as an earlier supervisor knew them.
        """
        if self._aside.get(name) == leader:
            del self._aside[name]
        self._leaders[name] = leader
        self._groups[name] = group
        self._known[name] = set(known)
        self._led[name] = dict(self._known[name])
        self._shared[name] = set()

    def set_aside(self, name: str, session: int) -> None:
        """Processes of `session` bear the marker of `name`, but are none of its members until they are added."""
        self._aside[name] = session

    def remove(self, name: str) -> None:
        """Nothing of `name` is left."""
        self._leaders.pop(name, None)
        self._groups.pop(name, None)
        self._known.pop(name, None)
        self._led.pop(name, None)
        self._shared.pop(name, None)

    def note_shared_memory(self, found: dict[str, list[procfs.Proc]]) -> None:
        """Remember which files in /dev/shm these members have mapped: nobody can tell once they were killed."""
        for name, rows in found.items():
            files = {path for row in rows for path in shared_memory.mapped_by(row.pid)}
            with self._lock:
                if name in self._shared:
                    self._shared[name] |= files

    def shared_files(self, name: str) -> set[str]:
        """Files in /dev/shm that members of `name` had mapped when they were looked at."""
        with self._lock:
            return set(self._shared.get(name, ()))

    def members(self, name: str) -> list[procfs.Proc]:
        """Live processes of one component."""
        return self.survey([name]).get(name, [])

    def sessions(self, name: str) -> dict[int, int]:
        """Sessions that members of `name` lead, as of the last look: session id -> start ticks of its leader."""
        with self._lock:
            return dict(self._led.get(name, {}))

    def survey(self, names: Iterable[str] | None = None) -> dict[str, list[procfs.Proc]]:
        """Live processes of each component (all that run, if `names` is None), with one look at the table."""
        table = procfs.scan()
        reap_adopted(table)
        with self._lock:
            return {name: self._of(name, table) for name in list(self._leaders if names is None else names)}

    def _of(self, name: str, table: dict[int, procfs.Proc]) -> list[procfs.Proc]:
        leader = self._leaders.get(name)
        if leader is None:
            return []
        known = self._known.setdefault(name, set())
        marker = f"{ENV_COMPONENT}={name}".encode()
        seeds = procfs.grouped(table, self._groups.get(name, "")) | {
            row.pid
            for row in table.values()
            if leader in (row.session, row.pgrp) or row.key in known or procfs.marked(row.pid, self._run, marker)
        }
        pids = procfs.with_descendants(table, seeds) - {os.getpid()}
        aside = self._aside.get(name)
        alive = [table[pid] for pid in pids if table[pid].alive and table[pid].session != aside]
        self._known[name] = {row.key for row in alive}
        self._led[name] = {row.pid: row.ticks for row in alive if row.pid == row.session}
        return alive

    def strays(self, since_ticks: int) -> list[procfs.Proc]:
        """Adopted processes started since then that no component claims: they left session and environment behind."""
        table = procfs.scan()
        mine, session = os.getpid(), os.getsid(0)
        adopted = {
            row.pid
            for row in table.values()
            if row.ppid == mine
            and row.session != session
            and row.pid not in SPAWNED
            and row.ticks >= since_ticks
            and procfs.environ(row.pid).get(ENV_RUN_ID, self._run_id) == self._run_id
        }
        return [table[pid] for pid in procfs.with_descendants(table, adopted) if table[pid].alive]
