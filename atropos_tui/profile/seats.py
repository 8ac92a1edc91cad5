"""Who sits where: engines on the machines of a profile's [[node]] tables, and on which of their GPUs. Data to data.

Nothing here judges: an engine for which too little is left gets too little, and `checks_nodes` says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Machines = Mapping[str, int]
"""GPUs of each machine, by its name, in order."""


class Seat(NamedTuple):
    """A machine, and GPUs of it by index."""

    node: str
    gpus: list[int]


@dataclass(frozen=True)
class Want:
    """What one section asks for."""

    hosts: Sequence[str]
    """The machines that it may take."""
    each: int = 1
    """Workers of one engine, and its GPUs where there are any."""
    machines: int | None = None
    """Machines of one engine, each with as many of its workers; None: as few as have its GPUs."""
    count: int | None = None
    """Engines; None: as many as `gpus` are enough for."""
    gpus: Sequence[int] = ()
    """Of each machine; empty: those that nobody names."""


def host_names(name: str, count: int) -> list[str]:
    """What people call the machines of a [[node]]."""
    return [name, *(f"{name}-{number}" for number in range(2, count + 1))]


def part_names(name: str, count: int) -> list[str]:
    """The components of an engine over several machines: the first, which serves, has its name."""
    return [name, *(f"{name}-node{number}" for number in range(2, count + 1))]


def left_over(machines: Machines, host: str, taken: Mapping[str, Collection[int]]) -> list[int]:
    """GPUs of a machine that are not `taken`."""
    return [gpu for gpu in range(machines.get(host, 0)) if gpu not in taken.get(host, ())]


def seat_engines(
    wants: Sequence[Want], machines: Machines, named: Mapping[str, Collection[int]]
) -> list[list[list[Seat]]]:
    """For each want its engines, and for each of those its machines; none where it may take none.

    Engines are spread evenly. Those without GPUs by name take them in the order of `wants`.

    Args:
        named: GPUs that somebody has by name, by machine; those of `wants` are added.
    """
    taken = {host: set(gpus) for host, gpus in named.items()}
    for want in wants:
        for host in want.hosts:
            taken.setdefault(host, set()).update(want.gpus)
    found = []
    for want in wants:
        room = {host: list(want.gpus) or left_over(machines, host, taken) for host in want.hosts}
        seats = _seats(want, room)
        for engine in seats:
            for seat in engine:
                taken.setdefault(seat.node, set()).update(seat.gpus)
        found.append(seats)
    return found


def _seats(want: Want, room: Mapping[str, list[int]]) -> list[list[Seat]]:
    hosts, most = list(room), max(map(len, room.values()), default=0)
    if not hosts:
        return [[]] * (want.count or 1)
    parts = want.machines or _fewest(want.each, most, len(hosts))
    groups = [hosts[at:][:parts] for at in range(0, max(1, len(hosts) - parts + 1), parts)]
    own = max(1, want.each // parts)
    count = want.count or (max(1, len(groups) * (most // own)) if want.gpus else 1)
    on = [index * len(groups) // count for index in range(count)]
    return [
        [Seat(host, room[host][on[:index].count(group) * own :][:own]) for host in groups[group]]
        for index, group in enumerate(on)
    ]


def _fewest(workers: int, most: int, hosts: int) -> int:
    """The smallest number of machines that each have the GPUs for an equal share of an engine's workers; 1 where they
    have none, or too few."""
    fitting = (count for count in range(1, hosts + 1) if workers % count == 0 and workers // count <= most)
    return next(fitting, 1)
