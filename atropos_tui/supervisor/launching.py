"""Start one component and end one: the place where state meets processes. Called only by the core's task."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from atropos_tui.stack import ports
from atropos_tui.supervisor import diagnoses, environment, procfs, shared_memory
from atropos_tui.supervisor.diagnoses import Diagnosis, Evidence
from atropos_tui.supervisor.environment import LaunchError
from atropos_tui.supervisor.guarding import Guard
from atropos_tui.supervisor.journal import ProcessEntry, ProcessTable
from atropos_tui.supervisor.ladder import end_set
from atropos_tui.supervisor.ledger import Ledger
from atropos_tui.supervisor.logs import LogDrain, LogFile
from atropos_tui.supervisor.members import Tracker
from atropos_tui.supervisor.messages import (
    Deadline,
    Exited,
    Fault,
    Gone,
    Leftovers,
    Message,
    Noted,
    PortTaken,
    Verdict,
    Wake,
)
from atropos_tui.supervisor.probe import Checker, Prober
from atropos_tui.supervisor.process import Child, spawn
from atropos_tui.supervisor.unit import Outcome, Unit
from trainer_core.contracts.control import Role, State
from trainer_core.contracts.run_dir import RunDir

PORT_PATIENCE_S = 5.0
"""How long a port that a stranger holds may take to become free."""
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "KILL")}


class Launcher:
    """Spawns, probes and ends components; reports by messages."""

    def __init__(
        self, ledger: Ledger, tracker: Tracker, guard: Guard, post: Callable[[Message], None], sock: str, token: str
    ) -> None:
        self._ledger, self._tracker, self._guard, self._post = ledger, tracker, guard, post
        self._socket, self._token = sock, token
        self._dir = RunDir(Path(ledger.stack.run_dir))
        self._http = httpx.AsyncClient(trust_env=False, verify=False)  # probes speak to this machine, no proxy
        self._tasks: set[asyncio.Task[None]] = set()
        self.table = ProcessTable(run_id=ledger.stack.run_id, supervisor=entry_of(os.getpid()))
        self.table.write(self._dir.journal_json)

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside the core; if it raises, the core hears of it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._post(Fault(error))

    async def close(self) -> None:
        """Cancel what runs beside the core."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def start(self, unit: Unit) -> None:
        """Spawn `unit`, whose gates are open; it may have to wait for its port, or be skipped.

        Raises:
            LaunchError: it cannot be started as written.
        """
        attempt = unit.attempt + 1
        launch = environment.prepare(self._ledger.stack, unit.spec, attempt, self._socket, self._token)
        if launch.creates and launch.creates.exists():
            self._ledger.move(unit, State.COMPLETED, f"skipped: {launch.creates} exists")
            return
        if not self._port_is_free(unit):
            return
        try:
            environment.remove(launch.clears)
            log_file = LogFile(self._dir.log(unit.name, attempt), self._ledger.stack.logs.max_bytes)
            child, pipe = spawn(
                launch.command, launch.env, launch.cwd, on_exit=lambda _: self._post(Exited(unit.name, attempt))
            )
        except OSError as error:
            fix = "check its command and cwd: atropos-tui plan shows them"
            raise LaunchError(f"cannot start {unit.name}: {error}", fix) from None
        self._adopt(unit, child, attempt)
        self._guard.clear(launch.clears)
        unit.launch = launch
        unit.log = LogDrain(pipe, log_file, lambda problem: self._disk_trouble(unit, problem))
        self._ledger.move(unit, State.STARTING, f"attempt {attempt}")
        self._watch(unit, attempt)

    def _adopt(self, unit: Unit, child: Child, attempt: int) -> None:
        unit.child, unit.attempt, unit.started_at = child, attempt, child.started_at
        unit.hurry, unit.outcome, unit.exit_code = asyncio.Event(), "", None
        unit.healthy_at, unit.port_wait = None, None
        self._tracker.add(unit.name, child.pid)
        self._guard.remember(child.pid, child.ticks)
        self.table.components[unit.name] = entry_of(child.pid, child.ticks, attempt)
        self.table.write(self._dir.journal_json)

    def _watch(self, unit: Unit, attempt: int) -> None:
        assert unit.launch and unit.log
        loop = asyncio.get_running_loop()
        unit.timer = loop.call_later(unit.spec.start_timeout_s, self._post, Deadline(unit.name, attempt))
        probes = unit.spec.probes
        if probes.startup or probes.readiness or probes.liveness:
            checker = Checker(self._http, unit.launch, unit.log)
            unit.prober = Prober(
                probes, checker, lambda result: self._post(Verdict(unit.name, attempt, result)), self.task
            )

    def _disk_trouble(self, unit: Unit, problem: str) -> None:
        fix = "free disk space; the run goes on, and lost log output is counted"
        self._post(Noted(unit.name, Diagnosis("the log cannot be written", problem, fix)))

    def _port_is_free(self, unit: Unit) -> bool:
        port = unit.spec.port
        if port is None or ports.is_free(port):
            unit.port_wait = None
            return True
        now = time.monotonic()
        if unit.port_wait is None:
            unit.port_wait = now
        if now - unit.port_wait < PORT_PATIENCE_S:
            unit.waiting_for = f"port {port}, which another process holds"
            asyncio.get_running_loop().call_later(0.25, self._post, Wake())
        elif unit.port_wait != float("inf"):
            unit.port_wait = float("inf")  # said once
            self.task(self._name_holder(unit.name, port))
        return False

    async def _name_holder(self, name: str, port: int) -> None:
        evidence = f"{name} was not started: port {port} did not become free in {PORT_PATIENCE_S:g} s"
        self._post(PortTaken(name, await asyncio.to_thread(diagnoses.port_taken, name, port, evidence)))

    def begin_end(self, unit: Unit, outcome: Outcome, number: int | None = None, grace_s: float | None = None) -> None:
        """Start ending the set of `unit`; `Gone` follows. While that runs, a stop overrides and a KILL hurries."""
        child = unit.child
        assert child is not None
        if unit.ending is not None:
            if outcome == "stopped" or not unit.outcome:
                unit.outcome = outcome
            if number == signal.SIGKILL:
                unit.hurry.set()
            return
        unit.outcome = outcome
        self._unwatch(unit)
        stop = unit.spec.stop
        first = SIGNALS[stop.signal] if number is None else number
        unit.ending = self.task(self._end(unit, child, first, stop.grace_s if grace_s is None else grace_s))

    def _unwatch(self, unit: Unit) -> None:
        if unit.prober:
            unit.prober.cancel()
        if unit.timer:
            unit.timer.cancel()
            unit.timer = None

    async def _end(self, unit: Unit, child: Child, number: int, grace_s: float) -> None:
        name, attempt = unit.name, unit.attempt
        killed = await end_set(
            child,
            lambda: self._tracker.members(name),
            number,
            grace_s,
            unit.hurry,
            lambda count: self._post(Leftovers(name, attempt, count)),
            lambda rows: self._post(Noted(name, stuck(rows))),
        )
        await asyncio.to_thread(shared_memory.remove_unused, self._tracker.shared_files(name))
        assert unit.log is not None and child.exit_code is not None
        unit.log.finish()
        diagnosis = None
        if child.exit_code != 0 and not unit.outcome:
            apis = [spec.name for spec in self._ledger.stack.components if spec.role is Role.API]
            found = Evidence(unit.spec, child.exit_code, unit.log.tail(200), *apis[:1])
            diagnosis = await asyncio.to_thread(diagnoses.diagnose, found)
        self._post(Gone(name, attempt, killed, diagnosis))

    def collect(self, unit: Unit) -> int:
        """After `Gone`: reap, forget, clear files; the exit code."""
        child = unit.child
        assert child is not None and child.exit_code is not None and unit.launch is not None
        self._unwatch(unit)
        child.reap()
        self._tracker.remove(unit.name)
        self._guard.forget(child.pid)
        self._guard.cleared(unit.launch.clears)
        self.table.components.pop(unit.name, None)
        self.table.write(self._dir.journal_json)
        try:
            environment.remove(unit.launch.clears)
        except OSError as error:
            fix = "remove it by hand before the next start"
            self._ledger.diagnose(unit, Diagnosis("a stale file cannot be removed", str(error), fix))
        unit.child, unit.ending, unit.prober = None, None, None
        unit.exit_code = child.exit_code
        return child.exit_code


def entry_of(pid: int, ticks: int | None = None, attempt: int = 0) -> ProcessEntry:
    """The journal's entry for a live process."""
    if ticks is None:
        row = procfs.read(pid)
        ticks = row.ticks if row else 0
    seconds = ticks / procfs.TICKS_PER_SECOND
    return ProcessEntry(pid=pid, create_time=seconds, ticks=ticks, pgid=pid, boot_id=procfs.boot_id(), attempt=attempt)


def stuck(rows: list[procfs.Proc]) -> Diagnosis:
    """The diagnosis for processes that outlive SIGKILL, by pid and state."""
    who = ", ".join(f"pid {row.pid} (state {row.state})" for row in rows)
    fix = "state D is a wait inside the kernel, for a disk or a driver (GPU: see dmesg); only that can end it"
    return Diagnosis("a process cannot be killed", who, fix)
