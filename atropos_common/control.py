"""Messages of the control socket: HTTP with JSON bodies over the run's Unix socket.

    GET  /status                     -> RunStatus
    GET  /events?after=SEQ           -> NDJSON: a Snapshot line first, then every later record of supervisor.jsonl
    POST /commands   CommandRequest  -> 202 Accepted | 409/404/422 Refusal
    GET  /commands/ID                -> CommandStatus
    GET  /recipe?action=A&component=C-> Recipe (what a command would do)
    GET  /logs/COMPONENT?n=N         -> text, the last N lines of the current attempt
    GET  /wait?for=X&timeout=S       -> WaitResult (for: ready, done, a component's name)

The trainer uses the same socket to ask for a new engine (`initiator="trainer"`).
A request may name the run that it means (`RUN_ID_HEADER`); the supervisor of any other run answers 421.
"""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

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
        """No process, and none will come without a command: it can be started, and there is nothing to stop."""
        return self in (State.STOPPED, State.FAILED, State.COMPLETED)

    @property
    def has_process(self) -> bool:
        """A process lives. Without one it rests, or (`pending`, `backoff`) waits to be started."""
        return self in (State.STARTING, State.HEALTHY, State.UNHEALTHY, State.STOPPING)

    def satisfies(self, condition: str) -> bool:
        """Whether a dependency in this state meets `condition` (started, healthy, completed)."""
        if condition == "completed":
            return self is State.COMPLETED
        if condition == "healthy":
            return self in (State.HEALTHY, State.COMPLETED)
        return self in (State.STARTING, State.HEALTHY, State.UNHEALTHY, State.COMPLETED)


class Role(StrEnum):
    """What a component is for; recipes and probes key on this, never on a name."""

    API = "api"
    ENV = "env"
    ENGINE = "engine"
    TRAINER = "trainer"
    PREPARE = "prepare"
    OTHER = "other"


class Phase(StrEnum):
    """Where a run as a whole stands."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class Message(BaseModel):
    """Base of all messages: unknown fields of a newer peer are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class StageStatus(Message):
    """A milestone of a component; `reached_at` in Unix seconds, null until then."""

    name: str
    reached_at: float | None = None
    usually: str = ""
    """What usually keeps it from being reached."""


class GpuStatus(Message):
    """One GPU as NVML sees it, whoever uses it; bytes, and percent of time in use."""

    index: int = Field(ge=0, le=2**16)
    node: str = ""
    """The node that it is in, if that is not the supervisor's."""
    name: str = ""
    used_bytes: int = Field(ge=0, le=2**60)
    total_bytes: int = Field(ge=0, le=2**60)
    utilization_percent: int | None = None
    """Null where the driver does not measure it (MIG)."""
    power_w: float | None = None
    temperature_c: int | None = None
    held_bytes: dict[str, int] = Field(default_factory=dict)
    """By component, where the driver tells the processes apart; the rest of `used_bytes` is anybody's."""

    @property
    def label(self) -> str:
        """Its index, behind its node where that is another."""
        return f"{self.node}:{self.index}" if self.node else str(self.index)


class ComponentStatus(Message):
    """One row of `ps`. Times are Unix seconds, memory is bytes, null where there is nothing to say."""

    name: str
    role: Role
    node: str = ""
    """Where it runs; empty where there is only one machine."""
    state: State
    attempt: int = 0
    restarts: int = 0
    """Restarts after a crash; a restart by hand is not counted."""
    errors: int = 0
    """Times that this attempt has printed ERROR; in a flood as far as it is looked at."""
    pid: int | None = None
    """On its node."""
    pids: list[int] = Field(default_factory=list)
    """Every live process of the component, descendants included."""
    port: int | None = None
    started_at: float | None = None
    since: float | None = None
    """When the present state began."""
    waiting_for: str = ""
    """What a pending or starting component waits for."""
    healthy: bool | None = None
    probe: str = ""
    """Which probe spoke last: startup, readiness or liveness."""
    probe_latency_s: float | None = None
    probe_detail: str = ""
    cpu_percent: float | None = None
    """Of one core, summed over its processes."""
    memory_bytes: int | None = None
    """Proportional set size where the kernel gives it, else resident size."""
    gpu_bytes: int | None = None
    """Summed over its processes; null where the driver does not tell them apart (containers)."""
    retry_at: float | None = None
    """In backoff: when it is started again."""
    crashes: int = 0
    """Within the window of its restart policy."""
    stages: list[StageStatus] = Field(default_factory=list)
    exit_code: int | None = None
    reason: str = ""
    diagnosis: str = ""


SILENT_S = 7.0
"""A far end speaks every two seconds: a node that has said nothing for so long is told of."""


class NodeStatus(Message):
    """A machine of a stack that runs on several; memory in bytes."""

    name: str
    host: str = ""
    """As its launcher knows it."""
    address: str = ""
    """What other machines dial."""
    gpus: int = 0
    """How many it has for this stack."""
    heard_at: float | None = None
    """When something there last spoke, Unix seconds; null where nothing has yet."""
    cpu_percent: float | None = None
    """Of all its cores."""
    memory_used: int | None = None
    memory_total: int | None = None


class RunStatus(Message):
    """Snapshot of a run; `seq` is the last record of supervisor.jsonl that it includes (-1: none yet)."""

    run_id: str
    name: str
    mode: str
    run_dir: str
    phase: Phase
    started_at: float
    seq: int = -1
    exit_code: int | None = None
    reason: str = ""
    supervisor_pid: int | None = None
    components: list[ComponentStatus] = Field(default_factory=list)
    gpus: list[GpuStatus] = Field(default_factory=list)
    """Empty where there is no NVIDIA driver."""
    nodes: list[NodeStatus] = Field(default_factory=list)
    """The machines, the supervisor's own first; empty where there is only that."""


class Snapshot(Message):
    """First line of `/events`."""

    kind: Literal["snapshot"] = "snapshot"
    status: RunStatus


class Recipe(Message):
    """What a command does, blast radius first."""

    action: str
    component: str | None = None
    stop: list[str] = Field(default_factory=list)
    """Stopped in this order, each gone before the next."""
    start: list[str] = Field(default_factory=list)
    """Started in this order, behind their gates."""
    note: str = ""
    """Why others are touched, and what is lost."""


Action = Literal["start", "stop", "restart", "kill", "down"]


class CommandRequest(Message):
    action: Action
    component: str | None = Field(None, max_length=256)
    """Required but for `down`; a `restart` without it is of every component that runs."""
    initiator: Literal["user", "trainer"] = "user"
    timeout_s: FiniteFloat | None = None
    """For `down`: seconds until what is left is killed."""


class Accepted(Message):
    command_id: str
    recipe: Recipe


class Refusal(Message):
    """Why a command was not taken, and what to do instead."""

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

    outcome: Literal["reached", "timeout", "impossible"]
    detail: str = ""
