"""Placement of engines on machines and GPUs. Pure; `cluster.checks` refuses what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Machines = Mapping[str, int]
"""GPUs of each machine, in order."""


class Placement(NamedTuple):
    node: str
    gpus: list[int]


@dataclass(frozen=True)
class Demand:
    hosts: Sequence[str]
    each: int = 1
    """Workers of one engine, and its GPUs if there are any."""
    machines: int | None = None
    """Machines of one engine; None: as few as have the GPUs."""
    count: int | None = None
    """Engines; None: as many as `gpus` suffice for."""
    gpus: Sequence[int] = ()
    """Indices on each machine; empty: those that no other section names."""


def host_names(name: str, count: int) -> list[str]:
    return [name, *(f"{name}-{number}" for number in range(2, count + 1))]


def part_names(name: str, count: int) -> list[str]:
    """Component names of an engine over several machines; the first, which serves, has the
    engine's name."""
    return [name, *(f"{name}-node{number}" for number in range(2, count + 1))]


def left_over(machines: Machines, host: str, taken: Mapping[str, Collection[int]]) -> list[int]:
    """GPUs of a machine that are not `taken`."""
    return [gpu for gpu in range(machines.get(host, 0)) if gpu not in taken.get(host, ())]


def place_engines(
    wants: Sequence[Demand], machines: Machines, named: Mapping[str, Collection[int]]
) -> list[list[list[Placement]]]:
    """Engines of each demand, each with its placements, spread evenly over its machines. `named`:
    machine -> GPUs that a section names."""
    # GPUs that are named anywhere are reserved first, whatever the order of the sections.
    taken = {host: set(gpus) for host, gpus in named.items()}
    for want in wants:
        for host in want.hosts:
            taken.setdefault(host, set()).update(want.gpus)
    found = []
    for want in wants:
        free = {host: list(want.gpus) or left_over(machines, host, taken) for host in want.hosts}
        placements = _placements(want, free)
        for engine in placements:
            for placement in engine:
                taken.setdefault(placement.node, set()).update(placement.gpus)
        found.append(placements)
    return found


def _placements(want: Demand, free: Mapping[str, list[int]]) -> list[list[Placement]]:
    hosts, most = list(free), max(map(len, free.values()), default=0)
    if not hosts:
        return [[]] * (want.count or 1)
    parts = want.machines or _fewest(want.each, most, len(hosts))
    groups = [hosts[at:][:parts] for at in range(0, max(1, len(hosts) - parts + 1), parts)]
    # Each engine takes one group of `parts` machines, with `own` GPUs on each of them.
    own = max(1, want.each // parts)
    count = want.count or (max(1, len(groups) * (most // own)) if want.gpus else 1)
    # Group of each engine, spread evenly; the engines of one group take consecutive GPUs.
    on = [index * len(groups) // count for index in range(count)]
    return [
        [
            Placement(host, free[host][on[:index].count(group) * own :][:own])
            for host in groups[group]
        ]
        for index, group in enumerate(on)
    ]


def _fewest(workers: int, most: int, hosts: int) -> int:
    """Smallest number of machines with GPUs for an equal share of the workers."""
    fitting = (
        count for count in range(1, hosts + 1) if workers % count == 0 and workers // count <= most
    )
    return next(fitting, 1)
