"""Bytes a parameter that an optimizer step takes, by optimizer and master weights: before it, at its peak, after it.

    python -m benchmarks.optimizer_memory
    python -m benchmarks.optimizer_memory --parameters 8e8 --device cuda

Weights are bfloat16 and all of them are trained. Each row is a process of its own, and its second step: the first makes
the optimizer's state. On a CPU the figures are of the whole process, less what it had before the weights, on a GPU of
PyTorch's allocator. A step goes by parts of a fixed size (64 million parameters), which is a hundredth of a large model
and most of what fits here, so `--part` makes it as small a share.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from trainer_core import optim
from trainer_core.config import TrainingConfig

SIDE = 1024
"""Rows and columns of each weight."""
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
"""Freed memory of a tensor goes back to the system, so that it is not counted."""


class Peak:
    """Memory in use, and the most since the last look."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def now(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else self._status("VmRSS")

    def most(self) -> int:
        most = torch.cuda.max_memory_allocated() if self.cuda else self._status("VmHWM")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        return most

    def _status(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024


def steps(optimizer: str, masters: str, shapes: list[tuple[int, int]], memory: Peak, device: torch.device) -> list[int]:
    """Bytes before, within and after the second step over weights of these shapes."""
    model = torch.nn.ParameterList(torch.randn(shape, device=device).mul_(0.02).bfloat16() for shape in shapes)
    config = TrainingConfig(model_name="m", optimizer=optimizer, master_weights=masters, lr=1e-3)
    stepper = optim.Stepper(model, config)
    for step in (1, 2):
        for param in model:
            (param * 1e-3).sum().backward()
        stepper.set_lr(step)
        memory.most()
        before = memory.now()
        stepper.clip()
        stepper.compute()
        stepper.write()
    return [before, memory.most(), memory.now()]


def measure(optimizer: str, masters: str, options: argparse.Namespace) -> list[float]:
    """Bytes a parameter of one row."""
    device = torch.device(options.device)
    optim.PART_PARAMETERS = int(options.part)
    memory = Peak(device.type == "cuda")
    steps(optimizer, masters, [(64, 64)], memory, device)  # what torch itself takes, once
    base = memory.now()
    count = int(options.parameters) // SIDE**2
    return [
        (value - base) / count / SIDE**2 for value in steps(optimizer, masters, [(SIDE, SIDE)] * count, memory, device)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=3e7)
    parser.add_argument("--part", type=float, default=1 << 20, help="parameters that are stepped at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "adafactor"])
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(*options.row, options)))
        return
    print(f"{'':<24}{'before':>8}{'peak':>8}{'kept':>8}   bytes a parameter")
    for optimizer in options.optimizers:
        for masters in ("fp32", "kahan", "stochastic"):
            command = [sys.executable, "-m", "benchmarks.optimizer_memory", *sys.argv[1:], "--row", optimizer, masters]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | RETURN_AT_ONCE)
            row = json.loads(done.stdout.splitlines()[-1])
            print(f"{optimizer + ' ' + masters:<24}" + "".join(f"{value:>8.1f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
