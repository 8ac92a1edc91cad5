"""Start one component and end one: the place where state meets processes. Called only by the core's task."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from atropos_tui.supervisor import cgroup, diagnoses, environment, procfs, shared_memory
from atropos_tui.supervisor.adoption import Estate, Heir, log_patterns
from atropos_tui.supervisor.diagnoses import Diagnosis, Evidence, Names
from atropos_tui.supervisor.diagnoses.roots import lasting_error
from atropos_tui.supervisor.diagnoses.scanner import LogScanner
from atropos_tui.supervisor.environment import Launch, LaunchError
from atropos_tui.supervisor.gpu_memory import GpuMemory
from atropos_tui.supervisor.guarding import Guard
from atropos_tui.supervisor.holding import HeldPorts
from atropos_tui.supervisor.journal import ProcessTable
from atropos_tui.supervisor.ladder import end_set
from atropos_tui.supervisor.ledger import Ledger
from atropos_tui.supervisor.members import Tracker
from atropos_tui.supervisor.messages import (
    Deadline,
    Draining,
    Exited,
    Fault,
    Gone,
    Leftovers,
    Message,
    Noted,
    PortTaken,
    Staged,
    Verdict,
    Wake,
)
from atropos_tui.supervisor.probe import Checker, Prober
from atropos_tui.supervisor.process import Leader
from atropos_tui.supervisor.spawning import Living, Spawner, entry_of
from atropos_tui.supervisor.stages import StageWatch
from atropos_tui.supervisor.unit import Outcome, Unit
from trainer_core.contracts.control import Phase, State
from trainer_core.contracts.http import LIMITS
from trainer_core.contracts.run_dir import RunDir

PORT_PATIENCE_S = 5.0
"""How long a port that a stranger holds may take to become free."""
EVIDENCE = 200
"""Lines of a log in which rules look for what explains an end."""
LOOKED_BACK = 1000
"""Lines in which the cause of that may lie: vLLM's tracebacks are long, and each of its processes prints one."""
GROUP_PATIENCE_S = 0.05
"""A control group that is not free by then goes with the run's own group at the end."""
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "KILL")}


class Launcher:
    """Spawns, probes and ends components; reports by messages."""

    def __init__(
        self,
        ledger: Ledger,
        tracker: Tracker,
        guard: Guard,
        gpus: GpuMemory,
        post: Callable[[Message], None],
        sock: str,
        token: str,
        estate: Estate,
    ) -> None:
        self._ledger, self._tracker, self._guard, self._post = ledger, tracker, guard, post
        self._gpus = gpus
        self._socket, self._token = sock, token
        self._dir = RunDir(Path(ledger.stack.run_dir))
        self._http = httpx.AsyncClient(limits=LIMITS, trust_env=False, verify=False)  # on this machine, no proxy
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawner = Spawner(ledger.stack, guard.group, sock, token)
        self._ports = HeldPorts(ledger.stack.components)
        self.table = estate.table or ProcessTable(run_id=ledger.stack.run_id)
        self.table.supervisor, self.table.group = entry_of(os.getpid()), guard.group
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
        self._spawner.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()
        self._ports.close()

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
        if not self._port_is_free(unit) or not self._gpus_are_free(unit):
            return
        try:
            environment.remove(launch.clears)
            living = self._spawner.start(unit.spec, attempt, launch, *self._listeners(unit, attempt))
        except OSError as error:
            fix = "check its command and cwd: atropos-tui plan shows them"
            raise LaunchError(f"cannot start {unit.name}: {error}", fix) from None
        self._take_in(unit, living, launch)
        self._ledger.move(unit, State.STARTING, f"attempt {attempt}{', which waited' if living.waited else ''}")
        self._watch(unit, attempt)

    def prepare_next(self, unit: Unit) -> None:
        """Where the next start shall be quick, let its process wait. If that fails, the start itself will say why."""
        if unit.spec.standby and self._ledger.phase is not Phase.STOPPING:
            attempt = unit.attempt + 1
            with contextlib.suppress(LaunchError, OSError):
                launch = environment.prepare(self._ledger.stack, unit.spec, attempt, self._socket, self._token)
                if pid := self._spawner.prepare(unit.spec, attempt, launch):
                    self._tracker.set_aside(unit.name, pid)

    def drop_next(self, name: str | None = None) -> None:
        """Nobody waits any more to be the next start of `name`, or of anyone."""
        self._spawner.drop_next(name)

    def adopt(self, unit: Unit, heir: Heir) -> None:
        """Go on with what an earlier supervisor started as `unit`; if it ended since, that is told at once."""
        attempt = heir.entry.attempt
        living = self._spawner.adopt(unit.spec, heir, *self._listeners(unit, attempt))
        self._take_in(unit, living, heir.launch)
        unit.proven, unit.stages = heir.entry.proven, dict(heir.entry.stages)
        unit.came_up = unit.proven or bool(unit.stages)
        self._ledger.move(unit, State.STARTING, f"adopted, attempt {attempt}")
        self._watch(unit, attempt)

    def _listeners(self, unit: Unit, attempt: int) -> tuple[Callable[[], None], Callable[[str], None]]:
        """Whom its end and trouble with its log are told."""
        return lambda: self._post(Exited(unit.name, attempt)), lambda problem: self._disk_trouble(unit, problem)

    def end_keeping(self) -> None:
        """From here on nothing outlives the supervisor, whatever happens to it."""
        self._guard.end_keeping()

    def note_progress(self) -> None:
        """Write down what an adopting supervisor could not find out: health, lines seen, sessions of descendants."""
        if not self._ledger.stack.survive:
            return
        before = dict(self.table.components)
        for name, entry in before.items():
            unit = self._ledger.units[name]
            seen = [pattern for pattern in log_patterns(unit.spec) if unit.log and unit.log.seen(pattern)]
            found = {"proven": unit.proven, "seen": seen, "stages": dict(unit.stages)}
            self.table.components[name] = entry.model_copy(update={**found, "sessions": self._tracker.sessions(name)})
        if self.table.components != before:
            self.table.write(self._dir.journal_json)

    def _take_in(self, unit: Unit, living: Living, launch: Launch) -> None:
        child, attempt = living.child, living.entry.attempt
        unit.launch, unit.log = launch, living.log
        unit.scanner = LogScanner(unit.spec, Names.of(self._ledger.stack))
        living.log.scanner = unit.scanner.feed
        unit.child, unit.attempt, unit.started_at = child, attempt, child.started_at
        unit.hurry, unit.outcome, unit.exit_code = asyncio.Event(), "", None
        unit.healthy_at, unit.port_wait, unit.exited_at = None, None, None
        unit.stages = {}
        self._tracker.add(unit.name, child.pid, living.entry.group, living.entry.sessions.items())
        for session, ticks in {**living.entry.sessions, child.pid: child.ticks}.items():
            self._guard.remember(session, ticks)
        self._guard.clear(launch.clears)
        self.table.components[unit.name] = living.entry
        self.table.write(self._dir.journal_json)

    def _watch(self, unit: Unit, attempt: int) -> None:
        assert unit.launch and unit.log
        loop = asyncio.get_running_loop()
        unit.timer = loop.call_later(unit.spec.start_timeout_s, self._post, Deadline(unit.name, attempt))
        unit.stage_watch = StageWatch(
            unit.spec.stages, unit.log, lambda stage: self._post(Staged(unit.name, attempt, stage))
        )
        if unit.spec.stages:
            self.task(unit.stage_watch.follow())
        probes = unit.spec.probes
        if probes.startup or probes.readiness or probes.liveness:
            checker = Checker(self._http, unit.launch, unit.log)
            unit.prober = Prober(
                probes, checker, lambda result: self._post(Verdict(unit.name, attempt, result)), self.task
            )

    def _disk_trouble(self, unit: Unit, problem: str) -> None:
        fix = "free disk space; the run goes on, and lost log output is counted"
        self._post(Noted(unit.name, Diagnosis("the log cannot be written", problem, fix, "log_unwritable")))

    def _port_is_free(self, unit: Unit) -> bool:
        port = unit.spec.port
        if port is None or self._ports.is_free(unit.spec):
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

    def _gpus_are_free(self, unit: Unit) -> bool:
        if self._gpus.admitted(unit.name, unit.spec.gpus):
            return True
        if unit.name not in self._gpus.asking:
            admission = self._gpus.admit(unit.name, unit.spec.gpus, self._shares_with(unit), lambda: self._post(Wake()))
            self.task(admission)
        unit.waiting_for = self._gpus.asking.get(unit.name, "a look at its GPU memory")
        return False

    def _shares_with(self, unit: Unit) -> Callable[[int], bool]:
        """Tells of a card whether another component with live processes uses it."""

        def shared(gpu: int) -> bool:
            others = (other for other in self._ledger.units.values() if other is not unit and other.child is not None)
            return any(gpu in other.spec.gpus and not self._gpus.is_leaving(other.name) for other in others)

        return shared

    async def _look_at_gpus(self, name: str) -> None:
        """See what the live processes of `name` hold, before they go."""
        rows = await asyncio.to_thread(self._tracker.members, name)
        await self._gpus.note({name: [row.pid for row in rows]})

    async def _gpu_memory_back(self, unit: Unit) -> None:
        name, attempt = unit.name, unit.attempt
        found = await self._gpus.leave(
            name,
            unit.spec.gpus,
            self._shares_with(unit),
            unit.hurry,
            lambda memory: self._post(Draining(name, attempt, memory)),
        )
        if found:
            self._post(Noted(name, found))

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

    async def _end(self, unit: Unit, child: Leader, number: int, grace_s: float) -> None:
        name, attempt = unit.name, unit.attempt
        look = self.task(self._look_at_gpus(name)) if unit.spec.gpus else None
        killed = await end_set(
            child,
            lambda: self._tracker.members(name),
            number,
            grace_s,
            unit.hurry,
            lambda count: self._post(Leftovers(name, attempt, count)),
            lambda rows: self._post(Noted(name, stuck(rows))),
            self.table.components[name].group,
        )
        await child.settle()
        await asyncio.to_thread(shared_memory.remove_unused, self._tracker.shared_files(name))
        assert unit.log is not None and child.exit_code is not None
        unit.log.finish()
        if unit.stage_watch:
            unit.stage_watch.look()
        if look:
            await look
            await self._gpu_memory_back(unit)
        diagnosis, error = None, ""
        if child.exit_code != 0 and not unit.outcome:
            lines = unit.log.tail(LOOKED_BACK)
            names, above = Names.of(self._ledger.stack), tuple(lines[:-EVIDENCE])
            found = Evidence(unit.spec, child.exit_code, lines[-EVIDENCE:], names, above)
            diagnosis = await asyncio.to_thread(diagnoses.diagnose, found)
            error = lasting_error(diagnosis.rule, lines) if child.exit_code > 0 else ""
        self._post(Gone(name, attempt, killed, diagnosis, error))

    def collect(self, unit: Unit) -> int:
        """After `Gone`: reap, forget, clear files; the exit code."""
        child = unit.child
        assert child is not None and child.exit_code is not None and unit.launch is not None
        self._unwatch(unit)
        child.reap()
        self._tracker.remove(unit.name)
        self._guard.forget(child.pid)
        self._guard.cleared(unit.launch.clears)
        cgroup.remove(self.table.components.pop(unit.name).group, GROUP_PATIENCE_S)
        if unit.one_shot and child.exit_code == 0:
            self.table.done = [*self.table.done, unit.name]
        self.table.write(self._dir.journal_json)
        try:
            environment.remove(unit.launch.clears)
        except OSError as error:
            fix = "remove it by hand before the next start"
            self._ledger.diagnose(unit, Diagnosis("a stale file cannot be removed", str(error), fix, "stale_file"))
        self._ports.hold(unit.spec)
        unit.child, unit.ending, unit.prober, unit.stage_watch = None, None, None, None
        unit.draining = ""
        unit.exit_code = child.exit_code
        return child.exit_code


def stuck(rows: list[procfs.Proc]) -> Diagnosis:
    """The diagnosis for processes that outlive SIGKILL, by pid and state."""
    who = ", ".join(f"pid {row.pid} (state {row.state})" for row in rows)
    fix = "state D is a wait inside the kernel, for a disk or a driver (GPU: see dmesg); only that can end it"
    return Diagnosis("a process cannot be killed", who, fix, "unkillable")
