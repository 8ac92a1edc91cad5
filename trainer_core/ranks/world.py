"""The ranks of one trainer, as the loop uses them; importable without torch.

torchrun starts the same program N times. The loop sees that only through `World`. What rank 0 alone
may do (call run-api and servers, write records) runs inside `share`, which gives every rank the
result or the exception. Everything that runs the model runs on every rank. Without torchrun the
world is `ALONE`, where these calls do nothing. `Ranks` in `rank_group.py` is the world of several
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from trainer_core.ranks.context_parallel import Context

T = TypeVar("T")

KNOWN = "on_every_rank"
"""Attribute of an exception that all ranks raise."""


def on_every_rank(error: BaseException) -> bool:
    """Return True if all ranks raise `error`, so that rank 0 reports it for all."""
    # `Ranks._raise` sets it, on exceptions of any type.
    return bool(getattr(error, KNOWN, False))


class World:
    """One rank among `size`; this class is the world of a single rank."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.mesh: DeviceMesh | None = None
        """One-dimensional mesh named "fsdp"; None for a single rank."""
        self.context: Context | None = None
        """Ranks that share rows with this one; None: each rank has rows of its own."""

    @property
    def dealt(self) -> World:
        """World of the ranks that get different rows: one of each set that shares rows."""
        return self

    def split(self, context: int) -> None:
        """Let each `context` neighbouring ranks share rows from now on."""

    def share(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 alone; return its result, or raise its exception, on every rank.
        The other ranks wait without a timeout. The result must be picklable; rank 0 gets the
        original."""
        return make()

    def first(self, make: Callable[[], T]) -> T:
        """Like `share`, but the result stays on rank 0. Other ranks get None, which they only pass
        on."""
        # `append` returns None, so the value itself is never pickled or sent.
        kept: list[T] = []
        self.share(lambda: kept.append(make()))
        return kept[0] if kept else cast(T, None)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over all ranks, in place."""
        return tensor

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, ordered by rank, on every rank. For small values: it goes
        through the CPU."""
        return [value]

    def agree(self, error: BaseException | None) -> None:
        """Raise the first rank's error on every rank, with its rank in front.

        Args:
            error: this rank's error; None if it has none.
        """
        if error is not None:
            raise error

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its result; an error on one rank is raised on all."""
        done: list[T] = []
        failed: Exception | None = None
        try:
            done.append(work())
        except Exception as error:
            failed = error
        # Every rank must reach this collective, also after an error of its own.
        self.agree(failed)
        return done[0]

    def known(self, error: BaseException) -> bool:
        """Return True if every rank raises `error` now, so that collectives still work."""
        return True

    def check(self, *, patience_s: float = 0.0) -> None:
        """Check that every rank is still there.

        Args:
            patience_s: seconds to wait for the end of a rank: its connections close before its
                process ends.

        Raises:
            RankGone: a rank has ended.
        """

    def close(self, error: BaseException | None = None) -> None:
        """Leave the world; waits for the others unless one is gone.

        Args:
            error: reason why this rank ends; passed to the ranks that do not know it yet.
        """


ALONE = World()
