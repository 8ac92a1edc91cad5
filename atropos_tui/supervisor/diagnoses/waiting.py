"""Rules about time that passes: nothing trains, something starts too slowly, a disk fills up. Pure, on a `Scene`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atropos_common.control import Role, State
from atropos_tui.supervisor.diagnoses.model import USUAL, Diagnosis, Names, Rule

NO_BATCHES = Rule("no_batches", "no batches: the trainer stands still")
SLOW_START = Rule("slow_start", "a component takes unusually long to start")
DISK_LOW = Rule("disk_low", "the run's disk is nearly full")
WAIT_RULES = (NO_BATCHES, SLOW_START, DISK_LOW)
STALL_S = 180.0
"""No optimizer step for so long, or for `STALL_STEPS` times the slowest of the last ones, is a stall."""
STALL_STEPS = 10.0
SLOW_START_S = {Role.API: 20.0, Role.ENGINE: 240.0, Role.TRAINER: 300.0}
"""A start that takes longer is worth a word; a quarter of the time-out where that is longer."""
SLOW_START_ANY_S = 60.0
LOW_BYTES = 200_000_000
NEVER_LOW_SHARE = 0.02
"""A disk that is small as a whole is low only below this share."""
DROPPED_MANY = 3


@dataclass(frozen=True)
class Part:
    """One component as the supervisor sees it. Times are Unix seconds."""

    name: str
    role: Role
    state: State
    since: float
    start_timeout_s: float = 600.0
    started_at: float = 0.0
    attempt: int = 0
    gated: bool = False
    """It has a probe that says when it is ready."""
    waiting_for: str = ""
    last_line: str = ""


@dataclass(frozen=True)
class ApiView:
    """What run-api says of itself. `problem` is set when it does not answer."""

    batch_size: int = -1
    """Sequences of a batch; -1 before a trainer has registered."""
    queue: int = 0
    """Groups that wait."""
    group: int = 0
    """Sequences of the newest group, 0 when there is none."""
    step: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Scene:
    """The run at one moment."""

    now: float
    parts: tuple[Part, ...]
    names: Names = USUAL
    step: int = 0
    step_at: float | None = None
    pace_s: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counted log lines since the newest step, see `scanner.COUNTED`."""
    ghosts: int = 0
    """Environments that run-api still counts although they are gone."""
    refused: tuple[str, ...] = ()
    """Environments whose requests the engine refuses, which is said of them."""
    api: ApiView | None = None
    """Asked for only when a run stands still."""
    free_bytes: int | None = None
    disk_bytes: int | None = None

    def of(self, role: Role) -> list[Part]:
        return [part for part in self.parts if part.role is role]


def starting_roles(scene: Scene) -> frozenset[Role]:
    """Roles of which a component is on its way up: who waits for them is right to wait."""
    coming = (State.PENDING, State.STARTING, State.BACKOFF, State.STOPPING)
    return frozenset(part.role for part in scene.parts if part.state in coming)


def stalled_s(scene: Scene) -> float | None:
    """Seconds without an optimizer step, once that is too long while everything should be running."""
    trainer = next((part for part in scene.of(Role.TRAINER) if part.state is State.HEALTHY), None)
    if trainer is None or starting_roles(scene):
        return None
    last = max([part.since for part in scene.parts if part.state is State.HEALTHY] + [scene.step_at or 0.0])
    silent = scene.now - last
    return silent if silent > max(STALL_S, STALL_STEPS * scene.pace_s) else None


@dataclass(frozen=True)
class Cause:
    """Why no batch comes, in words, and the way out."""

    title: str
    evidence: str
    fix: str


def no_batches(scene: Scene) -> Diagnosis | None:
    """The trainer stands still: which of the usual causes fits what is seen, and is not said elsewhere."""
    silent = stalled_s(scene)
    cause = next((found for look in CAUSES if (found := look(scene)) is not None), None)
    if silent is None or cause is None:
        return None
    after = f"no optimizer step for {silent:.0f} s" + (f" after step {scene.step}" if scene.step else "")
    names = scene.names
    fix = cause.fix.format(api=names.api, env=names.env, engine=names.engine, trainer=names.trainer)
    return NO_BATCHES.diagnosis(f"{after}; {cause.evidence}", fix, f"no batches: {cause.title}")


def _api_away(scene: Scene) -> Cause | None:
    if scene.api is None or not scene.api.problem:
        return None
    return Cause("run-api does not answer", scene.api.problem, "atropos-tui restart {api}")


def _nobody_registered(scene: Scene) -> Cause | None:
    if scene.api is None or scene.api.batch_size != -1:
        return None
    fix = "run-api was restarted behind the trainer's back, or the trainer asks another one: atropos-tui restart {api}"
    return Cause("no trainer is registered", "run-api's /info says batch_size -1", fix)


def _sizes(scene: Scene) -> Cause | None:
    api = scene.api
    if api is None or api.group < 1 or api.queue < 1 or api.batch_size % api.group == 0:
        return None
    evidence = f"groups of {api.group} never add up to a batch of {api.batch_size} ({api.queue} groups wait)"
    fix = (
        f"[trainer] batch_size * gradient_accumulation_steps must be a multiple of {api.group} (env.group_size under "
        "[env.args]); then atropos-tui restart {api}"
    )
    return Cause("group size and batch size do not fit", evidence, fix)


def _trainer_hangs(scene: Scene) -> Cause | None:
    api = scene.api
    if api is None or api.group < 1 or api.queue * api.group < api.batch_size:
        return None
    evidence = f"run-api holds {api.queue} groups of {api.group}, a batch is {api.batch_size}"
    fix = (
        "the batch is there, the trainer does not fetch it: atropos-tui logs {trainer} -n 50 shows what it does; "
        "atropos-tui restart {trainer} goes on from its checkpoint"
    )
    return Cause("the trainer hangs", evidence, fix)


def _no_environment(scene: Scene) -> Cause | None:
    envs = scene.of(Role.ENV)
    if any(part.state in (State.HEALTHY, State.UNHEALTHY) for part in envs):
        return None
    states = ", ".join(f"{part.name} is {part.state.value}" for part in envs) or "the stack has none"
    fix = "an environment ends when env.total_steps batches were drained (-1 is read as 1): atropos-tui start {env}"
    return Cause("no environment runs", states, fix)


def _engine_unwell(scene: Scene) -> Cause | None:
    ill = [part for part in scene.of(Role.ENGINE) if part.state is not State.HEALTHY]
    if not ill:
        return None
    evidence = ", ".join(f"{part.name} is {part.state.value}" for part in ill)
    return Cause("the engine is not healthy", evidence, "atropos-tui why {engine}; atropos-tui restart {engine}")


def _dropped(scene: Scene) -> Cause | None:
    count = scene.counts.get("dropped groups", 0)
    if count < DROPPED_MANY:
        return None
    fix = (
        "env.ensure_scores_are_not_same = false under [env.args] keeps groups of equal scores; then look at the "
        "rollouts: all right or all wrong teaches nothing"
    )
    return Cause("every group is dropped, its scores are all equal", f"{count} groups dropped since then", fix)


def _timed_out(scene: Scene) -> Cause | None:
    count = scene.counts.get("timed-out rollouts", 0)
    if not count:
        return None
    fix = (
        "lower env.max_num_workers_per_node or env.max_token_length under [env.args], or raise env.worker_timeout "
        "(600 s by default)"
    )
    return Cause("rollouts are cancelled before they are done", f"{count} workers timed out since then", fix)


def _ghosts(scene: Scene) -> Cause | None:
    if scene.ghosts < 1:
        return None
    evidence = f"{scene.ghosts} more registrations than environments that run"
    fix = (
        "run-api does not notice that an environment died, and keeps its share of every batch for it: "
        "atropos-tui restart {api} (it takes the environments along)"
    )
    return Cause("run-api waits for an environment that is gone", evidence, fix)


def _slow_rollouts(scene: Scene) -> Cause | None:
    if scene.refused:
        return None
    queue = f"{scene.api.queue} groups wait at run-api" if scene.api else "run-api was not asked"
    fix = (
        "rollouts are slow, or none is begun: atropos-tui logs {env} -n 50, and does {engine} generate? Shorter "
        "env.max_token_length, fewer env.max_num_workers_per_node; a program of your own must send to run-api"
    )
    return Cause("rollouts are slow", queue, fix)


CAUSES: tuple[Callable[[Scene], Cause | None], ...] = (
    _api_away, _nobody_registered, _sizes, _trainer_hangs, _no_environment, _engine_unwell, _dropped, _timed_out,
    _ghosts, _slow_rollouts,
)  # fmt: skip
"""The more certain first; the last one fits wherever it is not known why no rollouts come."""


def slow_start(part: Part, now: float) -> Diagnosis | None:
    """A component has been starting for longer than its role usually takes."""
    if part.state is not State.STARTING or not part.gated:
        return None
    usual = max(SLOW_START_S.get(part.role, SLOW_START_ANY_S), part.start_timeout_s / 4)
    took = now - part.since
    if took <= min(usual, part.start_timeout_s * 0.8):
        return None
    evidence = f"starting for {took:.0f} s (given up after {part.start_timeout_s:g} s)"
    for label, text in (("waits for", part.waiting_for), ("last line", part.last_line)):
        evidence += f"; {label}: {text}" if text else ""
    fix = (
        f"atropos-tui logs {part.name} -f shows what it does; a first start downloads and compiles. If it only "
        "needs longer, raise start_timeout_s in its section"
    )
    return SLOW_START.diagnosis(evidence, fix, f"{part.name} takes unusually long to start")


def disk_low(scene: Scene) -> Diagnosis | None:
    """The disk of the run directory is nearly full."""
    if scene.free_bytes is None or scene.disk_bytes is None:
        return None
    if scene.free_bytes >= min(LOW_BYTES, scene.disk_bytes * NEVER_LOW_SHARE):
        return None
    fix = "free space (df -h; du -sh RUN/checkpoints), or raise checkpoint_interval under [trainer]"
    evidence = f"{scene.free_bytes / 1e6:,.0f} MB of {scene.disk_bytes / 1e6:,.0f} MB are free in the run directory"
    return DISK_LOW.diagnosis(evidence, fix)
