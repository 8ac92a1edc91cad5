"""Ports of this machine: whether one is free, and who holds it; and whether anybody listens on a Unix socket.

psutil is imported where processes are looked at: commands that only ask for live runs do not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atropos_common.files import is_private, read_regular
from atropos_common.ports import LOOPBACK, bind, is_held
from atropos_common.run_dir import ENV_COMPONENT, ENV_CONTROL_SOCKET, ENV_RUN_DIR, ENV_RUN_ID, RunDir

if TYPE_CHECKING:
    import psutil

CONNECT_S = 1.0
"""Connecting to a local socket is immediate; only a full backlog takes longer."""


def listens(address: str) -> bool:
    """Whether somebody listens on the Unix socket at `address`: the one sign of a live supervisor that a killed one
    does not leave."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_S)
            probe.connect(address)
    except (BlockingIOError, TimeoutError):
        return True  # it listens, but has more callers than it can take just now
    except (OSError, ValueError):  # ValueError: a NUL in the address
        return False
    return True


def listener(address: str) -> int | None:
    """Pid of the process that listens on the Unix socket at `address`; `None` if there is none."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_S)
            probe.connect(address)
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except (OSError, ValueError):
        return None
    return int(pid) or None


def own_socket(run: RunDir) -> str | None:
    """Path of this run's control socket; `None` if `control.sock` leads to any other socket.

    A recording or a copied run directory brings a link to the socket of another run. The name of a socket depends on
    the run directory, so such a link never passes.
    """
    try:
        target = os.readlink(run.control_sock)  # noqa: PTH115 — the link's own path may be too long to connect to
    except OSError:
        return None
    is_its_own = os.path.basename(target) == run.socket_name and is_private(Path(target).parent)  # noqa: PTH119
    return target if is_its_own else None


def has_supervisor(run: RunDir) -> bool:
    """Whether a process of this machine listens on the run's socket; a killed supervisor leaves only the file."""
    address = own_socket(run)
    return address is not None and listens(address)


def is_free(port: int, *, held: bool = False) -> bool:
    """Whether a server could listen on `port` of the loopback address now; TIME_WAIT does not count as taken.

    Args:
        held: this process holds the port for that server.
    """
    try:
        bind(LOOPBACK, port, held=held).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Holder:
    """Who has a port: a process, and the run of ours that it belongs to, if any."""

    process: str
    """"python (pid 12): command line"."""
    run_id: str = ""
    run_dir: str = ""
    component: str = ""
    supervised: bool = False
    """Whether that run's supervisor answers."""
    survives: bool = False
    """Whether that run keeps its components for the next supervisor (`survive = true`)."""

    def __str__(self) -> str:
        if not self.run_id:
            return self.process
        return (
            f"{self.component or 'a process'} of {'live ' if self.supervised else ''}run {self.run_id}, {self.process}"
        )

    @property
    def way_out(self) -> str:
        """How to make it let go of the port."""
        if not self.run_id:
            return f"stop {self.process.partition(':')[0]}"
        if self.supervised:
            return f"end that run: atropos-tui down --run-dir {shlex.quote(self.run_dir)}"
        if self.survives:
            where = shlex.quote(self.run_dir)
            return (
                f"that run has no supervisor any more and keeps this for the next: atropos-tui up --resume {where} "
                f"goes on with it, atropos-tui clean --run-dir {where} ends it"
            )
        return "that run has no supervisor any more: atropos-tui clean ends what it left"


def holder(port: int) -> Holder | None:
    """Who listens on `port`, or will since its run holds it for him; None when nobody does or it is not ours to see."""
    import psutil

    def listening_or_awaited() -> Iterator[psutil.Process]:
        for row in psutil.net_connections(kind="tcp"):
            if row.status == psutil.CONN_LISTEN and row.laddr and row.laddr.port == port and row.pid:
                yield psutil.Process(row.pid)
        for process in psutil.process_iter():  # a live run holds the port for one that does not listen yet
            with contextlib.suppress(psutil.Error, OSError):
                if is_held(port, process.environ()):
                    yield process

    with contextlib.suppress(psutil.Error, OSError):
        for process in listening_or_awaited():
            words = f"{process.name()} (pid {process.pid}): {' '.join(process.cmdline())[:160]}"
            try:
                environ = process.environ()
            except (psutil.Error, OSError):  # another user's
                environ = {}
            run_id, run_dir = environ.get(ENV_RUN_ID, ""), environ.get(ENV_RUN_DIR, "")
            live = bool(run_id) and listens(environ.get(ENV_CONTROL_SOCKET, ""))
            return Holder(words, run_id, run_dir, environ.get(ENV_COMPONENT, ""), live, _survives(run_dir))
    return None


def _survives(run_dir: str) -> bool:
    """Whether the plan of the run in `run_dir`, if it can be read, lets its components outlive the supervisor."""
    try:
        plan = json.loads(read_regular(Path(run_dir) / "plan.json")) if run_dir else {}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(plan, dict) and plan.get("survive") is True
