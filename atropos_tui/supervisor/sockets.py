"""The control socket: a private Unix socket with a short path, and a symlink to it in the run directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
from pathlib import Path

from trainer_core.contracts.run_dir import RunDir


class SocketError(ValueError):
    """The socket cannot be made safely."""


def socket_folder() -> Path:
    """A folder of this user alone: below $XDG_RUNTIME_DIR, else in /tmp with mode 0700.

    Raises:
        SocketError: someone else made the folder in /tmp.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "atropos-tui"
    else:
        folder = Path("/tmp") / f"atropos-tui-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise SocketError(f"{folder} must be a folder of this user with mode 0700; remove it, or set XDG_RUNTIME_DIR")
    return folder


def socket_path(run: RunDir) -> Path:
    """Where the socket of this run lies: under 108 bytes, whatever the run directory is called."""
    digest = hashlib.blake2b(os.fsencode(run.root.resolve()), digest_size=10).hexdigest()
    return socket_folder() / f"{digest}.sock"


def listen(run: RunDir) -> tuple[socket.socket, Path]:
    """Bind the run's socket (mode 0600) and point `RUN/control.sock` at it. A dead one is replaced."""
    path = socket_path(run)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(before)
    server.listen(128)
    server.setblocking(False)
    aside = run.control_sock.with_name(f".{run.control_sock.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(path)
    aside.replace(run.control_sock)
    return server, path


def close(server: socket.socket, path: Path, run: RunDir) -> None:
    """Stop listening and remove both names."""
    server.close()
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        run.control_sock.unlink(missing_ok=True)
