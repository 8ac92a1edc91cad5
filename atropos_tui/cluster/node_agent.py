"""Node agent of a launcher: starts one component on its node for the supervisor.

    PREFIX python -I -S -c '... node_agent import main; main()' ROOT

stdin and stdout carry frames; the command line has no secrets. It first writes `MAGIC`, because a
login shell may print before it. The first frame is one of two:

- `start` with a job: start the component, send `kept` (pids), later `output`, `exit`, `left`,
`stuck` and `heartbeat`. It reads `end` (signal and grace period), `hurry`, `measure` and
`heartbeat`. When no process is left, it sends `gone` and exits.
- `sweep` with a job: kill what a killed node agent has left, send `gone`, exit.

At the end of stdin, or after `OWNER_S` without a frame, the component is killed. Programs reach the
supervisor by a socket that is tunnelled through the frames. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_common.system.files import scratch_below
from atropos_common.system.run_dir import ENV_CONTROL_SOCKET, LONGEST_SOCKET
from atropos_tui.cluster.frames import Connection, Frame
from atropos_tui.cluster.outbox import Channels, Heartbeats, Outbox
from atropos_tui.gpu import VISIBLE, Nvml, gpus_within
from atropos_tui.profile import redact
from atropos_tui.supervisor import bare
from atropos_tui.supervisor.journal.tracker import Tracker, UseMeter
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.logs import MOST_LEFT, read_some
from atropos_tui.supervisor.processes.process import (
    Child,
    Ending,
    LaunchError,
    become_subreaper,
    end_set,
    end_words,
    make_scratch,
    remove_files,
    spawn,
)

ARGUMENTS = bare(__name__)
"""Arguments for the Python of the node."""
MAGIC = b"\natropos-line 1\n"
HEARTBEAT_S = 2.0
OWNER_S = 60.0
"""Supervisor timeout in seconds: a killed srun leaves stdin open."""
OWNER_HEARTBEAT_S = 3.0
"""Seconds between two heartbeats of an idle supervisor."""
SURVEY_S = 5.0
"""Seconds between two surveys of members and their files in /dev/shm."""
SWEEP_TIMEOUT_S = 8.0


def environment(job: Mapping[str, Any], here: Mapping[str, str]) -> dict[str, str]:
    """The component's environment.

    This node's own (SLURM_*, HOME, TMPDIR, assigned GPUs) without secrets, then the supervisor's
    variables that belong to no machine, then the plan's.
    """
    own = {
        name: value
        for name, value in here.items()
        if redact.goes_to(name, job["role"]) and not name.startswith("ATROPOS_")
    }
    env: dict[str, str] = {**own, **gpus_within(job["env"], own.get(VISIBLE))}
    if job["path"]:
        parts = f"{job['path']}:{own.get('PATH') or os.defpath}".split(":")
        env["PATH"] = ":".join(dict.fromkeys(part for part in parts if part))
    return env


class NodeAgent:
    """One component on this node."""

    def __init__(self, line: Connection, out: Outbox, job: Mapping[str, Any]) -> None:
        self._line, self._out, self._job = line, out, job
        out.on_space = self._resume
        self._loop = asyncio.get_running_loop()
        self._channels = Channels(out)
        self._machine = procfs.MachineMeter()
        self._tracker = Tracker(job["run_id"])
        self._name = str(job["name"])
        self._child: Child | None = None
        self._pipe = -1
        self._reading = False
        self._hurry = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._use = UseMeter()
        self._driver: Nvml | None = None
        self._frame_at = time.monotonic()
        self._over = asyncio.Event()
        self._leaves = [Path(path) for path in job["clears"]]

    async def serve(self) -> None:
        heartbeats = Heartbeats(HEARTBEAT_S, lambda: [self._out])
        try:
            await self._start()
        except (OSError, LaunchError) as error:
            self._failed(error)
        else:
            self._take(self._line.pending())
            self._loop.add_reader(self._line.reading, self._receive)
            self._tasks = {
                self._loop.create_task(work) for work in (self._watch_owner(), self._survey())
            }
            await self._over.wait()
        heartbeats.close()
        await self._out.flush(OWNER_S)

    def _failed(self, error: OSError | LaunchError) -> None:
        """Report a failed start: exit code 2 if another try would fail too, otherwise 1."""
        reason = f"{error.problem}: {error.fix}" if isinstance(error, LaunchError) else str(error)
        lasting = isinstance(
            error, LaunchError | FileNotFoundError | NotADirectoryError | PermissionError
        )
        self._out.send("output", f"atropos: cannot start on {platform.node()}: {reason}\n".encode())
        self._out.send("exit", b"2" if lasting else b"1")
        remove_files(self._leaves)
        self._out.send("gone", b"0")

    async def _start(self) -> None:
        job = self._job
        env = environment(job, os.environ)
        remove_files(self._leaves)
        env[ENV_CONTROL_SOCKET] = await self._listen(job["socket"])
        if job["scratch"]:
            folder, env = scratch_below(env, job["scratch"])
            self._leaves.append(folder)
            make_scratch(folder)
        self._child, self._pipe = spawn(job["command"], env, job["cwd"])
        os.set_blocking(self._pipe, False)
        self._tracker.add(self._name, self._child.pid)
        mine = procfs.read(os.getpid())
        self._out.send(
            "kept",
            json.dumps(
                {
                    "pid": self._child.pid,
                    "ticks": self._child.ticks,
                    "end_pid": os.getpid(),
                    "end_ticks": mine.ticks if mine else 0,
                }
            ).encode(),
        )
        self._resume()
        # After `kept`: the supervisor must know the pids before the exit.
        self._child.begin(lambda child: self._out.send("exit", str(child.exit_code).encode()))

    async def _listen(self, name: str) -> str:
        """Create the socket on which the component reaches the supervisor."""
        folder = scratch_below(os.environ, name)[0]
        # A Unix socket's path is limited to about 108 bytes.
        if len(os.fsencode(folder)) > LONGEST_SOCKET - len("/control.sock"):
            folder = Path("/tmp", name)
        self._leaves.append(folder)
        make_scratch(folder)
        path = folder / "control.sock"
        path.unlink(missing_ok=True)
        await asyncio.start_unix_server(self._connected, path)
        return str(path)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._channels.open(reader, writer)

    # Incoming frames.

    def _receive(self) -> None:
        frames = self._line.read()
        if frames is None:
            self._orphaned()
        else:
            self._frame_at = time.monotonic()
            self._take(frames)

    def _take(self, frames: list[Frame]) -> None:
        for kind, payload in frames:
            if kind in ("data", "close"):
                self._channels.take(kind, payload)
            elif kind == "end":
                self._end(payload)
            elif kind == "hurry":
                self._hurry.set()
            elif kind == "measure":
                task = self._loop.create_task(self._measure())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _orphaned(self) -> None:
        """Kill the component, because its supervisor is gone."""
        self._loop.remove_reader(self._line.reading)
        self._out.close()
        self._hurry.set()
        self._end(end_words(signal.SIGKILL, 0.0))

    # Output.

    def _resume(self) -> None:
        if not self._reading and self._pipe >= 0:
            self._reading = True
            self._loop.add_reader(self._pipe, self._copy)

    def _copy(self) -> int:
        if self._pipe < 0:
            return 0
        data = read_some(self._pipe)
        if data is None:
            return 0
        if data:
            self._out.send("output", data)
        # Stop reading while the connection is full; the component then blocks on its pipe.
        if not data or self._out.is_full:
            self._loop.remove_reader(self._pipe)
            self._reading = False
        if not data:
            os.close(self._pipe)
            self._pipe = -1
        return len(data)

    # Ending.

    def _end(self, words: bytes) -> None:
        if self._ending is None and self._child is not None:
            number, grace_s = words.split()
            ending = Ending(
                number=int(number),
                grace_s=float(grace_s),
                hurry=self._hurry,
                members=lambda: self._tracker.members(self._name),
                on_leftover=lambda count: self._out.send("left", str(count).encode()),
                on_stuck=lambda processes: self._out.send("stuck", processes.encode()),
            )
            self._ending = self._loop.create_task(self._end_all(self._child, ending))

    async def _end_all(self, child: Child, ending: Ending) -> None:
        await self._look_at_shared_memory()
        killed = await end_set(child, ending)
        taken = 0
        while taken < MOST_LEFT and (count := self._copy()):
            taken += count
            await self._out.wait_for_space()
        # Only now: the zombie kept pid and group reserved during the kill.
        child.reap()
        await asyncio.to_thread(procfs.remove_unused, self._tracker.shared_files(self._name))
        await asyncio.to_thread(remove_files, self._leaves)
        self._out.send("gone", str(killed).encode())
        self._over.set()

    # Measurements and the supervisor's heartbeat.

    async def _watch_owner(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if time.monotonic() - self._frame_at > OWNER_S:
                self._orphaned()

    async def _survey(self) -> None:
        while self._ending is None:
            await asyncio.sleep(SURVEY_S)
            await self._look_at_shared_memory()

    async def _look_at_shared_memory(self) -> None:
        found = await asyncio.to_thread(self._tracker.survey)
        await asyncio.to_thread(self._tracker.note_shared_memory, found)

    async def _measure(self) -> None:
        self._out.send("usage", json.dumps(await asyncio.to_thread(self._usage)).encode())

    def _usage(self) -> dict[str, Any]:
        rows = self._tracker.members(self._name)
        own = self._use.read({self._name: rows})[self._name]
        return {**own, "machine": self._machine.read(), **self._gpu_use(set(own["pids"]))}

    def _gpu_use(self, pids: set[int]) -> dict[str, Any]:
        if not self._job["packages"]:
            return {}
        if self._driver is None:
            # The agent runs with -S, without site-packages: pynvml's folder comes with the job.
            sys.path.append(self._job["packages"])
            # The same numbering as in `environment`.
            self._driver = Nvml(os.environ.get(VISIBLE) or None)
        try:
            cards = self._driver.read()
        except Exception:  # no driver, or a broken one: report nothing
            return {}
        held = {
            card.index: sum(
                size or 0 for pid, size in (card.processes or {}).items() if pid in pids
            )
            for card in cards
        }
        known = any(pid in pids for card in cards for pid in card.processes or ())
        rows = [card.figures() | {"held_bytes": held[card.index]} for card in cards]
        return {"cards": rows, "gpu_bytes": sum(held.values()) if known else None}


def sweep(job: Mapping[str, Any]) -> int:
    """Kill what a killed or hanging node agent has left, and that agent. Return the number of
    killed processes."""
    tracker, mine = Tracker(job["run_id"]), procfs.ancestors()
    end = procfs.read(job["end_pid"]) if job["end_pid"] else None
    # The agent first, or it would report the end of its component.
    if end is not None and end.ticks == job["end_ticks"]:
        procfs.send(end, signal.SIGKILL)
    tracker.add(job["name"], job["pid"] or -1)
    killed: set[tuple[int, int]] = set()
    give_up = time.monotonic() + SWEEP_TIMEOUT_S
    while (
        rows := [row for row in tracker.members(job["name"]) if row.pid not in mine]
    ) and time.monotonic() < give_up:
        for row in rows:
            procfs.send(row, signal.SIGKILL)
            killed.add(row.key)
        time.sleep(0.02)
    folders = [scratch_below(os.environ, name)[0] for name in job["folders"]]
    remove_files([Path(path) for path in job["clears"]] + folders)
    return len(killed)


async def answer(reading: int, writing: int) -> None:
    """Execute the request of the first frame."""
    out, line = Outbox(writing), Connection(reading, -1)
    # The first frame is read in a thread, which may block.
    os.set_blocking(reading, True)
    out.write(MAGIC)
    try:
        kind, payload = await asyncio.to_thread(line.receive, OWNER_S)
    except OSError:
        return  # the supervisor is gone; nothing has started yet
    os.set_blocking(reading, False)
    job = json.loads(payload)
    if kind == "sweep":
        out.send("gone", str(await asyncio.to_thread(sweep, job)).encode())
        await out.flush(OWNER_S)
    elif kind == "start":
        await NodeAgent(line, out, job).serve()
    os._exit(0)  # a thread that hangs in the driver must not block the exit


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the child
    become_subreaper()
    reading, writing = os.dup(0), os.dup(1)  # stray prints go to stderr
    os.dup2(2, 1)
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    try:
        asyncio.run(answer(reading, writing))
    except PermissionError:
        sys.exit("atropos: the launcher connects no usable stdin (kubectl exec needs -i)")
