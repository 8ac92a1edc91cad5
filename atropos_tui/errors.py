"""What a user may get wrong, and the exit codes of the command line.

A `UserError` is shown as its title and its problems, never as a traceback; each problem says where, what and the fix.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes that scripts rely on."""

    DONE = 0
    FAULT = 1
    USAGE = 2
    COMPONENT_FAILED = 3
    TIMEOUT = 4
    NO_RUN = 5
    INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the file, the key in it, the reason, and the way out."""

    reason: str
    fix: str = ""
    file: str = ""
    key: str = ""

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.file, self.key) if part)
        lines = [f"{place}: {self.reason}" if place else self.reason]
        if self.fix:
            lines.append(f"    fix: {self.fix}")
        return "\n".join(lines)


@dataclass
class UserError(Exception):
    """A mistake that the user can mend."""

    title: str
    problems: list[Problem] = field(default_factory=list)
    exit_code: Exit = Exit.USAGE

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {problem}" for problem in self.problems)])


class Elsewhere(Exception):
    """This command is to be given on another machine: `prefix` runs it there, or `words` in its place."""

    def __init__(self, prefix: list[str], words: list[str] | None = None) -> None:
        super().__init__(" ".join(prefix))
        self.prefix = prefix
        self.words = words

    def run(self, argv: list[str]) -> int:
        """Give the command there, with this terminal and folder; its exit code."""
        return subprocess.call([*self.prefix, sys.executable, "-P", "-m", "atropos_tui", *(self.words or argv)])
