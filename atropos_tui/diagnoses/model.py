"""What every rule is made of: `Rule` and `Diagnosis`, the rules over log lines, and how often one may speak.

The rules themselves stand in the files `*_rules.py`; `OWN_RULES`, at the end of this file, are those that the
supervisor names where it finds the trouble itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from atropos_common.control import Role
from atropos_common.records import DiagnosisRecord
from atropos_tui.profile.spec import ComponentSpec, StackSpec

QUIET_S = 600.0
"""So long a finding must have been gone before it is a new one; twice as long after each time that it was told."""
LONGEST_EVIDENCE = 600
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
LONGEST_LINE = 8 * 1024
"""A rule looks at most at so many characters around its anchor."""


@dataclass(frozen=True)
class Diagnosis:
    """What went wrong, how we know, and the way out.

    `rule` is the name of its `Rule`; `episode` counts how often the same rule spoke in one attempt.
    """

    title: str
    evidence: str
    fix: str
    rule: str = ""
    episode: int = 0

    def record(self, component: str | None = None) -> DiagnosisRecord:
        """What the journal says of it; without a component it is about the run."""
        return DiagnosisRecord(
            component=component, rule=self.rule, title=self.title, evidence=self.evidence, fix=self.fix
        )


@dataclass(frozen=True)
class Rule:
    """Something that can be wrong: the stable name of its diagnoses, and what they are about.

    `docs/troubleshooting.md` has an entry for each, under that name.
    """

    name: str
    title: str
    passing: bool = field(default=False, kw_only=True)
    """Another process, or the machine, holds or has not done something yet: the next start may find it otherwise."""

    def diagnosis(self, evidence: str, fix: str, title: str = "") -> Diagnosis:
        """What this rule says now; `title` where more is known than the rule's own."""
        return Diagnosis(title or self.title, evidence, fix, self.name)


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

    def concerns(self, role: Role) -> bool:
        return not self.roles or role in self.roles

    def explain(self, match: LogMatch, episode: int = 0) -> Diagnosis:
        """The diagnosis of a match."""
        if self.tell is not None:
            said = self.tell(match)
        else:
            fix = self.fix if isinstance(self.fix, str) else self.fix.get(match.spec.role) or self.fix[None]
            said = Diagnosis(match.fill(self.title), match.line, match.fill(fix))
        return Diagnosis(said.title, shortened(said.evidence), said.fix, self.name, episode)


@dataclass
class RateLimit:
    """Whether one rule may speak: once when its finding begins, again only after it was gone for a while.

    Times are seconds of any one clock; where it was set back by more than the pause, the pause is over.
    """

    episodes: int = 0
    active: bool = False
    seen_at: float = float("-inf")
    _spoke_at: float = float("-inf")

    def raised(self, now: float) -> bool:
        """The finding is there; whether to say so."""
        self.seen_at = now
        if self.active:
            return False
        self.active = True
        if abs(now - self._spoke_at) < QUIET_S * 2.0 ** max(self.episodes - 1, 0):
            return False
        self.episodes += 1
        self._spoke_at = now
        return True

    def lowered(self) -> None:
        """The finding is gone."""
        self.active = False


def shortened(text: str, limit: int = LONGEST_EVIDENCE) -> str:
    """`text` stripped, cut in its middle where it is too long."""
    text = text.strip()
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]}"


def plain(line: bytes) -> str:
    """A line as text: decoded with replacement, without colours, cut."""
    return ANSI.sub("", line[:LONGEST_LINE].decode(errors="replace")).strip()


HEALTH_TIMEOUT = Rule("health_timeout", "vLLM did not become healthy in time", passing=True)
NOT_READY = Rule("not_ready", "a component did not become ready")
NOT_ANSWERING = Rule("not_answering", "a component runs but does not answer")
CANNOT_START = Rule("cannot_start", "a component cannot be started as written")
LOG_UNWRITABLE = Rule("log_unwritable", "the log cannot be written")
STALE_FILE = Rule("stale_file", "a stale file cannot be removed")
GPU_MEMORY_HELD = Rule("gpu_memory_held", "GPU memory of a component was not given back")
UNKILLABLE = Rule("unkillable", "a process cannot be killed")
WATCHER_FAULT = Rule("watcher_fault", "the diagnosing itself failed")
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
)
