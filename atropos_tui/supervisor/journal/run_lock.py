"""Lock of a run directory, against a second supervisor and against two `up`.

It locks `supervisor.jsonl`. `up` passes the descriptor to its supervisor, a supervisor to its
guard: the lock is never free in between.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from atropos_common.system.run_dir import RunDir
from atropos_tui.supervisor.journal.store import ProcessTable, RunInUseError, locked
from atropos_tui.supervisor.journal.tracker import supervisor_alive
from atropos_tui.supervisor.processes import procfs

GUARD_PATIENCE_S = 60.0
"""Seconds to wait for the guard of a killed supervisor."""
TELL_S = 2.0
"""Seconds after which the holder of the lock is printed."""


def lock_run(run: RunDir, *, patience_s: float = GUARD_PATIENCE_S) -> int:
    """Lock a run directory once the guard of a killed supervisor has finished; blocks.

    Returns:
        The locked descriptor of `supervisor.jsonl`.

    Raises:
        RunInUseError: a supervisor runs there, or a process holds the lock longer than
            `patience_s`.
        OSError: the file cannot be created.
    """
    began, reported = time.monotonic(), False
    while True:
        table = ProcessTable.load(run.journal_json)
        if (
            table
            and table.supervisor
            and table.supervisor.pid != os.getpid()
            and supervisor_alive(table)
        ):
            raise RunInUseError(
                f"{run.root}: another supervisor runs here (pid {table.supervisor.pid}); "
                f"attach to it"
            )
        try:
            return locked(run.supervisor_jsonl)
        except RunInUseError:
            waited = time.monotonic() - began
            # Without a journal there was no supervisor, so no guard can be finishing.
            if table is None or waited > patience_s:
                raise RunInUseError(
                    f"{run.root}: another supervisor runs here: {named(run.supervisor_jsonl)}"
                ) from None
            if waited > TELL_S and not reported:
                reported = True
                print(
                    f"waiting for the run directory: {named(run.supervisor_jsonl)}",
                    file=sys.stderr,
                    flush=True,
                )
        time.sleep(0.02)


def named(path: Path) -> str:
    """Processes that have `path` open, in words; with the command that continues a stopped one."""
    words = [
        f"pid {pid} holds {path.name}"
        + (f" and is stopped: kill -CONT {pid}" if procfs.is_stopped(pid) else "")
        for pid in holders(path)
    ]
    return ", ".join(words) or f"a process of another user or container holds {path}"


def holders(path: Path) -> Iterator[int]:
    """Other processes of this user that have `path` open."""
    try:
        wanted = path.stat()
    except OSError:
        return
    for pid in sorted(procfs.scan()):
        if pid != os.getpid() and any(
            os.path.samestat(wanted, found) for found in _open_files(pid)
        ):
            yield pid


def _open_files(pid: int) -> Iterator[os.stat_result]:
    try:
        descriptors = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            # stat() follows /proc/PID/fd/N to the open file itself, also if it is deleted.
            yield descriptor.stat()
