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
    each: int = 0
    """GPUs of one engine."""
    count: int | None = None
    """Engines; None: as many as `gpus` are enough for."""
    gpus: Sequence[int] = ()
    """Of each machine; empty: those that nobody names."""


def host_names(name: str, count: int) -> list[str]:
    """What people call the machines of a [[node]]."""
    return [name, *(f"{name}-{number}" for number in range(2, count + 1))]


def left_over(machines: Machines, host: str, taken: Mapping[str, Collection[int]]) -> list[int]:
    """GPUs of a machine that are not `taken`."""
    return [gpu for gpu in range(machines.get(host, 0)) if gpu not in taken.get(host, ())]


def seat_engines(
    wants: Sequence[Want], machines: Machines, named: Mapping[str, Collection[int]]
) -> list[list[list[Seat]]]:
    """For each want its engines, and for each of those its one machine; none where it may take none.

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
    if not hosts or not most:
        count = want.count or 1
        return [[Seat(hosts[index * len(hosts) // count], [])] for index in range(count)] if hosts else [[]] * count
    count = want.count or (max(1, len(hosts) * (most // want.each)) if want.gpus else 1)
    on = [hosts[index * len(hosts) // count] for index in range(count)]
    return [
        [Seat(host, room[host][on[:index].count(host) * want.each :][: want.each])] for index, host in enumerate(on)
    ]
