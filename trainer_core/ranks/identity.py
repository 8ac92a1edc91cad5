"""Rank of this process, and the meeting folder of ranks and nodes; importable without torch."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil

from atropos_common.net.node import NoSuchAddress, address_here
from atropos_common.system.files import is_private, write_private
from atropos_common.system.run_dir import ENV_RANKS_DIR
from trainer_core.errors import UsageError

GONE_CODE = 70
"""Exit code of a rank that leaves because another one is gone."""
SEEN_S = 2.0
"""Seconds within which a rank's process ends after its connections close."""

LAUNCHED = "launched"
"""File in the meeting folder: `launch.py` is the parent of the ranks and removes the folder."""
ENV_MEETING = "ATROPOS_RANKS_MEETING"
ENV_FIRST_RANK = "ATROPOS_FIRST_RANK"
ENV_RANKS = "ATROPOS_RANKS"
"""Environment variables that `launch.py` sets on several nodes: the meeting folder, the first rank
of this node, and the number of ranks on all nodes."""
MASTER = ("MASTER_ADDR", "MASTER_PORT")
MEET_S = 0.1
"""Seconds between two looks into the meeting folder."""
CODE = "code"
"""File in the meeting folder: the exit code of rank 0."""


def own_rank() -> int:
    """Return the rank of this process, from 0."""
    return first_rank() + int(os.environ.get("RANK", "0"))


def first_rank() -> int:
    """Return the lowest rank on this node."""
    return int(os.environ.get(ENV_FIRST_RANK, "0"))


def rank_count() -> int:
    """Return the number of ranks on all nodes."""
    return int(os.environ.get(ENV_RANKS) or os.environ.get("WORLD_SIZE", "1"))


def on_several_nodes() -> bool:
    """Return True if some ranks are on other nodes."""
    return ENV_MEETING in os.environ


def speaks_for_node() -> bool:
    """Return True for the first rank of a node that does not have rank 0."""
    return 0 < first_rank() == own_rank()


def node_address() -> str:
    """Return the numeric address under which other ranks reach this one.

    Raises:
        UsageError: ATROPOS_NODE_ADDRESS is not an address of this machine.
    """
    try:
        return address_here()
    except NoSuchAddress as error:
        raise UsageError(str(error)) from None


def keep_master() -> None:
    """Save the user's MASTER_ADDR and MASTER_PORT before torchrun sets its own."""
    for name in MASTER:
        os.environ[f"ATROPOS_{name}"] = os.environ.get(name, "")


def restore_master() -> None:
    """Restore the user's MASTER_ADDR and MASTER_PORT in a rank that `launch.py` started."""
    for name in MASTER:
        # An empty saved value still replaces torchrun's: the user had set none.
        if (kept := os.environ.pop(f"ATROPOS_{name}", None)) is not None:
            os.environ[name] = kept


def meeting_place(parent: int) -> Path:
    """Return the meeting folder of the children of `parent`, a torchrun; create it if it is
    missing.

    Raises:
        UsageError: another user created it.
    """
    if ENV_MEETING in os.environ:
        return Path(os.environ[ENV_MEETING])
    # The start time makes the name unique when the kernel reuses a process id.
    began = int(psutil.Process(parent).create_time() * 100)
    name = "-".join(
        [
            "atropos-ranks",
            str(parent),
            str(began),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        ]
    )
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise UsageError(
            f"other users have access to {folder}, the meeting folder of the ranks: remove "
            f"it, or set TMPDIR"
        )
    return folder


def meet_nodes(node: int, nodes: int, ranks: int) -> None:
    """Agree with the launchers on the other nodes on a meeting folder and on rank numbers; wait for
    them.

    Args:
        node: number of this launcher's node, from 0.
        nodes: number of nodes.
        ranks: number of ranks that this node starts.

    Raises:
        UsageError: there is no shared folder, or it belongs to another user.
    """
    if ENV_RANKS_DIR not in os.environ:
        raise UsageError(
            f"several nodes need a folder that all of them share: set {ENV_RANKS_DIR} to it"
        )
    folder = Path(os.environ[ENV_RANKS_DIR])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise UsageError(
            f"other users have access to {folder} ({ENV_RANKS_DIR}): make it private (chmod "
            f"700), or choose another"
        )
    # A random name for this start: entries of earlier starts in the folder do not match it.
    own = f"{secrets.token_hex(8)} {ranks}"
    print(
        f"node {node} of {nodes}: waiting for the trainer's other nodes in {folder}",
        file=sys.stderr,
        flush=True,
    )
    entries = _gather_nodes(folder, own, nodes) if node == 0 else _join_nodes(folder, own, node)
    counts = [int(each.split()[1]) for each in entries]
    os.environ[ENV_MEETING] = str(folder / entries[0].split()[0])
    os.environ[ENV_FIRST_RANK], os.environ[ENV_RANKS] = str(sum(counts[:node])), str(sum(counts))


def _gather_nodes(folder: Path, own: str, nodes: int) -> list[str]:
    """Collect the entries of all nodes and publish them; runs on node 0."""
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
    """Publish this node's entry and wait for node 0's list; runs on the other nodes."""
    while True:
        here = set(folder.iterdir())
        # A list without our entry is from an earlier start.
        if folder / "nodes" in here and own in (
            words := (folder / "nodes").read_text().splitlines()
        ):
            return words
        # Node 0 may have removed an early entry as a leftover, so write it again.
        if folder / f"node.{node}" not in here:
            write_private(folder / f"node.{node}", own)
        time.sleep(MEET_S)


def write_code(code: int) -> None:
    """Save the exit code of rank 0 for `launch.py`, which torchrun does not pass on."""
    folder = meeting_place(os.getppid())
    # Without `launch.py` nobody reads the code, and the last one out removes the folder.
    if (folder / LAUNCHED).exists():
        (folder / CODE).write_text(str(code))
    else:
        shutil.rmtree(folder, ignore_errors=True)


def read_code(folder: Path) -> int:
    """Read the exit code of rank 0; 1 if it left none."""
    try:
        return int((folder / CODE).read_text())
    except (OSError, ValueError):
        return 1


def leave_word(folder: Path, rank: int, words: str) -> None:
    """Record for ranks on other nodes that a rank ended without doing so itself; "": it ended
    normally."""
    path = folder / f"left.{rank}"
    if not path.exists():
        path.write_text(words)
