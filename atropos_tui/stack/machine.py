"""What this machine has: GPUs by NVML, and memory. Asked by `validate`, `plan` and `up`; plans themselves are pure."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from atropos_tui.stack.nvml import Nvml


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    total: int


@dataclass(frozen=True)
class Machine:
    """GPUs by index, and the host's memory in bytes."""

    gpus: tuple[Gpu, ...]
    host: int


def read_machine() -> Machine:
    """This machine; without a driver it has no GPUs."""
    return Machine(_gpus(), psutil.virtual_memory().total)


def _gpus() -> tuple[Gpu, ...]:
    try:
        return tuple(Gpu(card.name, card.total) for card in Nvml().read())
    except Exception:  # NVML has an error class per cause, and none of them matters here
        return ()


def gpu_count() -> int:
    """Number of NVIDIA GPUs that the driver shows; 0 without one."""
    return len(read_machine().gpus)
