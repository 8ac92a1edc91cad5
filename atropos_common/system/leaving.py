"""End of a process that has loaded torch."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit with `code` after the functions that libraries have registered for the exit."""
    atexit._run_exitfuncs()
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Write what is printed, and exit with `code`, without the interpreter's shutdown.

    It frees every object that torch has made, which takes a second, and with CUDA several. The
    supervisor waits for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
