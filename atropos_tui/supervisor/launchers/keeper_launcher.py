"""Launcher of `survive = true`: components below keepers, and their adoption by the next
supervisor.

A keeper (`keeper.py`) is the parent of one component and survives the supervisor. The next
supervisor calls `claim` before it starts anything, which connects to the keeper of each component
in `journal.json`:

- A running component is adopted with its pid, attempt and log.
- An exited one is adopted as well, so that its exit code and restart are handled as usual.
- One whose plan has changed is restarted.

All other processes of the run are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import marshal
import mmap
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atropos_common.system.run_dir import ENV_RUN_ID, RunDir
from atropos_tui.cluster.frames import Connection, Frame, is_own_peer
from atropos_tui.profile.spec import ComponentSpec, StackError, StackSpec
from atropos_tui.supervisor import bare
from atropos_tui.supervisor.journal.store import ProcessEntry, ProcessTable
from atropos_tui.supervisor.journal.tracker import Tracker, reap_leftovers
from atropos_tui.supervisor.launchers.launcher import (
    Inherited,
    Launcher,
    Living,
    OnExit,
    OnProblem,
    entry_of,
)
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.launch import Launch, prepare
from atropos_tui.supervisor.processes.logs import FULL, TAIL_BYTES, LogDrain
from atropos_tui.supervisor.processes.process import LaunchError, Local, remove_files

KEEPER_TRIES = 2
"""Retries if a keeper dies before the component started."""
GREETING_S = 15.0
"""Timeout of a keeper's answer in seconds. It usually takes milliseconds, but long on a machine
that swaps or whose disk hangs."""
SETTLE_S = 15.0
"""Seconds that a keeper may take to write the rest of the output; then it is killed."""


class KeeperError(OSError):
    """A keeper cannot be started or reached."""


@dataclass
class Handle:
    """A connected keeper and the content of its greeting."""

    address: str
    line: Connection
    keeper_pid: int = 0
    pid: int = 0
    ticks: int = 0
    started_at: float = 0.0
    notes: Mapping[str, str] | None = None
    exit_code: int | None = None
    rest: list[Frame] = field(default_factory=list)
    popen: subprocess.Popen[bytes] | None = None
    """The keeper's process, if it is a child of this process."""

    def close(self) -> None:
        """Disconnect; the keeper goes on alone."""
        self.line.close()


@dataclass(frozen=True)
class KeeperJob:
    """Component that a keeper starts and keeps."""

    command: list[str]
    env: dict[str, str]
    cwd: str
    group: str
    log: str
    max_bytes: int
    notes: dict[str, str]
    """Returned to a later supervisor at `attach`; no file holds them."""


class KeptProcess(Local):
    """A component whose parent is a keeper; has the interface of `process.Leader`."""

    def __init__(
        self,
        handle: Handle,
        on_output: Callable[[bytes], None],
        on_exit: Callable[[], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self._line, self._popen = handle.line, handle.popen
        self._on_output, self._on_exit, self._on_problem = on_output, on_exit, on_problem
        self._loop = asyncio.get_running_loop()
        self._left = asyncio.Event()
        self.pid, self.ticks, self.started_at = handle.pid, handle.ticks, handle.started_at
        self.keeper_pid = handle.keeper_pid
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        self._loop.add_reader(self._line.reading, self._receive)
        if handle.exit_code is not None:
            self._end(handle.exit_code)
        # Later, because the caller must store this object before `on_output` runs.
        self._loop.call_soon(self._take, handle.rest)

    def _receive(self) -> None:
        frames = self._line.read()
        if frames is not None:
            self._take(frames)
            return
        self._loop.remove_reader(self._line.reading)
        self._line.close()
        self._left.set()
        if self.exit_code is None:
            self._end(-signal.SIGKILL)  # the keeper was killed, and its component with it

    def _take(self, frames: list[Frame]) -> None:
        for kind, payload in frames:
            if kind == "output":
                self._on_output(payload)
            elif kind == "exit":
                self._end(int(payload))
            elif kind == "problem":
                self._on_problem(payload.decode(errors="replace"))

    def _end(self, code: int) -> None:
        self.exit_code = code
        self.exited.set()
        self._loop.call_soon(self._on_exit)

    def signal_group(self, number: int) -> None:
        """Signal its process group; safe because its keeper holds the zombie."""
        row = procfs.read(self.pid)
        # The keeper is in another process: check that the pid is not reused.
        if row is not None and row.ticks == self.ticks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def settle(self) -> None:
        """Let the keeper write the rest of the output and exit."""
        if not self._left.is_set():
            with contextlib.suppress(OSError):
                self._line.send("finish")
        try:
            await asyncio.wait_for(self._left.wait(), SETTLE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    self.keeper_pid, signal.SIGKILL
                )  # the connection is open, so the pid is not reused
            await self._left.wait()
        if self._popen is not None:
            await asyncio.to_thread(self._popen.wait)

    def reap(self) -> None:
        """No-op for the component: the keeper released its pid in `settle`."""
        procfs.SPAWNED.discard(self.keeper_pid)


class Spare:
    """A keeper without a component. It starts in advance, because the start of Python takes time
    that the supervisor must not wait. It exits when this process does."""

    def __init__(self, run: RunDir, run_id: str) -> None:
        """Start the keeper.

        Raises:
            OSError: the system is out of processes or descriptors.
        """
        self.address = f"atropos-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # An abstract address: no file to clean up. The random name is no secret, `is_own_peer`
            # checks the user.
            listener.bind(f"\0{self.address}")
            listener.listen(8)
            stderr = os.open(
                run.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            try:
                self.popen = subprocess.Popen(
                    [
                        sys.executable,
                        *bare("atropos_tui.supervisor.launchers.keeper"),
                        str(listener.fileno()),
                    ],
                    env={ENV_RUN_ID: run_id},
                    pass_fds=(listener.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                os.close(stderr)
        procfs.SPAWNED.add(self.popen.pid)
        self._line = _connect(self.address)

    def start(self, job: KeeperJob) -> Handle:
        """Start a component and wait for its pid: about a millisecond, if the keeper is ready.

        Raises:
            OSError: the log cannot be created, or the keeper failed.
        """
        # Before the keeper starts the component, so that the attempt number is used up.
        _create(Path(job.log))
        try:
            handle = _exchange(self.address, self._line, "start", packed(job))
        except KeeperError:
            self.discard()
            raise
        handle.popen = self.popen
        return handle

    def discard(self) -> None:
        """Kill the keeper: it is not needed, or it failed."""
        self._line.close()
        self.popen.kill()
        self.popen.wait()
        procfs.SPAWNED.discard(self.popen.pid)


def packed(job: KeeperJob) -> bytes:
    """Return the payload of `start`. It holds the component's environment with its secrets, so it
    is never written to disk."""
    return marshal.dumps(vars(job) | {"notes": json.dumps(job.notes)})


def lost(pid: int, ticks: int) -> Handle:
    """Return a stand-in for a killed keeper, whose component was killed with it."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.close(writing)
    return Handle(
        "",
        Connection(reading, -1),
        pid=pid,
        ticks=ticks,
        started_at=time.time(),
        exit_code=-signal.SIGKILL,
    )


def attach(address: str) -> Handle:
    """Connect to a keeper of an earlier supervisor; blocks.

    Raises:
        KeeperError: no process is there, it belongs to another user, or it does not answer in time.
    """
    return _exchange(address, _connect(address), "attach")


def _connect(address: str) -> Connection:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(GREETING_S)
        line.connect(f"\0{address}")
        if not is_own_peer(line):
            raise KeeperError("the keeper's address belongs to another user")
    except OSError as error:
        line.close()
        raise KeeperError(f"its keeper cannot be reached: {error}") from None
    line.setblocking(False)
    descriptor = line.detach()
    return Connection(descriptor, descriptor, GREETING_S)


def _exchange(address: str, line: Connection, kind: str, payload: bytes = b"") -> Handle:
    handle = Handle(address, line)
    try:
        line.send(kind, payload)
        _greet(handle)
    except OSError as error:
        handle.close()
        raise KeeperError(f"its keeper does not answer: {error}") from None
    return handle


def _greet(handle: Handle) -> None:
    deadline = time.monotonic() + GREETING_S
    while True:
        kind, payload = handle.line.receive(max(0.0, deadline - time.monotonic()))
        if kind == "kept":
            keeper, pid, ticks, started = payload.split()
            handle.keeper_pid, handle.pid, handle.ticks = int(keeper), int(pid), int(ticks)
            handle.started_at = float(started)
        elif kind == "notes":
            handle.notes = json.loads(payload)
        elif kind == "exit":
            handle.exit_code = int(payload)
        elif kind == "ready":
            break
        else:
            handle.rest.append((kind, payload))
    handle.rest += handle.line.pending()
    if not handle.pid:
        raise KeeperError("the component could not be started")


def _create(log: Path) -> None:
    """Create the log now: the attempt counts even if its keeper dies at once. A full disk does not
    prevent the start."""
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in FULL:
            raise


@dataclass(frozen=True)
class Adoptable(Inherited):
    """A component to adopt, and its keeper."""

    handle: Handle
    launch: Launch


@dataclass(frozen=True)
class Inheritance:
    """Everything to adopt from an earlier supervisor; empty for a fresh run."""

    adoptable: dict[str, Adoptable] = field(default_factory=dict)
    table: ProcessTable | None = None
    """Entries of exactly these components in the earlier journal."""
    token: str = ""
    """The run's token, which the components have in their environment, with the path `socket`."""
    socket: str = ""


class KeeperLauncher(Launcher):
    """Starts each component below a keeper of its own, which starts in advance.

    Args:
        group: the run's control group; "" if it has none.
        socket: path of the control socket, as the components know it.
        token: the run's token.
        adoptable: components to adopt.
    """

    adoptable = True

    def __init__(
        self,
        stack: StackSpec,
        group: str,
        socket: str,
        token: str,
        adoptable: Mapping[str, Adoptable],
    ) -> None:
        self._stack, self._group, self._token = stack, group, token
        self._notes = {"token": token, "socket": socket}
        self._run = RunDir(Path(stack.run_dir))
        self.inherited = self._adoptable = adoptable
        self._spares = [self._spare() for _ in stack.components]

    def start(
        self,
        spec: ComponentSpec,
        attempt: int,
        launch: Launch,
        on_exit: OnExit,
        on_problem: OnProblem,
    ) -> Living:
        group = procfs.part_group(self._group, spec.name, attempt)
        handle = self._start(launch, self._run.log(spec.name, attempt), group)
        log = LogDrain(None, None)
        kept = KeptProcess(handle, log.take, on_exit, on_problem)
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
        each = self._adoptable[name]
        log = ResumedDrain(self._run.log(name, each.entry.attempt), each.entry.seen)
        return Living(
            KeptProcess(each.handle, log.take, on_exit, on_problem), log, each.launch, each.entry
        )

    def close(self) -> None:
        while self._spares:
            self._spares.pop().discard()

    def _start(self, launch: Launch, log: Path, group: str) -> Handle:
        cwd = launch.cwd or os.getcwd()  # noqa: PTH109
        job = KeeperJob(
            launch.command,
            launch.env,
            cwd,
            group,
            str(log),
            self._stack.logs.max_bytes,
            self._notes,
        )
        for _ in range(len(self._spares) + KEEPER_TRIES):
            with contextlib.suppress(KeeperError):  # the keeper was killed: use the next one
                return self._started_by(self._spares.pop() if self._spares else self._spare(), job)
        return self._started_by(self._spare(), job)

    def _started_by(self, spare: Spare, job: KeeperJob) -> Handle:
        handle = spare.start(job)
        if not self._spares:
            self._spares.append(self._spare())  # for the next restart
        return handle

    def _spare(self) -> Spare:
        return Spare(self._run, self._stack.run_id)


def claim(stack: StackSpec, run: RunDir) -> Inheritance:
    """Connect to the components that can be adopted, and kill all other processes of the earlier
    supervisor; blocks.

    Raises:
        StackError: a live component cannot be compared with its plan; nothing was killed.
    """
    table = ProcessTable.load(run.journal_json)
    reached = (
        _reach(stack, table) if stack.survive and table and table.run_id == stack.run_id else {}
    )
    try:
        inheritance = _compare(stack, table, reached)
    except LaunchError as error:
        for _, handle in reached.values():
            handle.close()
        raise StackError(
            f"cannot adopt the running components of {stack.run_id}: {error.problem}; {error.fix}"
        ) from None
    _reap_others(stack.run_id, table, inheritance)
    return inheritance


def _reach(stack: StackSpec, table: ProcessTable) -> dict[str, tuple[ProcessEntry, Handle]]:
    """Connect to each component with a keeper. One whose keeper was killed counts as killed."""
    found = {}
    for name, entry in table.components.items():
        if not entry.keeper or stack.component(name) is None:
            continue
        try:
            handle = attach(entry.keeper)
        except KeeperError:
            handle = lost(entry.pid, entry.ticks)
        found[name] = entry, handle
    if all(handle.notes is None for _, handle in found.values()):
        return {}  # no keeper lives: start fresh, and report no crashes
    return found


def _compare(
    stack: StackSpec, table: ProcessTable | None, reached: dict[str, tuple[ProcessEntry, Handle]]
) -> Inheritance:
    notes = next((handle.notes for _, handle in reached.values() if handle.notes), None)
    if table is None or notes is None:
        return Inheritance()
    token, socket = notes["token"], notes["socket"]
    adoptable = {}
    for name, (entry, handle) in reached.items():
        spec = stack.component(name)
        assert spec is not None
        launch = prepare(stack, spec, entry.attempt, socket, token)
        changed = digest(stack, spec, launch, token) != entry.digest
        adoptable[name] = Adoptable(entry, changed, handle, launch)
    kept = {name: each.entry for name, each in adoptable.items()}
    return Inheritance(adoptable, table.model_copy(update={"components": kept}), token, socket)


def digest(stack: StackSpec, spec: ComponentSpec, launch: Launch, token: str) -> str:
    """Return a digest of a component's launch: command, folder, and the environment from the plan.

    Its key is the run's token, which no file holds, so that secret values cannot be guessed from
    it.
    """
    # Only variables of the plan: the rest of the environment may differ between supervisors.
    given = {key: launch.env[key] for key in sorted(spec.env)}
    what = json.dumps([stack.run_id, stack.run_dir, launch.command, launch.cwd, given])
    return hashlib.blake2b(what.encode(), digest_size=16, key=token.encode()[:64]).hexdigest()


def _reap_others(run_id: str, table: ProcessTable | None, inheritance: Inheritance) -> None:
    if not inheritance.adoptable:
        if table is not None:
            reap_leftovers(table.run_id, table)
        reap_leftovers(run_id)
        return
    assert table is not None
    tracker = Tracker(run_id)
    for name, each in inheritance.adoptable.items():
        tracker.add(name, each.entry.pid, each.entry.group, each.entry.sessions)
    keepers = {each.handle.keeper_pid for each in inheritance.adoptable.values()}

    def spared() -> set[int]:
        return keepers | {row.pid for rows in tracker.survey().values() for row in rows}

    # Survey again after each scan: adopted components may start new processes meanwhile.
    reap_leftovers(run_id, table, spared=spared)
    for name, entry in table.components.items():
        if name not in inheritance.adoptable:
            with contextlib.suppress(OSError):
                remove_files([Path(path) for path in entry.clears])
            if procfs.is_group_of(table.group, run_id) and entry.group.startswith(
                f"{table.group}/"
            ):
                procfs.remove_group(entry.group)


class ResumedDrain(LogDrain):
    """Output of an adopted component: new output, and for patterns also the existing log.

    Args:
        log: log of this attempt; the keeper writes it.
        seen: patterns that an earlier supervisor saw, perhaps in lines that rotation has dropped
            since.
    """

    def __init__(self, log: Path, seen: list[str]) -> None:
        super().__init__(None, None)
        self._parts = (log.with_name(log.name + ".1"), log)
        self._seen_before = set(seen)
        for path in self._parts:
            self._tail += _last_bytes(path, TAIL_BYTES)
        # The older segment comes first, so the tail keeps the newest bytes.
        del self._tail[:-TAIL_BYTES]

    def watch(self, pattern: str) -> None:
        super().watch(pattern)
        compiled = re.compile(pattern.encode())
        if pattern in self._seen_before or any(_matches(path, compiled) for path in self._parts):
            self._lines.note_seen(pattern)


def _last_bytes(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - count))
            return file.read(count)
    except OSError:
        return b""


def _matches(path: Path, pattern: re.Pattern[bytes]) -> bool:
    """Return True if a line of the file matches. Searches tens of megabytes in tens of
    milliseconds."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            lines = re.compile(pattern.pattern, pattern.flags | re.MULTILINE)
            # Find candidates in the whole file, then match each line alone: `\s` or a negated set
            # may span lines.
            for hit in lines.finditer(data):
                start = data.rfind(b"\n", 0, hit.start()) + 1
                end = data.find(b"\n", start)
                if pattern.search(data[start : end if end >= 0 else len(data)]):
                    return True
    except (OSError, ValueError):  # the file is missing or empty
        pass
    return False
