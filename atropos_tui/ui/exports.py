"""Files that the screen writes for the user: pictures, rollouts, reports."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from atropos_common.system.run_dir import RunDir


def new_file(run: Path, name: str, what: str, suffix: str) -> Path:
    """Create an empty private file in the folder `exports` of a run, and return its path.

    The current folder takes it if that folder cannot be written, as in a recording of another user.
    No existing file is touched.

    Args:
        name: name of the run.
        what: part of the file's name; may be empty.

    Raises:
        OSError: neither folder can be written.
    """
    folder = RunDir(run.resolve()).exports
    words = ["atropos", re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "run", what]
    stem = "-".join([word for word in words if word] + [time.strftime("%Y%m%d-%H%M%S")])
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return _created(folder, stem, suffix)
    except OSError:
        return _created(Path.cwd(), stem, suffix)


def _created(folder: Path, stem: str, suffix: str) -> Path:
    path, number = folder / f"{stem}{suffix}", 1
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            number += 1
            path = folder / f"{stem}_{number}{suffix}"
        else:
            return path


def write_new(run: Path, name: str, what: str, suffix: str, text: str) -> Path:
    """Write `text` to a new file as `new_file` creates it; return its path.

    Raises:
        OSError: it cannot be written.
    """
    path = new_file(run, name, what, suffix)
    try:
        # A rollout may hold half a surrogate pair, which UTF-8 cannot encode.
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path
