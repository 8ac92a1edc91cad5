"""Shares of long lists of cases: examples of properties, replaced values, settings of ranks.

`make test` tries a share; `make test-all` also runs what is marked slow, sets
`ATROPOS_TESTS_THOROUGH`, and tries all.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("ATROPOS_TESTS_THOROUGH"))


def left_out(cases: Iterable[str], slow: Collection[str]) -> list[Any]:
    """`cases` for `parametrize`, of which `make test` leaves out those that are `slow`."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case in slow)) for case in cases]


def examples(count: int) -> int:
    """Return the number of examples of a property: `count`, or a quarter of it."""
    return count if THOROUGH else max(20, count // 4)
