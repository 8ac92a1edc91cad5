"""A child that dies with its parent, even after SIGKILL. Standard library only.

    die_with_parent(os.getppid())                                   # in the child
    python -I -S parent_death.py PARENT_PID GROUP COMMAND [ARG...]

GROUP is a cgroup v2 folder, or empty. The child arms the kernel's signal after the fork, because
`preexec_fn` is unsafe beside threads. Exit codes are the shell's: 127 not found, 126 not
executable.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_RESET = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGPIPE,
    signal.SIGTERM,
    signal.SIGQUIT,
    signal.SIGXFSZ,
)


def die_with_parent(parent: int) -> bool:
    """Let the kernel kill this process with its parent thread; False if `parent` is dead
    already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def with_parent(command: list[str]) -> list[str]:
    """Command line of a child that dies with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), "", *command]


def become(parent: int, group: str, command: list[str], env: dict[str, str]) -> int:
    """Execute `command`; return only on failure, with the exit code."""
    if not die_with_parent(parent):
        return 1
    _join(group)
    os.umask(0o077)  # logs, sockets and checkpoints are this user's, wherever they lie
    for number in _RESET:
        signal.signal(number, signal.SIG_DFL)  # ignored signals would survive exec
    # A blocked signal survives exec too, and would make SIGTERM ineffective.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvpe(command[0], command, env)
    except FileNotFoundError:
        print(f"atropos: command not found: {command[0]}", file=sys.stderr)
        return 127
    except OSError as error:
        print(f"atropos: cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
        return 126


def _join(group: str) -> None:
    # After a failure the component still runs; only its control group does not list it.
    if group:
        try:
            with open(f"{group}/cgroup.procs", "w") as file:  # noqa: PTH123
                file.write("0")
        except OSError:
            return


if __name__ == "__main__":
    sys.exit(become(int(sys.argv[1]), sys.argv[2], sys.argv[3:], dict(os.environ)))
