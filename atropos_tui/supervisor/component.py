"""One component of a run: its state, its present attempt, and every step from one to the next.

    PENDING -> STARTING -> HEALTHY <-> UNHEALTHY -> STOPPING -> COMPLETED, STOPPED, FAILED or BACKOFF -> PENDING

(`TRANSITIONS` is the table.) `start` makes an attempt; its end (`_exited`, or `end` from outside) begins `_end`, which
returns when no process of the set is left; then `_gone` hands an `Ended` to the supervisor, who decides what follows;
`Restarts` says whether and when a crash is answered with another start. Only `Component` writes a component's fields,
and only in the supervisor's event loop: one state machine over one record, so one file, although a long one.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from atropos_common.control import ComponentStatus, Role, StageStatus, State
from atropos_common.records import ProbeRecord, StageRecord, StateRecord
from atropos_common.run_dir import RunDir
from atropos_tui.diagnoses import Diagnosis, Evidence, describe_exit, diagnose, model, node_lost, port_taken
from atropos_tui.diagnoses.exit_rules import is_wrong_usage, lasting_error
from atropos_tui.diagnoses.log_scanner import LogScanner, Printed
from atropos_tui.diagnoses.model import shortened
from atropos_tui.diagnoses.roots import same_words
from atropos_tui.diagnoses.stall_rules import Part
from atropos_tui.profile.spec import ComponentSpec, RestartPolicy
from atropos_tui.supervisor.launch import Launch
from atropos_tui.supervisor.launchers.launcher import Host, Living, Usage
from atropos_tui.supervisor.logs import LogDrain
from atropos_tui.supervisor.probe import Prober, ProbeResult, StageWatch, log_patterns
from atropos_tui.supervisor.process import Ending, LaunchError, Leader
from atropos_tui.supervisor.store import Store

ENDS = frozenset({State.STOPPED, State.BACKOFF, State.FAILED, State.COMPLETED})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.STARTING, State.STOPPED, State.COMPLETED, State.FAILED}),
    State.STARTING: ENDS | {State.HEALTHY, State.STOPPING},
    State.HEALTHY: ENDS | {State.UNHEALTHY, State.STOPPING},
    State.UNHEALTHY: ENDS | {State.HEALTHY, State.STOPPING},
    State.STOPPING: ENDS,
    State.BACKOFF: frozenset({State.PENDING, State.STOPPED, State.FAILED}),
    State.STOPPED: frozenset({State.PENDING}),
    State.FAILED: frozenset({State.PENDING}),
    State.COMPLETED: frozenset({State.PENDING}),
}
"""From each state, where a component may go next."""
HEALTHY_RESET_S = 60.0
"""After so long in health the backoff begins anew."""
ALIKE_S = 10.0
"""Minimum seconds between two equal failures of a start before they are final: a network disk may be back by then."""
REASON_ROOM = 300
"""Characters of an error line in the reason of a state."""
PROVEN_S = 5.0
"""A component without probes that lived this long has shown that it can start."""
SILENT_START_S = 60.0
"""The same for one whose stages tell of its start, and who has reached none."""
PORT_PATIENCE_S = 5.0
"""How long a port that a stranger holds may take to become free."""
ROOM_PATIENCE_S = 60.0
"""So long a start waits for a machine that is out of descriptors, processes, memory or disk."""
EVIDENCE = 200
"""Lines of a log in which rules look for what explains an end."""
LOOKED_BACK = 1000
"""Lines in which the cause of that may lie: vLLM's tracebacks are long, and each of its processes prints one."""
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "KILL")}

Outcome = Literal["", "stopped", "crash", "killed", "timeout"]


class IllegalTransitionError(AssertionError):
    """A step that `TRANSITIONS` does not allow: a fault of the supervisor."""


def check_step(old: State, new: State) -> None:
    """Let an allowed step pass.

    Raises:
        IllegalTransitionError: the step is not in the table.
    """
    if new not in TRANSITIONS[old]:
        raise IllegalTransitionError(f"{old} -> {new}")


class Restarts:
    """What the crashes of one component and the times between them say about its next start."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.count = 0
        """Starts that answered a crash."""
        self.proven = False
        """It was healthy once, so an exit is a crash and no mistake in its arguments."""
        self.came_up = False
        """It was past its start once, so how a later start fails is not how all do."""
        self.healthy_at: float | None = None
        """When the present attempt became healthy."""
        self.start_error = ""
        """The error line of the start that failed last, if another start would fail in the same way."""
        self._error_since = 0.0
        """Monotonic time of the first of the failures in a row that have these words."""
        self._crashes: deque[float] = deque()
        self._streak = 0

    def recent(self) -> int:
        """Crashes within the policy's window."""
        return sum(time.monotonic() - crash <= self._policy.window_s for crash in self._crashes)

    def delay(self, error: str, *, usage: bool = False, final: bool = False) -> tuple[float | None, str]:
        """Seconds from this crash to the next start; or None, and why there is none.

        Args:
            error: the error line of a start that would fail in the same way again; "" for any other crash.
            usage: it refused its arguments.
            final: its exit code says that another start is no use.
        """
        now = time.monotonic()
        if self.healthy_at is not None and now - self.healthy_at > HEALTHY_RESET_S:
            self._streak = 0
        hopeless = "wrong usage, not retried" if usage and not self.proven else ""
        hopeless = "final, not retried" if final else hopeless
        if self._fails_alike(error, now):
            hopeless = f"the start failed twice in the same words, not tried again: {shortened(error, REASON_ROOM)}"
        if hopeless:
            return None, hopeless
        policy = self._policy
        delay = next_delay(policy, self._crashes, self._streak, now)
        if delay is None:
            gave_up = f"gave up after {policy.max_restarts} restarts in {policy.window_s:g} s"
            return None, "restart policy never" if policy.policy == "never" else gave_up
        self._streak += 1
        self.count += 1
        return delay, ""

    def _fails_alike(self, error: str, now: float) -> bool:
        """Note that a start failed with this error line ("": in a way that may pass). Return whether starts have failed
        in these words for `ALIKE_S`."""
        last, self.start_error = self.start_error, "" if self.came_up else error
        alike = same_words(self.start_error, last)
        if not alike:
            self._error_since = now
        return alike and now - self._error_since >= ALIKE_S


def next_delay(policy: RestartPolicy, crashes: deque[float], streak: int, now: float) -> float | None:
    """Seconds until the next start after a crash at `now`; None when the policy is exhausted.

    Args:
        crashes: times of earlier crashes; those outside the window are removed, this one is added.
        streak: crashes since the last minute of health.
    """
    while crashes and now - crashes[0] > policy.window_s:
        crashes.popleft()
    crashes.append(now)
    if policy.policy == "never" or len(crashes) > policy.max_restarts:
        return None
    return min(policy.max_backoff_s, policy.backoff_s * 2.0**streak) * random.uniform(0.8, 1.2)


@dataclass(frozen=True)
class Ended:
    """An attempt of which no process is left, and whose GPU memory is back."""

    outcome: Outcome
    exit_code: int
    killed: int = 0
    """How many processes did not go by themselves."""
    diagnosis: Diagnosis | None = None
    error: str = ""
    """The error line of its log, where another start would fail in the same way."""
    usage: bool = False
    """It refused its arguments."""
    lost: str = ""
    """How its node was lost, if that is why it ended."""


class Owner(Protocol):
    """What a component needs of its supervisor."""

    def post(self, act: Callable[..., None], *args: Any) -> None:
        """Call `act` soon, then look at what has become possible."""

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside everything else; a fault in it ends the run."""

    def on_gone(self, component: Component, ended: Ended) -> None:
        """Nothing of an attempt is left."""

    def on_port_taken(self, component: Component, found: Diagnosis) -> None:
        """A stranger holds its port and did not let it go."""


class Component:
    """Live state of one component."""

    def __init__(self, spec: ComponentSpec, host: Host, store: Store, owner: Owner, attempt: int) -> None:
        """`attempt` counts those of earlier supervisors of the run."""
        self.spec = spec
        self._host, self._store, self._owner = host, store, owner
        self.state = State.PENDING
        self.reason = ""
        self.since = time.time()
        self.waiting_for = ""
        self.attempt = attempt
        self.started_at: float | None = None
        self.exited_at: float | None = None
        """When its main process ended; others of its set, or its GPU memory, may take longer."""
        self.exit_code: int | None = None
        self._command_id: str | None = None
        """The command that its next transitions belong to."""

        self.child: Leader | None = None
        """The main process of the present attempt, until nothing of its set is left."""
        self.log: LogDrain | None = None
        self._scanner: LogScanner | None = None
        """Looks for telling lines in what the present attempt prints."""
        self.outcome: Outcome = ""
        """What the end of the set means; empty: the process ended by itself, its exit code decides."""
        self._launch: Launch | None = None
        self._prober: Prober | None = None
        self._stage_watch: StageWatch | None = None
        self._stages: dict[str, float] = {}
        """When each stage of the present attempt was reached, in Unix seconds."""
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        """Runs while the process set is being ended."""
        self._draining = ""
        """GPU memory that is not back yet, while no process is left."""
        self._hurry = asyncio.Event()

        self._restarts = Restarts(spec.restart)
        self._retry_at: float | None = None
        """While it is in backoff: when it is started again, in Unix seconds."""
        self._port_wait: float | None = None
        """When its port was first found taken."""
        self._room_wait: float | None = None
        """When the machine was first found out of what a start needs."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def one_shot(self) -> bool:
        """A step that is done when it exits with 0, not when it is healthy."""
        return self.spec.role is Role.PREPARE or self.spec.creates is not None

    @property
    def has_gate(self) -> bool:
        return self.spec.probes.startup is not None or self.spec.probes.readiness is not None

    # What is told of it.

    def _move(self, new: State, reason: str = "", exit_code: int | None = None, retry_at: float | None = None) -> None:
        """Take it to state `new`: the only way there."""
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
        if new in (State.HEALTHY, State.COMPLETED, State.FAILED):
            self._command_id = None

    def diagnose(self, found: Diagnosis, attempt: int | None = None, **how: bool) -> None:
        """Publish a diagnosis, or the end of one (`Ledger.add`).

        Args:
            attempt: that the finding belongs to, the present one by default.
            how: `ending`, `again`.
        """
        self._store.diagnoses.add(self.name, found, self.attempt if attempt is None else attempt, **how)

    @property
    def found(self) -> Diagnosis | None:
        """The newest open diagnosis that is more than advice."""
        found = [each for each in self._store.diagnoses.of(self.name) if each.severity != "advice"]
        return found[-1] if found else None

    def newest_probe(self) -> ProbeResult | None:
        """The round that matters now: readiness once it runs, else startup or liveness."""
        last = self._prober.last if self._prober else {}
        return last.get("readiness") or last.get("startup") or last.get("liveness")

    def observe(self) -> tuple[Part, Printed | None]:
        """For the watcher: what is seen of it now, and what it printed since the last call."""
        last = self.log.tail(1) if self.log and self.state in (State.STARTING, State.COMPLETED) else []
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
        )
        if self._scanner is None:
            return part, None
        on_purpose = self.outcome in ("stopped", "killed")
        return part, Printed(self._scanner, self._scanner.take(), self.child is None, on_purpose)

    def row(self, usage: Usage) -> ComponentStatus:
        """One row of `ps`."""
        probe = self.newest_probe()
        child = self.child
        current = usage if child and usage.at >= child.started_at else Usage([child.pid] if child and child.pid else [])
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
                StageStatus(name=stage.name, reached_at=self._stages.get(stage.name), usually=stage.usually)
                for stage in self.spec.stages
            ],
            exit_code=self.exit_code,
            reason=f"{self.reason}; waiting for {self._draining}" if self._draining else self.reason,
            diagnosis=f"{self.found.title}: {self.found.fix}" if self.found else "",
        )

    def _waits_for(self, probe: ProbeResult | None) -> str:
        if self.state is State.STOPPING:
            return f"{self._draining} to be given back" if self._draining else self.waiting_for
        if self.state is State.STARTING and not self.waiting_for:
            return probe.detail if probe and not probe.ok else "its probe" if self.has_gate else "its exit"
        return self.waiting_for if self.state in (State.PENDING, State.STARTING) else ""

    # A start.

    def release(self, reason: str, command_id: str | None = None) -> None:
        """It shall run. By a command (`command_id`) whatever hindered it may have been mended."""
        if command_id is not None:
            self._command_id = command_id
            self._port_wait = self._room_wait = None
            self._restarts.start_error = ""
        if self.state.is_resting or self.state is State.BACKOFF:
            self._move(State.PENDING, reason)

    def start(self, missing: str = "") -> None:
        """Start it, unless something is in the way: what it depends on (`missing`), its port, memory of its cards.

        Raises:
            LaunchError: it cannot be started as written.
        """
        self.waiting_for = missing
        if missing:
            return
        attempt = self.attempt + 1
        launch = self._host.launch(self.spec, attempt)
        if launch.creates and launch.creates.exists():
            self._move(State.COMPLETED, f"skipped: {launch.creates} exists")
        elif self._port_is_free() and self._gpus_are_free():
            try:
                living = self._host.start(self.spec, attempt, launch, *self._listeners(attempt))
            except OSError as error:
                self._wait_for_room(error)
                return
            self._begin(living)
            self._move(State.STARTING, f"attempt {attempt}{', which waited' if living.waited else ''}")
            self._watch()
            if not self.has_gate and not self.one_shot:
                self._healthy("started; it has no probe")

    def _wait_for_room(self, error: OSError) -> None:
        """The machine is out of something now: look again in a second, for a while.

        Raises:
            LaunchError: it has been so for too long.
        """
        self._room_wait = self._room_wait or time.monotonic()
        if time.monotonic() - self._room_wait > ROOM_PATIENCE_S:
            fix = "see what uses it up (ulimit -n, ulimit -u, df, free), and `atropos-tui up --resume RUN`"
            raise LaunchError(f"cannot start {self.name} for {ROOM_PATIENCE_S:g} s: {error.strerror}", fix)
        self.waiting_for = f"the machine: {error.strerror}"
        asyncio.get_running_loop().call_later(1.0, self._owner.post, look_again)

    def adopt(self) -> None:
        """Go on with what an earlier supervisor started; if it ended since, that is told at once."""
        entry = self._host.launcher.inherited[self.name].entry
        self._begin(self._host.adopt(self.name, *self._listeners(entry.attempt)))
        self._stages = dict(entry.stages)
        self._restarts.proven = entry.proven
        self._restarts.came_up = entry.proven or bool(self._stages)
        self._move(State.STARTING, f"adopted, attempt {entry.attempt}")
        self._watch()
        if self.child and self.child.exit_code is None and not self.has_gate and not self.one_shot:
            self._healthy("adopted; it has no probe")

    def done_before(self) -> None:
        """It was done under an earlier supervisor whose other components live on."""
        self._move(State.COMPLETED, "done before, under the earlier supervisor")

    def _listeners(self, attempt: int) -> tuple[Callable[[], None], Callable[[str], None]]:
        """Whom its end and trouble with its log are told."""
        return lambda: self._owner.post(self._exited, attempt), self._disk_trouble

    def _disk_trouble(self, problem: str) -> None:
        fix = "free disk space; the run goes on, and lost log output is counted"
        found = model.LOG_UNWRITABLE.diagnosis(problem, fix)
        over = found.ended("it can be written again")
        self._owner.post(lambda: self.diagnose(found if problem else over, again=True))

    def _begin(self, living: Living) -> None:
        """A new attempt: nothing of the last one counts any more."""
        child = living.child
        self._launch, self.log = living.launch, living.log
        self._scanner = LogScanner(self.spec, self._host.names)
        living.log.scanner = self._scanner.feed
        self.child, self.attempt, self.started_at = child, living.entry.attempt, child.started_at
        self._hurry, self.outcome, self.exit_code = asyncio.Event(), "", None
        self._port_wait, self._room_wait, self.exited_at, self._stages = None, None, None, {}
        self._restarts.healthy_at = None

    def _watch(self) -> None:
        """Watch its log, its probes and the clock."""
        assert self._launch and self.log
        attempt, post, probes = self.attempt, self._owner.post, self.spec.probes
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.spec.start_timeout_s, post, self._late, attempt)
        records = RunDir(Path(self._host.stack.run_dir)).stages_jsonl(self.name)
        self._stage_watch = StageWatch(
            self.spec, records, attempt, self.log, lambda stage, at: post(self._staged, attempt, stage, at)
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
            self._port_wait = float("inf")  # said once
            self._owner.task(self._name_holder(port))
        return False

    async def _name_holder(self, port: int) -> None:
        evidence = f"{self.name} was not started: port {port} did not become free in {PORT_PATIENCE_S:g} s"
        found = await asyncio.to_thread(port_taken, self.name, port, evidence)
        self._owner.post(self._owner.on_port_taken, self, found)

    def _gpus_are_free(self) -> bool:
        gpus, name = self._host.gpus, self.name
        if self.spec.is_far or gpus.admitted(name, self.spec.gpus):
            return True
        if name not in gpus.asking:
            shared, again = self._host.shares_with(name), lambda: self._owner.post(look_again)
            self._owner.task(gpus.admit(name, self.spec.gpus, shared, again))
        self.waiting_for = gpus.asking.get(name, "a look at its GPU memory")
        return False

    # What happens to a living attempt. `attempt` tells a late call from a present one.

    def _is_present(self, attempt: int) -> bool:
        return self.attempt == attempt and self.child is not None

    def reach(self, stage: str, attempt: int) -> None:
        """Note a stage that run-api knows of, where the program records nothing."""
        if any(known.name == stage for known in self.spec.stages):
            self._staged(attempt, stage, time.time())

    def _staged(self, attempt: int, stage: str, at: float) -> None:
        if self._is_present(attempt) and stage not in self._stages:  # an adopted one was seen by another supervisor
            self._stages[stage] = at
            self._restarts.came_up |= not self.has_gate
            self._store.emit(StageRecord(component=self.name, stage=stage, attempt=attempt))
            self.note_progress()

    def _judged(self, attempt: int, found: ProbeResult) -> None:
        """A probe changed its mind."""
        if not self._is_present(attempt) or self._ending is not None:
            return
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
        elif found.which == "startup" and (not found.ok or self.spec.probes.readiness):
            return
        elif found.ok and self.state in (State.STARTING, State.UNHEALTHY):
            self._healthy(found.detail)
        elif not found.ok and self.state is State.HEALTHY:
            self._move(State.UNHEALTHY, found.detail)

    def _healthy(self, reason: str) -> None:
        if self._timer and not self.one_shot:
            self._timer.cancel()
        self._restarts.proven |= self.has_gate
        self._restarts.came_up |= self.has_gate
        self._restarts.healthy_at = self._restarts.healthy_at or time.monotonic()
        self.note_progress()
        self._move(State.HEALTHY, reason)
        self._host.prepare_next(self.spec, self.attempt + 1)

    def _does_not_answer(self, detail: str) -> None:
        reason = f"liveness failed: {detail}"
        fix = f"it is being restarted; atropos-tui logs {self.name} shows what it was doing"
        self.diagnose(model.NOT_ANSWERING.diagnosis(detail, fix, f"{self.name} runs but does not answer"))
        if self.state is State.HEALTHY:
            self._move(State.UNHEALTHY, reason)
        self._begin_end("crash")
        self._move(State.STOPPING, reason)

    def _late(self, attempt: int) -> None:
        """`start_timeout_s` is over."""
        if not self._is_present(attempt) or self.state is not State.STARTING or self._ending is not None:
            return
        probe = self.newest_probe()
        detail = probe.detail if probe else "it has not finished"
        reason = f"not {'done' if self.one_shot else 'healthy'} within {self.spec.start_timeout_s:g} s: {detail}"
        fix = f"see atropos-tui logs {self.name}; if it only needs longer, raise start_timeout_s"
        rule = model.HEALTH_TIMEOUT if self.spec.role is Role.ENGINE else model.NOT_READY
        self.diagnose(rule.diagnosis(detail, fix, f"{self.name} did not become ready"))
        self._begin_end("timeout")
        self._move(State.STOPPING, reason)

    def note_progress(self) -> None:
        """Write down what an adopting supervisor could not find out: health, lines seen, sessions of descendants."""
        if self._host.launcher.adoptable:
            patterns = log_patterns(self.spec.probes) + [stage.pattern for stage in self.spec.stages]
            seen = [pattern for pattern in patterns if self.log and self.log.seen(pattern)]
            found = {"proven": self._restarts.proven, "seen": seen, "stages": dict(self._stages)}
            self._host.note_progress(self.name, found)

    # An end.

    def stop(self, command_id: str | None, reason: str) -> None:
        """End it on purpose, with its signal and its grace; an end that is under way counts as that."""
        if self.state is not State.STOPPING:
            self._command_id = command_id
            self._begin_end("stopped")
            self._move(State.STOPPING, reason)
        elif self.outcome != "stopped":
            self._begin_end("stopped")

    def kill(self, command_id: str | None) -> None:
        """End it at once, which counts as a crash."""
        self._command_id = command_id
        self._begin_end("killed", signal.SIGKILL)

    def hurry(self) -> None:
        """Patience is over: kill what is left of it."""
        if self.child is not None:
            self._begin_end("stopped", signal.SIGKILL)

    def call_off(self, command_id: str | None, reason: str) -> None:
        """It is not started after all."""
        self._command_id = command_id
        self._move(State.STOPPED, reason)

    def _exited(self, attempt: int) -> None:
        """The main process ended; others of its set may live."""
        if self._is_present(attempt):
            self.exited_at = time.time()
            if self._ending is None:
                self._begin_end("", signal.SIGKILL)

    def _begin_end(self, outcome: Outcome, number: int | None = None) -> None:
        """Start ending the set; `_gone` follows. While that runs, a stop overrides and a KILL hurries."""
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
        look = self._owner.task(host.look_at_gpus(self.name)) if self.spec.gpus and not self.spec.is_far else None
        ending = Ending(
            number=number,
            grace_s=grace_s,
            hurry=self._hurry,
            members=lambda: host.tracker.members(self.name),
            on_leftover=lambda count: post(self._left_over, attempt, count),
            on_stuck=lambda who: post(self.diagnose, stuck(who)),
            group=host.table.components[self.name].group,
        )
        killed = await child.end_set(ending)
        await child.settle()
        await host.remove_shared_memory(self.name)
        assert self.log is not None
        self.log.finish()
        if self._stage_watch:
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
        """Return why it ended by itself, its error line where another start would fail in the same way, and whether it
        refused its arguments."""
        if child.lost:
            return node_lost(child.lost), "", False
        if not child.exit_code or self.outcome:
            return None, "", False
        lines = log.tail(LOOKED_BACK)
        found = Evidence(self.spec, child.exit_code, lines[-EVIDENCE:], self._host.names, tuple(lines[:-EVIDENCE]))
        diagnosis = await asyncio.to_thread(diagnose, found)
        error = lasting_error(diagnosis.rule, lines) if child.exit_code > 0 else ""
        return diagnosis, error, is_wrong_usage(found)

    def _left_over(self, attempt: int, count: int) -> None:
        """It ended by itself and left so many others, which are being ended."""
        if not self._is_present(attempt) or self.child is None or self.child.exit_code is None:
            return
        if self.state is not State.STOPPING:
            reason = f"{describe_exit(self.child.exit_code)}; ending {count} processes that it left"
            self._move(State.STOPPING, reason, self.child.exit_code)

    def _drains(self, attempt: int, memory: str) -> None:
        """No process of its set is left, but this much GPU memory is not back yet."""
        if not self._is_present(attempt) or self.child is None or self.child.exit_code is None:
            return
        if self.state is not State.STOPPING:
            end = describe_exit(self.child.exit_code)
            self._move(State.STOPPING, f"{end}; waiting for {memory}", self.child.exit_code)
            self.reason = end
        self._draining = memory
        self._store.notify()

    def _gone(self, attempt: int, killed: int, diagnosis: Diagnosis | None, error: str, usage: bool) -> None:
        """No process of its set is left, and its GPU memory is back."""
        if not self._is_present(attempt):
            return
        child, launch = self.child, self._launch
        assert child is not None and child.exit_code is not None and launch is not None
        self._unwatch()
        try:
            self._host.leave(self.spec, child, launch, done=self.one_shot and child.exit_code == 0)
        except OSError as problem:
            fix = "remove it by hand before the next start"
            self.diagnose(model.STALE_FILE.diagnosis(str(problem), fix))
        self.child, self._ending, self._prober, self._stage_watch = None, None, None, None
        self._draining = ""
        self.exit_code = child.exit_code
        if not self.has_gate:
            lived_s = (self.exited_at or time.time()) - (self.started_at or 0.0)
            self._restarts.proven |= lived_s > PROVEN_S
            self._restarts.came_up |= lived_s > (SILENT_START_S if self.spec.stages else PROVEN_S)
        self._owner.on_gone(self, Ended(self.outcome, child.exit_code, killed, diagnosis, error, usage, child.lost))

    # What follows from an end, as the supervisor decides.

    def rest(self, state: State, reason: str) -> None:
        """It is down: COMPLETED, STOPPED or FAILED."""
        self._move(state, reason, self.exit_code)

    def delay_after_crash(self, error: str, *, usage: bool) -> tuple[float | None, str]:
        """Seconds until it is started again, which is counted; or None, and why it is not (`Restarts.delay`)."""
        return self._restarts.delay(error, usage=usage, final=self.exit_code in self.spec.final_codes)

    def back_off(self, delay: float, reason: str) -> None:
        """It crashed, and is started again after `delay` seconds."""
        if self.outcome != "killed":
            self._command_id = None
        self._retry_at = time.time() + delay
        self._move(State.BACKOFF, reason, self.exit_code, retry_at=self._retry_at)
        self._command_id = None


def stuck(who: str) -> Diagnosis:
    """The diagnosis for processes (by pid and state) that outlive SIGKILL."""
    fix = "state D is a wait inside the kernel, for a disk or a driver (GPU: see dmesg); only that can end it"
    return model.UNKILLABLE.diagnosis(who, fix)


def look_again() -> None:
    """Nothing but a reason to look at what has become possible."""
