"""What the core knows about one component, and when a crash is answered with another start."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from atropos_tui.stack.spec import ComponentSpec, RestartPolicy
from atropos_tui.supervisor.diagnoses.roots import same_words
from atropos_tui.supervisor.diagnoses.scanner import LogScanner
from atropos_tui.supervisor.environment import Launch
from atropos_tui.supervisor.logs import LogDrain
from atropos_tui.supervisor.probe import Prober, ProbeResult
from atropos_tui.supervisor.process import Leader
from atropos_tui.supervisor.sampling import Usage
from atropos_tui.supervisor.stages import StageWatch
from trainer_core.contracts.control import ComponentStatus, Role, StageStatus, State

PROVEN_S = 5.0
"""A component without probes that lived this long has shown that it can start."""
SILENT_START_S = 60.0
"""The same for one whose stages tell of its start, and who has reached none."""
HEALTHY_RESET_S = 60.0
"""After so long in health the backoff begins anew."""

Outcome = Literal["", "stopped", "crash", "killed", "timeout"]


@dataclass
class Unit:
    """Live state of one component; only the core's task writes it."""

    spec: ComponentSpec
    state: State = State.PENDING
    wanted: bool = True
    """Whether it shall run; false after a stop by hand."""
    attempt: int = 0
    restarts: int = 0
    reason: str = ""
    waiting_for: str = ""
    since: float = field(default_factory=time.time)
    started_at: float | None = None
    exited_at: float | None = None
    """When its main process ended; others of its set, or its GPU memory, may take longer."""
    exit_code: int | None = None
    diagnosis: str = ""
    said: list[tuple[int, str, int]] = field(default_factory=list)
    """Attempt, rule and episode of what was diagnosed last, oldest first."""
    command_id: str | None = None
    """The command that its next transitions belong to."""

    child: Leader | None = None
    launch: Launch | None = None
    log: LogDrain | None = None
    scanner: LogScanner | None = None
    """Looks for telling lines in what the present attempt prints."""
    prober: Prober | None = None
    stage_watch: StageWatch | None = None
    stages: dict[str, float] = field(default_factory=dict)
    """When each stage of the present attempt was reached, in Unix seconds."""
    timer: asyncio.TimerHandle | None = None
    ending: asyncio.Task[None] | None = None
    """Runs while the process set is being ended."""
    draining: str = ""
    """GPU memory that is not back yet, while no process is left."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome = ""
    """What the end of the set means; empty: the process ended by itself, its exit code decides."""

    proven: bool = False
    """It was healthy once, so an exit is a crash and no mistake in its arguments."""
    came_up: bool = False
    """It was past its start once, so how a later start fails is not how all do."""
    start_error: str = ""
    """The error line of the start that failed last, if another start would fail in the same way."""
    healthy_at: float | None = None
    crashes: deque[float] = field(default_factory=deque)
    streak: int = 0
    retry_at: float | None = None
    """While it is in backoff: when it is started again, in Unix seconds."""
    port_wait: float | None = None
    """When its port was first found taken."""

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

    def lived(self, seconds: float) -> None:
        """An attempt of it has ended after `seconds`."""
        if not self.has_gate:
            self.proven = self.proven or seconds > PROVEN_S
            self.came_up = self.came_up or seconds > (SILENT_START_S if self.spec.stages else PROVEN_S)

    def fails_alike(self, error: str) -> bool:
        """A start has failed with this error line (none: in a way that may pass); whether the last one did so, too."""
        last, self.start_error = self.start_error, "" if self.came_up else error
        return same_words(self.start_error, last)

    def newest_probe(self) -> ProbeResult | None:
        """The round that matters now: readiness once it runs, else startup or liveness."""
        last = self.prober.last if self.prober else {}
        return last.get("readiness") or last.get("startup") or last.get("liveness")

    def row(self, usage: Usage) -> ComponentStatus:
        """One row of `ps`."""
        probe = self.newest_probe()
        child = self.child
        current = usage if child and usage.at >= child.started_at else Usage([child.pid] if child else [])
        running = child is not None and child.exit_code is None
        waiting = self.waiting_for
        if self.state is State.STOPPING and self.draining:
            waiting = f"{self.draining} to be given back"
        if self.state is State.STARTING and not waiting:
            waiting = probe.detail if probe and not probe.ok else "its probe" if self.has_gate else "its exit"
        return ComponentStatus(
            name=self.name,
            role=self.spec.role,
            state=self.state,
            attempt=self.attempt,
            restarts=self.restarts,
            pid=child.pid if child and running else None,
            pids=current.pids if running or self.ending else [],
            port=self.spec.port,
            started_at=self.started_at,
            since=self.since,
            waiting_for=waiting if self.state in (State.PENDING, State.STARTING, State.STOPPING) else "",
            healthy=probe.ok if probe else None,
            probe=probe.which if probe else "",
            probe_latency_s=probe.latency_s if probe else None,
            probe_detail=probe.detail if probe else "",
            cpu_percent=current.cpu_percent,
            memory_bytes=current.memory_bytes,
            gpu_bytes=current.gpu_bytes,
            retry_at=self.retry_at if self.state is State.BACKOFF else None,
            crashes=sum(time.monotonic() - crash <= self.spec.restart.window_s for crash in self.crashes),
            stages=[
                StageStatus(name=stage.name, reached_at=self.stages.get(stage.name), usually=stage.usually)
                for stage in self.spec.stages
            ],
            exit_code=self.exit_code,
            reason=f"{self.reason}; waiting for {self.draining}" if self.draining else self.reason,
            diagnosis=self.diagnosis,
        )


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
