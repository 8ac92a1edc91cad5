"""The control socket: a private Unix socket with a short path, and a symlink to it in the run directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
from pathlib import Path

from atropos_common.run_dir import RunDir

MAX_PATH_BYTES = 107
"""What the kernel takes for the path of a Unix socket."""
NAME_BYTES = 25
"""Of a socket's name in its folder."""


class SocketError(ValueError):
    """The socket cannot be made safely."""


def socket_folder() -> Path:
    """A folder of this user alone: below $XDG_RUNTIME_DIR, else in /tmp with mode 0700.

    Raises:
        SocketError: someone else made the folder in /tmp, or $XDG_RUNTIME_DIR is too long for a socket in it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "atropos-tui"
    else:
        folder = Path("/tmp") / f"atropos-tui-{os.getuid()}"
    size = len(os.fsencode(folder)) + 1 + NAME_BYTES
    if size > MAX_PATH_BYTES:
        reason = f"$XDG_RUNTIME_DIR is too long: a socket in {folder} would have a path of {size} bytes"
        raise SocketError(f"{reason}, and the kernel takes {MAX_PATH_BYTES}; set it to a shorter folder, or unset it")
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        raise SocketError(f"{folder} must be a folder of this user with mode 0700; remove it, or set XDG_RUNTIME_DIR")
    return folder


def _is_private(folder: Path) -> bool:
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def socket_path(run: RunDir) -> Path:
    """Where the socket of this run lies: under 108 bytes, whatever the run directory is called."""
    digest = hashlib.blake2b(os.fsencode(run.root.resolve()), digest_size=10).hexdigest()
    return socket_folder() / f"{digest}.sock"


def listen(run: RunDir, known_as: str = "") -> tuple[socket.socket, Path]:
    """Bind the run's socket (mode 0600) and point `RUN/control.sock` at it. A dead one is replaced.

    `known_as` is where components that live on look for it; taken if that folder is still there and private.
    """
    path = Path(known_as) if known_as and _is_private(Path(known_as).parent) else socket_path(run)
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
