"""Results that survive between the parts of a long run."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from atropos_common.system.files import write_private

ROOT = Path(__file__).parents[2]
SOURCES = ("trainer_core/audit", "trainer_core/objective", "benchmarks/silent_bugs")


class State:
    """Results of one state of the sources in a file, and the time limit of this part.

    Args:
        path: file; results of other sources in it are dropped.
        seconds: time after which no further audit begins; None: no limit.
    """

    def __init__(self, path: Path, seconds: float | None) -> None:
        self.path, self.sources = path, _sources()
        self.commit = _git("rev-parse", "--short=10", "HEAD")
        self._until = time.monotonic() + seconds if seconds else float("inf")
        found = json.loads(path.read_text()) if path.is_file() else {}
        self.done: dict[str, Any] = found["done"] if found.get("sources") == self.sources else {}

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until

    def save(self) -> None:
        kept = {"sources": self.sources, "done": self.done}
        write_private(self.path, json.dumps(kept, indent=1))


def _sources() -> str:
    """Digests of the folders that decide the results, with a mark if files differ from them."""
    changed = _git("status", "--porcelain", *SOURCES)
    return _git("rev-parse", *(f"HEAD:{folder}" for folder in SOURCES)) + (changed and " changed")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
