"""`${VAR}` in profiles: a few names are known while planning, the rest stay references until a process starts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import platformdirs

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

CACHE = "ATROPOS_CACHE"
"""Where prepared models are kept between runs; override it in the environment."""


def cache_dir() -> Path:
    """Folder for things that outlive a run, such as the demo's warm-started model."""
    return Path(os.environ.get(CACHE) or platformdirs.user_cache_dir("atropos-tui"))


def planning_variables(*, seed: int, run_dir: Path) -> dict[str, str]:
    """Variables that every profile may use in any string."""
    return {CACHE: str(cache_dir()), "ATROPOS_SEED": str(seed), "ATROPOS_RUN_DIR": str(run_dir)}


def expand(text: str, known: dict[str, str]) -> str:
    """Replace the known variables of `text`; unknown ones stay as they are."""
    return _REFERENCE.sub(lambda match: known.get(match.group(1), match.group(0)), text)


def references(text: str) -> list[str]:
    """Names of the variables that `text` refers to."""
    return _REFERENCE.findall(text)
