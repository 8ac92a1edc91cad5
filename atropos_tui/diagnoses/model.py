"""The parts of every rule: `Rule` with its severity and its end, `Diagnosis`, log rules, and `Finding`.

The rules themselves are in the files `*_rules.py`; `OWN_RULES`, at the end of this file, are those that the
supervisor names where it finds the trouble itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Literal

from atropos_common.control import Role
from atropos_common.records import DiagnosisRecord, Severity
from atropos_tui.profile.spec import ComponentSpec, StackSpec

QUIET_S = 600.0
"""Limit of the time, in seconds, that a finding which comes and goes must be gone before its diagnosis is over."""
WORK_S = 20.0
"""Seconds that a component works without the line of a log rule before the diagnosis is over."""
LONGEST_EVIDENCE = 600
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
LONGEST_LINE = 8 * 1024
"""A rule looks at most at so many characters around its anchor."""


class Ends(StrEnum):
    """When a diagnosis is over. Each is also over when its component completes, or when the run ends with code 0."""

    ATTEMPT = "attempt"
    """The component's next healthy attempt: crashes, failed starts, and facts of a whole attempt."""
    WORK = "work"
    """A line that clears it; else the component is healthy and works for `WORK_S` without the line (`LogScanner`)."""
    RECORDS = "records"
    """`MetricRule.good` records in a row without evidence (`MetricWatch`), or the next healthy attempt."""
    LOOK = "look"
    """The rule looks at the whole run and no longer finds it (`Watcher`)."""
    RUN = "run"
    """The end of the run, or of the supervisor that found it."""


class Layer(IntEnum):
    """How deep the cause lies: of two diagnoses of one severity the deeper one explains the other."""

    MACHINE = 0
    PROCESS = 1
    LINK = 2
    TRAINING = 3
    ROLLOUTS = 4


@dataclass(frozen=True)
class Diagnosis:
    """A detected problem: what went wrong, its evidence, and the way out. `Rule.diagnosis` makes one."""

    title: str
    evidence: str
    fix: str
    rule: str = ""
    severity: Severity = "warning"
    ends: Ends = Ends.ATTEMPT
    over: bool = False
    """The end of the diagnosis with this rule and title; `evidence` then says why it is over."""

    def ended(self, why: str) -> Diagnosis:
        """The end of this diagnosis."""
        return replace(self, evidence=why, fix="", over=True)

    def record(self, component: str | None = None) -> DiagnosisRecord:
        """The journal's record of it; without a component it is about the run."""
        return DiagnosisRecord(
            component=component,
            rule=self.rule,
            severity=self.severity,
            over=self.over,
            title=self.title,
            evidence=self.evidence,
            fix=self.fix,
        )


@dataclass(frozen=True)
class Rule:
    """Something that can be wrong: the stable name of its diagnoses, their severity, and when they are over.

    `docs/troubleshooting.md` has an entry for each, under that name.
    """

    name: str
    title: str
    passing: bool = field(default=False, kw_only=True)
    """Another process, or the machine, holds or has not done something yet: the next start may find it otherwise."""
    severity: Severity = field(default="warning", kw_only=True)
    ends: Ends = field(default=Ends.ATTEMPT, kw_only=True)
    layer: Layer = field(default=Layer.TRAINING, kw_only=True)
    shows_evidence: bool = field(default=False, kw_only=True)
    """The sentence about the run adds the evidence, since the title alone does not say enough."""
    event: Literal["", "mismatch", "alert"] = field(default="", kw_only=True)
    """The event of `[notify]` that a diagnosis of this rule is."""

    def diagnosis(self, evidence: str, fix: str, title: str = "") -> Diagnosis:
        """A diagnosis of this rule; `title` where more is known than the rule's own."""
        return self.stamp(Diagnosis(title or self.title, evidence, fix))

    def stamp(self, found: Diagnosis) -> Diagnosis:
        """`found` as a diagnosis of this rule."""
        return replace(found, rule=self.name, severity=self.severity, ends=self.ends)


@dataclass(frozen=True)
class Names:
    """What this stack calls its parts, so that a fix names a command that can be typed."""

    api: str = "api"
    env: str = "env"
    engine: str = "vllm"
    trainer: str = "trainer"

    @classmethod
    def of(cls, stack: StackSpec) -> Names:
        """The first component of each role; where there is none, what a profile would call it."""
        first = {spec.role.value: spec.name for spec in reversed(stack.components)}
        return cls(**{role: name for role, name in first.items() if role in cls.__dataclass_fields__})

    def fill(self, text: str, *groups: str, name: str = "") -> str:
        """`text` with `{name}`, `{api}`, `{env}`, `{engine}`, `{trainer}` and `{0}`, `{1}`... replaced."""
        return text.format(*groups, name=name, **vars(self))


USUAL = Names()


@dataclass(frozen=True)
class LogMatch:
    """A telling line of one component, stripped of colours, with the groups of the match."""

    spec: ComponentSpec
    names: Names
    line: str
    groups: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    """What the component printed last, the line included, for rules that look for a cause there."""

    def fill(self, text: str) -> str:
        return self.names.fill(text, *self.groups, name=self.spec.name)


@dataclass(frozen=True)
class LogPattern:
    """A line that tells.

    `anchor` is in every such line, byte for byte; `pattern` (default: the anchor) is a regular expression on the line.
    With `patience_s` the line alone is no trouble yet: it becomes one when nothing with `cleared_by` followed in that
    time, and the clock does not run while a component of a role in `waits_for` is starting.
    """

    anchor: str
    pattern: str = ""
    patience_s: float = 0.0
    cleared_by: tuple[str, ...] = ()
    waits_for: tuple[Role, ...] = ()

    @cached_property
    def needle(self) -> bytes:
        return self.anchor.encode()

    @cached_property
    def ends(self) -> tuple[bytes, ...]:
        return tuple(text.encode() for text in self.cleared_by)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern or re.escape(self.anchor))

    def ending(self, text: bytes, at: int) -> bytes:
        """The text of `cleared_by` that begins at `at`."""
        return next(end for end in self.ends if text.startswith(end, at))

    def match(self, line: str) -> re.Match[str] | None:
        """The match in a line that is free of colours."""
        return self.regex.search(line) if self.anchor in line else None


@dataclass(frozen=True)
class LogRule(Rule):
    """Patterns of one trouble in the logs of components of `roles` (none: of all), and the way out.

    `title` and `fix` may name parts (`{engine}`) and groups of the match (`{0}`). `tell`, where given, replaces both
    and may look at the machine; it is called in a thread. All speak while the run goes, `at_exit` ones explain an end.
    """

    fix: str | Mapping[Role | None, str]
    """One way out, or one by role (`None`: for every other role)."""
    patterns: tuple[LogPattern, ...]
    roles: tuple[Role, ...] = ()
    at_exit: bool = True
    unless: tuple[str, ...] = ()
    """Rules that explain the same line better; this one is silent while one of them has spoken."""
    tell: Callable[[LogMatch], Diagnosis] | None = None
    settle_s: float = 0.0
    """So long a program goes on telling why after such a line: only then is it explained."""
    ends: Ends = field(default=Ends.WORK, kw_only=True)
    quiet_s: float | None = field(default=None, kw_only=True)
    """Instead of `WORK_S`, where the program repeats the line less often than that."""

    def concerns(self, role: Role) -> bool:
        return not self.roles or role in self.roles

    def explain(self, match: LogMatch) -> Diagnosis:
        """The diagnosis of a match."""
        if self.tell is not None:
            said = self.tell(match)
        else:
            fix = self.fix if isinstance(self.fix, str) else self.fix.get(match.spec.role) or self.fix[None]
            said = Diagnosis(match.fill(self.title), match.line, match.fill(fix))
        return self.stamp(replace(said, evidence=shortened(said.evidence)))


@dataclass
class Finding:
    """One finding through time: its diagnosis is open while the evidence comes.

    A finding that comes back opens a new diagnosis at once. Its end then takes twice as long as the time before, so
    that one which comes and goes is recorded less and less often. Times are seconds of any one clock.
    """

    open: Diagnosis | None = None
    seen_at: float = float("-inf")
    times: int = 0
    """Diagnoses that it has opened."""

    def raised(self, now: float, found: Callable[[], Diagnosis]) -> list[Diagnosis]:
        """The evidence is there: the new diagnosis, or nothing while one is open."""
        self.seen_at = now
        if self.open is not None:
            return []
        self.open = found()
        self.times += 1
        return [self.open]

    def is_gone(self, now: float, after_s: float) -> bool:
        """Whether the evidence of the open diagnosis has been gone for long enough; a clock set back counts as that."""
        return self.open is not None and abs(now - self.seen_at) >= min(QUIET_S, after_s * self.slower)

    @property
    def slower(self) -> int:
        """Factor on the time to the end, by how often it has come back."""
        return 1 << min(max(self.times - 1, 0), 16)

    def closed(self, why: str) -> list[Diagnosis]:
        """The end of the open diagnosis, if there is one."""
        found, self.open = self.open, None
        return [found.ended(why)] if found else []


def shortened(text: str, limit: int = LONGEST_EVIDENCE) -> str:
    """`text` stripped, cut in its middle where it is too long."""
    text = text.strip()
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]}"


def plain(line: bytes) -> str:
    """A line as text: decoded with replacement, without colours, cut."""
    return ANSI.sub("", line[:LONGEST_LINE].decode(errors="replace")).strip()


HEALTH_TIMEOUT = Rule("health_timeout", "vLLM did not become healthy in time", passing=True, layer=Layer.PROCESS)
NOT_READY = Rule("not_ready", "a component did not become ready", layer=Layer.PROCESS)
NOT_ANSWERING = Rule("not_answering", "a component runs but does not answer", layer=Layer.PROCESS)
CANNOT_START = Rule("cannot_start", "a component cannot be started as written", layer=Layer.PROCESS)
LOG_UNWRITABLE = Rule("log_unwritable", "the log cannot be written", layer=Layer.MACHINE)
STALE_FILE = Rule("stale_file", "a stale file cannot be removed", layer=Layer.MACHINE)
GPU_MEMORY_HELD = Rule("gpu_memory_held", "GPU memory of a component was not given back", layer=Layer.MACHINE)
UNKILLABLE = Rule("unkillable", "a process cannot be killed", layer=Layer.MACHINE)
WATCHER_FAULT = Rule("watcher_fault", "the diagnosing itself failed", ends=Ends.LOOK)
NOT_NOTIFIED = Rule("not_notified", "a notification was not delivered", severity="advice", ends=Ends.RUN)
NO_METRICS = Rule("no_metrics", "no metrics are served", severity="advice", ends=Ends.RUN)
GUARD_DIES = Rule("guard_dies", "the run's guard does not live", ends=Ends.RUN, layer=Layer.MACHINE)
OWN_RULES = (
    HEALTH_TIMEOUT,
    NOT_READY,
    NOT_ANSWERING,
    CANNOT_START,
    LOG_UNWRITABLE,
    STALE_FILE,
    GPU_MEMORY_HELD,
    UNKILLABLE,
    WATCHER_FAULT,
    NOT_NOTIFIED,
    NO_METRICS,
    GUARD_DIES,
)
"""Rules without a watcher: the supervisor finds the trouble itself and says so."""
