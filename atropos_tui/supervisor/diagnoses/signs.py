"""What a log rule is made of: literal bytes to find fast, a pattern to be sure, and what to say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from atropos_common.control import Role
from atropos_tui.supervisor.diagnoses.model import Diagnosis, Fix, Rule, Sighting, Tell, fix_for, shortened

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
LONGEST_LINE = 8 * 1024
"""A rule looks at most at so many characters around its anchor."""


@dataclass(frozen=True)
class Sign:
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
    """Signs of one trouble in the logs of components of `roles` (none: of all), and the way out.

    `title` and `fix` may name parts (`{engine}`) and groups of the match (`{0}`). `tell`, where given, replaces both
    and may look at the machine; it is called in a thread. `live` rules speak while the run goes, all `at_exit` ones
    explain an end.
    """

    fix: Fix
    signs: tuple[Sign, ...]
    roles: tuple[Role, ...] = ()
    live: bool = True
    at_exit: bool = True
    unless: tuple[str, ...] = ()
    """Rules that explain the same line better; this one is silent while one of them has spoken."""
    tell: Tell | None = None
    settle_s: float = 0.0
    """So long a program goes on telling why after such a line: only then is it explained."""

    def concerns(self, role: Role) -> bool:
        return not self.roles or role in self.roles

    def explain(self, found: Sighting, episode: int = 0) -> Diagnosis:
        """The diagnosis of a sighting."""
        if self.tell is not None:
            said = self.tell(found)
            title, evidence, fix = said.title, said.evidence, said.fix
        else:
            title, evidence = found.fill(self.title), found.line
            fix = found.fill(fix_for(self.fix, found.spec.role))
        return Diagnosis(title, shortened(evidence), fix, self.name, episode)


def plain(line: bytes) -> str:
    """A line as text: decoded with replacement, without colours, cut."""
    return ANSI.sub("", line[:LONGEST_LINE].decode(errors="replace")).strip()
