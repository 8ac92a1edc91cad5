"""Run a function of a test module on several ranks: processes of their own, as torchrun would start
them.

They are forked from a process that has imported torch and the trainer, one for all ranks of a test
process: most of what a rank costs is that import. `trainer_core/ranks/test_loop.py` starts some as
a command line does.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.nursery import TRAINER, forked


@dataclass(frozen=True)
class Ended:
    """How one rank ended; negative: by which signal."""

    code: int
    output: str
    at: float
    """`time.monotonic()` when it was seen."""


def selected(request: pytest.FixtureRequest, argument: str) -> list[str]:
    """The values of a parameter in the tests of the module that are run, for a fixture that makes
    them all at once."""
    items = [
        item for item in request.session.items if getattr(item, "module", None) is request.module
    ]
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(str(params[argument]) for params in calls if argument in params))


def be_rank(words: list[str]) -> None:
    """Run the function of a rank."""
    call, folder, *more = words
    module, name = call.split(":")
    code = getattr(importlib.import_module(module), name)(Path(folder), *more)
    sys.stdout.flush()
    os._exit(code)


def run_ranks(
    function: str, folder: Path, *words: str, size: int = 2, limit_s: float = 150.0
) -> list[Ended]:
    """Call `module:function(folder, *words)` on each of `size` ranks; how they ended, by rank.

    Args:
        folder: where the ranks meet, too.
    """
    processes = []
    for rank in range(size):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        args = [function, str(folder), *words]
        processes.append(
            forked(TRAINER, "tests.support.ranks:be_rank", args, folder / f"output.{rank}", env=env)
        )
    ends: dict[int, float] = {}
    until = time.monotonic() + limit_s
    while len(ends) < size and time.monotonic() < until:
        ends |= {
            r: time.monotonic()
            for r, p in enumerate(processes)
            if r not in ends and p.poll() is not None
        }
        time.sleep(0.02)
    for process in processes:
        process.kill()  # none is left, unless a test is to fail
    return [
        Ended(process.wait(), (folder / f"output.{rank}").read_text(), ends.get(rank, float("inf")))
        for rank, process in enumerate(processes)
    ]
