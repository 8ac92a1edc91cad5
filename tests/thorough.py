"""How much of what is endless is tried: properties, and values that are replaced one after the other.

`make test` tries a share; `make test-all` sets `ATROPOS_TESTS_THOROUGH` and tries all.
"""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("ATROPOS_TESTS_THOROUGH"))


def examples(count: int) -> int:
    """Of a property: `count`, or a quarter."""
    return count if THOROUGH else max(20, count // 4)
