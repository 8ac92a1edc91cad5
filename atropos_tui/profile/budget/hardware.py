"""GPUs and host memory: of this machine, or by name for another one.

read_machine()            # from NVML and the host
named_machine("8xH100")   # also 2xH200, 1xA100-40GB, 4x80GB, 2xH200,1xL40S
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil

from atropos_common.models.model_math import GPU_MEMORY
from atropos_tui.gpu import Nvml, given_here

MOST_GPUS = 1024
_NAMED = re.compile(r"(?:(\d{1,4})\s*[xX*]\s*)?([A-Za-z0-9][A-Za-z0-9 _-]*)")
_SIZE = re.compile(r"(?:(?P<name>.+)-)?(?P<size>\d{1,4})\s*GI?B", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    name: str
    total: int


@dataclass(frozen=True)
class Hardware:
    """GPUs by index, and the host's memory in bytes."""

    gpus: tuple[Gpu, ...]
    host: int | None
    is_here: bool = True
    """The machine that this process runs on."""


def read_machine() -> Hardware:
    """No GPUs without a driver; within a SLURM job only the job's."""
    try:
        gpus = tuple(Gpu(card.name, card.total) for card in Nvml(given_here()).read())
    except Exception:  # NVML has one error class for each cause; all mean that no GPU is usable
        gpus = ()
    return Hardware(gpus, psutil.virtual_memory().total)


def named_machine(text: str) -> Hardware:
    """The machine that `--gpus` names.

    Raises:
        ValueError: unknown GPU; the message lists the known ones.
    """
    gpus: list[Gpu] = []
    for part in text.split(","):
        match = _NAMED.fullmatch(part.strip())
        if match is None or not 0 < int(match[1] or 1) <= MOST_GPUS - len(gpus):
            raise ValueError(f"not a list of GPUs such as {EXAMPLES}")
        gpus += [_gpu(match[2])] * int(match[1] or 1)
    return Hardware(tuple(gpus), None, is_here=False)


EXAMPLES = "8xH100, 2xH200, 1xA100-40GB, or by size as 4x80GB"


def _gpu(text: str) -> Gpu:
    name = re.sub(r"[\s_-]+", "-", text.strip()).upper().removeprefix("NVIDIA-")
    if name in GPU_MEMORY:
        return Gpu(name, GPU_MEMORY[name] * 1024**2)
    if size := _SIZE.fullmatch(name):
        known = GPU_MEMORY.get(size["name"] or "")
        # Marketing sizes differ from the usable memory: an H100-80GB has 79.6 GiB, an H200-141GB
        # 140.4.
        if known and abs(known / 1024 - int(size["size"])) < 3:
            return Gpu(name, known * 1024**2)
        if int(size["size"]):
            return Gpu(name, int(size["size"]) * 1024**3)
    known_names = ", ".join(GPU_MEMORY)
    raise ValueError(
        f"unknown GPU {text.strip()!r}; use one of {known_names}, or a size such as 4x80GB"
    )
