"""What the programs of a stack say of themselves between records, as numbers: vLLM's `/metrics`, run-api's `/status`,
and what the host and its GPUs are used for. `GaugeReader` fetches a `Sample`, `GaugeHistory` keeps them and makes rates
of counters, `split_*` tell who holds what.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from atropos_common.bridge import METRIC_VERSION
from atropos_common.control import ComponentStatus, GpuStatus, Role, RunStatus, State
from atropos_common.http import LIMITS

KEPT = 900
"""Samples kept: a quarter of an hour at one a second."""

ANSWER_S = 1.0
MOST_BYTES = 4_000_000
"""A longer answer is no metrics page."""
_ANSWERING = (State.HEALTHY, State.UNHEALTHY)
_CGROUP = Path("/sys/fs/cgroup")
OTHER = "other"
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_use",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    METRIC_VERSION: "weight_version",
}
"""The server's names and ours. Several lines of one name (an engine each, with data parallelism) are added up."""


@dataclass(frozen=True)
class EngineMetrics:
    """One look at an engine's counters. None where it does not tell."""

    running: float | None = None
    """Requests in the present batch."""
    waiting: float | None = None
    kv_use: float | None = None
    """Share of the KV cache in use, 0 to 1; the mean of several engines behind one port."""
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    weight_version: float | None = None
    """Of the weights that answer."""


@dataclass(frozen=True)
class HostUse:
    """The whole machine, or the container where that has limits of its own; memory in bytes, CPU in percent of all."""

    cpu_percent: float | None = None
    cores: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True)
class Sample:
    """Everything that was read at one moment."""

    time: float
    engines: dict[str, EngineMetrics] = field(default_factory=dict)
    queue: int | None = None
    """Groups that wait in run-api for the trainer; None where nobody answers."""
    host: HostUse = HostUse()


def parse_metrics(text: str) -> EngineMetrics:
    """The figures of a Prometheus page that are shown. Lines that cannot be read are left out."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if not line.startswith(("vllm:", METRIC_VERSION)):
            continue
        name = line.partition("{")[0] if "{" in line else line.partition(" ")[0]
        ours = _GAUGES.get(name)
        if ours is None:
            continue
        try:
            found.setdefault(ours, []).append(float(line[line.rfind("}") + 1 :].split()[0 if "{" in line else 1]))
        except (ValueError, IndexError):
            continue
    means = {"kv_use": sum(found["kv_use"]) / len(found["kv_use"])} if "kv_use" in found else {}
    return EngineMetrics(**{name: sum(values) for name, values in found.items()} | means)


def parse_queue(text: str) -> int | None:
    """`queue_size` of run-api's `/status`."""
    try:
        size = json.loads(text)["queue_size"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return size if isinstance(size, int) and not isinstance(size, bool) else None


@dataclass(frozen=True)
class EngineRates:
    """What a screen shows of an engine: counters turned into rates between two looks."""

    running: float | None
    waiting: float | None
    kv_use: float | None
    prefix_hit_rate: float | None
    """Share of looked-up prefix tokens that were there, over the window; None where none were looked up."""
    generated_per_s: float | None
    weight_version: float | None = None


@dataclass
class GaugeHistory:
    """The newest samples, oldest first."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT))
    cards: deque[dict[int, tuple[float | None, float]]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Per look at the supervisor's status: utilisation and share of memory in use of each GPU, both 0 to 1."""

    _cards_at: float | None = None

    @property
    def last(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    def add(self, sample: Sample) -> None:
        """Take a sample in; one that is not newer than the last is dropped (a clock that was set back starts anew)."""
        last = self.last
        if last and sample.time < last.time:
            self.samples.clear()
        elif last and sample.time == last.time:
            self.samples.pop()
        self.samples.append(sample)

    def rates(self, engine: str, window_s: float = 10.0) -> EngineRates | None:
        """How `engine` works, over the newest `window_s`; None when it did not answer the last time."""
        last = self.last
        now = last.engines.get(engine) if last else None
        if last is None or now is None:
            return None
        old = next((s for s in self.samples if s.time >= last.time - window_s and engine in s.engines), last)
        before, elapsed = old.engines[engine], last.time - old.time
        looked_up = _grown(before.prefix_queries, now.prefix_queries)
        hits = _grown(before.prefix_hits, now.prefix_hits)
        generated = _grown(before.generated_tokens, now.generated_tokens)
        return EngineRates(
            running=now.running,
            waiting=now.waiting,
            kv_use=now.kv_use,
            prefix_hit_rate=hits / looked_up if hits is not None and looked_up else None,
            generated_per_s=generated / elapsed if generated is not None and elapsed > 0 else None,
            weight_version=now.weight_version,
        )

    def queue(self) -> tuple[list[float], list[float]]:
        """Times and depths of run-api's queue."""
        known = [(sample.time, float(sample.queue)) for sample in self.samples if sample.queue is not None]
        return [time for time, _ in known], [depth for _, depth in known]

    def add_cards(self, gpus: Iterable[GpuStatus], now: float) -> None:
        """Remember how busy and how full the GPUs are; of one moment once."""
        found = {gpu.index: (_share(gpu.utilization_percent), gpu.used_bytes / max(gpu.total_bytes, 1)) for gpu in gpus}
        if found and now == self._cards_at:
            self.cards.pop()
        if found:
            self.cards.append(found)
            self._cards_at = now


def _share(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _grown(before: float | None, now: float | None) -> float | None:
    """By how much a counter grew; a counter that fell began anew with its process."""
    if before is None or now is None or not math.isfinite(now - before):
        return None
    return now - before if now >= before else now


class GaugeReader:
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


@dataclass(frozen=True)
class Share:
    """One part of a bar; bytes, or percent for CPU."""

    label: str
    amount: float


@dataclass(frozen=True)
class Split:
    """Parts in the order in which they are drawn; what is left of `total` is free."""

    parts: list[Share]
    total: float
    note: str = ""
    """How sure the parts are, where that has to be said."""

    @property
    def used(self) -> float:
        return sum(part.amount for part in self.parts)


def split_gpu(
    gpu: GpuStatus, rows: Sequence[ComponentStatus], planned: Mapping[str, Sequence[int]], trainer_bytes: float | None
) -> Split:
    """The memory of one GPU by component.

    NVML names processes by pids of the host, so inside a container it tells nothing apart. Then the trainer's own
    figure stands for the trainer, if it has just this GPU; the rest is told under the names of all who may hold it.

    Args:
        planned: GPUs of each component, as the plan hands them out.
        trainer_bytes: what torch has reserved in the trainer process, from its telemetry.
    """
    parts = [Share(row.name, float(gpu.held_bytes[row.name])) for row in rows if gpu.held_bytes.get(row.name)]
    rest = max(0.0, gpu.used_bytes - sum(part.amount for part in parts))
    if parts or not rest:
        return Split([*parts, *_rest(OTHER, rest)], gpu.total_bytes)
    here = [row for row in rows if row.pid and gpu.index in planned.get(row.name, ())]
    trainers = [row for row in here if row.role is Role.TRAINER and list(planned.get(row.name, ())) == [gpu.index]]
    if len(trainers) == 1 and trainer_bytes and trainer_bytes <= rest:
        parts = [Share(trainers[0].name, trainer_bytes)]
        rest -= trainer_bytes
    names = [row.name for row in here if row.name not in {part.label for part in parts}]
    note = "the driver does not tell processes apart here" if here else ""
    return Split([*parts, *_rest(" + ".join([*names, OTHER]), rest)], gpu.total_bytes, note)


def split_memory(rows: Iterable[ComponentStatus], host: HostUse) -> Split | None:
    """The host's memory by component; None where it is not known."""
    if host.memory_total is None or host.memory_used is None:
        return None
    parts = [Share(row.name, float(row.memory_bytes)) for row in rows if row.memory_bytes]
    rest = max(0.0, host.memory_used - sum(part.amount for part in parts))
    return Split([*parts, *_rest(OTHER, rest)], host.memory_total)


def split_cpu(rows: Sequence[ComponentStatus], host: HostUse) -> Split | None:
    """CPU by component, in percent of one core; the total is all cores."""
    if host.cpu_percent is None or not host.cores:
        return None
    if any(row.pid for row in rows) and all(row.cpu_percent is None for row in rows):
        return None  # the supervisor has just begun to measure: whose work it is, is not known
    parts = [Share(row.name, row.cpu_percent) for row in rows if row.cpu_percent]
    rest = max(0.0, host.cpu_percent * host.cores - sum(part.amount for part in parts))
    return Split([*parts, *_rest(OTHER, rest)], 100 * host.cores)


def _rest(label: str, amount: float) -> list[Share]:
    return [Share(label, amount)] if amount > 0 else []


def cells(split: Split, width: int) -> list[int]:
    """How many of `width` cells each part gets: never more than all, and a part that is there has at least one.

    Rounded by cumulated sums, so that the parts end where their sum ends.
    """
    if split.total <= 0 or width <= 0:
        return [0] * len(split.parts)
    edges, sum_so_far, taken = [], 0.0, 0
    for part in split.parts:
        sum_so_far += part.amount
        end = min(width, max(round(sum_so_far / split.total * width), taken + (1 if part.amount > 0 else 0)))
        edges.append(end - taken)
        taken = end
    return edges
