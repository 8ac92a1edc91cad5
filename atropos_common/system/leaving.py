"""End of a process that has loaded torch."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit with `code`, without the interpreter's shutdown.

    It frees every object that torch has made, which takes a second, and with CUDA several. The
    supervisor waits for it. Functions that libraries have registered for the exit still run.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
