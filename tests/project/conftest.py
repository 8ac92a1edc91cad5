"""The cockpit's fixtures, for tests that call its commands."""

from __future__ import annotations

from tests.atropos_tui.conftest import _no_hub, _one_parser

__all__ = ["_no_hub", "_one_parser"]
