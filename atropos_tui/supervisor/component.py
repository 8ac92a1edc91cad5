"""One component of a run: its state, its current attempt, and every transition.

    PENDING -> STARTING -> HEALTHY <-> UNHEALTHY
    -> STOPPING -> COMPLETED, STOPPED, FAILED or BACKOFF -> PENDING

`start` makes an attempt. Its exit (`_exited`) or a stop calls `_begin_end`; its task `_end` returns
when no process of the set is left. Then `_gone` passes an `Ended` to the supervisor. Only
`Component` writes a component's fields, and only in the event loop.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from atropos_common.protocol.control import (
    HEALTH_CHECK,
    ComponentStatus,
    Role,
    StageStatus,
    State,
)
from atropos_common.protocol.records import (
    ProbeRecord,
    StageRecord,
    StateRecord,
)
from atropos_common.system.run_dir import RunDir
from atropos_tui.diagnoses import (
    Diagnosis,
    Evidence,
    describe_exit,
    diagnose,
    model,
    node_lost,
    port_taken,
)
from atropos_tui.diagnoses.exit_rules import is_wrong_usage, lasting_error
from atropos_tui.diagnoses.log_scanner import LogScanner, Printed
from atropos_tui.diagnoses.stall_rules import Part
from atropos_tui.profile.spec import ComponentSpec
from atropos_tui.supervisor.journal.store import Store
from atropos_tui.supervisor.launchers.launcher import Host, Living, Usage
from atropos_tui.supervisor.probe import Prober, ProbeResult, StageWatch
from atropos_tui.supervisor.processes import procfs
from atropos_tui.supervisor.processes.launch import Launch
from atropos_tui.supervisor.processes.logs import LogDrain
from atropos_tui.supervisor.processes.process import Ending, LaunchError, Leader
from atropos_tui.supervisor.restarts import Restarts
from atropos_tui.supervisor.transitions import check_step

PROVEN_S = 5.0
"""Seconds of life that prove a start without health checks."""
SILENT_START_S = 60.0
"""The same for a component with stages that has reached none."""
PORT_PATIENCE_S = 5.0
"""Seconds to wait for a port in use."""
FIND_SHORTAGE = "find what uses it up (ulimit -n, ulimit -u, df, free)"
RESOURCE_PATIENCE_S = 60.0
"""Seconds to retry a start while descriptors, processes, memory or disk run out."""
EVIDENCE = 200
"""Last log lines in which the exit rules search."""
LOOKED_BACK = 1000
"""Log lines in which the root cause is searched: vLLM prints one long traceback per process."""
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "KILL")}

Outcome = Literal["", "stopped", "crash", "killed", "timeout"]


@dataclass(frozen=True)
class Ended:
    """A finished attempt: no process is left, and its GPU memory is free."""

    outcome: Outcome
    exit_code: int
    killed: int = 0
    diagnosis: Diagnosis | None = None
    error: str = ""
    """Error line, if another start would fail alike."""
    usage: bool = False
    lost: str = ""
    """How its node was lost, if that ended it."""


class Owner(Protocol):
    """The supervisor, as a component sees it."""

    def post(self, act: Callable[..., None], *args: Any) -> None:
        """Call `act` soon, then reconcile."""

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def on_gone(self, component: Component, ended: Ended) -> None: ...

    def on_port_taken(self, component: Component, found: Diagnosis) -> None: ...


class Component:
    """Live state of one component."""

    def __init__(
        self, spec: ComponentSpec, host: Host, store: Store, owner: Owner, attempt: int
    ) -> None:
        """`attempt`: last attempt of earlier supervisors."""
        self.spec = spec
        self._host, self._store, self._owner = host, store, owner
        self.state = State.PENDING
        self.reason = ""
        self.since = time.time()
        self.waiting_for = ""
        self.attempt = attempt
        self.started_at: float | None = None
        self.exited_at: float | None = None
        """Unix time of the main process's exit; its set and GPU memory may take longer."""
        self.exit_code: int | None = None
        self._command_id: str | None = None

        self.child: Leader | None = None
        """Main process; None once no process of its set is left."""
        self.log: LogDrain | None = None
        self._scanner: LogScanner | None = None
        self.outcome: Outcome = ""
        """Why it is ending; empty: it exited by itself."""
        self._launch: Launch | None = None
        self._prober: Prober | None = None
        self._stage_watch: StageWatch | None = None
        self._stages: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._draining = ""
        """GPU memory that is not free yet, in words."""
        self._hurry = asyncio.Event()

        self._restarts = Restarts(spec.restart)
        self._retry_at: float | None = None
        self._port_wait: float | None = None
        """Monotonic time since its port was found in use; infinity once reported."""
        self._resource_wait: float | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def one_shot(self) -> bool:
        """A step that is done at exit code 0 instead of at health."""
        return self.spec.role is Role.PREPARE or self.spec.creates is not None

    @property
    def has_gate(self) -> bool:
        return self.spec.probes.startup is not None or self.spec.probes.readiness is not None

    # Records and status.

    def _move(
        self,
        new: State,
        reason: str = "",
        exit_code: int | None = None,
        retry_at: float | None = None,
    ) -> None:
        """Record a transition. Nothing else sets `state`."""
        old = self.state
        check_step(old, new)
        self.state, self.reason, self.since, self.waiting_for = new, reason, time.time(), ""
        self._store.emit(
            StateRecord(
                component=self.name,
                old=old.value,
                new=new.value,
                attempt=self.attempt,
                reason=reason,
                command_id=self._command_id,
                pid=(self.child.pid or None) if self.child else None,
                exit_code=exit_code,
                retry_at=retry_at,
            )
        )
        # The command is finished; later transitions are not its effect.
        if new in (State.HEALTHY, State.COMPLETED, State.FAILED):
            self._command_id = None

    def diagnose(self, found: Diagnosis, attempt: int | None = None, **how: bool) -> None:
        """Publish a diagnosis, or the end of one (`Ledger.add`); `attempt` None: the current
        one."""
        self._store.diagnoses.add(
            self.name, found, self.attempt if attempt is None else attempt, **how
        )

    @property
    def found(self) -> Diagnosis | None:
        """Newest open diagnosis that is more than advice."""
        found = [each for each in self._store.diagnoses.of(self.name) if each.severity != "advice"]
        return found[-1] if found else None

    def newest_probe(self) -> ProbeResult | None:
        """Latest result of the check that matters now: readiness once it runs, else startup or
        liveness."""
        last = self._prober.last if self._prober else {}
        return last.get("readiness") or last.get("startup") or last.get("liveness")

    def observe(self) -> tuple[Part, Printed | None]:
        """View for the watcher, and the output since the last call."""
        last = (
            self.log.tail(1) if self.log and self.state in (State.STARTING, State.COMPLETED) else []
        )
        part = Part(
            self.name,
            self.spec.role,
            self.state,
            self.since,
            self.spec.start_timeout_s,
            self.started_at or 0.0,
            self.attempt,
            self.has_gate,
            self.waiting_for,
            last[0].strip()[:200] if last else "",
            # A process on another machine cannot be looked at.
            procfs.stopped(self.child.pid if self.child and not self.spec.is_far else None),
        )
        if self._scanner is None:
            return part, None
        on_purpose = self.outcome in ("stopped", "killed")
        return part, Printed(self._scanner, self._scanner.take(), self.child is None, on_purpose)

    def row(self, usage: Usage) -> ComponentStatus:
        """One row of `ps`."""
        probe = self.newest_probe()
        child = self.child
        # A sample older than the child belongs to the previous attempt, unless the clock was set
        # back.
        current = (
            usage
            if child and (usage.at >= child.started_at or child.pid in usage.pids)
            else Usage([child.pid] if child and child.pid else [])
        )
        running = child is not None and child.exit_code is None
        return ComponentStatus(
            name=self.name,
            role=self.spec.role,
            node=self.spec.place.node if self.spec.place else "",
            state=self.state,
            attempt=self.attempt,
            restarts=self._restarts.count,
            errors=self._scanner.errors if self._scanner else 0,
            pid=(child.pid or None) if child and running else None,
            pids=current.pids if running or self._ending else [],
            port=self.spec.port,
            started_at=self.started_at,
            since=self.since,
            waiting_for=self._waits_for(probe),
            healthy=probe.ok if probe else None,
            probe=probe.which if probe else "",
            probe_latency_s=probe.latency_s if probe else None,
            probe_detail=probe.detail if probe else "",
            cpu_percent=current.cpu_percent,
            memory_bytes=current.memory_bytes,
            gpu_bytes=current.gpu_bytes,
            retry_at=self._retry_at if self.state is State.BACKOFF else None,
            crashes=self._restarts.recent(),
            stages=[
                StageStatus(
                    name=stage.name, reached_at=self._stages.get(stage.name), usually=stage.usually
                )
                for stage in self.spec.stages
            ],
            exit_code=self.exit_code,
            reason=f"{self.reason}; waiting for {self._draining}"
            if self._draining
            else self.reason,
            diagnosis=f"{self.found.title}: {self.found.fix}" if self.found else "",
        )

    def _waits_for(self, probe: ProbeResult | None) -> str:
        if self.state is State.STOPPING:
            return f"{self._draining} to be given back" if self._draining else self.waiting_for
        if self.state is State.STARTING and not self.waiting_for:
            return (
                probe.detail
                if probe and not probe.ok
                else HEALTH_CHECK
                if self.has_gate
                else "its exit"
            )
        return self.waiting_for if self.state in (State.PENDING, State.STARTING) else ""

    # Starting.

    def release(self, reason: str, command_id: str | None = None) -> None:
        """Allow it to start. A command also resets the waits for port and resources."""
        if command_id is not None:
            self._command_id = command_id
            self._port_wait = self._resource_wait = None
            self._restarts.start_error = ""
        if self.state.is_resting or self.state is State.BACKOFF:
            self._move(State.PENDING, reason)

    def start(self, missing: str = "") -> None:
        """Start it, unless it waits for dependencies (`missing`), its port or GPU memory.

        Raises:
            LaunchError: it cannot be started as configured.
        """
        self.waiting_for = missing
        if missing:
            return
        attempt = self.attempt + 1
        try:
            launch = self._host.launch(self.spec, attempt)
            exists = launch.creates is not None and launch.creates.exists()
        except OSError as error:  # of a network disk, or of a folder that is closed to this user
            self._wait_for_resources(error, f"make {error.filename} readable")
            return
        # A prepare step whose result exists already (`creates`) is skipped.
        if exists:
            self._move(State.COMPLETED, f"skipped: {launch.creates} exists")
        elif self._port_is_free() and self._gpus_are_free():
            try:
                living = self._host.start(self.spec, attempt, launch, *self._listeners(attempt))
            except OSError as error:
                self._wait_for_resources(error, FIND_SHORTAGE)
                return
            self._begin(living)
            self._move(State.STARTING, f"attempt {attempt}")
            self._watch()
            if not self.has_gate and not self.one_shot:
                self._healthy("started; it has no health check")

    def _wait_for_resources(self, error: OSError, fix: str) -> None:
        """Retry the start in a second.

        Raises:
            LaunchError: `RESOURCE_PATIENCE_S` is over.
        """
        self._resource_wait = self._resource_wait or time.monotonic()
        if time.monotonic() - self._resource_wait > RESOURCE_PATIENCE_S:
            problem = f"cannot start {self.name} for {RESOURCE_PATIENCE_S:g} s: {error.strerror}"
            raise LaunchError(problem, f"{fix}, then atropos-tui up --resume RUN")
        self.waiting_for = f"the machine: {error.strerror}"
        asyncio.get_running_loop().call_later(1.0, self._owner.post, look_again)

    def _listeners(self, attempt: int) -> tuple[Callable[[], None], Callable[[str], None]]:
        return lambda: self._owner.post(self._exited, attempt), self._disk_trouble

    def _disk_trouble(self, problem: str) -> None:
        fix = "free disk space; the run goes on, and lost log output is counted"
        found = model.LOG_UNWRITABLE.diagnosis(problem, fix)
        over = found.ended("it can be written again")
        self._owner.post(lambda: self.diagnose(found if problem else over, again=True))

    def _begin(self, living: Living) -> None:
        child = living.child
        self._launch, self.log = living.launch, living.log
        self._scanner = LogScanner(self.spec, self._host.names)
        living.log.scanner = self._scanner.feed
        self.child, self.attempt, self.started_at = child, living.entry.attempt, child.started_at
        self._hurry, self.outcome, self.exit_code = asyncio.Event(), "", None
        self._port_wait, self._resource_wait, self.exited_at, self._stages = None, None, None, {}
        self._restarts.healthy_at = None

    def _watch(self) -> None:
        assert self._launch and self.log
        # Each callback carries the attempt, so that one that arrives after its end is ignored.
        attempt, post, probes = self.attempt, self._owner.post, self.spec.probes
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.spec.start_timeout_s, post, self._late, attempt)
        records = RunDir(Path(self._host.stack.run_dir)).stages_jsonl(self.name)
        self._stage_watch = StageWatch(
            self.spec,
            records,
            attempt,
            self.log,
            lambda stage, at: post(self._staged, attempt, stage, at),
        )
        self._owner.task(self._stage_watch.follow())
        if probes.startup or probes.readiness or probes.liveness:
            self._prober = Prober(
                probes,
                self._host.http,
                self._launch,
                self.log,
                self._stages,
                lambda found: post(self._judged, attempt, found),
                self._owner.task,
            )

    def _port_is_free(self) -> bool:
        port = self.spec.port
        if port is None or self._host.ports.is_free(self.spec):
            self._port_wait = None
            return True
        now = time.monotonic()
        if self._port_wait is None:
            self._port_wait = now
        if now - self._port_wait < PORT_PATIENCE_S:
            self.waiting_for = f"port {port}, which another process holds"
            asyncio.get_running_loop().call_later(0.25, self._owner.post, look_again)
        elif self._port_wait != float("inf"):
            self._port_wait = float("inf")  # reported once, see `_name_holder`
            self._owner.task(self._name_holder(port))
        return False

    async def _name_holder(self, port: int) -> None:
        evidence = (
            f"{self.name} was not started: port {port} did not become free in {PORT_PATIENCE_S:g} s"
        )
        found = await asyncio.to_thread(port_taken, self.name, port, evidence)
        self._owner.post(self._owner.on_port_taken, self, found)

    def _gpus_are_free(self) -> bool:
        gpus, name = self._host.gpus, self.name
        if self.spec.is_far or gpus.admitted(name, self.spec.gpus):
            return True
        # Admission reads memory of the GPUs in a task; its callback triggers the next try.
        if name not in gpus.asking:
            shared, again = self._host.shares_with(name), lambda: self._owner.post(look_again)
            self._owner.task(gpus.admit(name, self.spec.gpus, shared, again))
        self.waiting_for = gpus.asking.get(name, "a reading of its GPU memory")
        return False

    # Events of a live attempt. `attempt` lets a callback that arrives late be ignored.

    def _is_present(self, attempt: int) -> bool:
        return self.attempt == attempt and self.child is not None

    def reach(self, stage: str, attempt: int) -> None:
        """Record a stage that run-api reports for it."""
        if any(known.name == stage for known in self.spec.stages):
            self._staged(attempt, stage, time.time())

    def _staged(self, attempt: int, stage: str, at: float) -> None:
        if self._is_present(attempt) and stage not in self._stages:
            self._stages[stage] = at
            self._restarts.came_up |= not self.has_gate
            self._store.emit(StageRecord(component=self.name, stage=stage, attempt=attempt))

    def _judged(self, attempt: int, found: ProbeResult) -> None:
        if not self._is_present(attempt) or self._ending is not None:
            return
        # Failures are normal while it starts; recording them would flood the journal.
        if found.ok or self.state is not State.STARTING:
            self._store.emit(
                ProbeRecord(
                    component=self.name,
                    probe=found.which,
                    ok=found.ok,
                    latency_s=found.latency_s,
                    detail=found.detail,
                )
            )
        if found.which == "liveness":
            if not found.ok:
                self._does_not_answer(found.detail)
        # With a readiness check, a passed startup check does not make it healthy yet.
        elif found.which == "startup" and (not found.ok or self.spec.probes.readiness):
            return
        elif found.ok and self.state in (State.STARTING, State.UNHEALTHY):
            self._healthy(found.detail)
        elif not found.ok and self.state is State.HEALTHY:
            self._move(State.UNHEALTHY, found.detail)

    def _healthy(self, reason: str) -> None:
        # The start timeout of a one-shot step runs until its exit.
        if self._timer and not self.one_shot:
            self._timer.cancel()
        self._restarts.proven |= self.has_gate
        self._restarts.came_up |= self.has_gate
        self._restarts.healthy_at = self._restarts.healthy_at or time.monotonic()
        self._move(State.HEALTHY, reason)

    def _does_not_answer(self, detail: str) -> None:
        reason = f"liveness failed: {detail}"
        fix = f"see atropos-tui logs {self.name} for its last output; the supervisor restarts it"
        self.diagnose(
            model.NOT_ANSWERING.diagnosis(detail, fix, f"{self.name} runs but does not answer")
        )
        if self.state is State.HEALTHY:
            self._move(State.UNHEALTHY, reason)
        self._begin_end("crash")
        self._move(State.STOPPING, reason)

    def _late(self, attempt: int) -> None:
        if (
            not self._is_present(attempt)
            or self.state is not State.STARTING
            or self._ending is not None
        ):
            return
        probe = self.newest_probe()
        detail = probe.detail if probe else "it has not finished"
        reason = (
            f"not {'done' if self.one_shot else 'healthy'} within {self.spec.start_timeout_s:g} "
            f"s: {detail}"
        )
        fix = f"see atropos-tui logs {self.name}; if it only needs longer, raise start_timeout_s"
        rule = model.HEALTH_TIMEOUT if self.spec.role is Role.ENGINE else model.NOT_READY
        self.diagnose(rule.diagnosis(detail, fix, f"{self.name} did not become ready"))
        self._begin_end("timeout")
        self._move(State.STOPPING, reason)

    # Ending.

    def stop(self, command_id: str | None, reason: str) -> None:
        """Stop it with its signal and grace period. An end in progress then counts as this stop."""
        if self.state is not State.STOPPING:
            self._command_id = command_id
            self._begin_end("stopped")
            self._move(State.STOPPING, reason)
        elif self.outcome != "stopped":
            self._begin_end("stopped")

    def kill(self, command_id: str | None) -> None:
        """Send SIGKILL; the supervisor treats it as a crash."""
        self._command_id = command_id
        self._begin_end("killed", signal.SIGKILL)

    def hurry(self) -> None:
        if self.child is not None:
            self._begin_end("stopped", signal.SIGKILL)

    def call_off(self, command_id: str | None, reason: str) -> None:
        """Cancel a pending start."""
        self._command_id = command_id
        self._move(State.STOPPED, reason)

    def _exited(self, attempt: int) -> None:
        if self._is_present(attempt):
            self.exited_at = time.time()
            if self._ending is None:
                self._begin_end("", signal.SIGKILL)

    def _begin_end(self, outcome: Outcome, number: int | None = None) -> None:
        """Start ending the set. During an end, a stop overrides the outcome, and SIGKILL skips
        the grace period."""
        assert self.child is not None
        if self._ending is not None:
            if outcome == "stopped" or not self.outcome:
                self.outcome = outcome
            if number == signal.SIGKILL:
                self._hurry.set()
            return
        self.outcome = outcome
        self._unwatch()
        stop = self.spec.stop
        first, grace_s = (SIGNALS[stop.signal], stop.grace_s) if number is None else (number, 0.0)
        self._ending = self._owner.task(self._end(self.child, self.attempt, first, grace_s))

    def _unwatch(self) -> None:
        if self._prober:
            self._prober.cancel()
        if self._timer:
            self._timer.cancel()
            self._timer = None

    async def _end(self, child: Leader, attempt: int, number: int, grace_s: float) -> None:
        host, post = self._host, self._owner.post
        # Note the GPU pids while the processes still live; `_gpu_memory_back` waits for these to
        # go.
        look = (
            self._owner.task(host.look_at_gpus(self.name))
            if self.spec.gpus and not self.spec.is_far
            else None
        )
        ending = Ending(
            number=number,
            grace_s=grace_s,
            hurry=self._hurry,
            members=lambda: host.tracker.members(self.name),
            on_leftover=lambda count: post(self._left_over, attempt, count),
            on_stuck=lambda processes: post(self.diagnose, stuck(processes)),
            group=host.table.components[self.name].group,
        )
        killed = await child.end_set(ending)
        # Order: processes first, then their last output, then the log's end, since the diagnosis
        # reads the log.
        await child.settle()
        await host.remove_shared_memory(self.name)
        assert self.log is not None
        self.log.finish()
        if self._stage_watch:
            # A stage reached just before the exit may not be read yet.
            await self._stage_watch.look()
        if look:
            await look
            await self._gpu_memory_back(attempt)
        diagnosis, error, usage = await self._explain(child, self.log)
        post(self._gone, attempt, killed, diagnosis, error, usage)

    async def _gpu_memory_back(self, attempt: int) -> None:
        gpus, shared = self._host.gpus, self._host.shares_with(self.name)
        found = await gpus.leave(
            self.name,
            self.spec.gpus,
            shared,
            self._hurry,
            lambda memory: self._owner.post(self._drains, attempt, memory),
        )
        if found:
            self._owner.post(self.diagnose, found)

    async def _explain(self, child: Leader, log: LogDrain) -> tuple[Diagnosis | None, str, bool]:
        """Explain an exit: diagnosis, error line if another start would fail alike, refused
        arguments."""
        if child.lost:
            return node_lost(child.lost), "", False
        if not child.exit_code or self.outcome:
            return None, "", False
        lines = log.tail(LOOKED_BACK)
        found = Evidence(
            self.spec,
            child.exit_code,
            lines[-EVIDENCE:],
            self._host.names,
            tuple(lines[:-EVIDENCE]),
        )
        # In a thread: rules search up to `LOOKED_BACK` lines with regular expressions.
        diagnosis = await asyncio.to_thread(diagnose, found)
        error = lasting_error(diagnosis.rule, lines) if child.exit_code > 0 else ""
        return diagnosis, error, is_wrong_usage(found)

    def _left_over(self, attempt: int, count: int) -> None:
        if not self._is_present(attempt) or self.child is None or self.child.exit_code is None:
            return
        if self.state is not State.STOPPING:
            reason = f"{describe_exit(self.child.exit_code)}; ending {count} processes that it left"
            self._move(State.STOPPING, reason, self.child.exit_code)

    def _drains(self, attempt: int, memory: str) -> None:
        if not self._is_present(attempt) or self.child is None or self.child.exit_code is None:
            return
        if self.state is not State.STOPPING:
            end = describe_exit(self.child.exit_code)
            self._move(State.STOPPING, f"{end}; waiting for {memory}", self.child.exit_code)
            # The record has the wait; `row` adds the current amount to this shorter reason.
            self.reason = end
        self._draining = memory
        self._store.notify()

    def _gone(
        self, attempt: int, killed: int, diagnosis: Diagnosis | None, error: str, usage: bool
    ) -> None:
        if not self._is_present(attempt):
            return
        child, launch = self.child, self._launch
        assert child is not None and child.exit_code is not None and launch is not None
        self._unwatch()
        try:
            self._host.leave(self.spec, child, launch)
        except OSError as problem:
            # A file that the next attempt would mistake for its own could not be removed.
            fix = "remove it by hand before the next start"
            self.diagnose(model.STALE_FILE.diagnosis(str(problem), fix))
        self.child, self._ending, self._prober, self._stage_watch = None, None, None, None
        self._draining = ""
        self.exit_code = child.exit_code
        if not self.has_gate:
            # Without a health check only its lifetime shows that it started.
            lived_s = (self.exited_at or time.time()) - (self.started_at or 0.0)
            self._restarts.proven |= lived_s > PROVEN_S
            self._restarts.came_up |= lived_s > (SILENT_START_S if self.spec.stages else PROVEN_S)
        self._owner.on_gone(
            self, Ended(self.outcome, child.exit_code, killed, diagnosis, error, usage, child.lost)
        )

    # After an end, as the supervisor decides.

    def rest(self, state: State, reason: str) -> None:
        """Move to a final state."""
        self._move(state, reason, self.exit_code)

    def delay_after_crash(self, error: str, *, usage: bool) -> tuple[float | None, str]:
        """Seconds until the next start, or None and the reason."""
        return self._restarts.delay(
            error, usage=usage, final=self.exit_code in self.spec.final_codes
        )

    def back_off(self, delay: float, reason: str) -> None:
        """Wait `delay` seconds before the next start."""
        if self.outcome != "killed":
            self._command_id = None
        self._retry_at = time.time() + delay
        self._move(State.BACKOFF, reason, self.exit_code, retry_at=self._retry_at)
        self._command_id = None


def stuck(processes: str) -> Diagnosis:
    fix = (
        "repair the disk or driver (GPU: see dmesg): a process in state D waits for it inside "
        "the kernel"
    )
    return model.UNKILLABLE.diagnosis(processes, fix)


def look_again() -> None: ...
