"""The supervisor's fixtures, for rules that are tested on running stacks."""

from __future__ import annotations

from tests.atropos_tui.supervisor.conftest import (
    free_port,
    launch,
    no_inherited_run,
    prefix,
    pytest_generate_tests,
)

__all__ = ["free_port", "launch", "no_inherited_run", "prefix", "pytest_generate_tests"]
