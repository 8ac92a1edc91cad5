"""Use of machine, components and engines, from the supervisor's gauges."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from atropos_common.protocol.control import ComponentStatus, GpuStatus, Role
from atropos_common.protocol.records import GaugesRecord, HostUse

# Limit of the records: 3.5 kB each with three components, more with GPUs. Beyond it every second
# record before the newest hour is dropped, as in the file.
KEPT, NEWEST = 1440, 720
RATE_WINDOW_S = 15.0  # window for rates of counters
LEAST_UPDATES = 2  # weight updates in a window without which the rate of their work is unknown
OTHER = "other"


@dataclass(frozen=True)
class EngineRates:
    """Gauges of an engine, and rates of its counters."""

    running: float | None
    waiting: float | None
    kv_use: float | None
    prefix_hit_rate: float | None
    """Share of looked-up prefix tokens found in the cache."""
    generated_per_s: float | None
    weight_version: float | None = None


@dataclass
class GaugeHistory:
    """Newest records, oldest first."""

    samples: deque[GaugesRecord] = field(default_factory=deque)

    @property
    def last(self) -> GaugesRecord | None:
        return self.samples[-1] if self.samples else None

    def add(self, sample: GaugesRecord) -> None:
        """Add a record. An older one clears the history: the clock was set back."""
        last = self.last
        if last and sample.time < last.time:
            self.samples.clear()
        self.samples.append(sample)
        if len(self.samples) > KEPT:
            kept = list(self.samples)
            self.samples = deque([*kept[:-NEWEST:2], *kept[-NEWEST:]])

    def busy(self, gpus: Iterable[int], seconds: float) -> float | None:
        """Return the mean share of the newest `seconds` in which these GPUs of the supervisor's
        machine computed; None without a measurement."""
        wanted, end = set(gpus), self.last.time if self.last else 0.0
        inside = takewhile(lambda old: old.time >= end - seconds, reversed(self.samples))
        shares = [
            gpu.utilization_percent / 100
            for sample in inside
            for gpu in sample.gpus
            if gpu.index in wanted and not gpu.node and gpu.utilization_percent is not None
        ]
        return sum(shares) / len(shares) if shares else None

    def recomputed(self, engines: Iterable[str], seconds: float) -> float | None:
        """Return the tokens that `engines` computed again for each new one over the newest
        `seconds`; None if unknown, or with fewer than `LEAST_UPDATES` weight versions in them."""
        end = self.last.time if self.last else 0.0
        inside = list(takewhile(lambda old: old.time >= end - seconds, reversed(self.samples)))
        again = new = 0.0
        for engine in engines:
            seen = [sample.engines[engine] for sample in inside if engine in sample.engines]
            if not seen:
                return None
            more = _grown(seen[-1].recomputed_tokens, seen[0].recomputed_tokens)
            generated = _grown(seen[-1].generated_tokens, seen[0].generated_tokens)
            versions = _grown(seen[-1].weight_version, seen[0].weight_version)
            if more is None or generated is None or versions is None or versions < LEAST_UPDATES:
                return None
            again, new = again + more, new + generated
        return again / new if new else None

    def rates(self, engine: str) -> EngineRates | None:
        """Return rates of `engine` over the newest `RATE_WINDOW_S`; None if it did not answer."""
        last = self.last
        now = last.engines.get(engine) if last else None
        if last is None or now is None:
            return None
        inside = list(
            takewhile(lambda old: old.time >= last.time - RATE_WINDOW_S, reversed(self.samples))
        )
        # `inside` is newest first, so this is the oldest sample of the window; the newest always
        # fits.
        old = next(sample for sample in reversed(inside) if engine in sample.engines)
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
        """Return times and depths of run-api's queue."""
        known = [(one.time, float(one.queue)) for one in self.samples if one.queue is not None]
        return [time for time, _ in known], [depth for _, depth in known]

    def card(self, index: int, node: str = "") -> list[tuple[float | None, float] | None]:
        """Return utilization and used memory share (0 to 1) of a GPU, by record."""
        found: list[tuple[float | None, float] | None] = []
        for sample in self.samples:
            cards = (gpu for gpu in sample.gpus if (gpu.node, gpu.index) == (node, index))
            if card := next(cards, None):
                busy = card.utilization_percent
                held = min(1.0, card.used_bytes / max(card.total_bytes, 1))
                found.append((None if busy is None else busy / 100, held))
            else:
                found.append(None)
        return found

    def used(self, rows: Iterable[ComponentStatus]) -> list[ComponentStatus]:
        """Add the newest CPU and memory use to `rows` that have none."""
        use = self.last.components if self.last else {}
        return [
            row.model_copy(update=use[row.name].model_dump())
            if row.name in use and row.cpu_percent is None and row.memory_bytes is None
            else row
            for row in rows
        ]


def _grown(before: float | None, now: float | None) -> float | None:
    # A counter that fell has restarted from 0 with its process.
    if before is None or now is None or not math.isfinite(now - before):
        return None
    return now - before if now >= before else now


@dataclass(frozen=True)
class Share:
    """One part of a bar: bytes, or percent for CPU."""

    label: str
    amount: float


@dataclass(frozen=True)
class Split:
    """Parts in drawing order; the rest of `total` is free."""

    parts: list[Share]
    total: float
    note: str = ""
    """Limits of the accuracy, if any."""

    @property
    def used(self) -> float:
        return sum(part.amount for part in self.parts)


def split_gpu(
    gpu: GpuStatus,
    rows: Sequence[ComponentStatus],
    planned: Mapping[str, Sequence[int]],
    trainer_bytes: float | None,
) -> Split:
    """Divide the memory of one GPU by component; `trainer_bytes`: reserved by torch in the
    trainer."""
    held = ((row.name, gpu.held_bytes.get(row.name)) for row in rows)
    parts = [Share(name, float(amount)) for name, amount in held if amount]
    rest = max(0.0, gpu.used_bytes - sum(part.amount for part in parts))
    if parts or not rest:
        return Split([*parts, *_rest(OTHER, rest)], gpu.total_bytes)
    here = [row for row in rows if row.pid and gpu.index in planned.get(row.name, ())]
    alone = [row for row in here if list(planned.get(row.name, ())) == [gpu.index]]
    trainers = [row for row in alone if row.role is Role.TRAINER]
    if len(trainers) == 1 and trainer_bytes and trainer_bytes <= rest:
        parts = [Share(trainers[0].name, trainer_bytes)]
        rest -= trainer_bytes
    names = [row.name for row in here if row.name not in {part.label for part in parts}]
    note = "the driver does not tell processes apart here" if here else ""
    return Split([*parts, *_rest(" + ".join([*names, OTHER]), rest)], gpu.total_bytes, note)


def split_memory(rows: Iterable[ComponentStatus], host: HostUse) -> Split | None:
    """Divide the host's memory by component, if known."""
    if host.memory_total is None or host.memory_used is None:
        return None
    parts = [Share(row.name, float(row.memory_bytes)) for row in rows if row.memory_bytes]
    rest = max(0.0, host.memory_used - sum(part.amount for part in parts))
    return Split([*parts, *_rest(OTHER, rest)], host.memory_total)


def split_cpu(rows: Sequence[ComponentStatus], host: HostUse) -> Split | None:
    """Divide CPU use by component, in percent of one core."""
    if host.cpu_percent is None or not host.cores:
        return None
    if any(row.pid for row in rows) and all(row.cpu_percent is None for row in rows):
        return None  # the first measurement of each process is still missing
    parts = [Share(row.name, row.cpu_percent) for row in rows if row.cpu_percent]
    rest = max(0.0, host.cpu_percent * host.cores - sum(part.amount for part in parts))
    return Split([*parts, *_rest(OTHER, rest)], 100 * host.cores)


def _rest(label: str, amount: float) -> list[Share]:
    return [Share(label, amount)] if amount > 0 else []


def cells(split: Split, width: int) -> list[int]:
    """Return the cells of each part: in all at most `width`, at least one above 0."""
    if split.total <= 0 or width <= 0:
        return [0] * len(split.parts)
    edges, sum_so_far, taken = [], 0.0, 0
    for part in split.parts:
        sum_so_far += part.amount
        least = taken + (1 if part.amount > 0 else 0)
        end = min(width, max(round(sum_so_far / split.total * width), least))
        edges.append(end - taken)
        taken = end
    return edges
