"""Waiting for an inference server that starts, or comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from trainer_core.errors import EngineGone, Stopped

POLL_S = 0.1
ASK_S = 1.0
"""Between two questions to the supervisor."""

T = TypeVar("T")


def wait_for_server(
    ready: Callable[[], T],
    timeout_s: float,
    stop: threading.Event,
    *,
    meanwhile: tuple[type[Exception], ...] = (EngineGone,),
    coming: Callable[[], str | None] = lambda: None,
) -> T:
    """What `ready` returns once it no longer raises one of `meanwhile`; why it waits is printed once for each reason.

    Args:
        coming: what somebody who sees to the server says of it ("vllm is starting"). The time does not run while he
            does: he has limits of his own. Null: nobody sees to it.

    Raises:
        Exception: the last of `meanwhile`, after `timeout_s`.
        Stopped: `stop` was set.
    """
    deadline = time.monotonic() + timeout_s
    asked = 0.0
    printed = ""
    while True:
        try:
            return ready()
        except meanwhile as error:
            now = time.monotonic()
            if now - asked >= ASK_S:
                asked = now
                news = coming()
                deadline = max(deadline, now + timeout_s) if news else deadline
                reason = f"{news}: {error}" if news else str(error)
                if reason != printed:
                    printed = reason
                    print(f"Waiting for the inference server: {reason}")
            if now > deadline:
                raise type(error)(f"{error} (waited {timeout_s:.0f} s)") from None
        if stop.wait(POLL_S):
            raise Stopped
