"""Workers of an engine on a machine other than its API server's.

    python -m vllm_server --model MODEL --tensor-parallel-size 16 --nnodes 2 --master-addr A
    --master-port P
    python -m vllm_server ... --node-rank 1 --headless # on the other machine, with the same flags
    before

vLLM does the distributed work: requests to all workers (a step, new weights, an adapter) arrive
over its own channel, and our plugin runs in these workers too. This program does not notice the end
of the other machines; their common supervisor ends them together.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable
from typing import NoReturn

from atropos_common.protocol.stages import READY, reach
from vllm_server import compat
from vllm_server.config import ConfigError

logger = logging.getLogger(__name__)


class _Told(BaseException):
    """A signal requested the shutdown."""


def machines(args: Namespace) -> int:
    """Number of machines that the engine is spread over."""
    return int(getattr(args, "nnodes", 1))


def check_arguments(args: Namespace) -> None:
    """Refuse multi-machine flags that do not fit together.

    Raises:
        ConfigError: names the flag to change.
    """
    count, rank = machines(args), int(getattr(args, "node_rank", 0))
    workers = int(args.tensor_parallel_size) * int(args.pipeline_parallel_size)
    if count == 1 and not (args.headless or rank):
        return
    if count == 1:
        raise ConfigError(
            "--headless and --node-rank are for a part of an engine over several machines: "
            "add --nnodes N"
        )
    if not 0 <= rank < count:
        raise ConfigError(
            f"--node-rank {rank}: with --nnodes {count} it is a number from 0 to {count - 1}"
        )
    if args.headless != (rank > 0):
        raise ConfigError(
            "--headless is for all machines but the first: those with a --node-rank above 0, "
            "and only they"
        )
    if int(args.data_parallel_size) > 1:
        raise ConfigError(
            "--data-parallel-size does not go with --nnodes here: start a server for each replica"
        )
    if workers % count:
        raise ConfigError(
            f"{workers} workers (--tensor-parallel-size times --pipeline-parallel-size) "
            f"cannot be divided evenly among "
            f"--nnodes {count} machines"
        )


def run(args: Namespace) -> int:
    """Run the workers until SIGTERM.

    Returns:
        0 after SIGTERM, 1 when a worker died.

    Raises:
        ConfigError, EngineStartError: see `compat.starting`.
    """

    def leave(signum: int, _: object) -> NoReturn:
        # vLLM's start may swallow an exception, and there is nothing to save yet: exit at once.
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(128 + signum)

    def told(*_: object) -> NoReturn:
        raise _Told

    began = time.monotonic()
    _on_end(leave)
    with compat.starting("this part of vLLM's engine"):
        executor = compat.executor_of_part(args)
    try:
        _on_end(told)
        here = f"part {args.node_rank + 1} of {machines(args)}"
        reach(READY)
        logger.info(
            "ready after %.1f s: %s, with its first at %s",
            time.monotonic() - began,
            here,
            args.master_addr,
        )
        executor.start_worker_monitor(inline=True)
    except _Told:
        _on_end(leave)
        executor.shutdown()
        logger.info("stopped")
        return 0
    logger.error("a worker died; its own log lines are above")
    return 1


def _on_end(do: Callable[[int, object], NoReturn]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, do)
