"""A server made ready before it is needed: it imports everything, then waits for the line `go` on standard input.

Its predecessor serves meanwhile: no port is bound, no file of the bridge is touched, no memory of a GPU is taken. An
engine process that is not forked begins as well, and waits in our plugin for a lock that the server holds.

Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from typing import Generic, NoReturn, TypeVar

from atropos_common.run_dir import ENV_WAIT_FOR_GO, GO_LINE

logger = logging.getLogger(__name__)

ENV_ENGINE_LOCK = "ATROPOS_ENGINE_LOCK"
"""Path of the lock that an engine process has to get before it goes on; between a server and its own engine."""
IMPORTED = "everything is imported; waiting to be told to go"
ENGINE_IMPORTED = "the engine process has imported everything; waiting to be told to go"

Found = TypeVar("Found")


def is_asked(env: MutableMapping[str, str]) -> bool:
    """Whether ATROPOS_WAIT_FOR_GO=1, once: a process that executes itself again does not wait again."""
    return env.pop(ENV_WAIT_FOR_GO, "") == "1"


def import_parts(names: Sequence[str]) -> None:
    """Import what a start needs anyway; a part that this release keeps elsewhere is imported when it is needed."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def is_told_to_go() -> bool:
    """Wait for the line `go`. False when the input ends instead: who would have said it needs no server any more."""
    logger.info(IMPORTED)
    said = b""
    # Not `sys.stdin`: a thread that waits in it holds its lock, and Python aborts over that when it ends.
    while not said.endswith(b"\n") and (part := os.read(0, 64)):
        said += part
    return said.strip() == GO_LINE.strip()


class Turn(Generic[Found]):
    """Waits for `go` beside the main thread, which vLLM blocks while its engine starts, and lets the engine through.

    Args:
        env: gets the lock's path, for the engine process that is started next.
        arrive: what the server does first when its turn has come, in the waiting thread.
        leave: ends this process: with 0 when the input ends, with 2 when `arrive` fails. Does not return.
    """

    def __init__(
        self, env: MutableMapping[str, str], arrive: Callable[[], Found], leave: Callable[[int], NoReturn]
    ) -> None:
        self._found: Future[Found] = Future()
        self._env, self._arrive, self._leave = env, arrive, leave
        # Nobody else's, and gone with this process; opened by its path, it is locked apart from this descriptor.
        self._lock = os.memfd_create("atropos-go")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        env[ENV_ENGINE_LOCK] = f"/proc/{os.getpid()}/fd/{self._lock}"
        threading.Thread(target=self._await, name="await-go", daemon=True).start()

    def result(self) -> Found:
        """What `arrive` gave; waits for it. From here on the engine has passed."""
        self._env.pop(ENV_ENGINE_LOCK, None)
        return self._found.result()

    def _await(self) -> None:
        if not is_told_to_go():
            self._leave(0)
        try:
            self._found.set_result(self._arrive())
        except Exception as error:
            print(f"vllm_server: {error}", file=sys.stderr, flush=True)
            self._leave(2)
        # Not closed: an engine that is late would find something else under its number.
        fcntl.flock(self._lock, fcntl.LOCK_UN)


def wait_in_engine(env: MutableMapping[str, str], parts: Sequence[str]) -> None:
    """In an engine process whose server waits: import `parts`, go on when the server does. Elsewhere nothing."""
    if multiprocessing.parent_process() is None or (path := env.pop(ENV_ENGINE_LOCK, None)) is None:
        return
    import_parts(parts)
    logger.info(ENGINE_IMPORTED)
    with open(path, "rb") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_SH)
