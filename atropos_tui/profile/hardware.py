"""What this machine has: GPUs by NVML, memory, and what is known here about the models. Plans themselves are pure."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from atropos_tui.profile.models import Model, read_model
from atropos_tui.profile.nvml import Nvml
from atropos_tui.profile.plan import Site, engine_model, resolve_path


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


@dataclass(frozen=True)
class Inventory:
    """The machine, and by each engine's name what it serves, or in words why nothing is known about it."""

    machine: Machine
    models: dict[str, Model | str]


def read_machine() -> Machine:
    """This machine; without a driver it has no GPUs."""
    try:
        gpus = tuple(Gpu(card.name, card.total) for card in Nvml().read())
    except Exception:  # NVML has an error class per cause, and none of them matters here
        gpus = ()
    return Machine(gpus, psutil.virtual_memory().total)


def gpu_count() -> int:
    """Number of NVIDIA GPUs that the driver shows; 0 without one."""
    return len(read_machine().gpus)


def take_inventory(site: Site) -> Inventory:
    """What this machine has for a profile; the network is never asked."""
    made = {site.text(step.creates): step.name for step in site.profile.prepare if step.creates}
    known: dict[str, Model | str] = {}
    for section in site.profile.vllm:
        name = engine_model(site, section)
        if name not in known:
            known[name] = read_model(name)
        if isinstance(known[name], str) and name in made and not resolve_path(name).exists():
            known[name] = f"{made[name]} makes the model when the run starts"
    models = {section.name: known[engine_model(site, section)] for section in site.profile.vllm}
    return Inventory(read_machine(), models)
