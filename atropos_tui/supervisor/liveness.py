"""Whether the supervisor of a run directory lives, and which processes it left if it died."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from atropos_common.run_dir import ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_RUN_ID, RunDir
from atropos_tui.profile.ports import has_supervisor, listens
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.store import ProcessTable
from atropos_tui.supervisor.tracker import Leftover, find_leftovers, is_at, supervisor_alive


def left_by(run: RunDir, run_id: str, table: ProcessTable | None) -> list[Leftover] | None:
    """Processes that the dead supervisor of `run` left; `None` while that supervisor lives.

    Every command that calls a process left over asks here. Signs of a living supervisor, each of which suffices: its
    socket, its process as the journal names it, the socket that the run's processes were given. A run directory may
    lack the first two; the processes themselves always know their socket.
    """
    if has_supervisor(run) or (table and supervisor_alive(table)):
        return None
    found = find_leftovers(run_id, table, run.root) if run_id else []
    return None if any(listens(procfs.environ(one.pid).get(ENV_CONTROL_SOCKET, "")) for one in found) else found


def run_elsewhere(run: RunDir, run_id: str) -> str:
    """Another run directory in which a run with this id lives now; empty if there is none."""
    marker = f"{ENV_RUN_ID}={run_id}".encode()
    for pid in procfs.scan() if run_id else ():
        if procfs.marked(pid, marker):
            env = procfs.environ(pid)
            if not is_at(run.root, env) and listens(env.get(ENV_CONTROL_SOCKET, "")):
                return env[ENV_RUN_DIR]
    return ""


@contextlib.contextmanager
def holding(journal: Path) -> Iterator[bool]:
    """Keep every supervisor out of the run directory of this `supervisor.jsonl`; `False` if one is there already."""
    try:
        descriptor = os.open(journal, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # NFS needs O_RDWR
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
