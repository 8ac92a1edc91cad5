"""Measure bytes for each parameter of an optimizer step, by optimizer, masters and offload.

    python -m benchmarks.trainer.optimizer_memory
    python -m benchmarks.trainer.optimizer_memory --parameters 8e8 --device cuda --part 6.7e7

Weights are bfloat16, counted, and all of them are trained. Host memory is shown
apart. Each row is a process of its own, and its second step: the first makes the optimizer's state.
On a CPU the figures are of the whole process, less what it had before the weights and what an
offload keeps; on a GPU of PyTorch's allocator. A step goes by parts of a fixed size (64 million
parameters), which is a hundredth of a large model and most of what fits here, so `--part` makes it
as small a share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from trainer_core.config import TrainingConfig
from trainer_core.optimization import optimizers as optim

SIDE = 512
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


Row = tuple[str, str, str, str]
"""Optimizer, master weights, type of the gradients, and where the rest lies: device or host."""


def steps(row: Row, shapes: list[tuple[int, int]], memory: Peak, device: torch.device) -> list[int]:
    """Bytes before, within and after the second step over weights of these shapes, and those in the
    host's memory."""
    optimizer, masters, gradients, place = row
    model = torch.nn.ParameterList(
        torch.randn(shape, device=device).mul_(0.02).bfloat16() for shape in shapes
    )
    config = TrainingConfig.model_validate(
        {
            "model_name": "m",
            "optimizer": optimizer,
            "master_weights": masters,
            "lr": 1e-3,
            "gradient_dtype": gradients,
            "optimizer_offload": place == "host",
        }
    )
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
    away = 0 if stepper.host is None else stepper.host.bytes
    counted = [before, memory.most(), memory.now()]
    return [value - (0 if memory.cuda else away) for value in counted] + [away]


def measure(row: Row, options: argparse.Namespace) -> list[float]:
    """Bytes a parameter of one row."""
    device = torch.device(options.device)
    optim.PART_PARAMETERS = int(options.part)
    memory = Peak(device.type == "cuda")
    steps(row, [(64, 64)], memory, device)  # what torch itself takes, once
    base = memory.now()
    count = int(options.parameters) // SIDE**2
    *counted, away = steps(row, [(SIDE, SIDE)] * count, memory, device)
    return [value / count / SIDE**2 for value in [*(value - base for value in counted), away]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1.6e7)
    parser.add_argument(
        "--part", type=float, default=1 << 18, help="parameters that are stepped at a time"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "adamw_8bit", "adafactor"])
    parser.add_argument(
        "--model-size",
        type=float,
        default=8.03e9,
        help="parameters of the model in the last column",
    )
    parser.add_argument("--row", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row, options)))
        return
    print(
        f"{'':<42}{'before':>8}{'peak':>8}{'kept':>8}{'host':>8}   bytes a parameter; GiB at "
        f"the peak, in the host"
    )
    wanted = itertools.product(
        options.optimizers,
        ("fp32", "kahan", "stochastic"),
        ("float32", "bfloat16"),
        ("device", "host"),
    )
    for row in wanted:
        command = [
            sys.executable,
            "-m",
            "benchmarks.trainer.optimizer_memory",
            *sys.argv[1:],
            "--row",
            *row,
        ]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | RETURN_AT_ONCE
        )
        found = json.loads(done.stdout.splitlines()[-1])
        whole = (found[i] * options.model_size / 2**30 for i in (1, 3))
        print(
            f"{' '.join(row):<42}"
            + "".join(f"{value:>8.1f}" for value in found)
            + "   "
            + "".join(f"{value:>8.1f}" for value in whole),
            flush=True,
        )


if __name__ == "__main__":
    main()
