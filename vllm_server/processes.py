"""How vLLM's engine process begins and ends: without a second import of vLLM, and never after its server.

Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from trainer_core.contracts.run_dir import ENV_WAIT_FOR_GO
from vllm_server.config import ENV_FORK_ENGINE, ENV_INSTANCE_ID

logger = logging.getLogger(__name__)

IMPORTED = "everything is imported; waiting to be told to go"
TASKS = Path("/proc/self/task")
"""This process's threads, native ones too."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a child process of our server: be killed when the parent dies, so that SIGKILL of the server leaves no orphan.

    Does nothing in any other process. Safe to call twice.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and ENV_INSTANCE_ID in os.environ:
        _tie_to_parent(parent.pid)


def _tie_to_parent(pid: int) -> None:
    """Have the kernel kill this process when its parent `pid` dies; end at once if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != pid:
        os._exit(1)


def merge_worker_into_engine(args: Namespace, env: MutableMapping[str, str]) -> bool:
    """On the CPU let the engine process run the model itself: one process and one import of vLLM less.

    vLLM's separate worker exists there to bind OpenMP threads to cores; who asks for that keeps it.

    Args:
        args: vLLM's arguments, for a model of one rank; changed in place.
        env: changed in place.

    Returns:
        Whether the two are one now.
    """
    if args.distributed_executor_backend is not None:
        return False
    if "VLLM_CPU_OMP_THREADS_BIND" in env or env.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        return False
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    args.distributed_executor_backend = "uni"
    return True


def why_not_fork(env: Mapping[str, str], *, cpu: bool) -> str | None:
    """Why the engine may not be forked from this process; null when it may, which spares it the second import of vLLM.

    That import is 7 s and 0.3 GB on the CPU, 19 s on a GPU machine. Forking is safe while this process has one thread,
    native ones counted, and has not touched the GPU, whose driver does not survive a fork. On the CPU the child must
    not meet a pool of OpenMP threads that stayed behind either, hence only with OMP_NUM_THREADS=1. On a GPU it has to
    be asked for: a driver that some library touched unseen would break there.
    """
    if env.get(ENV_FORK_ENGINE, "1" if cpu else "0") != "1":
        return f"{ENV_FORK_ENGINE} is not 1"
    if cpu and env.get("OMP_NUM_THREADS") != "1":
        return "OMP_NUM_THREADS is not 1"
    names = [(task / "comm").read_text().strip() for task in TASKS.iterdir()]
    if len(names) > 1:
        return f"{len(names)} threads run already ({', '.join(sorted(set(names)))})"
    import torch

    return "CUDA is initialised" if torch.cuda.is_initialized() else None


def wait_for_go(env: MutableMapping[str, str], heavy: Sequence[str]) -> bool:
    """Where ATROPOS_WAIT_FOR_GO=1: import what a start needs, then wait for the line `go` on standard input.

    Returns:
        False when the input ended instead: whoever would have said it is gone, or needs no server any more.
    """
    if env.pop(ENV_WAIT_FOR_GO, "") != "1":
        return True
    for name in heavy:
        with contextlib.suppress(ImportError):  # a part that this release keeps elsewhere is imported when it is needed
            importlib.import_module(name)
    logger.info(IMPORTED)
    return sys.stdin.readline().strip() == "go"


def prepare_fork(listening: int) -> None:
    """Let every later child of this process die with it, keep its signals to itself, and not hold the port.

    Args:
        listening: file descriptor of the server's socket.
    """
    server = os.getpid()
    forked = False

    def in_child() -> None:
        nonlocal forked
        if forked:
            return  # a child of the engine, which is not the server's to tie
        forked = True
        # Closed by replacing it: the number stays taken, so that nobody closes another's file by it.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, listening)
        os.close(nothing)
        # The event loop's wakeup pipe is shared: a signal to the child would be taken for one to the server.
        signal.set_wakeup_fd(-1)
        _tie_to_parent(server)

    os.register_at_fork(after_in_child=in_child)
