"""Which rank this process is, and where ranks and nodes meet; known before torch is imported."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil

from atropos_common.files import is_private, write_private
from atropos_common.node import NoSuchAddress, address_here
from atropos_common.run_dir import ENV_RANKS_DIR
from trainer_core.errors import UsageError

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
