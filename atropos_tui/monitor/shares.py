"""Who holds what of a GPU's or the host's memory: parts for a bar, with an `other` part. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from atropos_common.control import ComponentStatus, GpuStatus, Role
from atropos_tui.monitor.gauges import HostUse

OTHER = "other"


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
