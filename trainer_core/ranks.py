"""The ranks of one trainer, as the loop knows them; without torch, so that it is known before that is imported.

torchrun starts the same program N times. The loop learns no more of that than `World`: what rank 0 alone may do (ask
run-api, speak to servers, write records) it does inside `share`, and what it got or what went wrong there is so on
every rank. Everything that runs the model runs on every rank. Without torchrun there is `ALONE`, which does nothing.
Several ranks are `Ranks` in `world.py`.
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

from atropos_common.files import is_private, write_private
from atropos_common.node import NoSuchAddress, address_here
from atropos_common.run_dir import ENV_RANKS_DIR
from trainer_core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from trainer_core.context_parallel import Context

T = TypeVar("T")

KNOWN = "on_every_rank"
"""Attribute of an exception that all ranks raise."""
GONE_CODE = 70
"""Exit code of a rank that leaves because another one has."""


SEEN_S = 2.0
"""In this time the process of a rank whose connections have closed is gone as well."""

LAUNCHED = "launched"
"""A file where ranks meet: `launch.py` is their parent, which removes that folder."""
ENV_MEETING = "ATROPOS_RANKS_MEETING"
ENV_FIRST_RANK = "ATROPOS_FIRST_RANK"
ENV_RANKS = "ATROPOS_RANKS"
"""Where ranks of several nodes meet, the first of this node, and how many there are of all: `launch.py` sets them."""
MASTER = ("MASTER_ADDR", "MASTER_PORT")
MEET_S = 0.1
CODE = "code"
"""Where they meet: the exit code of rank 0."""


def own_rank() -> int:
    """This process' rank, from 0."""
    return first_rank() + int(os.environ.get("RANK", "0"))


def first_rank() -> int:
    """The lowest rank on this node."""
    return int(os.environ.get(ENV_FIRST_RANK, "0"))


def rank_count() -> int:
    """How many there are."""
    return int(os.environ.get(ENV_RANKS) or os.environ.get("WORLD_SIZE", "1"))


def on_several_nodes() -> bool:
    """Whether some of the ranks are on other nodes."""
    return ENV_MEETING in os.environ


def speaks_for_node() -> bool:
    """Whether this is the first of the ranks on a node that rank 0 is not on."""
    return 0 < first_rank() == own_rank()


def node_address() -> str:
    """The address, as a number, under which the other ranks reach this one.

    Raises:
        UsageError: the one that ATROPOS_NODE_ADDRESS names is not this machine's.
    """
    try:
        return address_here()
    except NoSuchAddress as error:
        raise UsageError(str(error)) from None


def keep_master() -> None:
    """Before torchrun sets its own: where the user wants a broadcast's group to meet."""
    for name in MASTER:
        os.environ[f"ATROPOS_{name}"] = os.environ.get(name, "")


def restore_master() -> None:
    """In a rank that `launch.py` has started: torchrun's meeting point means nothing to us."""
    for name in MASTER:
        if (kept := os.environ.pop(f"ATROPOS_{name}", None)) is not None:
            os.environ[name] = kept


def on_every_rank(error: BaseException) -> bool:
    """Whether all ranks raise it, so that one of them may speak for all."""
    return bool(getattr(error, KNOWN, False))


def meeting_place(parent: int) -> Path:
    """The folder in which the children of `parent`, a torchrun, meet; made where it is not there yet.

    Raises:
        UsageError: somebody else has made it.
    """
    if ENV_MEETING in os.environ:
        return Path(os.environ[ENV_MEETING])
    began = int(psutil.Process(parent).create_time() * 100)
    name = "-".join(["atropos-ranks", str(parent), str(began), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")])
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise UsageError(f"{folder}, where the ranks would meet, is not this user's alone: remove it, or set TMPDIR")
    return folder


def meet_nodes(node: int, nodes: int, ranks: int) -> None:
    """Agree with the launchers of the other nodes where the ranks of this start meet, and which has which; waits for
    them. What earlier starts have left is of no use to this one, so each names itself anew.

    Args:
        node: of this launcher, from 0.
        nodes: how many there are.
        ranks: how many of its own this node will start.

    Raises:
        UsageError: there is no folder that all nodes share, or it is another user's.
    """
    if ENV_RANKS_DIR not in os.environ:
        raise UsageError(f"ranks on several nodes meet in a folder that all of them share: name it by {ENV_RANKS_DIR}")
    folder = Path(os.environ[ENV_RANKS_DIR])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise UsageError(f"{folder}, where the ranks would meet, is not this user's alone")
    own = f"{secrets.token_hex(8)} {ranks}"
    print(f"node {node} of {nodes}: waiting for the trainer's other nodes in {folder}", file=sys.stderr, flush=True)
    words = _gather_nodes(folder, own, nodes) if node == 0 else _join_nodes(folder, own, node)
    counts = [int(each.split()[1]) for each in words]
    os.environ[ENV_MEETING] = str(folder / words[0].split()[0])
    os.environ[ENV_FIRST_RANK], os.environ[ENV_RANKS] = str(sum(counts[:node])), str(sum(counts))


def _gather_nodes(folder: Path, own: str, nodes: int) -> list[str]:
    """The first node: what all have said, once all have."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif not path.name.startswith("."):  # those are being written
            path.unlink(missing_ok=True)
    others = [folder / f"node.{each}" for each in range(1, nodes)]
    while not set(others) <= set(folder.iterdir()):
        time.sleep(MEET_S)
    words = [own, *(path.read_text() for path in others)]
    (folder / own.split()[0]).mkdir(mode=0o700)
    write_private(folder / "nodes", "\n".join(words))
    return words


def _join_nodes(folder: Path, own: str, node: int) -> list[str]:
    """Another node: what all have said, once the first one has heard this one, however often it has begun anew."""
    while True:
        here = set(folder.iterdir())
        if folder / "nodes" in here and own in (words := (folder / "nodes").read_text().splitlines()):
            return words
        if folder / f"node.{node}" not in here:
            write_private(folder / f"node.{node}", own)
        time.sleep(MEET_S)


def write_code(code: int) -> None:
    """Tell `launch.py` how rank 0 has ended: torchrun does not."""
    folder = meeting_place(os.getppid())
    if (folder / LAUNCHED).exists():
        (folder / CODE).write_text(str(code))
    else:
        shutil.rmtree(folder, ignore_errors=True)


def read_code(folder: Path) -> int:
    """What `write_code` wrote; 1 where rank 0 did not come to that."""
    try:
        return int((folder / CODE).read_text())
    except (OSError, ValueError):
        return 1


def leave_word(folder: Path, rank: int, words: str) -> None:
    """Tell the ranks of other nodes that a rank has ended, where it could not say so itself; "": in good order."""
    path = folder / f"left.{rank}"
    if not path.exists():
        path.write_text(words)


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
