from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from atropos_tui.errors import Problem
from atropos_tui.profile.placement import host_names
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.sections import ClusterSection
from atropos_tui.profile.spec import Node, Place

SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=3",
    "ServerAliveCountMax=2",
    "ControlPath=none",
)
"""Ask no question, give up after 10 s, notice a silent machine within 10 s, use a separate
connection."""
BRIDGE = "atropos_tui.cluster.ray_bridge"


@dataclass(frozen=True)
class Hosts:
    """Machines of a stack, the supervisor's own first; empty for one machine."""

    nodes: tuple[Node, ...] = ()
    here: str = ""
    """Host of the supervisor; empty: none of these."""
    het: Mapping[str, int] | None = None
    """Host -> component of a heterogeneous SLURM job."""
    binds: bool = True
    """SLURM would bind a step to a part of the job's processors."""

    def node(self, name: str) -> Node:
        if name not in self._by_name:
            raise ValueError(f"no machine is called {name!r}")
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}


def foreseen(profile: Profile) -> Hosts:
    """Machines before they are allocated: the profile's `hosts`, or their own names."""
    if not profile.is_spread:
        return Hosts()
    nodes: list[Node] = []
    for group in profile.node:
        names = host_names(group.name, group.count)
        hosts = group.hosts or names
        addresses = group.addresses or [host.rpartition("@")[2] for host in hosts]
        of_each = zip(names, hosts, addresses, strict=False)
        # An ssh host may carry a user: me@box2 is reached by others as box2.
        nodes += [
            Node(name=name, host=host, address=at, gpus=group.gpus) for name, host, at in of_each
        ]
    return Hosts(tuple(nodes), nodes[0].host if nodes else "")


def hosts_of(
    profile: Profile,
    environment: Mapping[str, str],
    addresses: Mapping[str, str] | None = None,
    *,
    binds: bool = True,
) -> Hosts:
    """Machines of a profile; within a SLURM job those of its allocation.

    Args:
        addresses: host -> address for the other nodes.
        binds: see `Hosts`.
    """
    expected = foreseen(profile)
    if not profile.is_spread or profile.cluster is None or profile.cluster.launcher != "slurm":
        return expected
    groups = allocated(environment)
    # Before the allocation the machines have only their names.
    if not groups:
        return expected
    # srun needs the component of each host with --het-group.
    het = (
        {host: index for index, group in enumerate(groups) for host in group}
        if len(groups) > 1
        else None
    )
    by_host = addresses or {}
    nodes = [
        node.model_copy(update={"host": host, "address": by_host.get(host, host)})
        for node, host in zip(expected.nodes, _in_order(profile, groups), strict=False)
    ]
    return Hosts(tuple(nodes), environment.get("SLURMD_NODENAME", ""), het, binds)


def _in_order(profile: Profile, groups: list[list[str]]) -> list[str]:
    """One component of the job for each [[node]], or else all hosts in sequence."""
    if len(groups) == 1:
        return groups[0]
    return [
        host
        for section, group in zip(profile.node, groups, strict=False)
        for host in group[: section.count]
    ]


def allocated(environment: Mapping[str, str]) -> list[list[str]]:
    """Hosts of this SLURM job, by component of a heterogeneous job."""
    if "SLURM_JOB_ID" not in environment:
        return []  # stale variables of an allocation that has ended
    size = environment.get("SLURM_HET_SIZE", "")
    if size.isdecimal():
        lists = [
            environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", "")
            for index in range(int(size))
        ]
    else:
        lists = [environment.get("SLURM_JOB_NODELIST", environment.get("SLURM_NODELIST", ""))]
    return [expand_hosts(text) for text in lists if text]


_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> list[str]:
    """Expand SLURM's `n[1-3,07],login` to n1, n2, n3, n07, login."""
    return [
        host for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for host in _expanded(word)
    ]


def _expanded(word: str) -> Iterator[str]:
    choices = [
        [*_numbers(inside)] if inside else [outside] for inside, outside in _PART.findall(word)
    ]
    return map("".join, product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        # Leading zeros are part of a host's name: [07-10] is 07, 08, 09, 10.
        yield from (
            str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)
        )


def place_of(profile: Profile, hosts: Hosts, name: str) -> Place:
    """Place of components on the machine `name`."""
    cluster, node = profile.cluster or ClusterSection(), hosts.node(name)
    python = cluster.python or sys.executable
    het = (hosts.het or {}).get(node.host)
    prefix = [] if node.host == hosts.here else prefix_of(cluster, node, het, binds=hosts.binds)
    return Place(node=node.name, host=node.host, address=node.address, prefix=prefix, python=python)


def prefix_of(
    cluster: ClusterSection, node: Node, het: int | None = None, *, binds: bool = True
) -> list[str]:
    """Command that runs its arguments on `node`, with stdin, stdout and stderr connected.

    A SLURM step shares all that the job has on the node; `--exact` would give it one processor. The
    environment travels over stdin, so `srun` exports none.

    Args:
        het: component of a heterogeneous job.
        binds: see `Hosts`; otherwise `--cpu-bind=none` would only add a warning to each log.
    """
    match cluster.launcher:
        case "slurm":
            of = [f"--het-group={het}"] if het is not None else []
            gpus = [f"--gpus-per-node={node.gpus}"] if node.gpus else []
            free = ["--cpu-bind=none"] if binds else []
            return [
                "srun",
                *of,
                "--overlap",
                "-N1",
                "-n1",
                "-w",
                node.host,
                "--mem=0",
                *free,
                *gpus,
                "--input=all",
                "-u",
                "--export=NONE",
                "--kill-on-bad-exit=0",
            ]
        case "ssh":
            options = [word for option in SSH_OPTIONS for word in ("-o", option)]
            # Our options come first: ssh uses the first value of each option.
            return ["ssh", "-T", *options, *cluster.ssh, node.host]
        case "kubernetes":
            return ["kubectl", *cluster.kubectl, "exec", "-i", node.host, "--"]
        case "ray":
            at = ["--address", cluster.address] if cluster.address else []
            return [sys.executable, "-P", "-m", BRIDGE, *at, node.host]
    return []


def lacking(profile: Profile, hosts: Hosts) -> list[Problem]:
    missing = [name for name in profile.machines if name not in {node.name for node in hosts.nodes}]
    if not missing:
        return []
    wanted, there = len(profile.machines), len(hosts.nodes)
    fix = (
        f"ask for {wanted} (sbatch -N {wanted}; outside a job `atropos-tui up` does so itself), "
        f"or lower the counts"
    )
    reason = (
        f"the allocation has {there} of the {wanted} machines that the profile asks for, and "
        f"none for"
    )
    return [Problem(f"{reason} {', '.join(missing[:3])}", fix, key="node.0.count")]
