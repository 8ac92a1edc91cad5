"""Folders of files that outlive a crash of the machine, and that tell when they are not what was written.

    files = seal(folder)            # on the disk from now on
    damage(folder, files)           # null, or what is wrong, in words

A checksum is SHA-256 over the SHA-256 of each part of `PART_BYTES` bytes, so that the cores can share a large file.
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
    """One file as it was written."""

    bytes: int
    sha256: str
    """As in the module's docstring, in hexadecimal."""


def seal(folder: Path) -> dict[str, Sealed]:
    """Wait until all files below `folder` are on the disk; returns them by their path in it.

    Raises:
        OSError: the disk does not take them.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = checksums(paths)
    for path in [*paths, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(path)
    return {path.relative_to(folder).as_posix(): Sealed(bytes=path.stat().st_size, sha256=sums[path]) for path in paths}


def damage(folder: Path, files: dict[str, Sealed], *, deep: bool = True) -> str | None:
    """What of `files` is not as it was sealed, in words; null when all is.

    Args:
        deep: read the files, too; else existence and size.
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
    """The checksum of each file."""
    paths = list(paths)
    parts = [(path, start) for path in paths for start in range(0, max(path.stat().st_size, 1), PART_BYTES)]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda part: _part_digest(*part), parts))
    whole = {path: hashlib.sha256() for path in paths}
    for (path, _), digest in zip(parts, digests, strict=True):
        whole[path].update(digest)
    return {path: each.hexdigest() for path, each in whole.items()}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_full(error: BaseException) -> str | None:
    """In the system's words, where `error` says that the disk is full or the quota used up: safetensors repeats them in
    an error of its own."""
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
