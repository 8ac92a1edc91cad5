"""Files that others read while they are written: private, and replaced whole, so a reader sees the old or the new."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace `path` atomically with mode 0600.

    Args:
        durable: wait until the content is on the disk, so that it outlives the machine too.

    Raises:
        OSError: it cannot be written; `path` is as it was, and nothing is left beside it.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
