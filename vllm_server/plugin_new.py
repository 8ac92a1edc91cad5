"""How vLLM's engine process begins and ends: without a second import of vLLM, and never after its server.

Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from atropos_common import parent_death
from vllm_server.config import ENV_FORK_ENGINE, ENV_INSTANCE_ID

TASKS = Path("/proc/self/task")
"""This process's threads, native ones too."""


def die_with_parent() -> None:
    """In a child process of our server: be killed when the parent dies, so that SIGKILL of the server leaves no orphan.

    Does nothing in any other process. Safe to call twice.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and ENV_INSTANCE_ID in os.environ:
        _tie_to_parent(parent.pid)


def _tie_to_parent(pid: int) -> None:
    """Have the kernel kill this process when its parent `pid` dies; end at once if it is dead already."""
    if not parent_death.die_with_parent(pid):
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
    binds = env.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") != "nobind"
    if binds or env.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        return False
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    args.distributed_executor_backend = "uni"
    return True


def why_not_fork(env: Mapping[str, str], *, cpu: bool) -> str | None:
    """Why the engine may not be forked from this process; null when it may, which spares it the second import of vLLM.

    That import is 7 s and 0.3 GB on the CPU. Forking is safe while this process has one thread, native ones counted,
    and the child does not meet a pool of OpenMP threads that stayed behind, hence only with OMP_NUM_THREADS=1. On a GPU
    machine it never is: importing vLLM alone starts a thread of the driver, which does not survive a fork.
    """
    if not cpu:
        return "a GPU's driver does not survive a fork"
    if env.get(ENV_FORK_ENGINE, "1") != "1":
        return f"{ENV_FORK_ENGINE} is not 1"
    if env.get("OMP_NUM_THREADS") != "1":
        return "OMP_NUM_THREADS is not 1"
    names = [(task / "comm").read_text().strip() for task in TASKS.iterdir()]
    return f"{len(names)} threads run already ({', '.join(sorted(set(names)))})" if len(names) > 1 else None


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
