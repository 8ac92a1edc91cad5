"""Files in /dev/shm that killed processes leave: ours because our own processes had them mapped, never by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = "/dev/shm/"


def mapped_by(pid: int) -> set[str]:
    """Files in /dev/shm that process `pid` has mapped; those already unlinked are left out."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    found = {line[line.index(FOLDER) :] for line in lines if FOLDER in line}
    return {path for path in found if not path.endswith(" (deleted)")}


def remove_unused(paths: Iterable[str]) -> list[str]:
    """Remove those of `paths` that are this user's and that no process maps any more; what was removed."""
    left = {path for path in paths if _is_ours(path)}
    if not left:
        return []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            left -= mapped_by(int(entry.name))
    for path in left:
        with contextlib.suppress(OSError):
            Path(path).unlink()
    return sorted(left)


def _is_ours(path: str) -> bool:
    try:
        return Path(path).lstat().st_uid == os.getuid()
    except OSError:
        return False
