"""The ranks of one trainer, as the loop knows them; without torch, so that it is known before that is imported.

torchrun starts the same program N times. The loop learns no more of that than `World`: what rank 0 alone may do (ask
run-api, speak to servers, write records) it does inside `share`, and what it got or what went wrong there is so on
every rank. Everything that runs the model runs on every rank. Without torchrun there is `ALONE`, which does nothing.
Several ranks are `Ranks` in `rank_group.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from trainer_core.context_parallel import Context

T = TypeVar("T")

KNOWN = "on_every_rank"
"""Attribute of an exception that all ranks raise."""


def on_every_rank(error: BaseException) -> bool:
    """Whether all ranks raise it, so that one of them may speak for all."""
    return bool(getattr(error, KNOWN, False))


class World:
    """One rank among `size`."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.mesh: DeviceMesh | None = None
        """One-dimensional, "fsdp"; null for a single rank."""
        self.context: Context | None = None
        """The ranks that share rows with this one; null: each has rows of its own."""

    @property
    def dealt(self) -> World:
        """The ranks among which rows are dealt out; of those that share rows one each."""
        return self

    def split(self, context: int) -> None:
        """Let each `context` neighbours share rows from now on."""

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

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns, which every rank calls; what goes wrong on one is raised on all."""
        done: list[T] = []
        failed: Exception | None = None
        try:
            done.append(work())
        except Exception as error:
            failed = error
        self.agree(failed)
        return done[0]

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
