"""The supervisor's `launch`, for ranks that run under it."""

from __future__ import annotations

from tests.atropos_tui.supervisor.conftest import launch, prefix

__all__ = ["launch", "prefix"]
