"""TCP ports of this machine: whether one is free, and who holds it."""

from __future__ import annotations

import contextlib
import socket

import psutil


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of the loopback address now; TIME_WAIT does not count as taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def holder(port: int) -> str | None:
    """Who listens on `port`, as "python (pid 12): command line"; None when nobody does or it is not ours to see."""
    with contextlib.suppress(psutil.Error, OSError):
        for row in psutil.net_connections(kind="tcp"):
            if row.status == psutil.CONN_LISTEN and row.laddr and row.laddr.port == port and row.pid:
                process = psutil.Process(row.pid)
                return f"{process.name()} (pid {row.pid}): {' '.join(process.cmdline())[:160]}"
    return None
