"""Bring one component to life: as our own child, below a keeper that outlives us (`survive`), or adopted from one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atropos_tui.stack.spec import ComponentSpec, StackSpec
from atropos_tui.supervisor import cgroup, procfs
from atropos_tui.supervisor.adoption import Heir, ResumedDrain, digest
from atropos_tui.supervisor.environment import Launch
from atropos_tui.supervisor.journal import ProcessEntry
from atropos_tui.supervisor.keeping import Handle, Job, KeeperError, Kept, Spare
from atropos_tui.supervisor.log_file import LogFile
from atropos_tui.supervisor.logs import LogDrain
from atropos_tui.supervisor.process import Leader, spawn
from atropos_tui.supervisor.standby import Standby
from trainer_core.contracts.run_dir import RunDir

KEEPER_TRIES = 2
"""A keeper that is killed before it has started the component is nobody's crash: so many more are tried."""
OnExit = Callable[[], None]
OnProblem = Callable[[str], None]


@dataclass(frozen=True)
class Living:
    """A component that was brought to life."""

    child: Leader
    log: LogDrain
    entry: ProcessEntry
    """What the journal says of it."""
    waited: bool = False
    """It was prepared, and waited for its turn."""


class Spawner:
    """Starts the components of one run.

    Args:
        group: the run's control group, if it has one.
        socket: path of the control socket, as the components know it.
        token: the run's token.
    """

    def __init__(self, stack: StackSpec, group: str, socket: str, token: str) -> None:
        self._stack, self._group, self._socket, self._token = stack, group, socket, token
        self._run = RunDir(Path(stack.run_dir))
        self._spares = [self._spare() for _ in stack.components] if stack.survive else []
        self._standby = Standby()

    def start(
        self, spec: ComponentSpec, attempt: int, launch: Launch, on_exit: OnExit, on_problem: OnProblem
    ) -> Living:
        """Execute the command of `launch`.

        Raises:
            OSError: the log cannot be opened, or the process cannot be started.
        """
        path = self._run.log(spec.name, attempt)
        group = cgroup.part_group(self._group, spec.name, attempt)
        if self._stack.survive:
            handle = self._start_kept(spec, launch, path, group)
            kept = Kept(handle, on_exit, on_problem)
            entry = self._entry(spec, kept, attempt, launch, group)
            return Living(kept, LogDrain(handle.view, None), _with_keeper(entry, handle))
        file = LogFile(path, self._stack.logs.max_bytes)
        waited = self._standby.take(spec.name, attempt, launch)
        child, pipe = waited or spawn(launch.command, launch.env, launch.cwd, group=group)
        child.begin(lambda _: on_exit())
        entry = self._entry(spec, child, attempt, launch, group)
        return Living(child, LogDrain(pipe, file, on_problem), entry, waited=waited is not None)

    def adopt(self, spec: ComponentSpec, heir: Heir, on_exit: OnExit, on_problem: OnProblem) -> Living:
        """Go on with a component that an earlier supervisor started."""
        path = self._run.log(spec.name, heir.entry.attempt)
        log = ResumedDrain(heir.handle.view, path, heir.entry.seen)
        return Living(Kept(heir.handle, on_exit, on_problem), log, heir.entry)

    def prepare(self, spec: ComponentSpec, attempt: int, launch: Launch) -> int | None:
        """Let a process wait to be `attempt`, so that it takes less time; not below a keeper, which starts its own.

        Returns:
            Its pid.

        Raises:
            OSError: it cannot be started.
        """
        if self._stack.survive:
            return None
        group = cgroup.part_group(self._group, spec.name, attempt)
        return self._standby.prepare(spec.name, attempt, launch, group)

    def drop_next(self, name: str | None = None) -> None:
        """Nobody waits any more to be the next of `name`, or of anyone."""
        self._standby.discard(name)

    def close(self) -> None:
        """Nothing more will be started."""
        self.drop_next()
        while self._spares:
            self._spares.pop().discard()

    def _start_kept(self, spec: ComponentSpec, launch: Launch, log: Path, group: str) -> Handle:
        notes = {"token": self._token, "socket": self._socket}
        cwd = launch.cwd or os.getcwd()  # noqa: PTH109
        job = Job(launch.command, launch.env, cwd, group, str(log), self._stack.logs.max_bytes, notes)
        for _ in range(len(self._spares) + KEEPER_TRIES):
            with contextlib.suppress(KeeperError):  # someone has killed it
                return self._started_by(self._spares.pop() if self._spares else self._spare(), job)
        return self._started_by(self._spare(), job)

    def _started_by(self, spare: Spare, job: Job) -> Handle:
        handle = spare.start(job)
        if not self._spares:
            self._spares.append(self._spare())  # ready by the time of the next restart
        return handle

    def _spare(self) -> Spare:
        return Spare(self._run, self._stack.run_id)

    def _entry(self, spec: ComponentSpec, child: Leader, attempt: int, launch: Launch, group: str) -> ProcessEntry:
        return entry_of(child.pid, child.ticks, attempt).model_copy(
            update={
                "group": group,
                "clears": [os.path.abspath(path) for path in launch.clears],  # noqa: PTH100
                "digest": digest(self._stack, spec, launch, self._token),
            }
        )


def _with_keeper(entry: ProcessEntry, handle: Handle) -> ProcessEntry:
    row = procfs.read(handle.keeper_pid)
    found = {"keeper": handle.address, "keeper_pid": handle.keeper_pid, "keeper_ticks": row.ticks if row else 0}
    return entry.model_copy(update=found)


def entry_of(pid: int, ticks: int | None = None, attempt: int = 0) -> ProcessEntry:
    """The journal's entry for a live process."""
    if ticks is None:
        row = procfs.read(pid)
        ticks = row.ticks if row else 0
    seconds = ticks / procfs.TICKS_PER_SECOND
    return ProcessEntry(pid=pid, create_time=seconds, ticks=ticks, pgid=pid, boot_id=procfs.boot_id(), attempt=attempt)
