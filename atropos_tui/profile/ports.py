"""Ports and control sockets in use, and the processes that hold them."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_common.net.ports import LOOPBACK, bind, is_held
from atropos_common.system.files import is_private
from atropos_common.system.run_dir import (
    ENV_COMPONENT,
    ENV_CONTROL_SOCKET,
    ENV_RUN_DIR,
    ENV_RUN_ID,
    RunDir,
)

if TYPE_CHECKING:
    import psutil

CONNECT_S = 1.0
"""A Unix socket connects at once unless its backlog is full."""


def listens(address: str) -> bool:
    """True if a process listens on this Unix socket. A killed supervisor leaves every other sign of
    life."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_S)
            probe.connect(address)
    except (BlockingIOError, TimeoutError):
        return True  # it listens, but its backlog is full
    except (OSError, ValueError):  # ValueError: a NUL in the address
        return False
    return True


def listener(address: str) -> int | None:
    """Pid of the process that listens on the Unix socket."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_S)
            probe.connect(address)
            # SO_PEERCRED returns pid, uid and gid of the process that called listen().
            pid, _, _ = struct.unpack(
                "3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
    except (OSError, ValueError):
        return None
    return int(pid) or None


def own_socket(run: RunDir) -> str | None:
    """Path of this run's control socket; None if `control.sock` links to any other.

    A copied run directory links to the socket of the original.
    """
    try:
        target = os.readlink(run.control_sock)  # noqa: PTH115 — the link's own path may be too long to connect to
    except OSError:
        return None
    is_its_own = os.path.basename(target) == run.socket_name and is_private(Path(target).parent)  # noqa: PTH119
    return target if is_its_own else None


def has_supervisor(run: RunDir) -> bool:
    address = own_socket(run)
    return address is not None and listens(address)


def is_free(port: int, *, held: bool = False) -> bool:
    """True if a server could listen on `port` of the loopback. `held`: this process holds it."""
    try:
        bind(LOOPBACK, port, held=held).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        # The kernel chooses a free port; another program may take it after this.
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Holder:
    """Process that has a port, and its run if that is ours."""

    process: str
    run_id: str = ""
    run_dir: str = ""
    component: str = ""
    supervised: bool = False
    """The supervisor of that run answers."""

    def __str__(self) -> str:
        if not self.run_id:
            return self.process
        return (
            f"{self.component or 'a process'} of {'live ' if self.supervised else ''}run "
            f"{self.run_id}, {self.process}"
        )

    @property
    def way_out(self) -> str:
        if not self.run_id:
            return f"stop {self.process.partition(':')[0]}"
        if self.supervised:
            return f"end that run: atropos-tui down --run-dir {shlex.quote(self.run_dir)}"
        return "that run has no supervisor: atropos-tui clean stops its processes"


def holder(port: int) -> Holder | None:
    """Process that listens on `port`, or for which a run holds it; None if it belongs to another
    user."""
    import psutil

    def listening_or_awaited() -> Iterator[psutil.Process]:
        for row in psutil.net_connections(kind="tcp"):
            if (
                row.status == psutil.CONN_LISTEN
                and row.laddr
                and row.laddr.port == port
                and row.pid
            ):
                yield psutil.Process(row.pid)
        # A live run holds the port for a component that does not listen yet; its environment says
        # so.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if is_held(port, process.environ()):
                    yield process

    with contextlib.suppress(psutil.Error, OSError):
        for process in listening_or_awaited():
            words = f"{process.name()} (pid {process.pid}): {' '.join(process.cmdline())[:160]}"
            try:
                environ = process.environ()
            except (psutil.Error, OSError):  # a process of another user
                environ = {}
            run_id, run_dir = environ.get(ENV_RUN_ID, ""), environ.get(ENV_RUN_DIR, "")
            live = bool(run_id) and listens(environ.get(ENV_CONTROL_SOCKET, ""))
            return Holder(words, run_id, run_dir, environ.get(ENV_COMPONENT, ""), live)
    return None
