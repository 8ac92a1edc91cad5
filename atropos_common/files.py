"""Files that others read while they are written: private, and replaced whole, so a reader sees the old or the new."""

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
"""Bytes of a file that is read whole: a plan of 64 machines has a hundredth of that."""


def open_regular(path: Path) -> BinaryIO:
    """`path`, to be read.

    Raises:
        OSError: it is not there, or no file: opening a pipe would wait for a writer for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path) -> str:
    """The text of `path`, UTF-8.

    Raises:
        OSError: it is not there, no file, or larger than `LARGEST`.
        UnicodeDecodeError: it holds no text.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read().decode("utf-8")


def cut_torn_line(descriptor: int) -> int:
    """Cut away what follows the last newline of a file open for writing: its writer died in the middle of a line.

    Returns:
        the number of bytes cut.
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
    """Whether `path` is this user's, no link, and nobody else may write to it: what stands there can be believed."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return info.st_uid == os.getuid() and not stat.S_ISLNK(info.st_mode) and not info.st_mode & 0o022


def is_private(folder: Path) -> bool:
    """Whether it is a folder, no link, of this user, and nobody else may look into it."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def write_private(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace `path` atomically with mode 0600.

    Args:
        durable: wait until the content is on the disk, so that it outlives the machine too.

    Raises:
        OSError: it cannot be written; `path` is as it was, and nothing is left beside it.
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
    """A folder to write into that becomes `output` at the end, so that `output` is whole once it exists.

    Two that make the same at the same time may both; the first to be done is kept.
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
    """A folder for temporary files called `name` on this machine, and `env` with it. What torch has compiled is worth
    keeping, and would lie in the temporary folder, too."""
    around = Path(env.get("TMPDIR") or tempfile.gettempdir())
    compiled = str(around / f"torchinductor_{env.get('USER') or os.getuid()}")
    return around / name, {"TORCHINDUCTOR_CACHE_DIR": compiled, **env, "TMPDIR": str(around / name)}
