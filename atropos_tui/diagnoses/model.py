"""Base classes of diagnoses: `Rule`, `LogRule`, `Diagnosis`, and `Finding` (one problem over time).

The rules are in the files `*_rules.py`. `OWN_RULES` at the end of this file are those that the
supervisor reports without a watcher.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Literal

from atropos_common.protocol.control import Role
from atropos_common.protocol.records import DiagnosisRecord, Severity
from atropos_tui.profile.spec import ComponentSpec, StackSpec

QUIET_S = 600.0
"""Longest time, in seconds, that a recurring finding must be absent before its diagnosis is
over."""
WORK_S = 20.0
"""Seconds of normal work without the line of a log rule before its diagnosis is over."""
LONGEST_EVIDENCE = 600
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
LONGEST_LINE = 8 * 1024
"""Bytes of a line that are decoded; a rule searches this much text around its anchor."""


class Ends(StrEnum):
    """When a diagnosis is over. Each is also over when its component completes, or when the run
    ends with code 0."""

    ATTEMPT = "attempt"
    """At the next healthy attempt of the component: crashes, failed starts, facts about a whole
    attempt."""
    WORK = "work"
    """At a line that clears it, or after `WORK_S` of healthy work without the line (see
    `LogScanner`)."""
    RECORDS = "records"
    """After `MetricRule.good` records in a row without evidence (see `MetricWatch`), or at the next
    healthy attempt."""
    LOOK = "look"
    """When the rule checks the whole run and finds the opposite (see `Watcher`)."""
    RUN = "run"
    """At the end of the run, or of the supervisor that found it."""


class Layer(IntEnum):
    """Depth of the cause. Among diagnoses of one severity, the deeper one explains the others."""

    MACHINE = 0
    PROCESS = 1
    LINK = 2
    TRAINING = 3
    ROLLOUTS = 4


@dataclass(frozen=True)
class Diagnosis:
    """A detected problem: title, evidence and fix. `Rule.diagnosis` creates it."""

    title: str
    evidence: str
    fix: str
    rule: str = ""
    severity: Severity = "warning"
    ends: Ends = Ends.ATTEMPT
    over: bool = False
    """This object ends the diagnosis with the same rule and title; `evidence` is the reason."""

    def ended(self, why: str) -> Diagnosis:
        """Return the object that ends this diagnosis."""
        return replace(self, evidence=why, fix="", over=True)

    def record(self, component: str | None = None) -> DiagnosisRecord:
        """Return its record for the journal; without a component it is about the run."""
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
    """A kind of problem: the stable name of its diagnoses, their severity, and when they end.

    `docs/troubleshooting.md` has an entry for each name.
    """

    name: str
    title: str
    passing: bool = field(default=False, kw_only=True)
    """The cause may be gone at the next start: another process holds a resource, or the machine is
    not ready."""
    severity: Severity = field(default="warning", kw_only=True)
    ends: Ends = field(default=Ends.ATTEMPT, kw_only=True)
    layer: Layer = field(default=Layer.TRAINING, kw_only=True)
    shows_evidence: bool = field(default=False, kw_only=True)
    """The verdict line shows the evidence as well, because the title alone does not say enough."""
    event: Literal["", "mismatch", "alert"] = field(default="", kw_only=True)
    """Event of `[notify]` that a diagnosis of this rule triggers."""

    def diagnosis(self, evidence: str, fix: str, title: str = "") -> Diagnosis:
        """Create a diagnosis of this rule; `title` replaces the rule's title where more is
        known."""
        return self.stamp(Diagnosis(title or self.title, evidence, fix))

    def stamp(self, found: Diagnosis) -> Diagnosis:
        """Return `found` with the name, severity and end of this rule."""
        return replace(found, rule=self.name, severity=self.severity, ends=self.ends)


@dataclass(frozen=True)
class Names:
    """Names of the components of this stack, so that a fix shows a command that can be pasted."""

    api: str = "api"
    env: str = "env"
    engine: str = "vllm"
    trainer: str = "trainer"

    @classmethod
    def of(cls, stack: StackSpec) -> Names:
        """Return the first component of each role; a missing role gets the default name of a
        profile."""
        # Reversed, so that the first component of a role overwrites later ones.
        first = {spec.role.value: spec.name for spec in reversed(stack.components)}
        return cls(
            **{role: name for role, name in first.items() if role in cls.__dataclass_fields__}
        )

    def fill(self, text: str, *groups: str, name: str = "") -> str:
        """Replace `{name}`, `{api}`, `{env}`, `{engine}`, `{trainer}` and `{0}`, `{1}`... in
        `text`."""
        return text.format(*groups, name=name, **vars(self))


USUAL = Names()


@dataclass(frozen=True)
class LogMatch:
    """One matching log line of a component, without ANSI colours, and the groups of the match."""

    spec: ComponentSpec
    names: Names
    line: str
    groups: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    """Newest lines of the component, this one included, for rules that search them for the
    cause."""

    def fill(self, text: str) -> str:
        return self.names.fill(text, *self.groups, name=self.spec.name)


@dataclass(frozen=True)
class LogPattern:
    """A log line that a rule recognises.

    `anchor` occurs in every such line, byte for byte; `pattern` (default: the anchor) is a regular
    expression for the line. With `patience_s`, the line opens a diagnosis only if no text of
    `cleared_by` follows in that time. The clock stops while a component of a role in `waits_for` is
    starting.
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
        """Return the text of `cleared_by` that begins at `at`."""
        return next(end for end in self.ends if text.startswith(end, at))  # one does: `at` is a hit

    def match(self, line: str) -> re.Match[str] | None:
        """Match a line that has no ANSI colours."""
        # The anchor is much cheaper to search than the regular expression.
        return self.regex.search(line) if self.anchor in line else None


@dataclass(frozen=True)
class LogRule(Rule):
    """Log patterns of one problem in components of `roles` (empty: all roles), and the fix.

    `title` and `fix` may contain component names (`{engine}`) and groups of the match (`{0}`).
    `tell` replaces both if given; it runs in a thread and may inspect the machine. Every rule
    reports while the run goes on; those with `at_exit` also explain why a component ended.
    """

    fix: str | Mapping[Role | None, str]
    """One fix, or one for each role (`None`: every other role)."""
    patterns: tuple[LogPattern, ...]
    roles: tuple[Role, ...] = ()
    at_exit: bool = True
    unless: tuple[str, ...] = ()
    """Rules that explain the same line better; this rule stays silent while one of them is open."""
    tell: Callable[[LogMatch], Diagnosis] | None = None
    settle_s: float = 0.0
    """Seconds to wait after the line, because the program prints the cause later."""
    ends: Ends = field(default=Ends.WORK, kw_only=True)
    quiet_s: float | None = field(default=None, kw_only=True)
    """Replaces `WORK_S` for a program that repeats the line less often than that."""

    def concerns(self, role: Role) -> bool:
        return not self.roles or role in self.roles

    def explain(self, match: LogMatch) -> Diagnosis:
        if self.tell is not None:
            found = self.tell(match)
        else:
            fix = (
                self.fix
                if isinstance(self.fix, str)
                else self.fix.get(match.spec.role) or self.fix[None]
            )
            found = Diagnosis(match.fill(self.title), match.line, match.fill(fix))
        return self.stamp(replace(found, evidence=shortened(found.evidence)))


@dataclass
class Finding:
    """One problem over time: its diagnosis stays open while evidence comes.

    A problem that returns opens a new diagnosis at once. That one must then be absent twice as long
    as the one before, so that an intermittent problem is recorded less and less often. Times are
    seconds of any one clock.
    """

    open: Diagnosis | None = None
    seen_at: float = float("-inf")
    times: int = 0
    """Number of diagnoses it has opened."""

    def raised(self, now: float, found: Callable[[], Diagnosis]) -> list[Diagnosis]:
        """Note evidence at `now`: return the new diagnosis, or nothing while one is open."""
        self.seen_at = now
        if self.open is not None:
            return []
        self.open = found()
        self.times += 1
        return [self.open]

    def is_gone(self, now: float, after_s: float) -> bool:
        """Return True if the open diagnosis has had no evidence for long enough, or the clock
        jumped as far."""
        # abs(): after the clock was set back, `seen_at` may lie far ahead.
        return self.open is not None and abs(now - self.seen_at) >= min(
            QUIET_S, after_s * self.slower
        )

    @property
    def slower(self) -> int:
        """Factor on the time to the end: doubles each time the problem returns."""
        return 1 << min(max(self.times - 1, 0), 16)

    def closed(self, why: str) -> list[Diagnosis]:
        """End the open diagnosis, if there is one."""
        found, self.open = self.open, None
        return [found.ended(why)] if found else []


def shortened(text: str, limit: int = LONGEST_EVIDENCE) -> str:
    """Strip `text`, and cut its middle if it is longer than `limit` characters."""
    text = text.strip()
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]}"


def plain(line: bytes) -> str:
    """Decode a log line with replacement, cut to `LONGEST_LINE`, and remove ANSI colours."""
    return ANSI.sub("", line[:LONGEST_LINE].decode(errors="replace")).strip()


HEALTH_TIMEOUT = Rule(
    "health_timeout", "vLLM did not become healthy in time", passing=True, layer=Layer.PROCESS
)
NOT_READY = Rule("not_ready", "a component did not become ready", layer=Layer.PROCESS)
NOT_ANSWERING = Rule("not_answering", "a component runs but does not answer", layer=Layer.PROCESS)
CANNOT_START = Rule("cannot_start", "a component cannot be started as written", layer=Layer.PROCESS)
LOG_UNWRITABLE = Rule("log_unwritable", "the log cannot be written", layer=Layer.MACHINE)
STALE_FILE = Rule("stale_file", "a stale file cannot be removed", layer=Layer.MACHINE)
GPU_MEMORY_HELD = Rule(
    "gpu_memory_held", "GPU memory of a component was not given back", layer=Layer.MACHINE
)
UNKILLABLE = Rule("unkillable", "a process cannot be killed", layer=Layer.MACHINE)
WATCHER_FAULT = Rule("watcher_fault", "the diagnosing itself failed", ends=Ends.LOOK)
NOT_NOTIFIED = Rule(
    "not_notified", "a notification was not delivered", severity="advice", ends=Ends.RUN
)
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
"""Rules that the supervisor reports itself; no watcher evaluates them."""
