"""CPU and memory of every component, measured only when someone asks, at most every two seconds, in a thread."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from atropos_common.control import GpuStatus
from atropos_tui.supervisor import procfs
from atropos_tui.supervisor.gpu_memory import GpuMemory
from atropos_tui.supervisor.members import Tracker

MAX_AGE_S = 2.0
PATIENCE_S = 0.02
OLDEST_S = 10.0
"""A sample that is not that old is shown when a new one takes longer than `PATIENCE_S`."""
GPU_PATIENCE_S = 0.3
"""`ps` answers without GPU figures rather than wait for a slow driver, or for the first reading."""
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Of one component, descendants included; memory in bytes, CPU in percent of one core since the last sample."""

    pids: list[int] = field(default_factory=list)
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    at: float = 0.0
    """When it was measured, in Unix seconds."""


class Sampler:
    """Keeps the newest sample."""

    def __init__(self, tracker: Tracker, gpus: GpuMemory) -> None:
        self._tracker = tracker
        self._gpu_memory = gpus
        self.gpus: list[GpuStatus] = []
        """Every card of the machine, as of the newest sample."""
        self._measuring: asyncio.Task[None] | None = None
        self._taken = 0.0
        self._cpu: dict[tuple[int, int], int] = {}
        self._usage: dict[str, Usage] = {}

    async def fresh(self) -> dict[str, Usage]:
        """Usage by component, at most `MAX_AGE_S` old; on a machine so busy that measuring takes long, `OLDEST_S`."""
        age = time.monotonic() - self._taken
        if age > MAX_AGE_S or self._measuring is not None:
            if self._measuring is None:
                self._measuring = asyncio.create_task(self._measure_all())
            patience_s = PATIENCE_S if self._usage and age < OLDEST_S else None
            await asyncio.wait({self._measuring}, timeout=patience_s)
        return self._usage

    async def _measure_all(self) -> None:
        try:
            self._usage = await self._with_gpus(await asyncio.to_thread(self._sample))
        finally:
            self._measuring = None

    async def _with_gpus(self, usage: dict[str, Usage]) -> dict[str, Usage]:
        patience_s = GPU_PATIENCE_S if self._gpu_memory.reader.awake else 0.0
        members = {name: found.pids for name, found in usage.items()}
        held, cards = await self._gpu_memory.note(members, patience_s)
        self.gpus = [
            GpuStatus(
                index=card.index,
                name=card.name,
                used_bytes=card.used,
                total_bytes=card.total,
                utilization_percent=card.utilization,
                power_w=card.power_w,
                temperature_c=card.temperature_c,
                held_bytes=self._gpu_memory.held_on(card, members),
            )
            for card in cards
        ]
        return {name: replace(found, gpu_bytes=held.get(name)) for name, found in usage.items()}

    def _sample(self) -> dict[str, Usage]:
        at = time.time()
        rows = self._tracker.survey()
        now = time.monotonic()
        elapsed = now - self._taken if self._taken else None
        usage = {name: self._measure(members, elapsed, at) for name, members in rows.items()}
        self._cpu = {row.key: row.cpu_ticks for members in rows.values() for row in members}
        self._taken = now
        return usage

    def _measure(self, members: list[procfs.Proc], elapsed: float | None, at: float) -> Usage:
        memory = [size for size in (resident(row.pid) for row in members) if size is not None]
        known = [row.cpu_ticks - self._cpu[row.key] for row in members if row.key in self._cpu]
        cpu = 100 * sum(known) / procfs.TICKS_PER_SECOND / elapsed if elapsed and known else None
        return Usage(sorted(row.pid for row in members), cpu, sum(memory) if memory else None, at=at)


def resident(pid: int) -> int | None:
    """Proportional set size of `pid` in bytes, or its resident size where the kernel does not say."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return None
