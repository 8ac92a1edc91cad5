"""How the processes of a run come to life on this machine, and the books about those that live.

`Launcher` is the seam: a component is started directly (`DirectLauncher`), and dies with the supervisor, or by a keeper
that outlives it (`keeper_launcher.KeeperLauncher`, for `survive = true`). `Host` is what all components of a run share:
the launcher, held ports, GPU memory, who belongs to which component, the guard, and `journal.json`. No state of a
component is written here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from atropos_common.http import LIMITS
from atropos_common.run_dir import ENV_WAIT_FOR_GO, GO_LINE, RunDir
from atropos_tui.gpu import Nvml
from atropos_tui.profile.spec import ComponentSpec, StackSpec
from atropos_tui.supervisor import cgroup, environment, procfs, shared_memory
from atropos_tui.supervisor.diagnoses import Names
from atropos_tui.supervisor.environment import Launch, LaunchError
from atropos_tui.supervisor.gpu_memory import GpuMemory
from atropos_tui.supervisor.guarding import Guard
from atropos_tui.supervisor.holding import HeldPorts
from atropos_tui.supervisor.log_file import LogFile
from atropos_tui.supervisor.logs import LogDrain
from atropos_tui.supervisor.members import Tracker
from atropos_tui.supervisor.nvml import Reader
from atropos_tui.supervisor.process import Child, Leader, spawn
from atropos_tui.supervisor.store import ProcessEntry, ProcessTable

GROUP_PATIENCE_S = 0.05
"""A control group that is not free by then goes with the run's own group at the end."""
OnExit = Callable[[], None]
OnProblem = Callable[[str], None]


@dataclass(frozen=True)
class Living:
    """A component that was brought to life."""

    child: Leader
    log: LogDrain
    launch: Launch
    entry: ProcessEntry
    """What the journal says of it."""
    waited: bool = False
    """It was prepared, and waited for its turn."""


@dataclass(frozen=True)
class Inherited:
    """A component that an earlier supervisor of the run started, and that this one goes on with."""

    entry: ProcessEntry
    changed: bool
    """Its plan says something else now: it must be restarted."""


class Launcher(Protocol):
    """Starts the components of one run, or goes on with them; says at a component's end what became of it."""

    adoptable: bool
    """Whether what it starts lives on without this supervisor, for the next one to adopt."""

    @property
    def inherited(self) -> Mapping[str, Inherited]:
        """What an earlier supervisor left, by component."""

    def start(
        self, spec: ComponentSpec, attempt: int, launch: Launch, on_exit: OnExit, on_problem: OnProblem
    ) -> Living:
        """Execute the command of `launch`.

        Args:
            on_exit: called in the event loop when the main process has ended.
            on_problem: told what hinders the log.

        Raises:
            OSError: the log cannot be opened, or the process cannot be started.
        """

    def adopt(self, name: str, on_exit: OnExit, on_problem: OnProblem) -> Living:
        """Go on with a component of `inherited`."""

    def prepare(self, spec: ComponentSpec, attempt: int, launch: Launch) -> int | None:
        """Let a process wait to be `attempt`, so that it takes less time, where that can be done.

        Returns:
            Its pid.

        Raises:
            OSError: it cannot be started.
        """

    def drop_next(self, name: str | None = None) -> None:
        """Nobody waits any more to be the next of `name`, or of anyone."""

    def close(self) -> None:
        """Nothing more will be started."""


@dataclass(frozen=True)
class Waiting:
    """One process that waits to be an attempt."""

    attempt: int
    launch: Launch
    """What the attempt would be started with; if that has changed by then, it is of no use."""
    child: Child
    output: int
    """Read end of the pipe with its stdout and stderr."""
    word: int
    """Write end of its stdin."""

    def discard(self) -> None:
        os.close(self.word)
        os.close(self.output)
        self.child.abandon()

    def tell(self) -> bool:
        """Say `go`; False if nobody is there to hear it."""
        try:
            os.write(self.word, GO_LINE)
        except BrokenPipeError:
            return False
        return self.child.exit_code is None


class Standby:
    """Processes that will be the next attempt of a component: they import everything, then wait for the line `go`.

    One waits per component. It is no member of the component yet (`Tracker.set_aside`), listens nowhere, and dies with
    this process. What it prints stays in its pipe: the log belongs to the attempt that runs.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def prepare(self, name: str, attempt: int, launch: Launch, group: str) -> int:
        """Let one wait to be `attempt` of component `name`; nothing happens if it does already.

        Args:
            group: the control group of that attempt, or "".

        Returns:
            Its pid, which is its session.

        Raises:
            OSError: it cannot be started.
        """
        there = self._waiting.get(name)
        if there and there.attempt == attempt and there.launch == launch and there.child.exit_code is None:
            return there.child.pid
        self.discard(name)
        listening, word = os.pipe2(os.O_CLOEXEC)
        try:
            env = launch.env | {ENV_WAIT_FOR_GO: "1"}
            child, output = spawn(launch.command, env, launch.cwd, group=group, stdin=listening)
        except OSError:
            os.close(word)
            raise
        finally:
            os.close(listening)
        self._waiting[name] = Waiting(attempt, launch, child, output, word)
        return child.pid

    def take(self, name: str, attempt: int, launch: Launch) -> tuple[Child, int] | None:
        """The process that waited to be this attempt, told to go, and the read end of its pipe; null if none does."""
        found = self._waiting.pop(name, None)
        if found is None:
            return None
        if found.attempt != attempt or found.launch != launch or not found.tell():
            found.discard()
            return None
        os.close(found.word)
        return found.child, found.output

    def discard(self, name: str | None = None) -> None:
        """Nobody waits any more to be the next of `name`, or of anyone."""
        for each in list(self._waiting) if name is None else [name]:
            if found := self._waiting.pop(each, None):
                found.discard()


class DirectLauncher:
    """Starts components as children of this process, which die with it.

    Args:
        group: the run's control group, if it has one.
    """

    adoptable = False
    inherited: Mapping[str, Inherited] = {}

    def __init__(self, stack: StackSpec, group: str) -> None:
        self._run, self._max_bytes, self._group = RunDir(Path(stack.run_dir)), stack.logs.max_bytes, group
        self._standby = Standby()

    def start(
        self, spec: ComponentSpec, attempt: int, launch: Launch, on_exit: OnExit, on_problem: OnProblem
    ) -> Living:
        file = LogFile(self._run.log(spec.name, attempt), self._max_bytes)
        group = cgroup.part_group(self._group, spec.name, attempt)
        waited = self._standby.take(spec.name, attempt, launch)
        child, pipe = waited or spawn(launch.command, launch.env, launch.cwd, group=group)
        child.begin(lambda _: on_exit())
        entry = entry_of(child.pid, child.ticks, attempt, launch, group)
        return Living(child, LogDrain(pipe, file, on_problem), launch, entry, waited=waited is not None)

    def adopt(self, name: str, on_exit: OnExit, on_problem: OnProblem) -> Living:
        raise KeyError(name)  # nothing is inherited

    def prepare(self, spec: ComponentSpec, attempt: int, launch: Launch) -> int | None:
        group = cgroup.part_group(self._group, spec.name, attempt)
        return self._standby.prepare(spec.name, attempt, launch, group)

    def drop_next(self, name: str | None = None) -> None:
        self._standby.discard(name)

    def close(self) -> None:
        self.drop_next()


class Host:
    """What the components of one run share on this machine. Belongs to the supervisor's event loop.

    Args:
        socket: path of the control socket, as the components know it.
        token: the run's token.
        table: the earlier journal's entries of what is inherited.
    """

    def __init__(
        self, stack: StackSpec, guard: Guard, launcher: Launcher, socket: str, token: str, table: ProcessTable | None
    ) -> None:
        self.stack, self.guard, self.launcher = stack, guard, launcher
        self._socket, self._token = socket, token
        self.names = Names.of(stack)
        self.tracker = Tracker(stack.run_id)
        self.gpus = GpuMemory(Reader(Nvml()))
        self.ports = HeldPorts(stack.components)
        self.http = httpx.AsyncClient(limits=LIMITS, trust_env=False, verify=False)  # on this machine, no proxy
        self.table = table or ProcessTable(run_id=stack.run_id)
        self.table.supervisor, self.table.group = entry_of(os.getpid()), guard.group
        self._journal = RunDir(Path(stack.run_dir)).journal_json
        self._gpus_of = {spec.name: spec.gpus for spec in stack.components}
        self._ending = False
        self.table.write(self._journal)

    async def close(self) -> None:
        """Let go of ports and connections."""
        await self.http.aclose()
        self.ports.close()

    def end(self) -> None:
        """The run is being ended: nothing outlives the supervisor from here on, and nothing waits for a next start."""
        self._ending = True
        self.guard.end_keeping()
        self.launcher.drop_next()

    def launch(self, spec: ComponentSpec, attempt: int) -> Launch:
        """What `attempt` of `spec` is started as.

        Raises:
            LaunchError: a variable, the working directory or the program is missing.
        """
        return environment.prepare(self.stack, spec, attempt, self._socket, self._token)

    def start(
        self, spec: ComponentSpec, attempt: int, launch: Launch, on_exit: OnExit, on_problem: OnProblem
    ) -> Living:
        """Start it, and enter it into the books.

        Raises:
            LaunchError: it cannot be started as written.
        """
        try:
            environment.remove(launch.clears)
            living = self.launcher.start(spec, attempt, launch, on_exit, on_problem)
        except OSError as error:
            fix = "check its command and cwd: atropos-tui plan shows them"
            raise LaunchError(f"cannot start {spec.name}: {error}", fix) from None
        self._enter(spec.name, living)
        return living

    def adopt(self, name: str, on_exit: OnExit, on_problem: OnProblem) -> Living:
        """Go on with what an earlier supervisor started as component `name`."""
        living = self.launcher.adopt(name, on_exit, on_problem)
        self._enter(name, living)
        return living

    def prepare_next(self, spec: ComponentSpec, attempt: int) -> None:
        """Where the next start shall be quick, let its process wait. If that fails, the start itself will say why."""
        if spec.standby and not self._ending:
            with contextlib.suppress(LaunchError, OSError):
                if pid := self.launcher.prepare(spec, attempt, self.launch(spec, attempt)):
                    self.tracker.set_aside(spec.name, pid)

    def _enter(self, name: str, living: Living) -> None:
        child, entry = living.child, living.entry
        self.tracker.add(name, child.pid, entry.group, entry.sessions.items())
        for session, ticks in {**entry.sessions, child.pid: child.ticks}.items():
            self.guard.remember(session, ticks)
        self.guard.clear(living.launch.clears)
        self.table.components[name] = entry
        self.table.write(self._journal)

    def leave(self, spec: ComponentSpec, child: Leader, launch: Launch, *, done: bool) -> None:
        """Nothing of the component is left: reap it, forget it, remove its files, hold its port again.

        Args:
            done: a step that is not repeated under components that live on.

        Raises:
            OSError: a file that must not outlive it cannot be removed; all else is done.
        """
        child.reap()
        self.tracker.remove(spec.name)
        self.guard.forget(child.pid)
        self.guard.cleared(launch.clears)
        cgroup.remove(self.table.components.pop(spec.name).group, GROUP_PATIENCE_S)
        if done:
            self.table.done = [*self.table.done, spec.name]
        self.table.write(self._journal)
        try:
            environment.remove(launch.clears)
        finally:
            self.ports.hold(spec)

    def note_progress(self, name: str, found: Mapping[str, Any]) -> None:
        """Write down what an adopting supervisor could not find out: fields of the component's `ProcessEntry`."""
        entry = self.table.components.get(name)
        if entry is not None:
            new = entry.model_copy(update={**found, "sessions": self.tracker.sessions(name)})
            if new != entry:
                self.table.components[name] = new
                self.table.write(self._journal)

    def shares_with(self, name: str) -> Callable[[int], bool]:
        """Tells of a card whether another component with live processes uses it."""

        def shared(gpu: int) -> bool:
            others = (other for other in self.table.components if other != name)
            return any(gpu in self._gpus_of[other] and not self.gpus.is_leaving(other) for other in others)

        return shared

    async def look_at_gpus(self, name: str) -> None:
        """See what the live processes of `name` hold, before they go."""
        rows = await asyncio.to_thread(self.tracker.members, name)
        await self.gpus.note({name: [row.pid for row in rows]})

    async def survey(self) -> None:
        """Look at every process of the run: adopted zombies are collected, new sessions told to the guard."""
        found = await asyncio.to_thread(self.tracker.survey)
        await asyncio.to_thread(self.tracker.note_shared_memory, found)
        for rows in found.values():
            self.guard.remember_members(rows)
        if any(self._gpus_of.values()):
            await self.gpus.note({name: [row.pid for row in rows] for name, rows in found.items()})

    async def remove_shared_memory(self, name: str) -> None:
        """Remove the files in /dev/shm that only `name`, which is gone, had mapped."""
        await asyncio.to_thread(shared_memory.remove_unused, self.tracker.shared_files(name))


def entry_of(
    pid: int, ticks: int | None = None, attempt: int = 0, launch: Launch | None = None, group: str = ""
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
        clears=[os.path.abspath(path) for path in launch.clears] if launch else [],  # noqa: PTH100
    )
