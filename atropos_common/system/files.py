"""Private files that are replaced as a whole, lines that are appended as a whole, and safe ways to
read files."""

from __future__ import annotations

import contextlib
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
"""Bytes of a file that is read as a whole; a plan for 64 machines has a hundredth."""
IN_LOGS = 3


def open_regular(path: Path, unlinked: int = 1) -> BinaryIO:
    """Open for reading.

    Args:
        unlinked: number of last parts of `path` that may not be symbolic links. 1 suits a file
            in a run directory, `IN_LOGS` a log: a recording must not lead a reader to other
            files.

    Raises:
        OSError: missing, reached by such a link, or no regular file.
    """
    # O_NONBLOCK: opening a pipe without a writer would otherwise wait for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if unlinked < 2:
        descriptor = os.open(path, flags | (os.O_NOFOLLOW if unlinked else 0))
    else:
        # Relative to an open folder, so that no folder can be replaced by a link between two steps.
        with _opened_folder(path.parent, unlinked - 1) as folder:
            descriptor = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=folder)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def _opened_folder(path: Path, unlinked: int) -> Iterator[int]:
    at = os.open(path.parents[unlinked - 1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.parts[-unlinked:]:
            # One part at a time: O_NOFOLLOW covers only the last part of a path.
            inner = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
            )
            os.close(at)
            at = inner
        yield at
    finally:
        os.close(at)


def names_in(folder: Path, unlinked: int = 1, *, folders: bool = False) -> list[str]:
    """Sorted names of regular files, or of folders; links are left out. Empty if there is no such
    folder."""
    try:
        with _opened_folder(folder, unlinked) as descriptor, os.scandir(descriptor) as entries:
            is_wanted = os.DirEntry.is_dir if folders else os.DirEntry.is_file
            return sorted(
                entry.name for entry in entries if is_wanted(entry, follow_symlinks=False)
            )
    except OSError:
        return []


def next_data(descriptor: int, offset: int) -> int:
    """Skip a hole: the first offset with data, or the file's size."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return max(offset, os.fstat(descriptor).st_size) if error.errno == errno.ENXIO else offset
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)  # a buffered file does not expect it to move


def read_regular(path: Path, unlinked: int = 1) -> str:
    """Read UTF-8 text.

    Raises:
        OSError: cannot be opened by `open_regular`, or is larger than `LARGEST`.
        UnicodeDecodeError: no text.
    """
    with open_regular(path, unlinked) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read().decode("utf-8")


def cut_torn_line(descriptor: int) -> int:
    """Remove a last line without a newline, whose writer died; return its bytes."""
    size = os.fstat(descriptor).st_size
    end = size
    while end > 0:
        # Backwards in blocks: the last line is usually short, the file may have gigabytes.
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
    """True if only this user can write to `path`, and it is no link."""
    try:
        info = path.lstat()
    except OSError:
        return False
    # 0o022: write permission of group and others.
    return (
        info.st_uid == os.getuid() and not stat.S_ISLNK(info.st_mode) and not info.st_mode & 0o022
    )


def is_private(folder: Path) -> bool:
    """True for a folder of this user, not a link, closed to all others."""
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
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        # A device or a pipe would be replaced, not written to.
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, "not an ordinary file")
    # In the same folder, so that `replace` stays on one file system and is atomic. Mode is 0600.
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
            # Another process finished the same output first; its folder is as good.
            if not output.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def scratch_below(env: Mapping[str, str], name: str) -> tuple[Path, dict[str, str]]:
    """A temporary folder, and `env` that points to it. torch's compile cache stays outside, so that
    it survives."""
    around = Path(env.get("TMPDIR") or tempfile.gettempdir())
    compiled = around / f"torchinductor_{env.get('USER') or os.getuid()}"
    with contextlib.suppress(OSError):
        compiled.mkdir(mode=0o700)
    # torch runs the code in its cache, and another user may have made the folder first.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(compiled)} if is_own(compiled) else {}
    return around / name, {**cache, **env, "TMPDIR": str(around / name)}


def append_line(path: Path, line: bytes) -> bool:
    """Append a line to a file that others may append to; False: none of it is in the file."""
    try:
        # O_NOFOLLOW: the run directory may be a recording from elsewhere.
        descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        written = os.write(descriptor, line)
        # A full disk can accept a part; a torn line would merge with the next record.
        if written < len(line):
            os.ftruncate(descriptor, size)
        return written == len(line)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def why_full(error: BaseException) -> str | None:
    """Return the system's message if `error` means a full disk or quota, else None."""
    # By words: safetensors repeats the message in an error of its own, without the errno.
    full = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    return next((words for words in full if words in str(error)), None)
