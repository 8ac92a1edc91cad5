"""What `[notify]` asks for; apart from `spec`, for a screen reads this one policy and should not wait for the rest."""

from __future__ import annotations

from typing import Literal

from atropos_tui.stack.spec_base import Spec


class NotifyPolicy(Spec):
    """Tell someone who is not looking."""

    bell: bool = False
    """Ring the terminal that shows the run."""
    webhook: str | None = None
    """POST a JSON object here; `${VAR}` keeps a secret address out of files."""
    on: tuple[Literal["failed", "mismatch", "done"], ...] = ("failed", "mismatch", "done")
