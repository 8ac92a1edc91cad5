"""Files with concurrent readers: private, and replaced as a whole, so that a reader sees the old or
the new content."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LARGEST = 64 * 1024 * 1024
"""Limit in bytes of a file that is read as a whole; a plan for 64 machines has a hundredth of
it."""


def open_regular(path: Path) -> BinaryIO:
    """Open `path` for reading.

    Raises:
        OSError: it is missing or not a regular file: opening a pipe would block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path) -> str:
    """Text of `path`, UTF-8.

    Raises:
        OSError: it is missing, not a regular file, or larger than `LARGEST`.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read().decode("utf-8")


def cut_torn_line(descriptor: int) -> int:
    """Truncate a file open for writing after its last newline: its writer died in the middle of a
    line.

    Returns:
        The number of bytes removed.
    """
    size = os.fstat(descriptor).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return size - end


def is_own(path: Path) -> bool:
    """Return True if `path` belongs to this user, is not a link, and only this user can write to
    it, so that its content can be trusted."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return info.st_uid == os.getuid() and not stat.S_ISLNK(info.st_mode) and not info.st_mode & 0o022


def is_private(folder: Path) -> bool:
    """Return True if this is a folder of this user, not a link, and closed to all others."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def write_private(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace `path` atomically with mode 0600.

    Args:
        durable: wait until the content is on the disk, so that it survives a power loss.

    Raises:
        OSError: `path` cannot be written; it is unchanged, and no temporary file is left.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def made_aside(output: Path) -> Iterator[Path]:
    """Yield a folder that becomes `output` at the end, so that `output` is complete once it exists.

    Two processes may build the same output at once; the first to finish wins.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        try:
            aside.rename(output)
        except OSError:
            if not output.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def scratch_below(env: Mapping[str, str], name: str) -> tuple[Path, dict[str, str]]:
    """A temporary folder `name` on this machine, and `env` that points to it. torch's compile cache
    stays outside, so that it survives."""
    around = Path(env.get("TMPDIR") or tempfile.gettempdir())
    compiled = str(around / f"torchinductor_{env.get('USER') or os.getuid()}")
    return around / name, {"TORCHINDUCTOR_CACHE_DIR": compiled, **env, "TMPDIR": str(around / name)}
