"""Cross-checks of `[cluster]`, `[[node]]` and the `node` keys that need no machine. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from atropos_common.net.ports import is_loopback, is_wildcard
from atropos_tui.cluster.machines import foreseen
from atropos_tui.errors import Problem
from atropos_tui.profile.errors import counted, did_you_mean, gpu_named_twice, one_engine_fed
from atropos_tui.profile.placement import Placement, host_names
from atropos_tui.profile.profile import Profile
from atropos_tui.profile.site import receivers, trainer_placements, trainer_ranks, traits_of

ADD_CLUSTER = 'add [cluster] with launcher = "slurm", "ssh", "kubernetes" or "ray", or leave it out'


def check_nodes(profile: Profile) -> list[Problem]:
    """Contradictions about machines: whether they exist, then what is placed on them."""
    if not profile.is_spread:
        return list(_without_cluster(profile))
    wrong = [*_machines(profile), *_hosts(profile), *_known(profile)]
    # Placement needs valid machines, so their problems are reported alone.
    if wrong:
        return wrong
    return [
        *_engine_placements(profile),
        *_trainer_placements(profile),
        *crowded(profile),
        *_single_copy(profile),
        *_ports(profile),
        *_dialled(profile),
        *_api_host(profile),
        *_probes(profile),
    ]


def _node_keys(profile: Profile) -> Iterator[tuple[str, str]]:
    yield from (
        (f"{key}.node", part.node) for key, part in profile.parts.items() if part.node is not None
    )


def _without_cluster(profile: Profile) -> Iterator[Problem]:
    if profile.cluster is not None:
        return  # local: all machines are this one
    if profile.node:
        yield Problem("machines without a launcher", ADD_CLUSTER, key="node.0")
    for key, name in _node_keys(profile):
        yield Problem(
            f"{name!r} is another machine, but the profile has no [cluster]", ADD_CLUSTER, key=key
        )
    for index, section in enumerate(profile.vllm):
        if (section.machines or 1) > 1:
            reason = f"a server over {section.machines} machines, but the profile has no [cluster]"
            yield Problem(reason, ADD_CLUSTER, key=f"vllm.{index}.machines")


def _machines(profile: Profile) -> Iterator[Problem]:
    if not profile.node:
        reason = (
            f"launcher {profile.cluster.launcher!r} without machines" if profile.cluster else ""
        )
        yield Problem(
            reason, 'add [[node]] with name = "...", and gpus if it has any', key="cluster.launcher"
        )
    if profile.inference_gpus is not None:
        fix = "leave it out, and set vllm.node and trainer.node"
        yield Problem(
            "divides the GPUs of one machine, but this profile has several",
            fix,
            key="inference_gpus",
        )
    # `count = 2` creates NAME-2, which may collide with another [[node]].
    used = Counter(name for group in profile.node for name in host_names(group.name, group.count))
    for index, group in enumerate(profile.node):
        if twice := [name for name in host_names(group.name, group.count) if used[name] > 1]:
            reason = f"two machines are called {twice[0]!r}"
            yield Problem(reason, "give each [[node]] its own name", key=f"node.{index}.name")


def _hosts(profile: Profile) -> Iterator[Problem]:
    launcher = profile.cluster.launcher if profile.cluster else ""
    seen: dict[str, str] = {}
    for index, group in enumerate(profile.node):
        key, count = f"node.{index}.hosts", len(group.hosts)
        # Hosts are known only within the allocation.
        if launcher == "slurm":
            if group.hosts or group.addresses:
                fix = 'leave it out; to choose hosts: [cluster] sbatch = ["--nodelist=..."]'
                yield Problem("SLURM chooses the hosts", fix, key=key)
            continue
        if count != group.count:
            what = counted(count, "host") if count else "no hosts"
            fix = f"name {group.count}" + (
                f", or set count = {count}" if count else f", as {launcher} knows them"
            )
            yield Problem(f"{what} for count = {group.count}", fix, key=key)
        for host in group.hosts:
            if host in seen:
                reason = f"{host} belongs to {seen[host]} as well"
                yield Problem(
                    reason, "name each host once: a [[node]] may have several components", key=key
                )
            seen.setdefault(host, group.name)
        if group.addresses and len(group.addresses) != count:
            reason = f"{len(group.addresses)} addresses for {count} hosts"
            yield Problem(
                reason, "give one for each host, in the same order", key=f"node.{index}.addresses"
            )
        if every := [address for address in group.addresses if is_wildcard(address)]:
            fix = "give the address of its private interface, which the other nodes reach"
            yield Problem(
                f"{every[0]} means every interface of a machine", fix, key=f"node.{index}.addresses"
            )


def _known(profile: Profile) -> Iterator[Problem]:
    names = [group.name for group in profile.node]
    for key, name in _node_keys(profile):
        if not profile.hosts_named(name):
            meant = did_you_mean(name, names)
            yield Problem(
                f"no [[node]] is called {name!r}",
                f"{meant}use one of: {', '.join(names) or 'none'}",
                key=key,
            )


def _engine_placements(profile: Profile) -> Iterator[Problem]:
    for index, (section, made) in enumerate(zip(profile.vllm, profile.placed, strict=True)):
        key, node = f"vllm.{index}", section.node or profile.node[0].name
        there = max(profile.machines[host] for host in profile.hosts_named(section.node))
        if beyond := [gpu for gpu in section.gpus if gpu >= there]:
            yield Problem(*_beyond(beyond, node, there), key=f"{key}.gpus")
            continue
        if len(set(section.gpus)) < len(section.gpus):
            yield gpu_named_twice(section.gpus, f"{key}.gpus")
            continue
        if wrong := _spread(profile, index):
            yield wrong
            continue
        if len(made) > 1 and index == 0 and not traits_of(profile).feeds_all:
            fix = 'set replicas = 1 and as many GPUs as one takes, or use mode = "broadcast"'
            yield one_engine_fed(len(made), fix, f"{key}.replicas")
            continue
        wanted = section.gpus_needed
        short = [
            (engine, placements)
            for engine, placements in made
            if sum(len(placement.gpus) for placement in placements) < wanted
        ]
        if there and short:  # without GPUs the stack runs on CPUs
            engine, placements = short[0]
            got = sum(len(placement.gpus) for placement in placements)
            yield Problem(
                f"{engine.name} needs {counted(wanted, 'GPU')}, and {got or 'none'} "
                f"{'is' if got < 2 else 'are'} left for it on {node}, where each machine has "
                f"{there}",
                f"lower vllm.replicas or tensor_parallel, raise count or gpus of [[node]] "
                f"{node}, or use another node",
                key=f"{key}.node",
            )


def _spread(profile: Profile, index: int) -> Problem | None:
    section, parts = (
        profile.vllm[index],
        len(next((placements for _, placements in profile.placed[index]), [])),
    )
    key, node = f"vllm.{index}", section.node or profile.node[0].name
    wanted, there, workers = (
        section.machines or parts,
        len(profile.hosts_named(section.node)),
        section.gpus_needed,
    )
    if wanted == 1:
        return None
    if section.flag_number("data-parallel-size", 1) > 1:
        reason = "several copies of the weights in one server over several machines"
        fix = "leave it out, and set vllm.replicas for one server a copy"
        return Problem(reason, fix, key=f"{key}.args.{section.flag_key('data-parallel-size')}")
    # vLLM starts an equal number of workers on each machine.
    if workers % wanted:
        divisors = [str(number) for number in range(2, workers + 1) if workers % number == 0]
        fix = (
            f"set it to {' or '.join(divisors)}"
            if divisors
            else "leave it out, or raise tensor_parallel"
        )
        reason = f"{counted(workers, 'worker')} cannot be divided evenly among {wanted} machines"
        return Problem(reason, fix, key=f"{key}.machines")
    if wanted > there:
        reason = f"a server over {wanted} machines, and [[node]] {node} has {there}"
        return Problem(
            reason, f"lower it, or raise count of [[node]] {node}", key=f"{key}.machines"
        )
    if index == 0 and traits_of(profile).shares_memory:
        return Problem(
            f"single copy needs every worker of the engine on the trainer's machine, and "
            f"{section.name} is spread "
            f"over {wanted} machines",
            'use mode = "broadcast", "lora_only" or "none", or one machine with enough GPUs',
            key=f"{key}.machines" if section.machines else f"{key}.tensor_parallel",
        )
    return None


def _beyond(gpus: list[int], node: str, there: int) -> tuple[str, str]:
    has = "no GPUs" if not there else "GPU 0" if there == 1 else f"GPUs 0-{there - 1}"
    named = ", ".join(map(str, gpus))
    return (
        f"GPU {named} does not exist: [[node]] {node} has {has}",
        f"use {has}, or raise gpus of [[node]] {node}",
    )


def _trainer_placements(profile: Profile) -> Iterator[Problem]:
    trainer, placements = profile.trainer, trainer_placements(profile)
    node = trainer.node or profile.node[0].name
    # All machines of a [[node]] have the same number of GPUs.
    there = max(profile.machines[host] for host in profile.hosts_named(trainer.node))
    if beyond := [gpu for gpu in trainer.gpus if gpu >= there]:
        yield Problem(*_beyond(beyond, node, there), key="trainer.gpus")
        return
    # Either every machine of the trainer has GPUs or none has; on a CPU trainer GPUs are not
    # needed.
    bare = [placement.node for placement in placements if not placement.gpus]
    if (any(placement.gpus for placement in placements) and bare) or (
        there and bare and trainer.settings.get("device") != "cpu"
    ):
        reason = f"no GPU is left for the trainer on {', '.join(bare[:3])}"
        fix = "give engines fewer GPUs, set trainer.gpus, or set trainer.node to separate machines"
        yield Problem(reason, fix, key="trainer.node")
        return
    ranks, gpus = trainer_ranks(profile), sum(len(placement.gpus) for placement in placements)
    if gpus and ranks != gpus:
        counts = f"{counted(gpus, 'GPU')} on {counted(len(placements), 'machine')}"
        reason = f"{counted(ranks, 'rank')} and {counts}: each rank needs one GPU"
        yield Problem(reason, f"set it to {gpus}, or leave it out", key="trainer.processes")
    elif ranks % len(placements):
        reason = (
            f"{counted(ranks, 'rank')} cannot be divided evenly among {len(placements)} machines"
        )
        yield Problem(
            reason,
            f"set it to a multiple of {len(placements)}, or leave it out",
            key="trainer.processes",
        )


def crowded(profile: Profile) -> Iterator[Problem]:
    """GPUs that are used twice: by engines whose shares exceed 1, or by the trainer of a
    broadcast and an engine."""
    on: defaultdict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    one_copy = traits_of(profile).shares_memory
    # In single copy a trainer that names other GPUs than the first engine's is another problem.
    alone = profile.engines[0].gpus if one_copy else profile.trainer.gpus
    own = {("", gpu) for gpu in alone if not profile.is_spread}
    own |= {
        (placement.node, gpu) for placement in trainer_placements(profile) for gpu in placement.gpus
    }
    receiving = {engine.name for engine in receivers(profile)}
    for index, (section, made) in enumerate(zip(profile.vllm, profile.placed, strict=True)):
        there = {("", gpu) for gpu in section.gpus if not profile.is_spread}
        there |= {
            (placement.node, gpu)
            for _, placements in made
            for placement in placements
            for gpu in placement.gpus
        }
        # With a fixed cache size vLLM does not use its share of the GPU.
        if section.flag("kv-cache-memory-bytes") is None:
            for place in there:
                on[place].append((index, section.gpu_share))
        taken = {
            place
            for engine, placements in made
            if engine.name in receiving
            for place in (
                [(each.node, gpu) for each in placements for gpu in each.gpus]
                or [("", gpu) for gpu in engine.gpus]
            )
        }
        if both := sorted(taken & own):
            reason = (
                f"a broadcast needs separate GPUs, but trainer and engine share "
                f"{', '.join(map(_gpu_text, both))}"
            )
            fix = (
                f"name other GPUs for {section.name}, which gets its weights by broadcast"
                if one_copy
                else 'give each its own GPUs, or use mode = "shared_vllm"'
            )
            yield Problem(reason, fix, key=f"vllm.{index}.gpus")
    # One problem for each section, however many GPUs it shares.
    named: set[int] = set()
    for place, shares in sorted(on.items()):
        total, last = sum(share for _, share in shares), shares[-1][0]
        if len(shares) > 1 and total > 1 and last not in named:
            named.add(last)
            parts = " + ".join(f"{profile.vllm[index].name} {share:g}" for index, share in shares)
            yield Problem(
                f"the engines on {_gpu_text(place)} take {total:.2f} of its memory ({parts})",
                f"lower them to a sum below 1, such as {0.9 / len(shares):.2f} each",
                key=f"vllm.{last}.gpu_memory_utilization",
            )


def _gpu_text(place: tuple[str, int]) -> str:
    node, gpu = place
    return f"GPU {gpu} of {node}" if node else f"GPU {gpu}"


def _single_copy(profile: Profile) -> Iterator[Problem]:
    if not traits_of(profile).shares_memory:
        return
    if profile.trainer.node is not None and profile.trainer.node != profile.vllm[0].node:
        where = profile.vllm[0].node or profile.node[0].name
        yield Problem(
            f"single copy needs trainer and engine on the same machine, and the engine is on "
            f"{where!r}",
            f'leave it out, set it to {where!r}, or use mode = "broadcast"',
            key="trainer.node",
        )


def _ports(profile: Profile) -> Iterator[Problem]:
    last = max(port for _, port in profile.used_ports())
    if last > 65535:
        yield Problem(
            f"the last engine would have port {last}", "choose a lower one", key="vllm.0.port"
        )


def _dialled(profile: Profile) -> Iterator[Problem]:
    nodes = foreseen(profile).nodes
    lone = [node for node in nodes if is_loopback(node.address)]
    if lone and len(lone) < len(nodes):
        index = next(
            i
            for i, group in enumerate(profile.node)
            if lone[0].name in host_names(group.name, group.count)
        )
        reason = (
            f"{lone[0].address} is a loopback address, at which other machines cannot reach "
            f"{lone[0].name}"
        )
        fix = 'give its private address: addresses = ["10.0.0.1"]'
        yield Problem(
            reason,
            fix,
            key=f"node.{index}.{'addresses' if profile.node[index].addresses else 'hosts'}",
        )


def _api_host(profile: Profile) -> Iterator[Problem]:
    # Without an explicit host `Site` chooses the address by the clients' machines.
    host = profile.api.host
    if "host" in profile.api.model_fields_set and (is_loopback(host) or is_wildcard(host)):
        reason = f"other machines cannot reach run-api at {host}"
        yield Problem(
            reason,
            "leave it out for the address of its machine, or give that address",
            key="api.host",
        )


def _probes(profile: Profile) -> Iterator[Problem]:
    """Refuse checks that only the component's own machine can make."""
    # The supervisor runs on the profile's first machine.
    here = next(iter(profile.machines), None)
    for name, part in profile.component.items():
        if part.node is None or profile.hosts_named(part.node)[:1] == [here]:
            continue
        for kind in ("startup", "readiness", "liveness"):
            probe = getattr(part, kind)
            for check in probe.checks if probe else ():
                if check.kind == "exec" or (check.kind == "tcp" and is_loopback(check.host)):
                    reason = f"the supervisor makes this check, and {name} is on another machine"
                    fix = (
                        'use kind = "http" or "tcp" with the address of its machine, or kind = '
                        '"log" or "file"'
                    )
                    yield Problem(reason, fix, key=f"component.{name}.{kind}")
                    break


def unused_gpus(profile: Profile) -> dict[str, int]:
    """Machine -> number of unused GPUs."""
    taken: defaultdict[str, set[int]] = defaultdict(set)
    placements: list[Placement] = [
        placement for made in profile.placed for _, each in made for placement in each
    ]
    for placement in [*placements, *trainer_placements(profile)]:
        taken[placement.node].update(placement.gpus)
    return {
        host: count - len(taken[host])
        for host, count in profile.machines.items()
        if count > len(taken[host])
    }
