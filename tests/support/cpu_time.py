"""CPU time of a program."""

from __future__ import annotations

import resource
import subprocess
import sys


def cpu_seconds(*arguments: str) -> float:
    """CPU seconds of `python ARGUMENTS`: the wall time on an idle machine, and about the same on a
    busy one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, timeout=60, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
