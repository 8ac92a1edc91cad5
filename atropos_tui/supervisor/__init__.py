"""Supervisor: one event loop that owns every process of a run. It knows specs and roles, but no
profile and no Textual."""

from __future__ import annotations

import os

_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from {} import main; main()"


def bare(module: str) -> list[str]:
    """Return Python's arguments that run `main` of a module of ours which needs only the standard
    library.

    -I and -S make it start in milliseconds, and keep environment and working folder from changing
    its imports.
    """
    root = os.path.realpath(f"{__file__}/../../..")
    return ["-I", "-S", "-c", _CODE.format(module), root]
