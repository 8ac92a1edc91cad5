"""Folders of files that survive a crash of the machine, with checksums that detect damage.

    files = seal(folder)            # on the disk from now on
    damage(folder, files)           # None, or a description of the damage

A checksum is SHA-256 over the SHA-256 digests of parts of `PART_BYTES` bytes, so that several cores
can share a large file.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

PART_BYTES = 1 << 28
_READ_BYTES = 1 << 22
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Sealed(TypedDict):
    """Size and checksum of one file as written."""

    bytes: int
    sha256: str
    """Hexadecimal checksum, as in the module's docstring."""


def seal(folder: Path) -> dict[str, Sealed]:
    """Flush all files below `folder` to the disk and return their seals by relative path.

    Raises:
        OSError: the disk does not take them.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = checksums(paths)
    # Folders come after files: an entry must not reach the disk before the content it names.
    for path in [*paths, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(path)
    return {
        path.relative_to(folder).as_posix(): Sealed(bytes=path.stat().st_size, sha256=sums[path])
        for path in paths
    }


def damage(folder: Path, files: dict[str, Sealed], *, deep: bool = True) -> str | None:
    """Describe what differs from the seals in `folder`; None if nothing does.

    Args:
        deep: also compare checksums; else only existence and size.
    """
    for name, sealed in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} is missing ({error.strerror})"
        if size != sealed["bytes"]:
            return f"{name} has {size:,} bytes, and {sealed['bytes']:,} were written"
    if not deep:
        return None
    try:
        sums = checksums([folder / name for name in files])
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    changed = [name for name, sealed in files.items() if sums[folder / name] != sealed["sha256"]]
    return f"the content of {', '.join(changed)} is not what was written" if changed else None


def checksums(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the checksum of each file."""
    paths = list(paths)
    # max(..., 1): an empty file has one empty part, so it gets a checksum too.
    parts = [
        (path, start)
        for path in paths
        for start in range(0, max(path.stat().st_size, 1), PART_BYTES)
    ]
    # Threads suffice: hashlib releases the GIL for large buffers.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda part: _part_digest(*part), parts))
    whole = {path: hashlib.sha256() for path in paths}
    for (path, _), digest in zip(parts, digests, strict=True):
        whole[path].update(digest)
    return {path: each.hexdigest() for path, each in whole.items()}


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_full(error: BaseException) -> str | None:
    """Return the system's message if `error` means a full disk or an exceeded quota, else None."""
    # safetensors repeats the message in an error of its own, without the errno, so words are
    # compared.
    return next((words for words in map(os.strerror, _FULL) if words in str(error)), None)


def _part_digest(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        left = PART_BYTES
        while left and (chunk := file.read(min(left, _READ_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()
