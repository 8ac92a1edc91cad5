"""The stack fixture of the end-to-end tests, on a CUDA machine."""

from __future__ import annotations

from tests.e2e.conftest import _own_cache, stack

__all__ = ["_own_cache", "stack"]
