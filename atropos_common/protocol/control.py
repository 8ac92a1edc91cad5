"""Messages of the control socket: HTTP with JSON bodies over the run's Unix socket.

    GET  /status                     -> RunStatus
    GET  /events?after=SEQ           -> NDJSON: a Snapshot, then later lines of supervisor.jsonl
    POST /commands   CommandRequest  -> 202 Accepted | 409/404/422 Refusal
    GET  /commands/ID                -> CommandStatus
    GET  /recipe?action=A&component=C-> Recipe (what a command would do)
    GET  /wait?for=X&timeout=S       -> WaitResult (for: ready, done, a component's name)

The trainer uses the same socket to ask for a new engine (`initiator="trainer"`). A request may name
the run that it means (`RUN_ID_HEADER`); the supervisor of any other run answers 421.
"""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

# A stale client, such as a screen of a finished run, must not command its successor.
RUN_ID_HEADER = "atropos-run-id"
OTHER_RUN = 421
"""HTTP status for a request that names another run."""


class State(StrEnum):
    """States of a component."""

    PENDING = "pending"
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    STOPPING = "stopping"
    STOPPED = "stopped"
    BACKOFF = "backoff"
    FAILED = "failed"
    COMPLETED = "completed"

    @property
    def is_resting(self) -> bool:
        """True if it has no process and only a command can start one."""
        return self in (State.STOPPED, State.FAILED, State.COMPLETED)

    @property
    def has_process(self) -> bool:
        """True while a process lives. A component without one rests, or (`pending`, `backoff`)
        waits for its start."""
        return self in (State.STARTING, State.HEALTHY, State.UNHEALTHY, State.STOPPING)

    def satisfies(self, condition: str) -> bool:
        # A prepare step: its output exists only after it has ended.
        if condition == "completed":
            return self is State.COMPLETED
        # A completed component did its work, so its dependents may start.
        if condition == "healthy":
            return self in (State.HEALTHY, State.COMPLETED)
        return self in (State.STARTING, State.HEALTHY, State.UNHEALTHY, State.COMPLETED)


class Role(StrEnum):
    """Purpose of a component; recipes and health checks key on it, never on a name."""

    API = "api"
    ENV = "env"
    ENGINE = "engine"
    TRAINER = "trainer"
    PREPARE = "prepare"
    OTHER = "other"


class Phase(StrEnum):
    """Phase of a whole run."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class StageStatus(Message):
    """A milestone of a component; `reached_at` in Unix seconds, None before."""

    name: str
    reached_at: float | None = None
    usually: str = ""
    """Usual reason why it is not reached."""


class GpuStatus(Message):
    """One GPU as NVML reports it, for all users; bytes, and percent of time in use."""

    index: int = Field(ge=0, le=2**16)
    node: str = ""
    """Node of the GPU; empty for the supervisor's own."""
    name: str = ""
    # A recording from another machine may have any number here: refuse implausible ones.
    used_bytes: int = Field(ge=0, le=2**60)
    total_bytes: int = Field(ge=0, le=2**60)
    utilization_percent: int | None = None
    """None where the driver does not measure it (MIG)."""
    power_w: float | None = None
    temperature_c: int | None = None
    sm_percent: float | None = None
    """Busy streaming multiprocessors, a mean; None before Hopper, and where NVML refuses it."""
    bandwidth_percent: float | None = None
    """Used share of the memory bandwidth; None as above."""
    memory_busy_percent: int | None = None
    """Share of time in which memory was read or written, at any rate."""
    held_bytes: dict[str, int] = Field(default_factory=dict)
    """Bytes by component, where the driver reports processes; other programs use the rest of
    `used_bytes`."""

    @property
    def label(self) -> str:
        """Index of the GPU; on another node `NODE:INDEX`."""
        return f"{self.node}:{self.index}" if self.node else str(self.index)


# `waiting_for` of a component that has started and has not passed its check.
HEALTH_CHECK = "its health check"


class ComponentStatus(Message):
    """One row of `ps`. Times are Unix seconds, memory is bytes, None where there is no value."""

    name: str
    role: Role
    node: str = ""
    """Node of the component; empty on a single machine."""
    state: State
    attempt: int = 0
    restarts: int = 0
    """Restarts after a crash; restarts by command do not count."""
    errors: int = 0
    """Lines with ERROR in this attempt; a flood is sampled."""
    pid: int | None = None
    """Process id on its node."""
    # Descendants may have left the process group, so the supervisor finds them by parent.
    pids: list[int] = Field(default_factory=list)
    """Every live process of the component, descendants included."""
    port: int | None = None
    # Start of the present attempt.
    started_at: float | None = None
    since: float | None = None
    """Start of the present state."""
    waiting_for: str = ""
    """The condition that a pending or starting component waits for."""
    healthy: bool | None = None
    probe: str = ""
    """The health check that reported last: startup, readiness or liveness."""
    probe_latency_s: float | None = None
    probe_detail: str = ""
    cpu_percent: float | None = None
    """Percent of one core, summed over its processes."""
    memory_bytes: int | None = None
    """Proportional set size where the kernel reports it, else resident size."""
    gpu_bytes: int | None = None
    """Sum over its processes; None where the driver does not separate them (containers)."""
    retry_at: float | None = None
    """Time of the next start, in backoff."""
    crashes: int = 0
    """Crashes within the window of its restart policy."""
    stages: list[StageStatus] = Field(default_factory=list)
    exit_code: int | None = None
    reason: str = ""
    diagnosis: str = ""


NODE_SILENT_S = 7.0
"""Seconds without a message after which a node counts as silent; a node agent sends one every two
seconds."""


class NodeStatus(Message):
    """A machine of a stack that spans several; memory in bytes."""

    name: str
    host: str = ""
    """Host name that its launcher uses."""
    address: str = ""
    """Address that other machines dial."""
    gpus: int = 0
    """Number of its GPUs for this stack."""
    heard_at: float | None = None
    """Time of the last message from it, Unix seconds; None before the first."""
    cpu_percent: float | None = None
    """Percent of all its cores."""
    memory_used: int | None = None
    memory_total: int | None = None


class RunStatus(Message):
    """Snapshot of a run; `seq` is the last record of supervisor.jsonl that it includes (-1: none
    yet)."""

    run_id: str
    name: str
    mode: str
    run_dir: str
    phase: Phase
    started_at: float
    # A client that reads `/events` from this `seq` misses no record and gets none twice.
    seq: int = -1
    exit_code: int | None = None
    reason: str = ""
    supervisor_pid: int | None = None
    components: list[ComponentStatus] = Field(default_factory=list)
    gpus: list[GpuStatus] = Field(default_factory=list)
    """Empty without an NVIDIA driver."""
    nodes: list[NodeStatus] = Field(default_factory=list)
    """All machines, the supervisor's own first; empty for a single machine."""


class Snapshot(Message):
    """First line of `/events`."""

    kind: Literal["snapshot"] = "snapshot"
    status: RunStatus


class Recipe(Message):
    """Effect of a command on all components."""

    action: str
    component: str | None = None
    stop: list[str] = Field(default_factory=list)
    """Components to stop in this order, each after the previous one is gone."""
    start: list[str] = Field(default_factory=list)
    """Components to start in this order, each once its dependencies are ready."""
    note: str = ""
    """Reason why others are affected, and what is lost."""


Action = Literal["start", "stop", "restart", "kill", "down"]


class CommandRequest(Message):
    action: Action
    component: str | None = Field(None, max_length=256)
    """Required except for `down`; a `restart` without it restarts every running component."""
    initiator: Literal["user", "trainer"] = "user"
    # JSON parsers accept NaN, which no comparison with a deadline handles.
    timeout_s: FiniteFloat | None = None
    """For `down`: seconds until the rest is killed."""


class Accepted(Message):
    command_id: str
    recipe: Recipe


class Refusal(Message):
    """Reason why a command was refused, and the alternative."""

    error: str
    fix: str = ""


class CommandStatus(Message):
    command_id: str
    action: str
    component: str | None = None
    status: Literal["accepted", "running", "done", "failed"]
    detail: str = ""


class WaitResult(Message):
    """`outcome`: reached, timeout, or impossible (a component failed, the run ended)."""

    # `impossible` ends a wait early: the condition can no longer come true.
    outcome: Literal["reached", "timeout", "impossible"]
    detail: str = ""
