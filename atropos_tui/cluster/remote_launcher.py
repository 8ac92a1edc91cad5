"""Launcher of components on other nodes: each behind a command prefix (srun, ssh, kubectl exec) and
a node agent.

The prefix runs here as a child. Its stdin and stdout connect to the node agent; its stderr goes
into the component's log. A component is lost if the connection breaks before `gone`, or after
`LOST_S` of silence. That is a crash; before the next start another prefix kills what may be left
there (`sweep`), as `clean` and the next supervisor do.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter

from atropos_common.protocol.control import NODE_SILENT_S, GpuStatus
from atropos_common.system.run_dir import ENV_RUN_ID
from atropos_tui.cluster.frames import Connection, head
from atropos_tui.cluster.node_agent import ARGUMENTS, MAGIC, OWNER_HEARTBEAT_S
from atropos_tui.cluster.outbox import Channels, Heartbeats, Outbox, number_of
from atropos_tui.diagnoses import Diagnosis, node_lost
from atropos_tui.profile.spec import ComponentSpec, StackSpec
from atropos_tui.supervisor.journal.store import FarEntry, ProcessTable
from atropos_tui.supervisor.launchers.launcher import (
    DirectLauncher,
    Living,
    OnExit,
    OnProblem,
    Usage,
    entry_of,
)
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.launch import Launch, scratch_name
from atropos_tui.supervisor.processes.logs import LogDrain, LogFile, read_some, widen
from atropos_tui.supervisor.processes.process import Ending, end_words, spawn

CHECK_EVERY_S = 1.0
LOST_S = 20.0
"""Seconds of silence after which a node agent is lost."""
CONNECT_S = 60.0
"""Seconds to reach the node agent; a batch system may have to free resources first."""
LOGIN_S = 20.0
"""Seconds of a login after which the log says that the node does not answer."""
LAST_WORDS_S = 1.0
"""Seconds to wait for the exit of a prefix, which explains a broken connection."""
PREFIX_EXIT_S = 10.0
"""Seconds for the exit of a prefix after its node agent; then it is killed."""
SWEEP_TIMEOUT_S = 15.0
"""Seconds for a sweep; a lost node never answers."""
MEASURE_EVERY_S = 2.0
MEASURE_TIMEOUT_S = 0.3
"""Seconds for usage figures of other nodes."""
OF_THIS_HOST = re.compile(
    r"(HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|MAIL|TERM|HOSTNAME|TMPDIR|TMP|TEMP|DISPLAY|LS_COLORS|PATH"
    r"|(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL"
    r"|(XDG|SSH|DBUS|SLURM|SLURMD|SBATCH|SRUN|PMI|PMIX|KUBERNETES|RAY|SYSTEMD|JOURNAL|INVOCATION)_?[A-Z0-9_]*)"
)
"""Variables with a meaning on one machine or in one SLURM step only."""

_USAGE = TypeAdapter(Usage)

_SWEEPERS = ThreadPoolExecutor(16, "sweep")
"""Each lost node blocks a thread for `SWEEP_TIMEOUT_S`; ends of other components must not wait."""


def prefix_env(run_id: str) -> dict[str, str]:
    """This process's environment, without a component's marker: the prefix would become a member
    to kill."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("ATROPOS_")
    } | {ENV_RUN_ID: run_id}


class StartedThere(BaseModel):
    """Fields of `kept` that a node agent may set."""

    pid: int = Field(gt=0)
    ticks: int
    end_pid: int = Field(gt=0)
    end_ticks: int


class Machine(BaseModel):
    """Fields of `NodeStatus` that a node agent reports."""

    cpu_percent: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


class Far:
    """A component on another node, with the interface of `process.Leader`; `pid` is its pid
    there."""

    def __init__(
        self,
        entry: FarEntry,
        run_id: str,
        job: Mapping[str, Any],
        socket: str,
        log: LogDrain,
        on_exit: OnExit,
        on_kept: Callable[[FarEntry], None],
    ) -> None:
        self.entry, self._run_id, self._job, self._socket = entry, run_id, job, socket
        self._log, self._on_exit, self._on_kept = log, on_exit, on_kept
        self._loop = asyncio.get_running_loop()
        self.pid = self.ticks = 0
        self.started_at = time.time()
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        self.lost = ""
        self.usage: Usage | None = None
        self.machine: dict[str, Any] = {}
        """Fields of `NodeStatus` from the last `usage`."""
        self.cards: list[GpuStatus] = []
        self._measured = asyncio.Event()
        self._asked_at = 0.0
        self._frame_at = time.monotonic()
        self._reported = self._begun = self._leaving = False
        self._last_line = ""
        """Last line of the prefix's stderr, preferably with an error."""
        self._killed = 0
        self._gone = asyncio.Event()
        self._ending: Ending | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_prefix()
        self._channels = Channels(self._out)

    def _start_prefix(self) -> None:
        reading, stdout = os.pipe2(os.O_CLOEXEC)
        stdin, writing = os.pipe2(os.O_CLOEXEC)
        try:
            self.prefix, self._stderr = spawn(
                self.entry.command, prefix_env(self._run_id), "/", stdin=stdin, stdout=stdout
            )
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        finally:
            os.close(stdout)
            os.close(stdin)
        for descriptor in (reading, writing):
            widen(descriptor)
        # Both ends of the connection belong to the event loop.
        os.set_blocking(reading, False)
        os.set_blocking(self._stderr, False)
        self._line, self._out = Connection(reading, -1, after=MAGIC), Outbox(writing)
        self._loop.add_reader(reading, self._receive)
        self._loop.add_reader(self._stderr, self._read_stderr)
        self.prefix.begin(lambda _: self._task(self._line_ended()))

    def _task(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Incoming frames.

    def _receive(self) -> None:
        frames = self._line.read()
        if frames is None:
            self._loop.remove_reader(self._line.reading)
            self._task(self._line_ended())
            return
        self._frame_at, self._reported = time.monotonic(), False
        try:
            for kind, payload in frames:
                self._take(kind, payload)
        except (
            ValueError,
            TypeError,
            KeyError,
            struct.error,
        ):  # validate every frame of another machine
            self._loop.remove_reader(self._line.reading)
            self._task(self._lose("it broke the protocol of the node agent"))

    def _take(self, kind: str, payload: bytes) -> None:
        match kind:
            case "output":
                self._log.take(payload)
            case "began":
                # Only after the marker: a login shell could read the job from stdin.
                self._out.send("start", json.dumps(self._job).encode())
                self._begun = True
            case "kept":
                started = StartedThere.model_validate_json(payload)
                self.entry = self.entry.model_copy(update=started.model_dump())
                self.pid, self.ticks = self.entry.pid, self.entry.ticks
                self._on_kept(self.entry)
            case "exit":
                self._end(int(payload))
            case "gone":
                self._killed = int(payload)
                self._gone.set()
            case "left":
                if self._ending:
                    self._ending.on_leftover(int(payload))
            case "stuck":
                if self._ending:
                    self._ending.on_stuck(f"{payload.decode()} on node {self.entry.node}")
            case "usage":
                self._note_usage(json.loads(payload))
            # `expect` before the connection exists, because its first data may follow at once.
            case "open":
                self._channels.expect(number_of(payload))
                self._task(self._connect(number_of(payload)))
            case "data" | "close":
                self._channels.take(kind, payload)

    async def _connect(self, number: int) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            self._channels.refuse(number)
        else:
            await self._channels.carry(number, reader, writer)

    def _read_stderr(self) -> None:
        data = read_some(self._stderr)
        if data is None:
            return
        if not data:
            self._loop.remove_reader(self._stderr)
            return
        self._log.note(data)
        lines = [
            line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()
        ]
        telling = [line for line in lines if "error" in line.lower()] or lines
        self._last_line = telling[-1] if telling else self._last_line

    def _note_usage(self, found: dict[str, Any]) -> None:
        cards = found.pop("cards", [])
        self.machine = Machine.model_validate(found.pop("machine")).model_dump()
        self.usage = _USAGE.validate_python(found | {"at": time.time()})
        self.cards = [
            GpuStatus(
                **card | {"held_bytes": {self._job["name"]: card["held_bytes"]}},
                node=self.entry.node,
            )
            for card in cards
        ]
        self._measured.set()

    @property
    def heard_at(self) -> float:
        """Unix time of the last frame."""
        return time.time() - (time.monotonic() - self._frame_at)

    async def measure(self) -> None:
        """Request new figures if the old ones are outdated; waits up to `MEASURE_TIMEOUT_S`."""
        if (
            time.monotonic() - self._asked_at > MEASURE_EVERY_S
            and self.pid
            and self.exit_code is None
        ):
            self._asked_at = time.monotonic()
            self._measured.clear()
            self._out.send("measure")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._measured.wait(), MEASURE_TIMEOUT_S)

    # Losing a component.

    def look(self) -> None:
        """Report a silent node agent, or give the component up."""
        quiet_s = time.monotonic() - self._frame_at
        if self._gone.is_set() or self._leaving:
            return
        if self._begun and quiet_s > LOST_S:
            self._task(self._lose(f"nothing was heard from there for {quiet_s:.0f} s"))
        elif not self._begun and quiet_s > CONNECT_S:
            self._task(self._lose(f"it did not answer within {quiet_s:.0f} s"))
        elif quiet_s > (NODE_SILENT_S if self._begun else LOGIN_S) and not self._reported:
            self._reported = True
            what = "has said nothing" if self._begun else "has not answered"
            self._note(
                f"{self._where} {what} for {quiet_s:.0f} "
                f"s{f': {self._last_line}' if self._last_line else ''}"
            )

    @property
    def outbox(self) -> Outbox | None:
        """None until the node agent listens."""
        return self._out if self._begun else None

    @property
    def _where(self) -> str:
        return f"node {self.entry.node} ({self.entry.host})"

    def _note(self, words: str) -> None:
        self._log.note(f"\natropos: {words}\n".encode())

    async def _line_ended(self) -> None:
        """Handle an unexpected end of connection or prefix, and find its reason."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.prefix.exited.wait(), LAST_WORDS_S)
        await asyncio.sleep(0.05)  # let the event loop read the pipes first
        code = self.prefix.exit_code
        if code is None:
            how = "it closed the connection"
        elif code < 0:
            how = f"it was killed by {signal.Signals(-code).name}"
        else:
            how = f"it ended with exit code {code}"
        await self._lose(f"{how}: {self._last_line}" if self._last_line else how)

    async def _lose(self, how: str) -> None:
        if self._gone.is_set() or self._leaving:
            return
        self._leaving = True
        program = Path(self.entry.command[0]).name
        self.lost = f"{self._where}: {'lost' if self._begun else 'not reached'} by {program}: {how}"
        self._note(self.lost)
        self._out.close()
        # A prefix that still runs is useless now.
        await self._end_prefix(0.0)
        if self.exit_code is None:
            self._end(-signal.SIGKILL if self._begun else self.prefix.exit_code or 1)
        self._gone.set()

    def _end(self, code: int) -> None:
        self.exit_code = code
        self.exited.set()
        self._loop.call_soon(self._on_exit)

    async def _end_prefix(self, patience_s: float) -> None:
        try:
            await asyncio.wait_for(self.prefix.exited.wait(), patience_s)
        except TimeoutError:
            self.prefix.signal_group(signal.SIGKILL)
            await self.prefix.exited.wait()

    # Ending.

    def signal_group(self, number: int) -> None: ...

    async def end_set(self, ending: Ending) -> int:
        """Let the node agent end the component."""
        self._ending = ending
        if not self._begun and not self.lost:
            self._leaving = True  # nothing has started there
            self._out.close()
            await self._end_prefix(LAST_WORDS_S)
            self._end(-ending.number)
            return 0
        self._out.send("end", end_words(ending.number, ending.grace_s))
        hurrying = self._loop.create_task(self._hurry(ending.hurry))
        await self._gone.wait()
        hurrying.cancel()
        # The node agent is unreachable, but its component may still run.
        if self.lost and self._begun:
            problem = await self._loop.run_in_executor(
                _SWEEPERS, sweep_there, self.entry, self._run_id
            )
            if problem:
                self._note(f"{self._where}: its remaining processes could not be killed: {problem}")
        return self._killed

    async def _hurry(self, hurry: asyncio.Event) -> None:
        await hurry.wait()
        self._out.send("hurry")

    async def settle(self) -> None:
        """Let the prefix exit; the last output came before `gone`."""
        self._leaving = True
        self._channels.close()
        self._out.close()
        await self._end_prefix(PREFIX_EXIT_S)
        # One turn of the event loop, for the callback of the prefix's exit.
        await asyncio.sleep(0)
        self._loop.remove_reader(self._line.reading)
        self._loop.remove_reader(self._stderr)
        self._line.close()
        os.close(self._stderr)

    def reap(self) -> None:
        self.prefix.reap()


class RemoteLauncher(DirectLauncher):
    """Starts components with a prefix on their node, the others here."""

    def __init__(self, stack: StackSpec, group: str, socket: str, token: str) -> None:
        super().__init__(stack, group)
        self._stack, self._socket, self._token = stack, socket, token
        self._living: dict[str, Far] = {}
        self._machines: dict[str, dict[str, Any]] = {}
        """Last figures by node."""
        pynvml = importlib.util.find_spec("pynvml")
        self._packages = str(Path(pynvml.origin).parent) if pynvml and pynvml.origin else ""
        self._watching = asyncio.create_task(self._watch())
        self._heartbeats = Heartbeats(OWNER_HEARTBEAT_S, self._outboxes)

    def start(
        self,
        spec: ComponentSpec,
        attempt: int,
        launch: Launch,
        on_exit: OnExit,
        on_problem: OnProblem,
    ) -> Living:
        if not spec.is_far:
            return super().start(spec, attempt, launch, on_exit, on_problem)
        assert spec.place is not None
        folders = [scratch_name(self._token, f"{spec.name} control", attempt)]
        folders += [scratch_name(self._token, spec.name, attempt)] if spec.scratch else []
        entry = FarEntry(
            name=spec.name,
            node=spec.place.node,
            host=spec.place.host,
            command=spec.place.command(spec.place.python, *ARGUMENTS),
            clears=[os.path.abspath(path) for path in launch.clears],  # noqa: PTH100
            folders=folders,
            turn=turn_of_job() if self._stack.launcher == "slurm" else "",
        )
        log = LogDrain(
            None, LogFile(self._run.log(spec.name, attempt), self._max_bytes), on_problem
        )
        try:
            far = Far(
                entry,
                self._stack.run_id,
                self._job(spec, launch, entry),
                self._socket,
                log,
                on_exit,
                lambda now: self.on_far(spec.name, now),
            )
        except OSError:
            log.finish()
            raise
        self._living[spec.name] = far
        here = entry_of(far.prefix.pid, far.prefix.ticks, attempt).model_copy(update={"far": entry})
        return Living(far, log, launch, here)

    def _job(self, spec: ComponentSpec, launch: Launch, entry: FarEntry) -> dict[str, Any]:
        """Job of a node agent. It holds secrets, so it is never written to disk."""
        names = spec.env.keys()
        return {
            "run_id": self._stack.run_id,
            "name": spec.name,
            "command": launch.command,
            "cwd": launch.cwd or os.getcwd(),  # noqa: PTH109
            "env": {
                key: value
                for key, value in launch.env.items()
                if key in names or not OF_THIS_HOST.fullmatch(key)
            },
            "path": "" if "PATH" in names else launch.env.get("PATH", ""),
            "role": spec.role.value,
            "clears": entry.clears,
            "socket": entry.folders[0],
            "scratch": entry.folders[1] if spec.scratch else "",
            "packages": self._packages if spec.gpus else "",
        }

    def close(self) -> None:
        self._watching.cancel()
        self._heartbeats.close()
        super().close()

    async def usage(self) -> dict[str, Usage]:
        living = self._alive()
        await asyncio.gather(*(far.measure() for far in living.values()))
        return {name: far.usage for name, far in living.items() if far.usage}

    def machines(self) -> dict[str, dict[str, Any]]:
        for far in self._living.values():
            known = self._machines.setdefault(far.entry.node, {"heard_at": 0.0})
            # Several components of one node report it; the newest report counts.
            if far.heard_at >= known["heard_at"]:
                known |= {**far.machine, "heard_at": far.heard_at}
        return self._machines

    def cards(self) -> list[GpuStatus]:
        found: dict[tuple[str, int], GpuStatus] = {}
        for far in self._alive().values():
            for card in far.cards:
                before = found.get((card.node, card.index))
                held = {**before.held_bytes, **card.held_bytes} if before else card.held_bytes
                found[card.node, card.index] = card.model_copy(update={"held_bytes": held})
        return list(found.values())

    def _alive(self) -> dict[str, Far]:
        self._living = {
            name: far for name, far in self._living.items() if far.prefix.exit_code is None
        }
        return self._living

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            for far in list(self._alive().values()):
                far.look()

    def _outboxes(self) -> list[Outbox]:
        return [outbox for far in list(self._living.values()) if (outbox := far.outbox)]


def turn_of_job() -> str:
    """SLURM job id and restart count as `ID.COUNT`; "" outside a job."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return job and f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def sweep_there(entry: FarEntry, run_id: str) -> str:
    """Kill what is left of a component on its node; blocks. Return the problem, or ""."""
    job = {"run_id": run_id} | entry.model_dump(exclude={"node", "host", "command"})
    try:
        prefix = subprocess.Popen(
            entry.command,
            env=prefix_env(run_id),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return f"{entry.command[0]}: {error.strerror}"
    procfs.SPAWNED.add(prefix.pid)
    killing = threading.Timer(SWEEP_TIMEOUT_S, lambda: os.killpg(prefix.pid, signal.SIGKILL))
    # communicate() has no timeout for the read of `_until_magic`, so a timer kills the prefix.
    killing.start()
    try:
        request = json.dumps(job).encode()
        output = _until_magic(prefix)
        rest, words = prefix.communicate(head("sweep", request) + request)
        output += rest
    finally:
        killing.cancel()
        procfs.SPAWNED.discard(prefix.pid)
    if output.rpartition(MAGIC)[2].startswith(b"gone "):
        return ""
    last = words.decode(errors="replace").strip().splitlines()[-1:]
    return last[0] if last else f"no answer within {SWEEP_TIMEOUT_S:g} s"


def _until_magic(prefix: subprocess.Popen[bytes]) -> bytes:
    """Output up to the node agent's marker: a login shell's start-up file might consume earlier
    input."""
    assert prefix.stdout is not None
    output = b""
    while MAGIC not in output and (data := os.read(prefix.stdout.fileno(), 65536)):
        output += data
    return output


def far_entries(table: ProcessTable | None) -> list[FarEntry]:
    """Components on other nodes that a supervisor of this boot has recorded.

    Those of another boot have ended with their connection. Commands in a recording of another
    machine must not run here.
    """
    entries = table.components.values() if table else ()
    return [entry.far for entry in entries if entry.far and entry.boot_id == procfs.boot_id()]


def sweep_nodes(table: ProcessTable | None) -> dict[str, Diagnosis]:
    """Kill what a killed supervisor has left on other nodes, in parallel; blocks.

    Returns:
        Component -> diagnosis of a failed sweep.
    """
    if table is None:
        return {}
    entries = [far for far in far_entries(table) if not far.turn or far.turn == turn_of_job()]
    results = _SWEEPERS.map(lambda entry: sweep_there(entry, table.run_id), entries)
    problems = zip(entries, results, strict=True)
    return {
        entry.name: node_lost(
            f"node {entry.node} ({entry.host}): processes of an earlier supervisor may still "
            f"run there: {problem}"
        )
        for entry, problem in problems
        if problem
    }
