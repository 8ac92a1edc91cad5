"""What a rule says, and when it may say it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atropos_common.control import Role
from atropos_tui.profile.spec import ComponentSpec, StackSpec

QUIET_S = 600.0
"""So long a finding must have been gone before it is a new one; twice as long after each time that it was told."""
LONGEST_EVIDENCE = 600


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


@dataclass(frozen=True)
class Rule:
    """Something that can be wrong: the stable name of its diagnoses, and what they are about.

    `docs/troubleshooting.md` has an entry for each, under that name.
    """

    name: str
    title: str

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
        first = {spec.role: spec.name for spec in reversed(stack.components)}
        return cls(
            first.get(Role.API, cls.api),
            first.get(Role.ENV, cls.env),
            first.get(Role.ENGINE, cls.engine),
            first.get(Role.TRAINER, cls.trainer),
        )


USUAL = Names()


@dataclass(frozen=True)
class Sighting:
    """A telling line of one component, stripped of colours, with the groups of the match."""

    spec: ComponentSpec
    names: Names
    line: str
    groups: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    """What the component printed last, the line included, for rules that look for a cause there."""

    def fill(self, text: str) -> str:
        """`text` with `{name}`, `{api}`, `{env}`, `{engine}`, `{trainer}` and `{0}`, `{1}`... replaced."""
        names = self.names
        return text.format(
            *self.groups, name=self.spec.name, api=names.api, env=names.env, engine=names.engine, trainer=names.trainer
        )


Tell = Callable[[Sighting], Diagnosis]
Fix = str | Mapping[Role | None, str]
"""One way out, or one by role (`None`: for every other role)."""


def fix_for(fix: Fix, role: Role) -> str:
    return fix if isinstance(fix, str) else fix.get(role) or fix[None]


@dataclass
class Voice:
    """Whether one rule may speak: once when its finding begins, again only after it was gone for a while.

    Times are seconds of any one clock.
    """

    episodes: int = 0
    active: bool = False
    seen_at: float = field(default=float("-inf"))
    _spoke_at: float = field(default=float("-inf"))

    def raised(self, now: float) -> bool:
        """The finding is there; whether to say so."""
        self.seen_at = now
        if self.active:
            return False
        self.active = True
        if now - self._spoke_at < QUIET_S * 2.0 ** max(self.episodes - 1, 0):
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
