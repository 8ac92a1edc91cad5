"""Start of a run's processes on this machine, and the state that they share.

`Launcher` is the interface; `DirectLauncher` starts components that die with the supervisor. `Host`
holds the shared state of a run's components: launcher, held ports, GPU memory, process membership,
guard, and `journal.json`. It writes no state of a component.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from atropos_common.net.http import LIMITS
from atropos_common.net.ports import hold
from atropos_common.protocol.control import GpuStatus, NodeStatus
from atropos_common.system.run_dir import RunDir
from atropos_tui.diagnoses import Names
from atropos_tui.gpu import Nvml, given_here
from atropos_tui.profile import ports
from atropos_tui.profile.spec import ComponentSpec, StackSpec
from atropos_tui.supervisor.journal.store import FarEntry, ProcessEntry, ProcessTable
from atropos_tui.supervisor.journal.tracker import Tracker, UseMeter
from atropos_tui.supervisor.launchers.gpu_memory import GpuMemory, Reader
from atropos_tui.supervisor.launchers.guard import Guard
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.launch import Launch, prepare
from atropos_tui.supervisor.processes.logs import LogDrain, LogFile
from atropos_tui.supervisor.processes.process import (
    LaunchError,
    Leader,
    make_scratch,
    remove_files,
    spawn,
)

GROUP_PATIENCE_S = 0.05
"""Seconds to wait for an empty control group."""
MAX_AGE_S = 2.0
USAGE_TIMEOUT_S = 0.02
OLDEST_S = 10.0
"""Oldest usage sample that is shown, in seconds."""
GPU_PATIENCE_S = 0.3
"""Seconds that `ps` waits for GPU figures."""
SCARCE = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
"""Errors of a start that may pass: no descriptors, processes, memory or disk."""

OnExit = Callable[[], None]
OnProblem = Callable[[str], None]


@dataclass(frozen=True)
class Living:
    child: Leader
    log: LogDrain
    launch: Launch
    entry: ProcessEntry


class Launcher:
    """Starts the components of one run. The defaults fit a launcher without other nodes."""

    on_far: Callable[[str, FarEntry], None]
    """Called when a component is up on another node."""

    def start(
        self,
        spec: ComponentSpec,
        attempt: int,
        launch: Launch,
        on_exit: OnExit,
        on_problem: OnProblem,
    ) -> Living:
        """Execute the command of `launch`.

        Args:
            on_exit: called in the event loop after the exit of the main process.
            on_problem: called with a problem of the log.

        Raises:
            OSError: the log cannot be opened, or the process cannot be started.
        """
        raise NotImplementedError

    async def usage(self) -> dict[str, Usage]:
        return {}

    def cards(self) -> list[GpuStatus]:
        return []

    def machines(self) -> dict[str, dict[str, Any]]:
        """Measured fields of `NodeStatus` for each other node."""
        return {}

    def close(self) -> None:
        """Release everything; nothing starts after this."""


class DirectLauncher(Launcher):
    """Starts components as children, which die with this process."""

    def __init__(self, stack: StackSpec, group: str) -> None:
        self._run, self._max_bytes, self._group = (
            RunDir(Path(stack.run_dir)),
            stack.logs.max_bytes,
            group,
        )

    def start(
        self,
        spec: ComponentSpec,
        attempt: int,
        launch: Launch,
        on_exit: OnExit,
        on_problem: OnProblem,
    ) -> Living:
        file = LogFile(self._run.log(spec.name, attempt), self._max_bytes)
        group = procfs.part_group(self._group, spec.name, attempt)
        try:
            child, pipe = spawn(launch.command, launch.env, launch.cwd, group=group)
        except OSError:
            file.close()
            raise
        child.begin(lambda _: on_exit())
        entry = entry_of(child.pid, child.ticks, attempt, launch, group)
        return Living(child, LogDrain(pipe, file, on_problem), launch, entry)


class HeldPorts:
    """Ports that a run holds for its components, from before the first start until after the last.

    A port that cannot be held now is tried again when its component ends, and before each start.
    """

    def __init__(self, components: Iterable[ComponentSpec]) -> None:
        self._held: dict[int, socket.socket] = {}
        for spec in components:
            self.hold(spec)

    def hold(self, spec: ComponentSpec) -> bool:
        """False if another process has the port."""
        if (
            spec.port is not None
            and spec.port_held
            and not spec.is_far
            and spec.port not in self._held
        ):
            with contextlib.suppress(OSError):
                self._held[spec.port] = hold(spec.port)
            return spec.port in self._held
        return True

    def is_free(self, spec: ComponentSpec) -> bool:
        """True if the component could listen now; a port on another node counts as free."""
        return (
            spec.port is None
            or spec.is_far
            or (self.hold(spec) and ports.is_free(spec.port, held=spec.port_held))
        )

    def close(self) -> None:
        while self._held:
            self._held.popitem()[1].close()


@dataclass(frozen=True)
class Usage:
    """Memory in bytes, CPU in percent of one core, of one component and its descendants."""

    pids: list[int] = field(default_factory=list)
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    at: float = 0.0


class UsageSampler:
    """Usage of every component, measured on request, at most once per `MAX_AGE_S`."""

    def __init__(self, tracker: Tracker, gpus: GpuMemory, launcher: Launcher) -> None:
        self._tracker = tracker
        self._gpu_memory = gpus
        self._launcher = launcher
        self.gpus: list[GpuStatus] = []
        """GPUs of all machines, as of the newest sample."""
        self._measuring: asyncio.Task[None] | None = None
        self._taken = 0.0
        self._use = UseMeter()
        self._usage: dict[str, Usage] = {}
        self._machine = procfs.MachineMeter()
        self._own: dict[str, Any] = {}

    def nodes(self, stack: StackSpec) -> list[NodeStatus]:
        """Machines of a stack, as of the newest sample and each node's last report."""
        here = {spec.place.node for spec in stack.components if spec.place and not spec.is_far}
        far = self._launcher.machines()
        own = {**self._own, "heard_at": time.time()}
        return [
            NodeStatus(
                **{**node.model_dump(), **(own if node.name in here else far.get(node.name, {}))}
            )
            for node in stack.nodes
        ]

    async def fresh(self) -> dict[str, Usage]:
        age = time.monotonic() - self._taken
        if age > MAX_AGE_S or self._measuring is not None:
            if self._measuring is None:
                self._measuring = asyncio.create_task(self._measure_all())
            patience_s = USAGE_TIMEOUT_S if self._usage and age < OLDEST_S else None
            await asyncio.wait({self._measuring}, timeout=patience_s)
        return self._usage

    async def _measure_all(self) -> None:
        try:
            here, elsewhere = await asyncio.gather(
                asyncio.to_thread(self._sample), self._launcher.usage()
            )
            self._usage = await self._with_gpus(here) | elsewhere
            self.gpus += self._launcher.cards()
        finally:
            self._measuring = None

    async def _with_gpus(self, usage: dict[str, Usage]) -> dict[str, Usage]:
        patience_s = GPU_PATIENCE_S if self._gpu_memory.reader.awake else 0.0
        members = {name: found.pids for name, found in usage.items()}
        held, cards = await self._gpu_memory.note(members, patience_s)
        self.gpus = [
            GpuStatus(**card.figures(), held_bytes=self._gpu_memory.held_on(card, members))
            for card in cards
        ]
        return {name: replace(found, gpu_bytes=held.get(name)) for name, found in usage.items()}

    def _sample(self) -> dict[str, Usage]:
        at = time.time()
        rows = self._tracker.survey()
        # After the scan, so that its duration does not count as age.
        self._taken = time.monotonic()
        usage = {name: Usage(**found, at=at) for name, found in self._use.read(rows).items()}
        self._own = self._machine.read()
        return usage


class Host:
    """Shared state of one run's components on this machine. Belongs to the supervisor's event loop.

    Args:
        socket: path of the control socket, as the components know it.
        token: the run's token.
    """

    def __init__(
        self,
        stack: StackSpec,
        guard: Guard,
        launcher: Launcher,
        socket: str,
        token: str,
    ) -> None:
        self.stack, self.guard, self.launcher = stack, guard, launcher
        self._socket, self._token = socket, token
        self.names = Names.of(stack)
        self.tracker = Tracker(stack.run_id)
        self.gpus = GpuMemory(Reader(Nvml(given_here())))
        self.ports = HeldPorts(stack.components)
        # For health checks on this machine: no proxy, no certificates.
        self.http = httpx.AsyncClient(limits=LIMITS, trust_env=False, verify=False)
        self.table = ProcessTable(run_id=stack.run_id)
        self.table.supervisor, self.table.group = entry_of(os.getpid()), guard.group
        self._journal = RunDir(Path(stack.run_dir)).journal_json
        self._gpus_of = {spec.name: spec.gpus for spec in stack.components if not spec.is_far}
        launcher.on_far = self._note_far
        self._unwritten = False
        self.table.write(self._journal)

    async def close(self) -> None:
        await self.http.aclose()
        self.ports.close()

    def launch(self, spec: ComponentSpec, attempt: int) -> Launch:
        """Raises:
        LaunchError: a variable, the working directory or the program is missing.
        """
        return prepare(self.stack, spec, attempt, self._socket, self._token)

    def start(
        self,
        spec: ComponentSpec,
        attempt: int,
        launch: Launch,
        on_exit: OnExit,
        on_problem: OnProblem,
    ) -> Living:
        """Start a component and enter it into tracker, guard and journal.

        Raises:
            LaunchError: it cannot be started as configured.
            OSError: the machine lacks resources now (`SCARCE`).
        """
        try:
            if not spec.is_far:
                # Files of an earlier attempt that this one would mistake for its own.
                remove_files(launch.clears)
                make_scratch(launch.scratch)
                self.guard.clear(launch.leaves)
            living = self.launcher.start(spec, attempt, launch, on_exit, on_problem)
        except OSError as error:
            if error.errno in SCARCE:
                raise
            fix = "check its command and cwd: atropos-tui plan shows them"
            if Path(str(error.filename or "/")).is_relative_to(self.stack.run_dir):
                fix = (
                    f"make {self.stack.run_dir} readable and writable again, then atropos-tui up "
                    f"--resume it"
                )
            raise LaunchError(f"cannot start {spec.name}: {error}", fix) from None
        self._enter(spec.name, living)
        return living

    def _enter(self, name: str, living: Living) -> None:
        entry = living.entry
        # The guard must know the session before the component can start children.
        self.guard.remember(entry.pid, entry.ticks)
        if entry.far is None:
            self.tracker.add(name, entry.pid, entry.group)
        self.table.components[name] = entry
        self._write_soon()

    def _write_soon(self) -> None:
        """Write the table after this turn of the event loop: many components start in one."""
        if not self._unwritten:
            self._unwritten = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._unwritten = False
        self.table.write(self._journal)

    def _note_far(self, name: str, far: FarEntry) -> None:
        if name in self.table.components:
            self.table.components[name] = self.table.components[name].model_copy(
                update={"far": far}
            )
            self._write_soon()

    def leave(self, spec: ComponentSpec, child: Leader, launch: Launch) -> None:
        """Clean up after a component of which no process is left: reap it, drop its entries, remove
        its files, hold its port again.

        Raises:
            OSError: a file that must not outlive it cannot be removed; everything else is done.
        """
        child.reap()
        entry = self.table.components.pop(spec.name)
        self.tracker.remove(spec.name)
        self.guard.forget(entry.pid)
        # The guard must not delete files of the next attempt.
        self.guard.cleared(launch.leaves)
        procfs.remove_group(entry.group, GROUP_PATIENCE_S)
        self.table.write(self._journal)
        try:
            if entry.far is None:
                remove_files(launch.leaves)
        finally:
            # The port again before anything else can take it.
            self.ports.hold(spec)

    def shares_with(self, name: str) -> Callable[[int], bool]:
        """True for a card that another live component uses."""

        def shared(gpu: int) -> bool:
            others = (other for other in self.table.components if other != name)
            return any(
                gpu in self._gpus_of.get(other, ()) and not self.gpus.is_leaving(other)
                for other in others
            )

        return shared

    async def look_at_gpus(self, name: str) -> None:
        """Record which GPU processes belong to `name` while they live."""
        rows = await asyncio.to_thread(self.tracker.members, name)
        await self.gpus.note({name: [row.pid for row in rows]})

    async def survey(self) -> None:
        """Scan the processes: reap adopted zombies, pass new sessions to the guard."""
        found = await asyncio.to_thread(self.tracker.survey)
        await asyncio.to_thread(self.tracker.note_shared_memory, found)
        for name, rows in found.items():
            self.guard.note_shared_memory(self.tracker.shared_files(name))
            for row in rows:
                if row.pid == row.session:
                    self.guard.remember(row.pid, row.ticks)
        if any(self._gpus_of.values()):
            await self.gpus.note({name: [row.pid for row in rows] for name, rows in found.items()})

    async def remove_shared_memory(self, name: str) -> None:
        """Remove the files in /dev/shm that only processes of `name` had mapped."""
        if name in self._gpus_of:  # it runs on this machine
            await asyncio.to_thread(procfs.remove_unused, self.tracker.shared_files(name))


def entry_of(
    pid: int,
    ticks: int | None = None,
    attempt: int = 0,
    launch: Launch | None = None,
    group: str = "",
) -> ProcessEntry:
    """The journal's entry for a live process."""
    if ticks is None:
        row = procfs.read(pid)
        ticks = row.ticks if row else 0
    return ProcessEntry(
        pid=pid,
        create_time=ticks / procfs.TICKS_PER_SECOND,
        ticks=ticks,
        pgid=pid,
        boot_id=procfs.boot_id(),
        attempt=attempt,
        group=group,
        clears=[os.path.abspath(path) for path in launch.leaves] if launch else [],  # noqa: PTH100
    )
