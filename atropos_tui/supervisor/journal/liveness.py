"""State of a run directory's supervisor, and the processes that a dead one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_RUN_ID, RunDir
from atropos_tui.profile.ports import has_supervisor, listens
from atropos_tui.supervisor.journal.store import ProcessTable
from atropos_tui.supervisor.journal.tracker import Leftover, find_leftovers, is_at, supervisor_alive
from atropos_tui.supervisor.processes import procfs


def left_by(run: RunDir, run_id: str, table: ProcessTable | None) -> list[Leftover] | None:
    """Return the processes that the dead supervisor of `run` left; None while it lives.

    One sign of life suffices: its socket, its process in the journal, or the socket in the
    environment of the run's processes. A run directory may lack the first two.
    """
    if has_supervisor(run) or (table and supervisor_alive(table)):
        return None
    found = find_leftovers(run_id, table, run.root) if run_id else []
    # The processes know their socket even if the run directory was moved.
    return (
        None
        if any(listens(procfs.environ(one.pid).get(ENV_CONTROL_SOCKET, "")) for one in found)
        else found
    )


def run_elsewhere(run: RunDir, run_id: str) -> str:
    """Another run directory in which a run with this id lives now."""
    marker = f"{ENV_RUN_ID}={run_id}".encode()
    for pid in procfs.scan() if run_id else ():
        # `marked` is a cheap test; `environ` parses the whole environment.
        if procfs.marked(pid, marker):
            env = procfs.environ(pid)
            if not is_at(run.root, env) and listens(env.get(ENV_CONTROL_SOCKET, "")):
                return env[ENV_RUN_DIR]
    return ""


@contextlib.contextmanager
def holding(journal: Path) -> Iterator[bool]:
    """Lock out supervisors; False if one holds the lock."""
    try:
        descriptor = os.open(
            journal, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )  # NFS needs O_RDWR
    except OSError:
        yield True  # no journal or no folder: there is nothing to lock
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
