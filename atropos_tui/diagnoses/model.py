"""Base classes of diagnoses. `OWN_RULES` are those that the supervisor reports without a
watcher."""

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

LONGEST_ABSENCE_S = 600.0
"""Longest absence, in seconds, that a recurring problem needs before its diagnosis ends."""
WORK_S = 20.0
"""Seconds of work without the line before a log diagnosis ends."""
LONGEST_EVIDENCE = 600
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
REQUEST_LINE = re.compile(r'"[A-Z]+ \S+ HTTP/[\d.]+" \d{3}')
"""The access log of a server. A client chooses the path, even if its request is refused."""
LONGEST_LINE = 8 * 1024
"""Bytes of a line that are decoded."""


class Ends(StrEnum):
    """When a diagnosis is over. All end when the component completes or the run ends with code
    0."""

    ATTEMPT = "attempt"
    """At the next healthy attempt."""
    WORK = "work"
    """At a line that clears it, or after `WORK_S` of healthy work without the line."""
    RECORDS = "records"
    """After `MetricRule.good` records without evidence, or at the next healthy attempt."""
    LOOK = "look"
    """When the rule finds the opposite."""
    RUN = "run"
    """At the end of the run or of its supervisor."""


class Layer(IntEnum):
    """Depth of the cause: a deeper diagnosis explains the others of its severity."""

    MACHINE = 0
    PROCESS = 1
    LINK = 2
    TRAINING = 3
    ROLLOUTS = 4


@dataclass(frozen=True)
class Diagnosis:
    """A detected problem."""

    title: str
    evidence: str
    fix: str
    rule: str = ""
    severity: Severity = "warning"
    ends: Ends = Ends.ATTEMPT
    over: bool = False
    """Ends the diagnosis with the same rule and title; `evidence` is the reason."""

    def ended(self, why: str) -> Diagnosis:
        return replace(self, evidence=why, fix="", over=True)

    def record(self, component: str | None = None) -> DiagnosisRecord:
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
    """A kind of problem: name, severity and end of its diagnoses."""

    name: str
    title: str
    passing: bool = field(default=False, kw_only=True)
    """The cause may be gone at the next start."""
    severity: Severity = field(default="warning", kw_only=True)
    ends: Ends = field(default=Ends.ATTEMPT, kw_only=True)
    layer: Layer = field(default=Layer.TRAINING, kw_only=True)
    shows_evidence: bool = field(default=False, kw_only=True)
    """The verdict line shows the evidence too."""
    event: Literal["", "mismatch", "alert"] = field(default="", kw_only=True)
    """Event of `[notify]` that it triggers."""

    def diagnosis(self, evidence: str, fix: str, title: str = "") -> Diagnosis:
        """Create a diagnosis; `title` replaces the rule's title where more is known."""
        return self.stamp(Diagnosis(title or self.title, evidence, fix))

    def stamp(self, found: Diagnosis) -> Diagnosis:
        """Return `found` with name, severity and end of this rule."""
        return replace(found, rule=self.name, severity=self.severity, ends=self.ends)


@dataclass(frozen=True)
class Names:
    """Component names, so that a fix is a command to paste."""

    api: str = "api"
    env: str = "env"
    engine: str = "vllm"
    trainer: str = "trainer"

    @classmethod
    def of(cls, stack: StackSpec) -> Names:
        """First component of each role; a missing role gets a profile's default name."""
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
    spec: ComponentSpec
    names: Names
    line: str
    groups: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    """Newest lines, this one included, to search for the cause."""

    def fill(self, text: str) -> str:
        return self.names.fill(text, *self.groups, name=self.spec.name)


@dataclass(frozen=True)
class LogPattern:
    """A log line that a rule recognises.

    `anchor` occurs in every such line; `pattern` (default: the anchor) is a regular expression.
    With `patience_s` the line counts only if no text of `cleared_by` follows in that time. The
    clock stops while a role in `waits_for` is starting, or a user has stopped it.
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
        """Match a line without ANSI colours.

        Only a pattern whose anchor begins with a quotation mark matches lines of an access log.
        """
        # The anchor is much cheaper to search than the regular expressions.
        if self.anchor not in line:
            return None
        if not self.anchor.startswith('"') and REQUEST_LINE.search(line):
            return None
        return self.regex.search(line)


@dataclass(frozen=True)
class LogRule(Rule):
    """Log patterns of one problem in components of `roles` (empty: all), and the fix.

    `title` and `fix` may contain `{engine}` and groups of the match (`{0}`). `tell` replaces both;
    it runs in a thread. Rules with `at_exit` also explain why a component ended.
    """

    fix: str | Mapping[Role | None, str]
    """One fix, or one for each role (`None`: all others)."""
    patterns: tuple[LogPattern, ...]
    roles: tuple[Role, ...] = ()
    at_exit: bool = True
    unless: tuple[str, ...] = ()
    """Rules that explain the same line better; while one is open, this one stays silent."""
    tell: Callable[[LogMatch], Diagnosis] | None = None
    settle_s: float = 0.0
    """Seconds to wait after the line, because the cause is printed later."""
    ends: Ends = field(default=Ends.WORK, kw_only=True)
    quiet_s: float | None = field(default=None, kw_only=True)
    """Replaces `WORK_S` for lines that repeat less often."""
    recorded: bool = field(default=False, kw_only=True)
    """The line stands in for a record: without effect where a metric rule of this name judges the
    records of the attempt."""

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
    """One problem over time.

    If it returns, its next diagnosis must be absent twice as long before it ends, so an
    intermittent problem is recorded less and less often.
    """

    open: Diagnosis | None = None
    seen_at: float = float("-inf")
    times: int = 0

    def raised(self, now: float, found: Callable[[], Diagnosis]) -> list[Diagnosis]:
        """Note evidence: return the new diagnosis, or nothing while one is open."""
        self.seen_at = now
        if self.open is not None:
            return []
        self.open = found()
        self.times += 1
        return [self.open]

    def is_gone(self, now: float, after_s: float) -> bool:
        """True if there was no evidence for long enough, or the clock jumped as far."""
        # abs(): after the clock was set back, `seen_at` may lie far ahead.
        return self.open is not None and abs(now - self.seen_at) >= min(
            LONGEST_ABSENCE_S, after_s * self.slower
        )

    @property
    def slower(self) -> int:
        """Factor on the time to the end: doubles each time the problem returns."""
        return 1 << min(max(self.times - 1, 0), 16)

    def closed(self, why: str) -> list[Diagnosis]:
        found, self.open = self.open, None
        return [found.ended(why)] if found else []


def shortened(text: str, limit: int = LONGEST_EVIDENCE) -> str:
    """Strip `text`, and cut its middle above `limit` characters."""
    text = text.strip()
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]}"


def plain(line: bytes) -> str:
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
"""Rules that no watcher evaluates."""
