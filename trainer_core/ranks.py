"""What a rank is told by torchrun, and where ranks meet; without torch, so that it is known before that is imported."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

from atropos_common.files import is_private
from trainer_core.errors import UsageError

KNOWN = "on_every_rank"
"""Attribute of an exception that all ranks raise."""
GONE_CODE = 70
"""Exit code of a rank that leaves because another one has."""


LAUNCHED = "launched"
"""A file where ranks meet: `launch.py` is their parent, which removes that folder."""


def own_rank() -> int:
    """This process' rank, from 0."""
    return int(os.environ.get("RANK", "0"))


def rank_count() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_every_rank(error: BaseException) -> bool:
    """Whether all ranks raise it, so that one of them may speak for all."""
    return bool(getattr(error, KNOWN, False))


def meeting_place(parent: int) -> Path:
    """The folder in which the children of `parent`, a torchrun, meet; made where it is not there yet.

    Raises:
        UsageError: somebody else has made it.
    """
    began = int(psutil.Process(parent).create_time() * 100)
    name = "-".join(["atropos-ranks", str(parent), str(began), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")])
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise UsageError(f"{folder}, where the ranks would meet, is not this user's alone: remove it, or set TMPDIR")
    return folder


def write_code(code: int) -> None:
    """Tell `launch.py` how rank 0 has ended: torchrun does not."""
    folder = meeting_place(os.getppid())
    if (folder / LAUNCHED).exists():
        (folder / "code").write_text(str(code))
    else:
        shutil.rmtree(folder, ignore_errors=True)


def read_code(folder: Path) -> int:
    """What `write_code` wrote; 1 where rank 0 did not come to that."""
    try:
        return int((folder / "code").read_text())
    except (OSError, ValueError):
        return 1
