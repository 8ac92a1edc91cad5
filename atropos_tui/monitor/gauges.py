"""What the programs of a stack say of themselves between records, as numbers: vLLM's `/metrics`, run-api's `/status`,
the host. Pure: parsing, rates from counters, a bounded history. `sampler` fetches the texts.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from atropos_common.control import GpuStatus

KEPT = 900
"""Samples kept: a quarter of an hour at one a second."""

_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_use",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
}
"""vLLM's names and ours. Several lines of one name (an engine each, with data parallelism) are added up."""


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
        if not line.startswith("vllm:"):
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
    prompt_per_s: float | None


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
        return EngineRates(
            running=now.running,
            waiting=now.waiting,
            kv_use=now.kv_use,
            prefix_hit_rate=hits / looked_up if hits is not None and looked_up else None,
            generated_per_s=_rate(before.generated_tokens, now.generated_tokens, elapsed),
            prompt_per_s=_rate(before.prompt_tokens, now.prompt_tokens, elapsed),
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


def _rate(before: float | None, now: float | None, elapsed: float) -> float | None:
    grown = _grown(before, now)
    return grown / elapsed if grown is not None and elapsed > 0 else None
