"""Where each component of a profile for several machines runs, and what brings it there. Data to data.

    hosts_of(profile, os.environ)      # the machines, as the launcher knows them; before there are any: by their names
    place_of(profile, hosts, "infer")  # host, address, and the command in front of the component's own

The launcher's hosts come as data: those of ssh, Kubernetes and Ray from the profile, those of SLURM from the
environment of a job, with the addresses that `addresses` has for them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from atropos_tui.errors import Problem
from atropos_tui.profile.seats import host_names
from atropos_tui.profile.sections import ClusterSection, Profile
from atropos_tui.profile.spec import Node, Place

SSH_OPTIONS = (
    "BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=3", "ServerAliveCountMax=2", "ControlPath=none",
)  # fmt: skip
"""Ask nobody, give up soon, and end within 10 s when the other machine falls silent, with a connection of one's own."""
BRIDGE = "atropos_tui.supervisor.launchers.ray_bridge"


@dataclass(frozen=True)
class Hosts:
    """The machines of a stack, the supervisor's own first; none where there is only that."""

    nodes: tuple[Node, ...] = ()
    here: str = ""
    """The host where the supervisor runs; empty: none of them."""
    het: Mapping[str, int] | None = None
    """The component of a heterogeneous SLURM job that each host belongs to."""
    binds: bool = True
    """Whether SLURM would bind a step to some of the processors that the job has on a node."""

    def node(self, name: str) -> Node:
        """The machine of that name.

        Raises:
            ValueError: there is none.
        """
        if name not in self._by_name:
            raise ValueError(f"no machine is called {name!r}")
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}


def foreseen(profile: Profile) -> Hosts:
    """The machines before it is known which they are: by their names, or by `hosts` where the profile has them."""
    if not profile.is_spread:
        return Hosts()
    nodes: list[Node] = []
    for group in profile.node:
        names = host_names(group.name, group.count)
        hosts = group.hosts or names
        addresses = group.addresses or [host.rpartition("@")[2] for host in hosts]
        of_each = zip(names, hosts, addresses, strict=False)
        nodes += [Node(name=name, host=host, address=at, gpus=group.gpus) for name, host, at in of_each]
    return Hosts(tuple(nodes), nodes[0].host if nodes else "")


def hosts_of(
    profile: Profile,
    environment: Mapping[str, str],
    addresses: Mapping[str, str] | None = None,
    *,
    binds: bool = True,
) -> Hosts:
    """The machines of a profile, as far as the environment knows them: in a SLURM job those of its allocation.

    Args:
        addresses: what others dial, by host; a host that is not in it is dialled by its name.
        binds: see `Hosts`.
    """
    expected = foreseen(profile)
    if not profile.is_spread or profile.cluster is None or profile.cluster.launcher != "slurm":
        return expected
    groups = allocated(environment)
    if not groups:
        return expected
    het = {host: index for index, group in enumerate(groups) for host in group} if len(groups) > 1 else None
    dialled = addresses or {}
    nodes = [
        node.model_copy(update={"host": host, "address": dialled.get(host, host)})
        for node, host in zip(expected.nodes, _dealt(profile, groups), strict=False)
    ]
    return Hosts(tuple(nodes), environment.get("SLURMD_NODENAME", ""), het, binds)


def _dealt(profile: Profile, groups: list[list[str]]) -> list[str]:
    """Hosts in the order of the profile's machines: of each [[node]] a component of the job, else one after another."""
    if len(groups) == 1:
        return groups[0]
    return [host for section, group in zip(profile.node, groups, strict=False) for host in group[: section.count]]


def allocated(environment: Mapping[str, str]) -> list[list[str]]:
    """The hosts of the SLURM job that an environment is of, by component of a heterogeneous one; empty outside."""
    if "SLURM_JOB_ID" not in environment:
        return []  # what was an allocation once
    size = environment.get("SLURM_HET_SIZE", "")
    if size.isdecimal():
        lists = [environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", "") for index in range(int(size))]
    else:
        lists = [environment.get("SLURM_JOB_NODELIST", environment.get("SLURM_NODELIST", ""))]
    return [expand_hosts(text) for text in lists if text]


_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> list[str]:
    """SLURM's short form of several hosts: `n[1-3,07],login` is n1, n2, n3, n07 and login."""
    return [host for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for host in _expanded(word)]


def _expanded(word: str) -> Iterator[str]:
    choices = [[*_numbers(inside)] if inside else [outside] for inside, outside in _PART.findall(word)]
    return map("".join, product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1))


def place_of(profile: Profile, hosts: Hosts, name: str) -> Place:
    """Where what runs on the machine called `name` runs."""
    cluster, node = profile.cluster or ClusterSection(), hosts.node(name)
    python = cluster.python or sys.executable
    het = (hosts.het or {}).get(node.host)
    prefix = [] if node.host == hosts.here else prefix_of(cluster, node, het, binds=hosts.binds)
    return Place(node=node.name, host=node.host, address=node.address, prefix=prefix, python=python)


def prefix_of(cluster: ClusterSection, node: Node, het: int | None = None, *, binds: bool = True) -> list[str]:
    """The command that runs what follows it on `node`, with its stdin, stdout and stderr connected.

    Of a node in SLURM a step takes all that the job has there, and shares it with the other steps: `--exact` would
    leave it one processor. What it is started with comes over its stdin, so the environment of `srun` stays here.

    Args:
        het: the component of a heterogeneous job.
        binds: see `Hosts`; where SLURM does not, an srun that is told not to says so in each component's log.
    """
    match cluster.launcher:
        case "slurm":
            of = [f"--het-group={het}"] if het is not None else []
            gpus = [f"--gpus-per-node={node.gpus}"] if node.gpus else []
            free = ["--cpu-bind=none"] if binds else []
            return [
                "srun", *of, "--overlap", "-N1", "-n1", "-w", node.host, "--mem=0", *free, *gpus, "--input=all",
                "-u", "--export=NONE", "--kill-on-bad-exit=0",
            ]  # fmt: skip
        case "ssh":
            options = [word for option in SSH_OPTIONS for word in ("-o", option)]
            return ["ssh", "-T", *options, *cluster.ssh, node.host]
        case "kubernetes":
            return ["kubectl", *cluster.kubectl, "exec", "-i", node.host, "--"]
        case "ray":
            at = ["--address", cluster.address] if cluster.address else []
            return [sys.executable, "-P", "-m", BRIDGE, *at, node.host]
    return []


def lacking(profile: Profile, hosts: Hosts) -> list[Problem]:
    """What an allocation has too little of."""
    missing = [name for name in profile.machines if name not in {node.name for node in hosts.nodes}]
    if not missing:
        return []
    wanted, there = len(profile.machines), len(hosts.nodes)
    fix = f"ask for {wanted} (sbatch -N {wanted}; outside a job `atropos-tui up` does so itself), or lower the counts"
    reason = f"the allocation has {there} of the {wanted} machines that the profile asks for, and none for"
    return [Problem(f"{reason} {', '.join(missing[:3])}", fix, key="node.0.count")]
