"""Whether somebody listens on a Unix socket: the one sign of a live supervisor that a killed one does not leave.

Apart from `ports`, since commands that only look for live runs should not wait for psutil.
"""

from __future__ import annotations

import socket

CONNECT_S = 1.0
"""Connecting to a local socket is immediate; only a full backlog takes longer."""


def listens(address: str) -> bool:
    """Whether somebody listens on the Unix socket at `address`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_S)
            probe.connect(address)
    except (BlockingIOError, TimeoutError):
        return True  # it listens, but has more callers than it can take just now
    except (OSError, ValueError):  # ValueError: a NUL in the address
        return False
    return True
