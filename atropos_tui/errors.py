"""Errors that a user can correct, and the exit codes of the command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from enum import IntEnum

# A supervisor needs about eight open files for each component, plus its connections.
LEAST_FILES = 128


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
    """One mistake and its fix."""

    reason: str
    fix: str = ""
    file: str = ""
    key: str = ""
    line: int | None = None
    """Line of the key, counted from 1."""

    @property
    def place(self) -> str:
        """File, line and key, in the form that editors link to."""
        file = f"{self.file}:{self.line}" if self.file and self.line else self.file
        return ": ".join(part for part in (file, self.key) if part)

    @property
    def what(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason

    def __str__(self) -> str:
        return f"{self.what}\n    fix: {self.fix}" if self.fix else self.what


@dataclass
class UserError(Exception):
    """A mistake that the user can correct, shown without a traceback."""

    title: str
    problems: list[Problem] = field(default_factory=list)
    exit_code: Exit = Exit.USAGE

    def __str__(self) -> str:
        lines = [self.title]
        for number, problem in enumerate(self.problems, 1):
            lines.append(f"  {problem.what}")
            # Neighbours with the same fix show it once, after the last of them.
            is_shared = number < len(self.problems) and self.problems[number].fix == problem.fix
            if problem.fix and not is_shared:
                lines.append(f"    fix: {problem.fix}")
        return "\n".join(lines)


class Elsewhere(Exception):
    """A command that must run on another machine; `prefix` reaches it (ssh, srun), `words`
    replace its arguments."""

    def __init__(self, prefix: list[str], words: list[str] | None = None) -> None:
        super().__init__(" ".join(prefix))
        self.prefix = prefix
        self.words = words

    def run(self, argv: list[str]) -> int:
        """Run it there with this terminal; return the exit code."""
        # -P: modules in the current folder must not shadow installed ones.
        return subprocess.call(
            [*self.prefix, sys.executable, "-P", "-m", "atropos_tui", *(self.words or argv)]
        )
