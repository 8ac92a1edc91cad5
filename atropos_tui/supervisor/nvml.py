"""Readings of the NVIDIA driver for an event loop, in a thread that may hang without anyone waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Protocol

from atropos_tui.gpu import Card, NoDriverError

PATIENCE_S = 5.0
"""So long a reading may take; a driver in trouble answers after minutes, or never."""
RETRY_S = 30.0
"""After a reading that failed, the driver is left alone for this long."""


class Driver(Protocol):
    """What the gate needs of NVML. Both are called in a thread and may raise anything."""

    def read(self) -> list[Card]:
        """Every card, by index.

        Raises:
            NoDriverError: there is none, and there will be none.
        """
        ...

    def has_open(self, pid: int, index: int) -> bool:
        """Whether the process that is `pid` here really uses card `index`."""
        ...


class Reader:
    """Readings for the event loop: never raises, never blocks, None where there is no answer."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.absent = False
        """There is no driver: nobody has to ask again."""
        self.awake = False
        """A reading has come back: the next ones take milliseconds, not the seconds of the first."""
        self._running: asyncio.Future[list[Card] | None] | None = None
        self._began = 0.0
        self._silent_until = 0.0

    async def cards(self, patience_s: float | None = None) -> list[Card] | None:
        """Every card as it is now; None without a driver, after a failure, and when it takes too long.

        Args:
            patience_s: how long this caller waits, at most `PATIENCE_S` after the reading began.
        """
        if self._running is None:
            if self.absent or time.monotonic() < self._silent_until:
                return None
            self._begin()
        assert self._running is not None
        left = self._began + PATIENCE_S - time.monotonic()
        wait_s = max(0.0, left if patience_s is None else min(left, patience_s))
        running = self._running
        await asyncio.wait([running], timeout=wait_s)
        return running.result() if running.done() else None

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._running, self._began = loop.create_future(), time.monotonic()

        def read() -> None:
            found = self._read()
            with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
                loop.call_soon_threadsafe(self._finish, found)

        # A thread of its own: one of a pool that hangs in the driver would hold up the end of the program.
        threading.Thread(target=read, name="nvml", daemon=True).start()

    def _finish(self, found: list[Card] | None) -> None:
        running, self._running, self.awake = self._running, None, True
        if running is not None:
            running.set_result(found)

    def _read(self) -> list[Card] | None:
        try:
            return self.driver.read()
        except NoDriverError:
            self.absent = True
        except Exception:  # a GPU that fell off the bus must not take the run with it
            self._silent_until = time.monotonic() + RETRY_S
        return None
