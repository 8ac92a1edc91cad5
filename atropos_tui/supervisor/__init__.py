"""Supervisor: one event loop that owns every process of a run. It knows specs and roles, no
profile and no Textual."""

from __future__ import annotations

import os

_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from {} import main; main()"


def bare(module: str) -> list[str]:
    """Return Python's arguments that run `main` of a module which needs only the standard library.

    -I and -S: a start in milliseconds, with imports that environment and working folder cannot
    change.
    """
    root = os.path.realpath(f"{__file__}/../../..")
    return ["-I", "-S", "-c", _CODE.format(module), root]
