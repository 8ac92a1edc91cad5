"""Becomes the command that follows, and dies with the process that started it.

    python -I -S die_with_parent.py PARENT_PID COMMAND [ARG...]

The parent-death signal must be set in the child, after the fork; hence this program instead of a `preexec_fn`, which is
not safe beside torch's threads. It imports no package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Execute `command`; ends the process when `parent` has died already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
