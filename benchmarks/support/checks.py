"""Checks of a benchmark: each one that fails is named on stderr and makes the exit status 1.

checks = Checks()
checks.at_most("gradient's relative error", found["error"], 1e-5)
return checks.status()
"""

from __future__ import annotations

import math
import sys


class Checks:
    """Bounds of one call; a value that is not a number fails."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def at_most(self, name: str, value: float, bound: float) -> None:
        self.that(
            value <= bound and not math.isnan(value), f"{name} is {value:.4g}, above {bound:.4g}"
        )

    def at_least(self, name: str, value: float, bound: float) -> None:
        self.that(
            value >= bound and not math.isnan(value), f"{name} is {value:.4g}, below {bound:.4g}"
        )

    def that(self, holds: bool, failure: str) -> None:
        """Note `failure`, a sentence, unless it `holds`."""
        if not holds:
            self.failed.append(failure)

    def status(self) -> int:
        """Print what failed; the exit status."""
        for failure in self.failed:
            print(f"CHECK FAILED: {failure}", file=sys.stderr, flush=True)
        return int(bool(self.failed))
