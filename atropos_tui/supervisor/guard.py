"""The last one to leave: when the supervisor is gone, ends every process of the run, then itself.

    python -I -S -c 'sys.path.insert(0, ROOT); from atropos_tui.supervisor.guard import main; main()' FD RUN_ID

Direct children of a killed supervisor die by their parent-death signal; their descendants do not, and double-forked
ones belong to nobody. The guard holds the read end of a pipe, learns from it the sessions that the run started
(`S SESSION TICKS`, `F SESSION` when one is gone) and the files that go with them (`C PATH`, `D PATH`), and acts on its
end of file: it kills by the run-id marker in the environment, by those sessions, and all descendants of both; then it
removes the files.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from atropos_tui.supervisor import procfs

QUIET_ROUNDS = 3
"""Empty looks at the process table, one after the other, before the run counts as gone."""
GIVE_UP_S = 60.0


def run_members(run_id: str, sessions: dict[int, int], exclude: set[int]) -> list[procfs.Proc]:
    """Live processes of the run.

    Args:
        run_id: value of `ATROPOS_RUN_ID` in their environment.
        sessions: session id -> start ticks of its leader; a leader with other ticks is a stranger with a re-used pid.
        exclude: pids never to name, such as the caller's.
    """
    table = procfs.scan()
    ours = {sid for sid, ticks in sessions.items() if sid not in table or table[sid].ticks == ticks}
    marker = b"ATROPOS_RUN_ID=" + os.fsencode(run_id)
    seeds = {
        row.pid for row in table.values() if row.session in ours or row.pgrp in ours or procfs.marked(row.pid, marker)
    }
    found = procfs.with_descendants(table, seeds - exclude) - exclude
    return [table[pid] for pid in found if pid in table and table[pid].alive]


def sweep(run_id: str, sessions: dict[int, int], exclude: set[int]) -> None:
    """Kill until nothing of the run has been seen for some rounds."""
    give_up = time.monotonic() + GIVE_UP_S
    quiet = 0
    while quiet < QUIET_ROUNDS and time.monotonic() < give_up:
        members = run_members(run_id, sessions, exclude)
        for member in members:
            procfs.send(member, signal.SIGKILL)
        quiet = 0 if members else quiet + 1
        time.sleep(0.01)


def follow(descriptor: int) -> tuple[dict[int, int], set[bytes]]:
    """Read notes until the supervisor is gone; sessions that were alive then, files that must not outlive them."""
    sessions: dict[int, int] = {}
    files: set[bytes] = set()
    with open(descriptor, "rb") as pipe:
        for line in pipe:
            note = line.split()
            if line.startswith(b"C "):
                files.add(line[2:].rstrip(b"\n"))
            elif line.startswith(b"D "):
                files.discard(line[2:].rstrip(b"\n"))
            elif note[:1] == [b"S"] and len(note) == 3:
                sessions[int(note[1])] = int(note[2])
            elif note[:1] == [b"F"] and len(note) == 2:
                sessions.pop(int(note[1]), None)
    return sessions, files


def remove(path: bytes) -> None:
    """Delete one file, if it is there."""
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sessions, files = follow(int(sys.argv[1]))
    sweep(sys.argv[2], sessions, {os.getpid()})
    for path in files:
        remove(path)
