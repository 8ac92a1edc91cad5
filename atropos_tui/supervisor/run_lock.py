"""The lock of a run directory: one supervisor at a time, and one `up` that prepares the directory for it.

It is a lock of `supervisor.jsonl`. Who takes it looks at the directory afterwards, and hands the locked descriptor on:
`up` to its supervisor, a supervisor to its guard, so that nobody else comes in between.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from atropos_common.run_dir import RunDir
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.store import ProcessTable, RunInUseError, locked
from atropos_tui.supervisor.tracker import supervisor_alive

GUARD_PATIENCE_S = 60.0
"""Seconds to wait for the guard of a supervisor that was killed; it gives up by itself after that time."""
TELL_S = 2.0
"""Seconds of waiting after which the process that is waited for is named."""


def lock_run(run: RunDir, *, patience_s: float = GUARD_PATIENCE_S) -> int:
    """Lock a run directory, once the guard of a supervisor that was killed there has finished; blocking.

    Returns:
        The locked descriptor of `supervisor.jsonl`.

    Raises:
        RunInUseError: a supervisor runs there, or a process holds the lock for longer than `patience_s`.
        OSError: the file cannot be made.
    """
    began, told = time.monotonic(), False
    while True:
        table = ProcessTable.load(run.journal_json)
        if table and table.supervisor and table.supervisor.pid != os.getpid() and supervisor_alive(table):
            raise RunInUseError(f"{run.root}: another supervisor runs here (pid {table.supervisor.pid}); attach to it")
        try:
            return locked(run.supervisor_jsonl)
        except RunInUseError:
            waited = time.monotonic() - began
            if table is None or waited > patience_s:
                raise RunInUseError(
                    f"{run.root}: another supervisor runs here: {named(run.supervisor_jsonl)}"
                ) from None
            if waited > TELL_S and not told:
                told = True
                print(f"waiting for the run directory: {named(run.supervisor_jsonl)}", file=sys.stderr, flush=True)
        time.sleep(0.02)


def named(path: Path) -> str:
    """The processes that have `path` open, in words, with what lets a stopped one go on."""
    words = [
        f"pid {pid} holds {path.name}" + (f" and is stopped: kill -CONT {pid}" if procfs.is_stopped(pid) else "")
        for pid in holders(path)
    ]
    return ", ".join(words) or f"a process that is not seen here holds {path}"


def holders(path: Path) -> Iterator[int]:
    """Other processes of this user that have `path` open."""
    try:
        wanted = path.stat()
    except OSError:
        return
    for pid in sorted(procfs.scan()):
        if pid != os.getpid() and any(os.path.samestat(wanted, found) for found in _open_files(pid)):
            yield pid


def _open_files(pid: int) -> Iterator[os.stat_result]:
    try:
        descriptors = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            yield descriptor.stat()
