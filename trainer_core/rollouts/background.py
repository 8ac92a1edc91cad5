"""A call in a thread of its own, whose answer is waited for later, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from trainer_core.errors import Stopped

T = TypeVar("T")
LOOK_S = 0.2
"""Between two looks at the stop while the answer does not come."""
IDLE_S = 1.0


class Background(Generic[T]):
    """One call, begun at once. A stop ends the wait for it, not the call."""

    def __init__(self, call: Callable[[], T], stop: threading.Event) -> None:
        self._stop = stop
        self._answers: SimpleQueue[T | BaseException] = SimpleQueue()
        threading.Thread(target=self._run, args=(call,), daemon=True, name="run-api").start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._answers.put(call())
        except BaseException as error:
            self._answers.put(error)

    def answer(self, on_idle: Callable[[], None] = lambda: None) -> T:
        """Wait for it, once; `on_idle` is called about once a second and may raise.

        Raises:
            Stopped: the stop is set. Else what the call raised.
        """
        next_check = time.monotonic() + IDLE_S
        while True:
            try:
                found = self._answers.get(timeout=LOOK_S)
            except Empty:
                if self._stop.is_set():
                    raise Stopped from None
                if time.monotonic() >= next_check:
                    on_idle()
                    next_check = time.monotonic() + IDLE_S
                continue
            if isinstance(found, BaseException):
                raise found
            return found
