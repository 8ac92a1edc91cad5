"""The ranks of one trainer, as the loop knows them; without torch, so that it is known before that is imported.

torchrun starts the same program N times. The loop learns no more of that than `World`: what rank 0 alone may do (ask
run-api, speak to servers, write records) it does inside `share`, and what it got or what went wrong there is so on
every rank. Everything that runs the model runs on every rank. Without torchrun there is `ALONE`, which does nothing.
Several ranks are `Ranks` in `world.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import psutil

from atropos_common.files import is_private
from trainer_core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

KNOWN = "on_every_rank"
"""Attribute of an exception that all ranks raise."""
GONE_CODE = 70
"""Exit code of a rank that leaves because another one has."""


SEEN_S = 2.0
"""In this time the process of a rank whose connections have closed is gone as well."""

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


class World:
    """One rank among `size`."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.mesh: DeviceMesh | None = None
        """One-dimensional, "fsdp"; null for a single rank."""

    def share(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, or the exception that it raises there, on every rank. Rank 0 alone calls it,
        and the others wait for it as long as it takes. What it returns can be pickled; rank 0 keeps the original."""
        return make()

    def first(self, make: Callable[[], T]) -> T:
        """As `share`, where what `make` returns stays on rank 0. The others get null, and may only hand that on."""
        kept: list[T] = []
        self.share(lambda: kept.append(make()))
        return kept[0] if kept else cast(T, None)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks, element by element, in place."""
        return tensor

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank. For small ones: it goes through the CPU."""
        return [value]

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank what one of them has met with: the first one's, with its rank in front.

        Args:
            error: this rank's; null when all is well here.
        """
        if error is not None:
            raise error

    def known(self, error: BaseException) -> bool:
        """Whether every rank meets with `error` now, so that what all of them do together is still possible."""
        return True

    def check(self, *, patience_s: float = 0.0) -> None:
        """Is every rank still there?

        Args:
            patience_s: how long to look for one that is ending: its connections close before its process is gone.

        Raises:
            RankGone: one is not.
        """

    def close(self, error: BaseException | None = None) -> None:
        """Leave; waits for the others, unless one is gone.

        Args:
            error: what ends this rank; the others learn of it, where they do not know it yet.
        """


ALONE = World()
