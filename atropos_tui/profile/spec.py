"""Complete description of a stack: the interface between planning and the supervisor.

No profile, no defaults, no mode. `${VAR}` stays a reference; the supervisor resolves it when it
spawns the process.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from atropos_common.protocol.control import Action, Recipe, Role
from atropos_common.system.run_dir import is_safe_name
from atropos_tui.errors import Problem

# Braces are required: `$NAME` belongs to a shell in a command.
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand(text: str, known: Mapping[str, str]) -> str:
    """Replace the known `${VAR}` in `text`; unknown ones stay."""
    return _REFERENCE.sub(lambda match: known.get(match.group(1), match.group(0)), text)


def references(text: str) -> list[str]:
    """Return the names of the variables in `text`."""
    return _REFERENCE.findall(text)


class StackPart(BaseModel):
    """Strict and frozen part of a stack. Its validator is built on first use, which keeps
    imports fast."""

    # A typo in a key is an error, and a started run cannot change its own description.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class ProfilePart(StackPart):
    """Part that profiles share: its texts become descriptions in the profile's JSON Schema."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class HttpCheck(ProfilePart):
    """Check that passes if `GET url` answers with `status`."""

    kind: Literal["http"] = "http"
    """Kind of the check."""
    url: str
    """URL on this machine, such as http://127.0.0.1:8080/health."""
    status: int = 200
    """Expected HTTP status."""


class TcpCheck(ProfilePart):
    """Check that passes if a connection opens."""

    kind: Literal["tcp"] = "tcp"
    """Kind of the check."""
    host: str = "127.0.0.1"
    """Host to connect to."""
    port: int
    """Port to connect to."""


class ExecCheck(ProfilePart):
    """Check that passes if the command exits with 0."""

    kind: Literal["exec"] = "exec"
    """Kind of the check."""
    command: list[str]
    """Program and arguments."""


class LogCheck(ProfilePart):
    """Check that passes once a line of the current attempt's log matches."""

    kind: Literal["log"] = "log"
    """Kind of the check."""
    pattern: str
    """Regular expression; it may match anywhere in a line."""
    label: str = ""
    """Meaning of the line, for display."""


class StageCheck(ProfilePart):
    """Check that passes once the component has recorded a stage in this attempt, as our own
    programs do."""

    kind: Literal["stage"] = "stage"
    """Kind of the check."""
    stage: str
    """Name of the stage."""
    label: str = ""
    """Meaning of the stage, for display."""


class FileCheck(ProfilePart):
    """Check that passes if the file exists."""

    kind: Literal["file"] = "file"
    """Kind of the check."""
    path: str
    """Path on this machine."""


Check = Annotated[
    HttpCheck | TcpCheck | ExecCheck | LogCheck | StageCheck | FileCheck,
    Field(discriminator="kind"),
]


class Probe(ProfilePart):
    """Group of checks: passes after `success_threshold` rounds in a row in which all pass, fails
    after `failure_threshold` failed rounds in a row."""

    checks: list[Check] = Field(min_length=1)
    """Checks that must all pass: each a table with a `kind`."""
    interval_s: float = Field(0.5, gt=0)
    """Seconds between two rounds of checks."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds after which a round of checks fails."""
    success_threshold: int = Field(1, ge=1)
    """Rounds in a row that must pass."""
    failure_threshold: int = Field(3, ge=1)
    """Failed rounds in a row after which it fails."""
    start_period_s: float = Field(0.0, ge=0)
    """Seconds after the process start in which failures do not count."""


class Probes(ProfilePart):
    """Health checks of one component."""

    startup: Probe | None = None
    """Check of the start: the others begin when it passes; without `readiness` the component is
    then healthy."""
    readiness: Probe | None = None
    liveness: Probe | None = None
    """Check of life: when it fails, the component is unhealthy and restarts by its policy."""


class RestartPolicy(ProfilePart):
    """When a process that exited by itself starts again."""

    policy: Literal["never", "on-failure", "always"] = "on-failure"
    """on-failure: restart after an exit code other than 0."""
    backoff_s: float = Field(1.0, ge=0)
    """First delay in seconds; doubles up to `max_backoff_s`, with jitter; resets after a healthy
    minute."""
    max_backoff_s: float = Field(30.0, ge=0)
    """Longest delay in seconds."""
    max_restarts: int = Field(3, ge=0)
    """Limit of restarts within `window_s`; after that the component is `failed`."""
    window_s: float = Field(600.0, gt=0)
    """Length in seconds of the window in which restarts count."""


class StopPolicy(ProfilePart):
    """Signal the main process group, wait `grace_s`, then kill all remaining processes of the
    component."""

    signal: Literal["TERM", "INT", "HUP", "QUIT", "KILL"] = "TERM"
    """Signal that asks the process to exit."""
    grace_s: float = Field(10.0, ge=0)
    """Seconds from this signal to SIGKILL."""


class Stage(StackPart):
    """Named point of a component's start-up, reached when the program records it; shown by `ps` and
    `why`."""

    name: str
    pattern: str = ""
    """Log line that marks the stage for programs that record none themselves."""
    usually: str = ""
    """Usual cause when it is not reached, and the fix."""


def is_hosted(command: Sequence[str]) -> bool:
    """Return True if `atropos_envs` runs this environment: it then counts its groups and records
    the end of its setup."""
    return any(word.startswith("atropos_envs.") for word in command)


LauncherName = Literal["local", "slurm", "ssh", "ray", "kubernetes"]
"""How a program is started on another node."""


class Node(StackPart):
    """A machine of the stack."""

    name: str
    """Name for display: the [[node]]'s name, with -2, -3 and so on from its second host on."""
    host: str
    """Name of the machine for the launcher."""
    address: str
    """Address for connections from components on other nodes."""
    gpus: int = Field(0, ge=0)
    """GPUs that the stack uses there, with the indices from 0."""


class Place(StackPart):
    """Machine of a component, and the command that reaches it."""

    node: str
    """Name of the `Node`."""
    host: str
    """Name of the machine for the launcher."""
    address: str
    """Address for connections from other nodes; a server binds it if one of its clients is on
    another node."""
    prefix: list[str] = Field(default_factory=list)
    """Command that runs its arguments on `host` with stdin, stdout and stderr connected; empty: the
    supervisor's own machine."""
    python: str = Field(default_factory=lambda: sys.executable)
    """Python interpreter on that machine."""

    def command(self, *argv: str) -> list[str]:
        """Return the command line that runs `argv` there. ssh passes one string to a remote shell,
        so its words are quoted."""
        # Other launchers (srun, kubectl exec) keep argv as a list.
        behind_ssh = bool(self.prefix) and self.prefix[0].rpartition("/")[2] == "ssh"
        return [*self.prefix, *(map(shlex.quote, argv) if behind_ssh else argv)]


class ComponentSpec(StackPart):
    """One program of the stack."""

    name: str
    role: Role = Role.OTHER
    command: list[str] = Field(min_length=1)
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    """Variables added to the supervisor's environment."""
    depends_on: dict[str, Literal["started", "healthy", "completed"]] = Field(default_factory=dict)
    probes: Probes = Field(default_factory=Probes)
    restart: RestartPolicy = Field(default_factory=RestartPolicy)
    stop: StopPolicy = Field(default_factory=StopPolicy)
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds to become healthy; after that the start fails with exit code 4."""
    port: int | None = None
    """Port on which it listens: shown, and checked before the start."""
    # Held ports prevent a race on shared machines: another user could bind the port between two
    # starts.
    port_held: bool = False
    """The supervisor keeps the port bound for the whole run, so that no other user takes it between
    two starts. ATROPOS_HELD_PORT tells the program to bind it as well."""
    gpus: list[int] = Field(default_factory=list)
    """GPU indices on its node."""
    place: Place | None = None
    """Machine where it runs; None: the stack has only the supervisor's."""
    creates: str | None = None
    """Path that makes a one-shot step unnecessary: if it exists, the step is skipped."""
    clears: list[str] = Field(default_factory=list)
    """Files to remove before every start and after every stop (stale manifest, shared memory)."""
    scratch: bool = False
    """Give each attempt its own temporary folder (TMPDIR), removed with its processes."""
    stages: list[Stage] = Field(default_factory=list)
    restart_with: list[str] = Field(default_factory=list)
    """Components that must stop and start together with this one."""
    ends_run: bool = False
    """End the run with exit code 0 when this component succeeds; the rest is stopped."""
    final_codes: list[int] = Field(default_factory=list)
    """Exit codes after which a restart cannot help: the run fails at once."""

    @property
    def url(self) -> str:
        """Base URL of its port, with the host of its own HTTP probes if there are any, else the
        loopback."""
        every = (
            probe
            for probe in (self.probes.readiness, self.probes.startup, self.probes.liveness)
            if probe
        )
        asked = (
            check.url for probe in every for check in probe.checks if isinstance(check, HttpCheck)
        )
        # Only a probe of the component's own port tells its address.
        found = (re.match(rf"https?://[^/]+:{self.port}(?=/|$)", url) for url in asked)
        return next((match[0] for match in found if match), f"http://127.0.0.1:{self.port}")

    @property
    def is_far(self) -> bool:
        """True if a launcher starts it on another node."""
        return self.place is not None and bool(self.place.prefix)


class LogPolicy(ProfilePart):
    """Limits for the stored output of components."""

    max_bytes: int = Field(64 * 1024 * 1024, gt=0)
    """Bytes kept for each attempt; rotation counts the lines it drops."""


class NotifyPolicy(ProfilePart):
    """Notifications of important events."""

    bell: bool = False
    """Ring the bell of the terminal that shows the run."""
    webhook: str | None = None
    """URL that receives a JSON object by POST; `${VAR}` keeps a secret URL out of files."""
    command: list[str] = Field(default_factory=list)
    """Program and arguments to run, with the JSON object on standard input."""
    on: tuple[Literal["failed", "mismatch", "alert", "done"], ...] = (
        "failed",
        "mismatch",
        "alert",
        "done",
    )


class AlertSpec(ProfilePart):
    """Warning when a metric of the records leaves its bounds."""

    metric: str
    """Number in the trainer's records, such as `entropy_mean` (list: docs/telemetry.md), or a
    held-out accuracy: `eval/SPLIT` of all environments, `eval/ENV/SPLIT` of one. The steps of an
    accuracy are weight versions."""
    below: float | None = None
    """Warn if the value is smaller."""
    above: float | None = None
    """Warn if the value is larger."""
    slope: float | None = None
    """Warn if the value changes by this amount a step or more, over at least five steps; negative:
    it falls."""
    z: float | None = Field(None, gt=0)
    """Warn if the value is this many standard deviations away from the mean of the 50 steps
    before."""
    for_steps: int = Field(1, ge=1, le=1000)
    """Steps in a row that must meet the condition."""


class MetricsPolicy(ProfilePart):
    """Metrics for Prometheus, at `/metrics` of the supervisor."""

    port: int | None = Field(None, ge=1, le=65535)
    """Port of the metrics; without it none are served."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address to bind. All who can reach it can read the state of the run."""


class StackSpec(StackPart):
    """Everything that the supervisor runs, in start order; it stops in reverse order."""

    run_id: str
    name: str
    mode: str
    run_dir: str
    components: list[ComponentSpec]
    logs: LogPolicy = Field(default_factory=LogPolicy)
    notify: NotifyPolicy = Field(default_factory=NotifyPolicy)
    metrics: MetricsPolicy = Field(default_factory=MetricsPolicy)
    alerts: list[AlertSpec] = Field(default_factory=list)
    variables: dict[str, str] = Field(default_factory=dict, repr=False)
    """Values from `.env` files for the `${VAR}` of this stack. The process environment has
    priority. Never written to a file."""
    launcher: LauncherName = "local"
    """How components start on nodes other than the supervisor's."""
    nodes: list[Node] = Field(default_factory=list)
    """The machines, the supervisor's own first; empty for a stack of one machine."""

    @property
    def gpu_count(self) -> int:
        """Number of GPUs of all components; one that several share counts once."""
        parts = ((part.place.node if part.place else "", part.gpus) for part in self.components)
        return len({(node, gpu) for node, gpus in parts for gpu in gpus})

    def component(self, name: str) -> ComponentSpec | None:
        return next((c for c in self.components if c.name == name), None)


class StackError(ValueError):
    """A stack that cannot run as written."""


def check_stack(stack: StackSpec) -> None:
    """Refuse a stack that cannot run.

    Raises:
        StackError: all faults: a name used twice or unusable in a path, an unknown dependency, a
            cycle.
    """
    names = [spec.name for spec in stack.components]
    faults = [
        f"two components are called {name!r}: give each its own name"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    faults += [
        f"component name {name!r}: use letters, digits, dot, dash, underscore"
        for name in names
        if not is_safe_name(name)
    ]
    faults += [f"{fault.reason}: {fault.fix}" for fault in dependency_faults(stack)]
    if faults:
        raise StackError("; ".join(faults))


def dependency_faults(stack: StackSpec) -> list[Problem]:
    """Return unknown dependencies, and one problem for each dependency cycle at its first
    component. `key` holds the component's name."""
    waits = {spec.name: set(spec.depends_on) for spec in stack.components}
    faults = []
    for spec in stack.components:
        # Without duplicates, in the order of the profile.
        for other in dict.fromkeys([*spec.depends_on, *spec.restart_with]):
            if other not in waits:
                reason = f"{spec.name} depends on {other!r}, which is not in the stack"
                fix = f"name one of: {', '.join(name for name in waits if name != spec.name)}"
                faults.append(Problem(reason, fix, key=spec.name))
    # A component that reaches itself is part of a cycle: with it are all that reach it and are
    # reached by it.
    after = {name: reached(name, waits) for name in waits}
    # Each cycle is reported once, at its first component.
    named: set[str] = set()
    for name, others in after.items():
        if name in others and name not in named:
            circle = [other for other in waits if other in others and name in after[other]]
            named.update(circle)
            reason = f"circular depends_on among: {', '.join(circle)}"
            fix = "remove its own name" if len(circle) == 1 else "remove one of these dependencies"
            faults.append(Problem(reason, fix, key=name))
    return faults


def reached(start: str, leads_to: Mapping[str, Collection[str]]) -> set[str]:
    found: set[str] = set()
    open_ = [start]
    while open_:
        new = set(leads_to.get(open_.pop(), ())) - found
        found |= new
        open_ += new
    return found


def recipe(
    stack: StackSpec,
    action: Action,
    component: str | None,
    *,
    initiator: str = "user",
    among: Collection[str] | None = None,
) -> Recipe:
    """Components that `action` stops and starts, in order.

    A restart that the trainer requests never stops the trainer.

    Args:
        among: limits the components that restart with it.

    Raises:
        KeyError: no such component.
    """
    order = [spec.name for spec in stack.components]
    if action == "down":
        return Recipe(action=action, stop=order[::-1], note="Stops the whole stack; the run ends.")
    if action == "restart" and component is None:
        start = order if among is None else [name for name in order if name in among]
        note = "Restarts the whole stack; the trainer saves a checkpoint and continues from it."
        return Recipe(action=action, stop=start[::-1], start=start, note=note)
    spec = stack.component(component) if component is not None else None
    if spec is None:
        raise KeyError(component)
    # Transitive: a component that restarts may force others to restart too.
    touched = {spec.name} | reached(
        spec.name, {part.name: part.restart_with for part in stack.components}
    )
    if among is not None:  # components without a process now are not restarted
        touched &= set(among)
    # The trainer waits for its new engine, so it must not be stopped by its own request.
    if initiator == "trainer":
        touched -= {part.name for part in stack.components if part.role == "trainer"}
    touched |= {spec.name}
    start = [name for name in order if name in touched]
    stop = start[::-1]  # a component stops before those that it depends on
    match action:
        case "start":
            return Recipe(action=action, component=component, start=start)
        case "stop":
            return Recipe(
                action=action,
                component=component,
                stop=stop,
                note=_left_alone(stack, spec, touched),
            )
        case "kill":
            return _killed(stack, spec, start)
    return Recipe(
        action=action, component=component, stop=stop, start=start, note=_why(spec, touched)
    )


def _killed(stack: StackSpec, spec: ComponentSpec, touched: list[str]) -> Recipe:
    policy = spec.restart
    if restarts_after_crash(spec):
        stopped, start = touched, touched
        many = policy.max_restarts + 1
        ends = f"The run ends at {many} crashes within {policy.window_s:g} s."
        note = f"Counts as a crash. {ends} {_why(spec, set(touched))}".rstrip()
    else:
        stopped, start = [part.name for part in stack.components], []
        rule = "is never" if policy.policy == "never" else "allows no restart"
        note = f"Counts as a crash, and its restart policy {rule}: the run ends with code 3."
    stop = [spec.name, *(name for name in reversed(stopped) if name != spec.name)]
    return Recipe(action="kill", component=spec.name, stop=stop, start=start, note=note)


def restarts_after_crash(spec: ComponentSpec) -> bool:
    """False: a crash ends the run."""
    return spec.restart.policy != "never" and spec.restart.max_restarts > 0


def _why(spec: ComponentSpec, touched: set[str]) -> str:
    others = sorted(touched - {spec.name})
    if not others:
        return ""
    reasons = {
        "engine": "the weights are in its memory: the trainer saves a checkpoint, stops, and "
        "resumes from it",
        "api": "run-api keeps registrations in memory only",
    }
    depends = _verb(others, "it depends on it", "they depend on it")
    return (
        f"{', '.join(others)} {_verb(others, 'restarts', 'restart')} too: "
        f"{reasons.get(spec.role.value, depends)}."
    )


def _verb(subjects: list[str], singular: str, plural: str) -> str:
    return singular if len(subjects) == 1 else plural


def _left_alone(stack: StackSpec, spec: ComponentSpec, touched: Collection[str]) -> str:
    bound = [
        other.name
        for other in stack.components
        if other.name in touched and other.name != spec.name
    ]
    users = [
        other.name
        for other in stack.components
        if spec.name in other.depends_on and other.name not in touched
    ]
    notes = (
        [f"{', '.join(users)} {_verb(users, 'keeps', 'keep')} running without it."] if users else []
    )
    if bound:
        first = " with a checkpoint" if spec.role == "engine" else ""
        notes.append(
            f"{', '.join(bound)} cannot run without it and {_verb(bound, 'stops', 'stop')} "
            f"first{first}; atropos-tui start {spec.name} starts all of them again."
        )
    return " ".join(notes)
