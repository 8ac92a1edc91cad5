"""`result.json`: how a run ended. Written once, by the supervisor, before anyone is told that the run is over."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from trainer_core.contracts.files import write_private


class RunResult(BaseModel):
    """Exit code as in the table of exit codes: 0 done, 1 fault, 3 failed, 4 timed out, 130 interrupted."""

    model_config = ConfigDict(extra="ignore")
    exit_code: int
    reason: str
    component: str | None = None
    """The component that decided it."""
    last_lines: list[str] = Field(default_factory=list)
    """The end of its log."""
    ended_at: float = Field(default_factory=time.time)

    def write(self, path: Path) -> None:
        """Replace `path` atomically. A full disk costs the file, not the clean end."""
        with contextlib.suppress(OSError):
            write_private(path, self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: Path) -> RunResult | None:
        """The result in `path`; None while the run goes on, or when it was cut short."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None
