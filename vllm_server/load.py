"""How much the server is asked: completions under way, and the seconds in which there were none, exactly.

The door counts, since every request for completions passes it. `/metrics` shows the counts beside vLLM's own, and
`/bridge/info` tells the trainer the idle seconds. What waits for the hold is not under way; a pause is no idleness.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atropos_common.bridge import METRIC_IDLE_S, METRIC_REQUESTS, METRIC_SLOTS, METRIC_VERSION

if TYPE_CHECKING:
    from prometheus_client import Metric


class ServerLoad:
    """Counts since the server began; of one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.under_way = 0
        self.requests = 0
        """For completions, whatever became of them."""
        self._idle_s = 0.0
        self._idle_since = clock()

    @property
    def idle_s(self) -> float:
        """Seconds without a request under way."""
        return self._idle_s + (0.0 if self.under_way else self._clock() - self._idle_since)

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request for completions, from its arrival to the end of its answer."""
        self._idle_s = self.idle_s
        self.requests += 1
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            if not self.under_way:
                self._idle_since = self._clock()


class LoadMetrics:
    """The counts for Prometheus, as a collector of its registry."""

    def __init__(self, load: ServerLoad, slots: int, version: Callable[[], int | None]) -> None:
        """`slots`: sequences that the engine computes at a time, vLLM's --max-num-seqs; `version`: of its weights."""
        self._load, self._slots, self._version = load, slots, version

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield CounterMetricFamily(METRIC_IDLE_S, "Seconds without a request for completions.", self._load.idle_s)
        yield CounterMetricFamily(METRIC_REQUESTS, "Requests for completions.", self._load.requests)
        yield GaugeMetricFamily(METRIC_SLOTS, "Sequences that are computed at a time, at most.", self._slots)
        if (version := self._version()) is not None:
            yield GaugeMetricFamily(METRIC_VERSION, "Version of the weights that answer.", version)
