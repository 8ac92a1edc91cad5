"""Run a screen in this terminal until it is left, or until the terminal itself is gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from atropos_tui.ui.acting import ActingApp, Outcome

LEAVE_S = 3.0
"""How long the screen may take to close once it was told to go."""


def run_app(app: ActingApp) -> Outcome:
    """Show `app` until it is left. TERM, HUP and a terminal that is gone detach, as the driver itself would not."""
    # A long history is half a million objects that stay: looking for cycles among them costs a fifth of reading it.
    gc.set_threshold(50_000, 20, 100)
    # Threads parse records and logs: a key need not wait for the usual five milliseconds of each of them.
    sys.setswitchinterval(0.0005)

    left = threading.Event()
    # The driver's writer can block for ever on a terminal that is gone; the screen owns nothing, so it may just go.
    last_resort = threading.Timer(LEAVE_S, os._exit, (0,))
    last_resort.daemon = True

    async def attended() -> Outcome | None:
        loop = asyncio.get_running_loop()

        def leave() -> None:
            if not left.is_set():
                with contextlib.suppress(RuntimeError):  # told twice
                    last_resort.start()
                loop.call_soon_threadsafe(app.exit, "detach")

        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, leave)
        threading.Thread(target=_watch_terminal, args=(leave,), name="terminal", daemon=True).start()
        try:
            return await app.run_async()
        finally:
            left.set()
            last_resort.cancel()

    return asyncio.run(attended()) or ("failed" if app.return_code else "detach")


def _watch_terminal(gone: Callable[[], None]) -> None:
    """Wait until the other side of our terminal is closed. Only who owns the terminal is told by a HUP signal; any
    other would read its end for ever, at the cost of a whole core."""
    if sys.__stdin__ is None or not sys.__stdin__.isatty():
        return
    watched = select.poll()
    watched.register(sys.__stdin__.fileno(), 0)  # a hang-up is told unasked
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in watched.poll()):
        pass
    gone()
