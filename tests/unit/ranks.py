"""Runs a function of a test module on several ranks: processes of their own, as torchrun would start them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """How one rank ended; negative: by which signal."""

    code: int
    output: str
    at: float
    """`time.monotonic()` when it was seen."""


def run_ranks(function: str, folder: Path, *words: str, size: int = 2, limit_s: float = 150.0) -> list[Ended]:
    """Call `module:function(folder, *words)` on each of `size` ranks; how they ended, by rank.

    Args:
        folder: where the ranks meet, too.
    """
    module, name = function.split(":")
    code = f"import os, sys; from pathlib import Path; from {module} import {name}; "
    code += f"code = {name}(Path(sys.argv[1]), *sys.argv[2:]); sys.stdout.flush(); os._exit(code)"
    processes = []
    for rank in range(size):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
        }  # fmt: skip
        with (folder / f"output.{rank}").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code, str(folder), *words], env=env, stdout=output, stderr=output
                )
            )
    ends: dict[int, float] = {}
    until = time.monotonic() + limit_s
    while len(ends) < size and time.monotonic() < until:
        ends |= {r: time.monotonic() for r, p in enumerate(processes) if r not in ends and p.poll() is not None}
        time.sleep(0.02)
    for process in processes:
        process.kill()  # none is left, unless a test is to fail
        process.wait()
    return [
        Ended(process.returncode, (folder / f"output.{rank}").read_text(), ends.get(rank, float("inf")))
        for rank, process in enumerate(processes)
    ]
