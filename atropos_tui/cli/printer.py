"""Printing that never holds up whoever calls it: a paused terminal or a full pipe must not stop a supervisor."""

from __future__ import annotations

import queue
import threading

PATIENCE_S = 2.0
"""How long the end waits for a reader that does not read."""
BACKLOG = 10_000


class Printer:
    """Lines go through a bounded queue to a thread; what does not fit is counted and said at the end."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(BACKLOG)
        self._dropped = 0
        self._thread = threading.Thread(target=self._print, name="printer", daemon=True)

    def say(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def __enter__(self) -> Printer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._dropped:
            self.say(f"({self._dropped} lines were not printed: `atropos-tui events` has them)")
        try:
            self._lines.put(None, timeout=PATIENCE_S)
        except queue.Full:
            return
        self._thread.join(PATIENCE_S)

    def _print(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                print(line, flush=True)
            except (BrokenPipeError, ValueError):
                return  # nobody reads any more; the run goes on
