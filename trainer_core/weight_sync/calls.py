"""Calls that are made all at the same time, and that nobody has to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from atropos_common.group import POLL_S

T = TypeVar("T")


class Calls(Generic[T]):
    """One call for each name, all at the same time, in threads that nobody has to wait for."""

    def __init__(self, calls: Mapping[str, Callable[[], T]]) -> None:
        self.names = list(calls)
        self._results: dict[str, T] = {}
        self._failures: dict[str, Exception] = {}
        for name, call in calls.items():
            threading.Thread(target=self._run, args=(name, call), daemon=True).start()

    def over(self) -> bool:
        """Every call has returned or failed."""
        return not self.waiting()

    def waiting(self) -> list[str]:
        return [name for name in self.names if name not in self._results and name not in self._failures]

    def wait(self, timeout_s: float) -> None:
        """Until every call is over, but no longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.over() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def failures(self) -> dict[str, Exception]:
        return {name: self._failures[name] for name in self.names if name in self._failures}

    def raise_failure(self) -> None:
        for error in self.failures().values():
            raise error

    def results(self) -> dict[str, T]:
        """Of the calls that have returned."""
        return dict(self._results)

    def _run(self, name: str, call: Callable[[], T]) -> None:
        try:
            self._results[name] = call()
        except Exception as error:
            self._failures[name] = error
