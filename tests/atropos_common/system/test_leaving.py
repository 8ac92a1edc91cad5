"""End of a process without the interpreter's shutdown."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys
from atropos_common.system.leaving import leave

class Slow:
    def __del__(self):
        print("freed")

kept = Slow()
atexit.register(print, "registered")
sys.stdout.write("output ")
leave(3)
"""


def test_output_and_registered_functions_come_before_the_end_and_nothing_is_freed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "output registered\n", "")
