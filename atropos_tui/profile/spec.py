"""What each component is, in full, and whether they fit together: the interface between planning and the supervisor.

A `StackSpec` is complete and explicit. The supervisor needs nothing else: no profile, no defaults, no mode.
`${VAR}` in `command`, `env` and `cwd` stays a reference here and is resolved only when the process is spawned.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from atropos_common.control import Role
from atropos_common.run_dir import is_safe_name
from atropos_tui.errors import Problem

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand(text: str, known: Mapping[str, str]) -> str:
    """Replace the `${VAR}` of `text` that are known; unknown ones stay as they are."""
    return _REFERENCE.sub(lambda match: known.get(match.group(1), match.group(0)), text)


def references(text: str) -> list[str]:
    """Names of the variables that `text` refers to."""
    return _REFERENCE.findall(text)


class StackPart(BaseModel):
    """The base of every part of a stack: strict, frozen, and built when it is first used."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class ProfilePart(StackPart):
    """One that profiles have, too: their schema explains its keys by the texts here."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class HttpCheck(ProfilePart):
    """Passes when `GET url` answers with `status`."""

    kind: Literal["http"] = "http"
    """Which check this is."""
    url: str
    """Address on this machine, such as http://127.0.0.1:8080/health."""
    status: int = 200
    """HTTP status that counts as well."""


class TcpCheck(ProfilePart):
    """Passes when a connection opens."""

    kind: Literal["tcp"] = "tcp"
    """Which check this is."""
    host: str = "127.0.0.1"
    """Where to connect."""
    port: int
    """Port to connect to."""


class ExecCheck(ProfilePart):
    """Passes when the command exits with 0."""

    kind: Literal["exec"] = "exec"
    """Which check this is."""
    command: list[str]
    """Program and arguments."""


class LogCheck(ProfilePart):
    """Passes once a line of the component's present log matches the regular expression."""

    kind: Literal["log"] = "log"
    """Which check this is."""
    pattern: str
    """Regular expression, searched for in each line."""
    label: str = ""
    """What the line means, for people."""


class StageCheck(ProfilePart):
    """Passes once the component has recorded a stage in this attempt, as our own programs do."""

    kind: Literal["stage"] = "stage"
    """Which check this is."""
    stage: str
    """Name of the stage."""
    label: str = ""
    """What the stage means, for people."""


class FileCheck(ProfilePart):
    """Passes when the file exists."""

    kind: Literal["file"] = "file"
    """Which check this is."""
    path: str
    """A file on this machine."""


Check = Annotated[HttpCheck | TcpCheck | ExecCheck | LogCheck | StageCheck | FileCheck, Field(discriminator="kind")]


class Probe(ProfilePart):
    """All checks must pass, `success_threshold` times running; `failure_threshold` failures running make it fail."""

    checks: list[Check] = Field(min_length=1)
    """What must pass: each a table with a `kind`."""
    interval_s: float = Field(0.5, gt=0)
    """Seconds from one attempt to the next."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds after which an attempt has failed."""
    success_threshold: int = Field(1, ge=1)
    """Passes running until it counts as passed."""
    failure_threshold: int = Field(3, ge=1)
    """Failures running until it counts as failed."""
    start_period_s: float = Field(0.0, ge=0)
    """Failures in the first seconds of the process do not count."""


class Probes(ProfilePart):
    """The probes of one component."""

    startup: Probe | None = None
    """Gates the others; a component without `readiness` is healthy once this passed."""
    readiness: Probe | None = None
    liveness: Probe | None = None
    """Fails: unhealthy, then a restart by the policy."""


class RestartPolicy(ProfilePart):
    """When a process that ended by itself is started again."""

    policy: Literal["never", "on-failure", "always"] = "on-failure"
    """on-failure: after an exit code other than 0."""
    backoff_s: float = Field(1.0, ge=0)
    """First delay; doubles up to `max_backoff_s`, with jitter; reset after a minute of health."""
    max_backoff_s: float = Field(30.0, ge=0)
    """Longest delay in seconds."""
    max_restarts: int = Field(3, ge=0)
    """At most this many within `window_s`, then `failed`."""
    window_s: float = Field(600.0, gt=0)
    """Seconds in which restarts are counted."""


class StopPolicy(ProfilePart):
    """Signal the main process group, wait `grace_s`, then KILL every process of the set."""

    signal: Literal["TERM", "INT", "HUP", "QUIT", "KILL"] = "TERM"
    """What asks the process to end."""
    grace_s: float = Field(10.0, ge=0)
    """Seconds that it has for that."""


class Stage(StackPart):
    """A named point of a component's start-up, shown by `ps` and `why`: reached once the program records it."""

    name: str
    pattern: str = ""
    """For programs of others, which record nothing: reached, too, once a line of the present log matches."""
    usually: str = ""
    """What usually keeps it from being reached, and the way out."""


def is_hosted(command: Sequence[str]) -> bool:
    """Return whether `atropos_envs` runs this environment: it counts its groups and says when its setup is over."""
    return any(word.startswith("atropos_envs.") for word in command)


LauncherName = Literal["local", "slurm", "ssh", "ray", "kubernetes"]
"""What brings a program to another node."""


class Node(StackPart):
    """A machine of the stack."""

    name: str
    """What people call it: the [[node]]'s name, with -2, -3 and so on from its second host on."""
    host: str
    """What the launcher calls it."""
    address: str
    """What components on other nodes dial."""
    gpus: int = Field(0, ge=0)
    """How many it has for this stack, counted from 0."""


class Place(StackPart):
    """Where a component runs, and how it comes there."""

    node: str
    """The `Node`'s name."""
    host: str
    """What the launcher calls the node."""
    address: str
    """What components on other nodes dial, and what this one binds to where one of them does."""
    prefix: list[str] = Field(default_factory=list)
    """The command that runs what follows it on `host`, with its stdin, stdout and stderr connected; empty: the
    supervisor is there itself."""
    python: str = Field(default_factory=lambda: sys.executable)
    """The interpreter there."""

    def command(self, *argv: str) -> list[str]:
        """What runs `argv` there. ssh hands its words to a shell at the far end, as one line."""
        behind_ssh = bool(self.prefix) and self.prefix[0].rpartition("/")[2] == "ssh"
        return [*self.prefix, *(map(shlex.quote, argv) if behind_ssh else argv)]


class ComponentSpec(StackPart):
    """One program of the stack."""

    name: str
    role: Role = Role.OTHER
    command: list[str] = Field(min_length=1)
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the supervisor's environment."""
    depends_on: dict[str, Literal["started", "healthy", "completed"]] = Field(default_factory=dict)
    probes: Probes = Field(default_factory=Probes)
    restart: RestartPolicy = Field(default_factory=RestartPolicy)
    stop: StopPolicy = Field(default_factory=StopPolicy)
    start_timeout_s: float = Field(600.0, gt=0)
    """Not healthy by then: the gate timed out (exit code 4)."""
    port: int | None = None
    """The port it listens on, for display and for the check that it is free."""
    port_held: bool = False
    """The supervisor holds that port for the whole run, so that no other user takes it between two starts; the program
    binds beside it, told by ATROPOS_HELD_PORT."""
    gpus: list[int] = Field(default_factory=list)
    """Indices on the node where it runs."""
    place: Place | None = None
    """Where it runs; None: on the supervisor's machine, which is the only one."""
    creates: str | None = None
    """A one-shot step that is skipped when this path exists."""
    clears: list[str] = Field(default_factory=list)
    """Files removed before every start and after every stop (stale manifest, shared memory)."""
    scratch: bool = False
    """Each attempt has a temporary folder of its own (TMPDIR), which is removed with its processes."""
    stages: list[Stage] = Field(default_factory=list)
    restart_with: list[str] = Field(default_factory=list)
    """Components that must go and come back with this one."""
    standby: bool = False
    """Its next start is prepared while it runs: the same command with ATROPOS_WAIT_FOR_GO=1, which imports what it
    needs and goes no further before it reads the line `go`."""
    ends_run: bool = False
    """Its success ends the run: the rest is stopped and the run's exit code is 0."""
    final_codes: list[int] = Field(default_factory=list)
    """Exit codes after which another start is no use: the run fails at once."""

    @property
    def url(self) -> str:
        """Where its port is asked, from its own probes; on the loopback where none says otherwise."""
        every = (probe for probe in (self.probes.readiness, self.probes.startup, self.probes.liveness) if probe)
        asked = (check.url for probe in every for check in probe.checks if isinstance(check, HttpCheck))
        found = (re.match(rf"https?://[^/]+:{self.port}(?=/|$)", url) for url in asked)
        return next((match[0] for match in found if match), f"http://127.0.0.1:{self.port}")

    @property
    def is_far(self) -> bool:
        """Whether a launcher brings it to another node."""
        return self.place is not None and bool(self.place.prefix)


class LogPolicy(ProfilePart):
    """How much of the components' output is kept."""

    max_bytes: int = Field(64 * 1024 * 1024, gt=0)
    """Kept per attempt; what rotation dropped is counted."""


class NotifyPolicy(ProfilePart):
    """Tell someone who is not looking."""

    bell: bool = False
    """Ring the terminal that shows the run."""
    webhook: str | None = None
    """POST a JSON object here; `${VAR}` keeps a secret address out of files."""
    command: list[str] = Field(default_factory=list)
    """Run this program and arguments with the JSON object on its standard input."""
    on: tuple[Literal["failed", "mismatch", "alert", "done"], ...] = ("failed", "mismatch", "alert", "done")


class AlertSpec(ProfilePart):
    """Tell when a metric of the records leaves its bounds."""

    metric: str
    """Name of a number in the trainer's records, such as `entropy_mean`; docs/telemetry.md has them all. Or a held-out
    accuracy: `eval/SPLIT` of each environment, `eval/ENV/SPLIT` of one; its steps are the weight versions."""
    below: float | None = None
    """The value is smaller."""
    above: float | None = None
    """The value is larger."""
    slope: float | None = None
    """It changes by so much a step or more, over at least five steps; negative: it falls."""
    z: float | None = Field(None, gt=0)
    """It lies so many standard deviations off the mean of the 50 steps before."""
    for_steps: int = Field(1, ge=1, le=1000)
    """In so many steps in a row."""


class MetricsPolicy(ProfilePart):
    """Figures for Prometheus, at `/metrics` of the supervisor."""

    port: int | None = Field(None, ge=1, le=65535)
    """Where they are served; without it nothing is."""
    host: str = Field("127.0.0.1", min_length=1)
    """The address that it is bound to. Who can reach it can read how the run stands."""


class StackSpec(StackPart):
    """Everything the supervisor runs, in start order: stopping goes through the list backwards."""

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
    """What `${VAR}` of this stack refers to beside the environment, which wins: from `.env` files, and never written to
    a file."""
    launcher: LauncherName = "local"
    """What brings components to the nodes that the supervisor is not on."""
    nodes: list[Node] = Field(default_factory=list)
    """The machines, the supervisor's own first; empty where there is only that."""
    survive: bool = False
    """Whether the components outlive a supervisor that is killed, for the next one to adopt."""

    def component(self, name: str) -> ComponentSpec | None:
        """The component of that name; None when there is none."""
        return next((c for c in self.components if c.name == name), None)


class StackError(ValueError):
    """A stack that cannot be run as written."""


def check_stack(stack: StackSpec) -> None:
    """Let a runnable stack pass.

    Raises:
        StackError: a name twice or not usable in a path, an unknown dependency, a circle, `survive` with other nodes;
            all of them.
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
    if stack.survive and any(spec.is_far for spec in stack.components):
        faults.append("survive = true keeps components on this machine only, and some are on other nodes: leave it out")
    if faults:
        raise StackError("; ".join(faults))


def dependency_faults(stack: StackSpec) -> list[Problem]:
    """Unknown dependencies, and one fault for each set of components that wait for one another, at its first. The key
    of each is the name of a component."""
    waits = {spec.name: set(spec.depends_on) for spec in stack.components}
    faults = []
    for spec in stack.components:
        for other in dict.fromkeys([*spec.depends_on, *spec.restart_with]):
            if other not in waits:
                reason = f"{spec.name} depends on {other!r}, which is not in the stack"
                fix = f"name one of: {', '.join(name for name in waits if name != spec.name)}"
                faults.append(Problem(reason, fix, key=spec.name))
    after = {name: reached(name, waits) for name in waits}
    named: set[str] = set()
    for name, others in after.items():
        if name in others and name not in named:
            circle = [other for other in waits if other in others and name in after[other]]
            named.update(circle)
            reason = f"circular depends_on among: {', '.join(circle)}"
            fix = "take itself out" if len(circle) == 1 else "let one of them not wait for the next"
            faults.append(Problem(reason, fix, key=name))
    return faults


def reached(start: str, leads_to: Mapping[str, Collection[str]]) -> set[str]:
    """Every name to which `start` leads, at any distance."""
    found: set[str] = set()
    open_ = [start]
    while open_:
        new = set(leads_to.get(open_.pop(), ())) - found
        found |= new
        open_ += new
    return found
