"""What runs: one event loop that owns every process of a run. Knows specs and roles; no profile, no Textual."""

from __future__ import annotations

import os

_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from {} import main; main()"


def bare(module: str) -> list[str]:
    """What follows `python` to run `main` of one of our modules that needs the standard library alone: it starts in
    milliseconds, and nothing in its environment or folder decides what it imports."""
    root = os.path.realpath(f"{__file__}/../../..")
    return ["-I", "-S", "-c", _CODE.format(module), root]
