"""Moved to `atropos_common`; the old names stay for one release.

from trainer_core.contracts.records import parse_line    # write atropos_common.records instead
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import atropos_common

NEED_TORCH = ("group",)

for _module in pkgutil.iter_modules(atropos_common.__path__):
    if _module.name not in NEED_TORCH:
        sys.modules[f"{__name__}.{_module.name}"] = importlib.import_module(
            f"atropos_common.{_module.name}"
        )
sys.modules[f"{__name__}.hosts"] = sys.modules[f"{__name__}.http"]
