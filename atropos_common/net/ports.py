"""A loopback port that its owner holds for one program, from before its first start until after its
last.

Another user who takes the port between two attempts would receive prompts and the token. So the
owner keeps a bound socket that does not listen; only processes of the same user with SO_REUSEPORT
can bind beside it. The owned program does so, and excludes further binds once it listens. Handing
the socket over would not work: until the program listens, any user may bind beside it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping

from atropos_common.system.run_dir import ENV_HELD_PORT

LOOPBACK = "127.0.0.1"
BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's default."""
_TRY_S = 2.0
"""Seconds of retries for a held port: another user's failing attempt blocks it for a moment."""
_BESIDE = "127.0.0.2"
"""Another loopback address, where none of our programs listens."""


def hold(port: int) -> socket.socket:
    """Hold `port` until the socket is closed.

    Raises:
        OSError: another program uses or holds it.
    """
    held = socket.socket()
    try:
        # Ignore lingering connections of an earlier server.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, port))
        held.listen()  # fails if another program listens, and ends binds by SO_REUSEADDR
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.shutdown(socket.SHUT_RD)  # stop listening, but stay bound
    except OSError:
        held.close()
        raise
    return held


def is_held(port: int, env: Mapping[str, str]) -> bool:
    """The parent process holds `port` for this one."""
    return env.get(ENV_HELD_PORT) == str(port)


def bind(host: str, port: int, *, held: bool) -> socket.socket:
    """A socket bound to `port` that does not listen yet.

    Args:
        held: the parent holds the port.

    Raises:
        OSError: another program uses it.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(held))
        _persistently(lambda: bound.bind((host, port)), _TRY_S if held else 0.0)
    except OSError:
        bound.close()
        raise
    return bound


def listen(bound: socket.socket) -> None:
    """Listen exclusively: no program of the same user can bind beside it any more.

    Raises:
        OSError: another program listens there.
    """
    shared = bool(bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT))
    _persistently(lambda: bound.listen(BACKLOG), _TRY_S if shared else 0.0)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    # The kernel caches that the sockets of a port share it, until one binds that does not.
    with contextlib.suppress(OSError), socket.socket() as beside:
        beside.bind((_BESIDE, bound.getsockname()[1]))


def _persistently(take: Callable[[], None], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return take()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.001)
