"""Fetch what `gauges` understands: `Sampler().read(status)`, in a thread, since each answer may take a second.

Nothing here raises for what a program answers or does not answer: what could not be read is left out of the sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from atropos_common.control import ComponentStatus, Role, RunStatus, State
from atropos_common.http import LIMITS
from atropos_tui.monitor.gauges import HostUse, Sample, parse_metrics, parse_queue

ANSWER_S = 1.0
MOST_BYTES = 4_000_000
"""A longer answer is no metrics page."""
_ANSWERING = (State.HEALTHY, State.UNHEALTHY)
_CGROUP = Path("/sys/fs/cgroup")


class Sampler:
    """Keeps connections and what is needed to turn CPU seconds into percent."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._http = httpx.Client(timeout=ANSWER_S, limits=LIMITS, trust_env=False)
        self._cpu = _cpu_seconds()

    def read(self, status: RunStatus | None) -> Sample:
        """Look at every engine and at run-api, all at once, and at the host."""
        rows = [row for row in status.components if row.port and row.state in _ANSWERING] if status else []
        engines = [row for row in rows if row.role is Role.ENGINE]
        apis = [row for row in rows if row.role is Role.API]
        answers = self._ask([(row, "/metrics") for row in engines] + [(row, "/status") for row in apis])
        metrics = dict(zip((row.name for row in engines), answers, strict=False))
        queues = [parse_queue(text) for text in answers[len(engines) :] if text is not None]
        return Sample(
            time=self._clock(),
            engines={name: parse_metrics(text) for name, text in metrics.items() if text is not None},
            queue=next((depth for depth in queues if depth is not None), None),
            host=self._host(),
        )

    def close(self) -> None:
        self._http.close()

    def _host(self) -> HostUse:
        """CPU since the last call and memory, of the container where it has a limit, else of the machine."""
        before, self._cpu = self._cpu, _cpu_seconds()
        busy, whole = (now - then for now, then in zip(self._cpu, before, strict=True))
        used, total = _memory()
        return HostUse(100 * busy / whole if whole > 0 else None, float(psutil.cpu_count() or 1), used, total)

    def _ask(self, routes: list[tuple[ComponentStatus, str]]) -> list[str | None]:
        if not routes:
            return []
        with ThreadPoolExecutor(len(routes), thread_name_prefix="gauges") as pool:
            return list(pool.map(lambda route: self._get(route[0].port, route[1]), routes))

    def _get(self, port: int | None, path: str) -> str | None:
        try:
            with self._http.stream("GET", f"http://127.0.0.1:{port}{path}") as answer:
                if answer.status_code != 200:
                    return None
                body = b""
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        return None
                return body.decode("utf-8", "replace")
        except (httpx.HTTPError, OSError):
            return None


def _cpu_seconds() -> tuple[float, float]:
    """Seconds of all cores that were spent working, and all of them.

    psutil's own percentages are since the last call of the same thread, and each look here may be in another one.
    """
    times = psutil.cpu_times()
    whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # these are in user and nice
    return whole - times.idle - getattr(times, "iowait", 0.0), whole


def _memory() -> tuple[int, int]:
    """Bytes used, and bytes there are."""
    memory = psutil.virtual_memory()
    used, total = memory.total - memory.available, memory.total
    limit, held = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and held is not None and limit < total:
        return max(0, held - _reclaimable()), limit
    return used, total


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None


def _reclaimable() -> int:
    """Cached files of a container: the kernel gives them back when memory is needed."""
    try:
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0
