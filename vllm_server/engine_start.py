"""vLLM's engine client for a server: forked where that is safe, and what goes wrong is said in one line."""

from __future__ import annotations

import contextlib
import logging
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

from vllm_server import compat, processes
from vllm_server.config import ConfigError

logger = logging.getLogger(__name__)


class EngineStartError(RuntimeError):
    """vLLM's engine did not start; its own lines say why."""


def ranks(args: Namespace) -> int:
    """Processes that hold the model or a part of it."""
    return int(args.tensor_parallel_size) * int(args.pipeline_parallel_size) * int(args.data_parallel_size)


def why_not_fork(args: Namespace) -> str | None:
    """Why the engine may not be forked from this process; null when it may."""
    cpu = compat.is_cpu()
    one_process = ranks(args) == 1 and args.distributed_executor_backend in (("uni",) if cpu else ("uni", None))
    return processes.why_not_fork(os.environ, cpu=cpu) if one_process else "it starts workers of its own"


def _engine_client(args: Namespace, why_not: str | None, sock: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    """By fork where that is safe, else as vLLM starts it."""
    if why_not:
        logger.info("the engine process starts afresh, and imports vLLM again: %s", why_not)
        return compat.build_async_engine_client(args)
    processes.prepare_fork(sock.fileno())
    return compat.forked_engine_client(args, lambda: processes.why_not_fork(os.environ, cpu=compat.is_cpu()))


@contextlib.asynccontextmanager
async def start_engine(args: Namespace, why_not: str | None, sock: Any) -> AsyncIterator[Any]:
    """vLLM's engine client, for as long as the block runs.

    Args:
        why_not: it may not be forked, as `why_not_fork` says.
        sock: the server's, which a forked engine must not hold.

    Raises:
        ConfigError: vLLM refuses the model or a flag.
        EngineStartError: the engine process failed. Both say in one line what vLLM says, without its traceback.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context(_engine_client(args, why_not, sock))
        except Exception as error:
            logger.debug("engine start", exc_info=True)
            reason = " ".join(str(error).split())[:400]
            if isinstance(error, ValueError | OSError):
                raise ConfigError(f"vLLM refuses this configuration: {reason}") from None
            raise EngineStartError(f"vLLM's engine did not start: {reason} (its log lines are above)") from error
        yield engine
