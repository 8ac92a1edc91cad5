"""The ranks of one trainer, as the loop uses them; importable without torch.

`share` runs what only rank 0 may do (call servers, write records) and gives every rank its result
or exception. Everything that runs the model runs on every rank. A trainer without torchrun is
`ALONE`; `Ranks` in `group.py` is the world of several ranks.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import psutil

from atropos_common.net.ports import NoSuchAddress, address_here
from atropos_common.system.files import is_private, write_private
from atropos_common.system.run_dir import ENV_RANKS_DIR
from trainer_core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from trainer_core.ranks.context_parallel import Context

T = TypeVar("T")

GONE_CODE = 70
"""Exit code of a rank that leaves because another is gone."""
SEEN_S = 2.0
"""Seconds from the end of a rank's connections to that of its process."""

LAUNCHED = "launched"
"""File that says that `launch.py` started the ranks and removes the folder."""
ENV_MEETING = "ATROPOS_RANKS_MEETING"
ENV_FIRST_RANK = "ATROPOS_FIRST_RANK"
ENV_RANKS = "ATROPOS_RANKS"
"""Environment of ranks on several nodes: meeting folder, first rank here, number of ranks."""
MASTER = ("MASTER_ADDR", "MASTER_PORT")
MEET_S = 0.1
CODE = "code"
"""File with the exit code of rank 0."""
KNOWN = "on_every_rank"
"""Attribute of an exception that all ranks raise."""


def on_every_rank(error: BaseException) -> bool:
    """Return True if all ranks raise `error`, so that rank 0 reports it."""
    # `Ranks._raise` sets it, on exceptions of any type.
    return bool(getattr(error, KNOWN, False))


class World:
    """One rank among `size`; this class is a single rank's world."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        # FSDP's sharding and context parallelism, set by `Ranks`.
        self.mesh: DeviceMesh | None = None
        """One-dimensional mesh "fsdp"; None for a single rank."""
        self.context: Context | None = None
        """Ranks that share rows with this one."""

    @property
    def dealt(self) -> World:
        """World of the ranks with different rows: one of each set that shares rows."""
        return self

    def split(self, context: int) -> None:
        """Let `context` neighbouring ranks share rows from now on."""

    def share(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on rank 0, or raise its exception, on every rank.

        The result must be picklable. Other ranks wait without a timeout.
        """
        return make()

    def first(self, make: Callable[[], T]) -> T:
        """Like `share`, but other ranks get None, which they only pass on."""
        # `append` returns None, so the value itself is never pickled or sent.
        kept: list[T] = []
        self.share(lambda: kept.append(make()))
        return kept[0] if kept else cast(T, None)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over all ranks, in place."""
        return tensor

    def gather(self, value: T) -> list[T]:
        """Return every rank's value by rank; for small values."""
        return [value]

    def agree(self, error: BaseException | None) -> None:
        """Raise the first rank's error on every rank, naming the rank."""
        if error is not None:
            raise error

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; an error on one is raised on all."""
        done: list[T] = []
        failed: Exception | None = None
        try:
            done.append(work())
        except Exception as error:
            failed = error
        # Every rank must reach this collective, even after an error of its own.
        self.agree(failed)
        return done[0]

    def known(self, error: BaseException) -> bool:
        return True

    def check(self, *, patience_s: float = 0.0) -> None:
        """Raise `RankGone` if a rank has ended.

        `patience_s`: seconds to wait for it.
        """

    def close(self, error: BaseException | None = None) -> None:
        """Leave the world, telling `error` to ranks that do not know it; waits for ranks that
        still run."""


ALONE = World()


def own_rank() -> int:
    return first_rank() + int(os.environ.get("RANK", "0"))


def first_rank() -> int:
    return int(os.environ.get(ENV_FIRST_RANK, "0"))


def rank_count() -> int:
    return int(os.environ.get(ENV_RANKS) or os.environ.get("WORLD_SIZE", "1"))


def on_several_nodes() -> bool:
    """Return True if other nodes have ranks."""
    return ENV_MEETING in os.environ


def speaks_for_node() -> bool:
    """Return True for a node's first rank, unless it is rank 0."""
    return 0 < first_rank() == own_rank()


def node_address() -> str:
    """Return the numeric address under which other ranks reach this one."""
    try:
        return address_here()
    except NoSuchAddress as error:
        raise UsageError(str(error)) from None


def keep_master() -> None:
    """Save the user's MASTER_ADDR and MASTER_PORT before torchrun sets its own."""
    for name in MASTER:
        os.environ[f"ATROPOS_{name}"] = os.environ.get(name, "")


def restore_master() -> None:
    """Restore what `keep_master` saved."""
    for name in MASTER:
        # An empty saved value still replaces torchrun's: the user had set none.
        if (kept := os.environ.pop(f"ATROPOS_{name}", None)) is not None:
            os.environ[name] = kept


def meeting_place(parent: int) -> Path:
    """Return the meeting folder of the children of `parent`, a torchrun."""
    if ENV_MEETING in os.environ:
        return Path(os.environ[ENV_MEETING])
    # The start time makes the name unique when the kernel reuses a process id.
    began = int(psutil.Process(parent).create_time() * 100)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    folder = Path(tempfile.gettempdir()) / f"atropos-ranks-{parent}-{began}-{restarts}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise UsageError(
            f"other users have access to {folder}, the ranks' meeting folder: remove it, "
            "or set TMPDIR"
        )
    return folder


def meet_nodes(node: int, nodes: int, ranks: int) -> None:
    """Agree with other nodes' launchers on a meeting folder and rank numbers.

    Args:
        node: number of this node, from 0.
        ranks: number of ranks on this node.
    """
    if ENV_RANKS_DIR not in os.environ:
        raise UsageError(f"several nodes need a folder that all share: set {ENV_RANKS_DIR} to it")
    folder = Path(os.environ[ENV_RANKS_DIR])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise UsageError(
            f"other users have access to {folder} ({ENV_RANKS_DIR}): make it private (chmod "
            f"700), or choose another"
        )
    # A random name for this start: entries of earlier starts in the folder do not match it.
    own = f"{secrets.token_hex(8)} {ranks}"
    waiting = f"node {node} of {nodes}: waiting for the trainer's other nodes in {folder}"
    print(waiting, file=sys.stderr, flush=True)
    entries = _gather_nodes(folder, own, nodes) if node == 0 else _join_nodes(folder, own, node)
    counts = [int(each.split()[1]) for each in entries]
    os.environ[ENV_MEETING] = str(folder / entries[0].split()[0])
    os.environ[ENV_FIRST_RANK], os.environ[ENV_RANKS] = str(sum(counts[:node])), str(sum(counts))


def _gather_nodes(folder: Path, own: str, nodes: int) -> list[str]:
    # Remove what an earlier start left behind.
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif not path.name.startswith("."):  # another node is writing it now
            path.unlink(missing_ok=True)
    others = [folder / f"node.{each}" for each in range(1, nodes)]
    # Listing the folder refreshes a network file system's cache, which `exists` may not.
    while not set(others) <= set(folder.iterdir()):
        time.sleep(MEET_S)
    words = [own, *(path.read_text() for path in others)]
    (folder / own.split()[0]).mkdir(mode=0o700)
    # Last, since its appearance tells the other nodes that the meeting folder exists.
    write_private(folder / "nodes", "\n".join(words))
    return words


def _join_nodes(folder: Path, own: str, node: int) -> list[str]:
    while True:
        here = set(folder.iterdir())
        words = (folder / "nodes").read_text().splitlines() if folder / "nodes" in here else []
        # A list without our entry is from an earlier start.
        if own in words:
            return words
        # Node 0 may have removed an early entry as a leftover, so write it again.
        if folder / f"node.{node}" not in here:
            write_private(folder / f"node.{node}", own)
        time.sleep(MEET_S)


def write_code(code: int) -> None:
    # For `launch.py`: torchrun does not pass exit codes on.
    folder = meeting_place(os.getppid())
    # Without `launch.py` nobody reads the code, and the last one out removes the folder.
    if (folder / LAUNCHED).exists():
        (folder / CODE).write_text(str(code))
    else:
        shutil.rmtree(folder, ignore_errors=True)


def read_code(folder: Path) -> int:
    """Return the exit code of rank 0; 1 if it left none."""
    try:
        return int((folder / CODE).read_text())
    except (OSError, ValueError):
        return 1


def record_end(folder: Path, rank: int, reason: str) -> None:
    """Record how a rank ended for ranks on other nodes; "": normally."""
    path = folder / f"left.{rank}"
    if not path.exists():
        path.write_text(reason)
