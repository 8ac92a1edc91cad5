"""The launcher of `survive = true`: components below keepers, and how the next supervisor goes on with them.

A keeper (`keeper.py`) is the parent of one component, and lives on without us. After a kill of the supervisor the next
one claims what lives before it starts anything (`claim`): each component that `journal.json` names is asked of its
keeper. One that runs is taken in with its pid, its attempt and its log; one that ended meanwhile is taken in, too, so
that its exit code is judged like any other and its restart takes with it what the recipe says; one whose plan says
something else now is restarted. All else of the run is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atropos_common.run_dir import RunDir
from atropos_tui.profile.spec import ComponentSpec, StackError, StackSpec
from atropos_tui.supervisor import cgroup, environment, keeping, leftovers, procfs
from atropos_tui.supervisor.environment import Launch, LaunchError
from atropos_tui.supervisor.keeping import Handle, Job, KeeperError, Kept, Spare
from atropos_tui.supervisor.launcher import Inherited, Living, OnExit, OnProblem, entry_of
from atropos_tui.supervisor.logs import TAIL_BYTES, LogDrain
from atropos_tui.supervisor.members import Tracker
from atropos_tui.supervisor.store import ProcessEntry, ProcessTable

KEEPER_TRIES = 2
"""A keeper that is killed before it has started the component is nobody's crash: so many more are tried."""


@dataclass(frozen=True)
class Heir(Inherited):
    """One component to adopt, and the way to its keeper."""

    handle: Handle
    launch: Launch


@dataclass(frozen=True)
class Estate:
    """What an earlier supervisor left to this one; empty for a fresh run."""

    heirs: dict[str, Heir] = field(default_factory=dict)
    table: ProcessTable | None = None
    """The earlier journal's entries of exactly these heirs."""
    token: str = ""
    """They hold the run's token and the path of the control socket in their environment."""
    socket: str = ""


class KeeperLauncher:
    """Starts each component below a keeper of its own, which is started before it is needed.

    Args:
        group: the run's control group, if it has one.
        socket: path of the control socket, as the components know it.
        token: the run's token.
        heirs: what an earlier supervisor left.
    """

    adoptable = True

    def __init__(self, stack: StackSpec, group: str, socket: str, token: str, heirs: Mapping[str, Heir]) -> None:
        self._stack, self._group, self._token = stack, group, token
        self._notes = {"token": token, "socket": socket}
        self._run = RunDir(Path(stack.run_dir))
        self.inherited = heirs
        self._spares = [self._spare() for _ in stack.components]

    def start(
        self, spec: ComponentSpec, attempt: int, launch: Launch, on_exit: OnExit, on_problem: OnProblem
    ) -> Living:
        group = cgroup.part_group(self._group, spec.name, attempt)
        handle = self._start(launch, self._run.log(spec.name, attempt), group)
        log = LogDrain(None, None)
        kept = Kept(handle, log.take, on_exit, on_problem)
        row = procfs.read(handle.keeper_pid)
        entry = entry_of(kept.pid, kept.ticks, attempt, launch, group).model_copy(
            update={
                "digest": digest(self._stack, spec, launch, self._token),
                "keeper": handle.address,
                "keeper_pid": handle.keeper_pid,
                "keeper_ticks": row.ticks if row else 0,
            }
        )
        return Living(kept, log, launch, entry)

    def adopt(self, name: str, on_exit: OnExit, on_problem: OnProblem) -> Living:
        heir = self.inherited[name]
        log = ResumedDrain(self._run.log(name, heir.entry.attempt), heir.entry.seen)
        return Living(Kept(heir.handle, log.take, on_exit, on_problem), log, heir.launch, heir.entry)

    def prepare(self, spec: ComponentSpec, attempt: int, launch: Launch) -> int | None:
        return None  # a keeper starts its own

    def drop_next(self, name: str | None = None) -> None:
        return

    def close(self) -> None:
        while self._spares:
            self._spares.pop().discard()

    def _start(self, launch: Launch, log: Path, group: str) -> Handle:
        cwd = launch.cwd or os.getcwd()  # noqa: PTH109
        job = Job(launch.command, launch.env, cwd, group, str(log), self._stack.logs.max_bytes, self._notes)
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


def claim(stack: StackSpec, run: RunDir) -> Estate:
    """End what cannot be adopted of the earlier supervisor's processes, and reach the rest; blocking.

    Raises:
        StackError: a component that lives cannot be compared with its plan; nothing was ended.
    """
    table = ProcessTable.load(run.journal_json)
    reached = _reach(stack, table) if stack.survive and table and table.run_id == stack.run_id else {}
    try:
        estate = _compare(stack, table, reached)
    except LaunchError as error:
        for _, handle in reached.values():
            handle.close()
        raise StackError(f"cannot adopt what still runs of {stack.run_id}: {error.problem}; {error.fix}") from None
    _reap_others(stack.run_id, table, estate)
    return estate


def _reach(stack: StackSpec, table: ProcessTable) -> dict[str, tuple[ProcessEntry, Handle]]:
    """Each component that a keeper keeps, and each whose keeper was killed: it counts as killed, too."""
    found = {}
    for name, entry in table.components.items():
        if not entry.keeper or stack.component(name) is None:
            continue
        try:
            handle = keeping.attach(entry.keeper)
        except KeeperError:
            handle = keeping.lost(entry.pid, entry.ticks)
        found[name] = entry, handle
    if all(handle.notes is None for _, handle in found.values()):
        return {}  # no keeper lives: nothing to adopt, and a fresh start needs no crashes to tell of
    return found


def _compare(stack: StackSpec, table: ProcessTable | None, reached: dict[str, tuple[ProcessEntry, Handle]]) -> Estate:
    notes = next((handle.notes for _, handle in reached.values() if handle.notes), None)
    if table is None or notes is None:
        return Estate()
    token, socket = notes["token"], notes["socket"]
    heirs = {}
    for name, (entry, handle) in reached.items():
        spec = stack.component(name)
        assert spec is not None
        launch = environment.prepare(stack, spec, entry.attempt, socket, token)
        changed = digest(stack, spec, launch, token) != entry.digest
        heirs[name] = Heir(entry, changed, handle, launch)
    kept = {name: heir.entry for name, heir in heirs.items()}
    return Estate(heirs, table.model_copy(update={"components": kept}), token, socket)


def digest(stack: StackSpec, spec: ComponentSpec, launch: Launch, token: str) -> str:
    """What a component was started as: command, folder, and the environment that the plan gives it.

    Keyed with the run's token, which no file holds, so that nobody can guess a secret value from it.
    """
    given = {key: launch.env[key] for key in sorted(spec.env)}
    what = json.dumps([stack.run_id, stack.run_dir, launch.command, launch.cwd, given])
    return hashlib.blake2b(what.encode(), digest_size=16, key=token.encode()[:64]).hexdigest()


def _reap_others(run_id: str, table: ProcessTable | None, estate: Estate) -> None:
    if not estate.heirs:
        if table is not None:
            leftovers.reap(table.run_id, table)
        leftovers.reap(run_id)
        return
    assert table is not None
    tracker = Tracker(run_id)
    for name, heir in estate.heirs.items():
        tracker.add(name, heir.entry.pid, heir.entry.group, heir.entry.sessions.items())
    keepers = {heir.handle.keeper_pid for heir in estate.heirs.values()}

    def spared() -> set[int]:
        return keepers | {row.pid for rows in tracker.survey().values() for row in rows}

    leftovers.reap(run_id, table, spared=spared)
    for name, entry in table.components.items():
        if name not in estate.heirs:
            with contextlib.suppress(OSError):
                environment.remove([Path(path) for path in entry.clears])
            if cgroup.is_of(table.group, run_id) and entry.group.startswith(f"{table.group}/"):
                cgroup.remove(entry.group)


class ResumedDrain(LogDrain):
    """The output of an adopted component: what comes now, and for patterns also what its log holds already.

    Args:
        log: the log of this attempt; the keeper writes it.
        seen: patterns that an earlier supervisor saw, perhaps in lines that rotation has dropped since.
    """

    def __init__(self, log: Path, seen: list[str]) -> None:
        super().__init__(None, None)
        self._parts = (log.with_name(log.name + ".1"), log)
        self._seen_before = set(seen)
        for path in self._parts:
            self._tail += _last_bytes(path, TAIL_BYTES)
        del self._tail[:-TAIL_BYTES]

    def watch(self, pattern: str) -> None:
        if pattern in self._watches:
            return
        super().watch(pattern)
        compiled, seen = self._watches[pattern]
        seen[0] = seen[0] or pattern in self._seen_before or any(_matches(path, compiled) for path in self._parts)


def _last_bytes(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - count))
            return file.read(count)
    except OSError:
        return b""


def _matches(path: Path, pattern: re.Pattern[bytes]) -> bool:
    """Whether a line of the file matches; tens of megabytes in tens of milliseconds."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            lines = re.compile(pattern.pattern, pattern.flags | re.MULTILINE)
            for hit in lines.finditer(data):
                start = data.rfind(b"\n", 0, hit.start()) + 1
                end = data.find(b"\n", start)
                if pattern.search(data[start : end if end >= 0 else len(data)]):
                    return True
    except (OSError, ValueError):  # no such file, or an empty one
        pass
    return False
