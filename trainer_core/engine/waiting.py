"""Waiting for an inference server that starts, or comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from trainer_core.errors import EngineGone, Stopped

POLL_S = 0.1

T = TypeVar("T")


def wait_for_server(
    ready: Callable[[], T],
    timeout_s: float,
    stop: threading.Event,
    *,
    meanwhile: tuple[type[Exception], ...] = (EngineGone,),
) -> T:
    """What `ready` returns once it no longer raises one of `meanwhile`; why it waits is printed once for each reason.

    Raises:
        Exception: the last of `meanwhile`, after `timeout_s`.
        Stopped: `stop` was set.
    """
    deadline = time.monotonic() + timeout_s
    said = ""
    while True:
        try:
            return ready()
        except meanwhile as error:
            if str(error) != said:
                said = str(error)
                print(f"Waiting for the inference server: {said}")
            if time.monotonic() > deadline:
                raise type(error)(f"{said} (waited {timeout_s:.0f} s)") from None
        if stop.wait(POLL_S):
            raise Stopped
