"""Rules about time: no progress, refused rollouts, slow starts, a full disk.

`RefusalWatch` parses lines such as
    refused 331 requests to /generate (400): top_p=0.95: changes ... Send top_p=1 [of 332 since
        10:04:51]
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atropos_common.protocol.control import Role, State
from atropos_common.protocol.records import FLAT
from atropos_common.system.run_dir import ENV_ENGINE_URLS
from atropos_tui.diagnoses.model import USUAL, Diagnosis, Ends, Layer, Names, Rule, shortened
from atropos_tui.profile.spec import ComponentSpec, StackSpec

STALL_S = 180.0
"""Seconds without a step that are a stall, or `STALL_STEPS` times the slowest recent step."""
STALL_STEPS = 10.0
SLOW_START_S = {Role.API: 20.0, Role.ENGINE: 240.0, Role.TRAINER: 300.0}
"""Usual start times in seconds, or a quarter of the start timeout if that is longer."""
SLOW_START_ANY_S = 60.0
LOW_BYTES = 200_000_000
NEVER_LOW_SHARE = 0.02
"""Free share above which a disk is never low."""
ENOUGH = 5
SHARE = 0.5
"""Smallest share of refused requests."""
LASTS_S = 320.0
"""Seconds after which a refusal is out of date; the engine repeats a lasting one within 300 s."""
KEPT = 40
"""Refusal lines kept for each reason."""
SOME = 3
"""Accepted groups, or steps, that show that requests are accepted again."""
REFUSAL_LINE = re.compile(
    r"(refused (\d+) requests? to (\S+) \((\d+)\): (.*) \[of (\d+) since [\d:]+\])"
    r"(?: \(last (\d+) s ago\))?$"
)
RUNS = (State.HEALTHY, State.UNHEALTHY)

FIXES = (
    (
        re.compile(r"\. ((?:Send|Leave out) .+?)(?:, or\b|$)"),
        "{env} requests sampling that cannot be trained on: {0}. Change its program, or the "
        "option under [env.args] if "
        "it has one; then atropos-tui restart {env}",
    ),
    (
        re.compile(r"does not exist|is not served here"),
        "leave out openai.model_name under [env.args], it is derived; then atropos-tui "
        "restart {env}",
    ),
    (
        re.compile(r"chat template is no longer allowed|(?:no|have a|provide a) chat template"),
        "the model has no chat template, and {env} requests chat completions: set `model` to "
        "an instruct model, or "
        "save its template as chat_template.jinja in the model's folder; then atropos-tui "
        "restart {engine}",
    ),
    (
        re.compile(r"maximum (?:model|context) length|max_model_len"),
        "raise [vllm] max_model_len, or lower the length that {env} requests: "
        "env.max_token_length under [env.args]",
    ),
    (
        re.compile(""),
        "change what {env} sends; atropos-tui logs {engine} --grep refused shows every "
        "reason; then atropos-tui "
        "restart {env}",
    ),
)
"""Pattern of a reason -> fix; the first match applies."""


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
    waiting_for: str = ""
    last_line: str = ""
    stopped_pid: int | None = None
    """Its process, if SIGSTOP has stopped it."""


@dataclass(frozen=True)
class ApiView:
    """State of run-api; `problem` is set if it does not answer."""

    batch_size: int = -1
    queue: int = 0
    group: int = 0
    step: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Flow:
    """Measurements of one environment over the newest seconds."""

    engine: str = "vllm"
    workers: str | None = None
    """`max_num_workers` of its command."""
    could_ask_s: float | None = None
    """Seconds since it could send requests: registered, with a healthy engine."""
    hosted: bool = False
    """It runs in our host."""
    requests: int = 0
    asked_s: float | None = None
    """Seconds since its engine's first request."""
    watches_engine: bool = False
    """The engine counts its requests."""
    counts: bool = True
    """Its groups are counted."""
    counted_s: float = 0.0
    """Seconds over which they are counted."""
    sent: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    examples: Mapping[str, str] = field(default_factory=dict)
    """Reason -> newest message."""
    failures: Counter[str] = field(default_factory=Counter)
    malformed: Counter[str] = field(default_factory=Counter)
    malformed_example: str = ""
    evaluation_failures: Counter[str] = field(default_factory=Counter)
    seconds: float | None = None
    """Seconds over which the fields below were measured; None if too short."""
    waiting: float = 0.0
    idle: float = 0.0
    tokens_per_s: float = 0.0
    running: float = 0.0
    slots: float = 0.0
    queued: float = 0.0
    ceiling: float | None = None
    """Tokens per second that the engine can generate."""
    streak: Counter[str] = field(default_factory=Counter)
    """Left-out groups since the last accepted one, by reason."""
    bounds: Mapping[str, Any] = field(default_factory=dict)
    """Workers and queue slots, as fields of `EnvFlow`."""

    @property
    def capacity_used(self) -> float | None:
        """Used share of the engine's capacity."""
        return (
            None
            if self.seconds is None or not self.ceiling
            else min(1.0, self.tokens_per_s / self.ceiling)
        )

    @property
    def made(self) -> int:
        return self.sent + self.left_out.total()

    @property
    def flat(self) -> int:
        return self.left_out[FLAT]


@dataclass(frozen=True)
class RunSnapshot:
    """The run at one moment."""

    now: float
    parts: tuple[Part, ...]
    names: Names = USUAL
    step: int = 0
    last_step: float = math.inf
    """Last optimizer step of the run."""
    step_at: float | None = None
    pace_s: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Log lines since the newest step, by the names in `log_scanner.COUNTED`."""
    ghosts: int = 0
    """Registrations of environments that no longer run."""
    refused: Mapping[str, Diagnosis] = field(default_factory=dict)
    """Environment -> diagnosis of its refused requests."""
    accepted: Collection[str] = ()
    """Environments with accepted groups since their engine's last refusal."""
    flows: Mapping[str, Flow] = field(default_factory=dict)
    """Measurements by environment."""
    explained: Mapping[str, Diagnosis] = field(default_factory=dict)
    """Environment -> its finding by the flow rules."""
    api: ApiView | None = None
    """Fetched only while the run is stalled."""
    free_bytes: int | None = None
    disk_bytes: int | None = None

    @property
    def trainer(self) -> str:
        return next((part.name for part in self.of(Role.TRAINER)), self.parts[0].name)

    def of(self, role: Role) -> list[Part]:
        return [part for part in self.parts if part.role is role]


@dataclass(frozen=True)
class StallRule(Rule):
    """A rule for a whole run at one moment; `look` returns findings by component."""

    look: Callable[[RunSnapshot], Mapping[str, Diagnosis | None]]
    refuted: Callable[[RunSnapshot, Part], bool]
    """A component shows the opposite; only then does the diagnosis end."""
    end: str
    """Reason recorded at the end of the diagnosis."""
    each_attempt: bool = False
    """Each attempt opens a diagnosis of its own."""
    ends: Ends = field(default=Ends.LOOK, kw_only=True)


def starting_roles(run: RunSnapshot) -> frozenset[Role]:
    """Roles that are starting or stopping: waiting for them is normal."""
    coming = (State.PENDING, State.STARTING, State.BACKOFF, State.STOPPING)
    return frozenset(part.role for part in run.parts if part.state in coming)


def stopped_roles(run: RunSnapshot) -> frozenset[Role]:
    """Roles of which a user stopped a component: the run waits for `start`."""
    return frozenset(part.role for part in run.parts if part.state is State.STOPPED)


def stalled_s(run: RunSnapshot) -> float | None:
    """Seconds without a step if they are a stall and no component is starting."""
    trainer = next((part for part in run.of(Role.TRAINER) if part.state is State.HEALTHY), None)
    # After its last step the trainer saves the model, which may take minutes.
    if trainer is None or starting_roles(run) or run.step >= run.last_step:
        return None
    # A component that just became healthy gets the full time as well.
    last = max(
        [part.since for part in run.parts if part.state is State.HEALTHY] + [run.step_at or 0.0]
    )
    silent = run.now - last
    return silent if silent > max(STALL_S, STALL_STEPS * run.pace_s) else None


@dataclass(frozen=True)
class Cause:
    title: str
    evidence: str
    fix: str


def no_batches(run: RunSnapshot) -> Diagnosis | None:
    """Why the stalled trainer gets no batch; None if another rule reports it."""
    silent = stalled_s(run)
    if any(part.stopped_pid for part in run.parts):
        return None  # the rule process_stopped reports it
    if all(part.state.is_resting for part in run.of(Role.ENV)) and ended_early(run):
        return None  # the rule environment_ended reports it
    cause = next((found for look in CAUSES if (found := look(run)) is not None), None)
    if silent is None or cause is None:
        return None
    after = f"no optimizer step for {silent:.0f} s" + (
        f" after step {run.step}" if run.step else ""
    )
    fix = run.names.fill(cause.fix)
    return NO_BATCHES.diagnosis(f"{after}; {cause.evidence}", fix, f"no batches: {cause.title}")


def _api_away(run: RunSnapshot) -> Cause | None:
    if run.api is None or not run.api.problem:
        return None
    return Cause("run-api does not answer", run.api.problem, "atropos-tui restart {api}")


def _nobody_registered(run: RunSnapshot) -> Cause | None:
    if run.api is None or run.api.batch_size != -1:
        return None
    fix = (
        "atropos-tui restart {api}: it was restarted without the trainer, or the trainer uses "
        "another run-api"
    )
    return Cause("no trainer is registered", "run-api's /info says batch_size -1", fix)


def _sizes(run: RunSnapshot) -> Cause | None:
    api = run.api
    # run-api returns whole groups only, so a batch must be a multiple of the group size.
    if api is None or api.group < 1 or api.queue < 1 or api.batch_size % api.group == 0:
        return None
    evidence = (
        f"groups of {api.group} never add up to a batch of {api.batch_size} ({api.queue} groups "
        f"wait)"
    )
    fix = (
        f"[trainer] batch_size * gradient_accumulation_steps must be a multiple of "
        f"{api.group} (env.group_size under "
        "[env.args]); then atropos-tui restart {api}"
    )
    return Cause("group size and batch size do not fit", evidence, fix)


def _trainer_hangs(run: RunSnapshot) -> Cause | None:
    api = run.api
    if api is None or api.group < 1 or api.queue * api.group < api.batch_size:
        return None
    evidence = f"run-api holds {api.queue} groups of {api.group}, a batch is {api.batch_size}"
    fix = (
        "a batch is ready, but the trainer does not fetch it: atropos-tui logs {trainer} -n "
        "50 shows what it does; "
        "atropos-tui restart {trainer} continues from its checkpoint"
    )
    return Cause("the trainer hangs", evidence, fix)


def _no_environment(run: RunSnapshot) -> Cause | None:
    envs = run.of(Role.ENV)
    if any(part.state in (State.HEALTHY, State.UNHEALTHY) for part in envs):
        return None
    states = (
        ", ".join(f"{part.name} is {part.state.value}" for part in envs) or "the stack has none"
    )
    fix = (
        "atropos-tui start {env}; an environment ends after env.total_steps batches (-1 is read "
        "as 1)"
    )
    return Cause("no environment runs", states, fix)


def _engine_unwell(run: RunSnapshot) -> Cause | None:
    ill = [part for part in run.of(Role.ENGINE) if part.state is not State.HEALTHY]
    if not ill:
        return None
    evidence = ", ".join(f"{part.name} is {part.state.value}" for part in ill)
    return Cause(
        "the engine is not healthy",
        evidence,
        "atropos-tui why {engine}; atropos-tui restart {engine}",
    )


def _timed_out(run: RunSnapshot) -> Cause | None:
    count = run.counts.get("timed-out rollouts", 0)
    if not count:
        return None
    fix = (
        "lower env.max_num_workers_per_node or env.max_token_length under [env.args], or "
        "raise env.worker_timeout "
        "(600 s by default)"
    )
    return Cause(
        "rollouts are cancelled before they are done", f"{count} workers timed out since then", fix
    )


def _ghosts(run: RunSnapshot) -> Cause | None:
    if run.ghosts < 1:
        return None
    evidence = f"{run.ghosts} more registrations than environments that run"
    fix = (
        "atropos-tui restart {api} (the environments restart with it): run-api does not "
        "notice that an environment "
        "died, and reserves its share of every batch"
    )
    return Cause("run-api waits for an environment that is gone", evidence, fix)


def _slow_rollouts(run: RunSnapshot) -> Cause | None:
    if run.refused or run.explained:
        return None
    queue = (
        f"{run.api.queue} groups wait at run-api" if run.api else "the state of run-api is unknown"
    )
    fix = (
        "check if rollouts start: atropos-tui logs {env} -n 50, and if {engine} generates. "
        "If they are slow, lower "
        "env.max_token_length and env.max_num_workers_per_node; a program of your own must "
        "send groups to run-api"
    )
    return Cause("rollouts are slow", queue, fix)


CAUSES: tuple[Callable[[RunSnapshot], Cause | None], ...] = (
    _api_away,
    _nobody_registered,
    _sizes,
    _trainer_hangs,
    _no_environment,
    _engine_unwell,
    _timed_out,
    _ghosts,
    _slow_rollouts,
)
"""Most certain first; the last one always applies."""


def slow_start(part: Part, now: float) -> Diagnosis | None:
    if part.state is not State.STARTING or not part.gated:
        return None
    usual = max(SLOW_START_S.get(part.role, SLOW_START_ANY_S), part.start_timeout_s / 4)
    took = now - part.since
    # Report before the timeout ends the start, even if that is short.
    if took <= min(usual, part.start_timeout_s * 0.8):
        return None
    evidence = f"starting for {took:.0f} s (given up after {part.start_timeout_s:g} s)"
    for label, text in (("waits for", part.waiting_for), ("last line", part.last_line)):
        evidence += f"; {label}: {text}" if text else ""
    fix = (
        f"atropos-tui logs {part.name} -f shows what it does; a first start downloads and "
        f"compiles. If it only "
        "needs more time, raise start_timeout_s in its section"
    )
    return SLOW_START.diagnosis(evidence, fix, f"{part.name} takes unusually long to start")


def _stopped(part: Part) -> Diagnosis | None:
    if (pid := part.stopped_pid) is None:
        return None
    return STOPPED.diagnosis(
        f"process {pid} is stopped (SIGSTOP), and all others wait for it",
        f"kill -CONT {pid}, or atropos-tui restart {part.name}",
        f"{part.name} is stopped",
    )


def is_low(free: int | None, size: int | None) -> bool:
    return free is not None and size is not None and free < min(LOW_BYTES, size * NEVER_LOW_SHARE)


def disk_low(run: RunSnapshot) -> Diagnosis | None:
    if (
        run.free_bytes is None
        or run.disk_bytes is None
        or not is_low(run.free_bytes, run.disk_bytes)
    ):
        return None
    fix = "free space (df -h; du -sh RUN/checkpoints), or raise checkpoint_interval under [trainer]"
    evidence = (
        f"{run.free_bytes / 1e6:,.0f} MB of {run.disk_bytes / 1e6:,.0f} MB are free in the run "
        f"directory"
    )
    return DISK_LOW.diagnosis(evidence, fix)


@dataclass(frozen=True)
class _Row:
    at: float
    """Unix time of reading."""
    text: str
    status: str
    reason: str
    count: int
    seen: int
    """Requests since the first refusal."""


class RefusalWatch:
    """Refused requests of each engine, and the environments that they stop."""

    def __init__(self, stack: StackSpec) -> None:
        self._asks = asked_engines(stack.components)
        self._attempts: dict[str, int] = {}
        self._rows: dict[str, dict[tuple[str, ...], list[_Row]]] = {}
        self._logged: Counter[tuple[str, int]] = Counter()
        self._refused_at: dict[str, float] = {}
        """Monotonic time of the newest refusal by an engine of each environment."""
        self._accepted: dict[str, deque[tuple[float, int]]] = {}
        """Monotonic time and number of accepted groups, at each count of an environment."""

    def feed(
        self, engine: str, attempt: int, lines: Iterable[str], now: float, clock: float
    ) -> None:
        if self._attempts.get(engine) != attempt:
            self._attempts[engine], self._rows[engine] = attempt, {}
        for line in lines:
            if (match := REFUSAL_LINE.search(line)) is None:
                continue
            text, count, path, status, reason, seen, age = match.groups()
            rows = self._rows[engine].setdefault((path, status, reason), [])
            if rows and rows[-1].count >= int(count):
                rows.clear()  # the engine has dropped this reason and counts from 1 again
            rows.append(_Row(now, text, status, reason, int(count), int(seen)))
            del rows[:-KEPT]
            for env in (env for env, engines in self._asks.items() if engine in engines):
                # A late line is no new refusal: groups that came after its refusals still count.
                refused_at = max(self._refused_at.get(env, -math.inf), clock - int(age or 0))
                self._refused_at[env] = refused_at

    def accepted(self, env: str, count: int, clock: float) -> None:
        """run-api accepted `count` more groups of `env`."""
        if count:
            self._accepted.setdefault(env, deque(maxlen=KEPT)).append((clock, count))

    def working(self) -> frozenset[str]:
        """Environments whose groups were accepted since the engine's newest refusal."""
        return frozenset(
            env
            for env, refused_at in self._refused_at.items()
            # The first count may still include groups from before this refusal.
            if sum([n for at, n in self._accepted.get(env, ()) if at > refused_at][1:]) >= SOME
        )

    def note_refusals(self, env: str, attempt: int, count: int) -> None:
        self._logged[env, attempt] += count

    def judge(self, parts: Sequence[Part], now: float) -> dict[str, Diagnosis]:
        """Return a diagnosis for each environment whose requests its engine refuses.

        Of several environments on one engine, those whose own log shows refusals, or all if none
        does.
        """
        works = self.working()
        running = [
            p for p in parts if p.role is Role.ENV and p.state in RUNS and p.name not in works
        ]
        engines = {part.name for part in parts if part.role is Role.ENGINE and part.state in RUNS}
        found: dict[str, Diagnosis] = {}
        for env in running:
            for engine in engines.intersection(self._asks.get(env.name, ())):
                beside = [part for part in running if engine in self._asks.get(part.name, ())]
                logged = self._logged[env.name, env.attempt]
                # Another environment of this engine shows refusals in its log, so they are its own.
                if not logged and any(self._logged[part.name, part.attempt] for part in beside):
                    continue
                worst = self._worst(engine, env.started_at, logged >= ENOUGH, now)
                if worst is not None:
                    found[env.name] = _diagnosis(env.name, engine, worst)
        return found

    def _worst(self, engine: str, started_at: float, logged: bool, now: float) -> _Row | None:
        """Return the most frequent reason, if `engine` refuses most requests since the environment
        started."""
        standing = []
        for rows in self._rows.get(engine, {}).values():
            if now - rows[-1].at <= LASTS_S:
                standing.append((rows[-1], *_since(rows, started_at, logged)))
        refused, seen = (
            sum(count for _, count, _ in standing),
            max((seen for *_, seen in standing), default=0),
        )
        if refused < ENOUGH or refused < SHARE * seen:
            return None
        return max(standing, key=lambda row: row[1])[0]


def _since(rows: Sequence[_Row], started_at: float, logged: bool) -> tuple[int, int]:
    """Refused and seen requests that an environment may have sent since `started_at`.

    The first line may report older refusals: it counts only if the environment's own log shows
    refusals.
    """
    newest, after = rows[-1], [row for row in rows if row.at >= started_at]
    if logged or len(after) == len(rows):
        return newest.count, newest.seen
    return (newest.count - after[0].count, newest.seen - after[0].seen) if after else (0, 0)


def asked_engines(components: Iterable[ComponentSpec]) -> dict[str, tuple[str, ...]]:
    """Engines of each environment: those whose ports its variable or command names, else the
    first."""
    components = list(components)
    engines = [spec for spec in components if spec.role is Role.ENGINE]
    asked = {}
    for spec in components:
        if spec.role is Role.ENV and engines:
            # Hosted environments get the variable; others have the URL in their command.
            urls = spec.env.get(ENV_ENGINE_URLS) or " ".join(spec.command)
            named = [each.name for each in engines if re.search(rf":{each.port}\b", urls)]
            asked[spec.name] = tuple(named or [engines[0].name])
    return asked


def _diagnosis(env: str, engine: str, row: _Row) -> Diagnosis:
    hit, fix = next((match, fix) for pattern, fix in FIXES if (match := pattern.search(row.reason)))
    # The reason is a sentence; here it continues one.
    words = [f"{group[0].lower()}{group[1:]}" for group in hit.groups()]
    title = f"{engine} refuses the requests of {env} ({row.status})"
    return REFUSED.diagnosis(shortened(row.text), fix.format(*words, env=env, engine=engine), title)


def is_training(run: RunSnapshot) -> bool:
    """The newest step is more recent than a stall."""
    return run.step_at is not None and run.now - run.step_at <= max(
        STALL_S, STALL_STEPS * run.pace_s
    )


def has_room(run: RunSnapshot) -> bool:
    return run.free_bytes is not None and not is_low(run.free_bytes, run.disk_bytes)


def ended_early(run: RunSnapshot) -> dict[str, Diagnosis | None]:
    """Return a diagnosis for each environment that exited while steps are left."""
    trainers = run.of(Role.TRAINER)
    if not trainers or all(part.state.is_resting for part in trainers) or run.step >= run.last_step:
        return {}
    left = [part for part in run.of(Role.ENV) if part.state is State.COMPLETED]
    others = [part.name for part in run.of(Role.ENV) if not part.state.is_resting]
    rest = (
        f"the run goes on with {', '.join(others)}"
        if others
        else "no environment is left, so no batch will come"
    )
    return {part.name: _ended(part, rest) for part in left}


def _ended(part: Part, rest: str) -> Diagnosis:
    last = f"; its last line: {part.last_line}" if part.last_line else ""
    return ENDED.diagnosis(
        f"it exited with 0 after {max(0.0, part.since - part.started_at):.0f} s{last}; {rest}",
        f"atropos-tui logs {part.name} -n 50 shows why; correct that, then atropos-tui start "
        f"{part.name}. "
        "A stock environment ends after env.total_steps batches (-1 is read as 1)",
        f"{part.name} ended before the run",
    )


ENDED = StallRule(
    "environment_ended",
    "an environment ended before the run",
    ended_early,
    lambda run, part: not part.state.is_resting,
    "it runs again",
    each_attempt=True,
    severity="alarm",
    layer=Layer.PROCESS,
    shows_evidence=True,
)
REFUSED = StallRule(
    "rollouts_refused",
    "an engine refuses the requests of an environment",
    lambda run: run.refused,
    lambda run, part: part.name in run.accepted,
    "its groups come again",
    each_attempt=True,
    severity="alarm",
    layer=Layer.LINK,
    shows_evidence=True,
)
NO_BATCHES = StallRule(
    "no_batches",
    "no batches: the trainer makes no steps",
    lambda run: {run.trainer: no_batches(run)},
    lambda run, part: is_training(run),
    "optimizer steps come again",
    layer=Layer.ROLLOUTS,
)
STOPPED = StallRule(
    "process_stopped",
    "a component's process is stopped",
    lambda run: {part.name: _stopped(part) for part in run.parts},
    lambda run, part: part.state is State.HEALTHY and not part.stopped_pid,
    "its process runs again",
    severity="alarm",
    layer=Layer.PROCESS,
    shows_evidence=True,
)
DISK_LOW = StallRule(
    "disk_low",
    "the run's disk is nearly full",
    lambda run: {run.trainer: disk_low(run)},
    lambda run, part: has_room(run),
    "there is room again",
    severity="alarm",
    layer=Layer.MACHINE,
    shows_evidence=True,
)
SLOW_START = StallRule(
    "slow_start",
    "a component takes unusually long to start",
    lambda run: {part.name: slow_start(part, run.now) for part in run.parts},
    lambda run, part: part.state is State.HEALTHY,
    "it is healthy",
    layer=Layer.PROCESS,
)
STALL_RULES = (STOPPED, REFUSED, ENDED, NO_BATCHES, DISK_LOW, SLOW_START)
