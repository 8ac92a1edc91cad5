"""A port of the loopback that its owner holds for one program, from before its first start until after its last.

Between two lives of a server its port would be free, and any user of the machine could take it: whoever asks the server
that he waits for would hand that stranger prompts, and the run's token. So the owner keeps a socket that is bound and
does not listen. A connection is refused, as if nobody were there, and nobody else can bind, but for processes of the
same user that ask for SO_REUSEPORT: the kernel compares the user ids. The owned program does so (`bind`), told by
ATROPOS_HELD_PORT, and shuts that door behind it once it listens (`listen`).

Why the program is not simply handed the one socket: to listen on it a second time it would have to set SO_REUSEADDR,
since connections of its former life linger, and until it listens anyone may bind beside it. A process that tries all
the time gets in within some dozen restarts.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping

from atropos_common.run_dir import ENV_HELD_PORT

LOOPBACK = "127.0.0.1"
BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's own."""
_TRY_S = 2.0
"""For so long a port that is held for us is tried: a stranger's vain attempt to listen counts while it lasts."""
_BESIDE = "127.0.0.2"
"""Another address of the loopback, where nothing of ours listens."""


def hold(port: int) -> socket.socket:
    """Keep `port` until the socket is closed.

    Raises:
        OSError: somebody else has it, or holds it; EADDRINUSE.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server do not matter
        held.bind((LOOPBACK, port))
        held.listen()  # settles that nobody else listens there, and ends that others may bind by SO_REUSEADDR
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.shutdown(socket.SHUT_RD)  # it listens no more, and stays bound
    except OSError:
        held.close()
        raise
    return held


def is_held(port: int, env: Mapping[str, str]) -> bool:
    """Whether who started this process, with `env`, holds `port` for it."""
    return env.get(ENV_HELD_PORT) == str(port)


def bind(host: str, port: int, *, held: bool) -> socket.socket:
    """A socket bound to `port`, which does not listen yet.

    Args:
        held: the owner holds the port for this process.

    Raises:
        OSError: somebody else has it.
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
    """Listen, alone: from here on nobody of the same user binds beside it either, such as another server by mistake.

    Raises:
        OSError: somebody else listens there.
    """
    shared = bool(bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT))
    _persistently(lambda: bound.listen(BACKLOG), _TRY_S if shared else 0.0)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    # The kernel remembers of a port that its sockets share it and looks no further, until one binds that does not.
    with contextlib.suppress(OSError), socket.socket() as beside:
        beside.bind((_BESIDE, bound.getsockname()[1]))


def _persistently(take: Callable[[], None], seconds: float) -> None:
    """Take a port, again and again for `seconds` while somebody has it.

    Raises:
        OSError: somebody still has it.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return take()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.001)
