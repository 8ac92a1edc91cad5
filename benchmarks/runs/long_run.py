"""Measure what grows in a long run: process memory, file sizes, attach time, step time.

    python -m benchmarks.runs.long_run [--steps 10000] [--every 10] [--mode lora_only]
        [--set trainer.batch_size=16 ...] [--samples FILE] [--json]
    python -m benchmarks.runs.long_run --table FILE    # of earlier samples

One demo of `--steps` steps with a screen attached throughout. Every few seconds a sample: the
step, the memory that each process has for itself, the bytes of each file or folder of the run, the
median step time since the last sample; ten times, how long a second screen takes from the command
to the run's numbers. Over the samples after the first fifth a line is fitted by least squares: what
grows by step, with its standard error, and what that makes of 10,000 steps. Growth counts where it
is more than three standard errors and `WORTH` of the value at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil

from benchmarks.demo import prepare
from benchmarks.restarts import MODES
from benchmarks.runs.demo_stack import NotRecovered, Stack
from benchmarks.runs.faults import processes
from benchmarks.ui import Screen

FIRST = 0.2
"""The share of samples that are left out of the fit: caches fill."""
FAR = 10_000
WORTH = 0.01
ATTACHES = 10


@dataclass(frozen=True)
class Line:
    """Least squares over steps: value at the first and the last sample, growth by step and its
    standard error."""

    first: float
    last: float
    slope: float
    error: float

    @property
    def grows(self) -> bool:
        return self.slope > 3 * self.error and self.slope * FAR > WORTH * self.last


def fit(steps: list[float], values: list[float]) -> Line:
    """The line through `values`; three samples at least.

    Raises:
        ValueError: there are fewer, or all are of one step.
    """
    if len(steps) < 3 or len(set(steps)) == 1:
        raise ValueError("a line needs three samples of different steps")
    x, y = mean(steps), mean(values)
    spread = sum((step - x) ** 2 for step in steps)
    slope = (
        sum((step - x) * (value - y) for step, value in zip(steps, values, strict=True)) / spread
    )
    rest = sum(
        (value - y - slope * (step - x)) ** 2 for step, value in zip(steps, values, strict=True)
    )
    return Line(values[0], values[-1], slope, (rest / (len(steps) - 2) / spread) ** 0.5)


def samples(stack: Stack, steps: int, every: float) -> Iterator[dict[str, float]]:
    """Samples until the run ends; `step` beside values named `memory NAME`, `file NAME`, `step_s`
    and `attach_s`."""
    stack.wait(lambda: len(stack.steps()) >= 2, "the first steps")
    screen, attached, timed = Screen(stack.live.root), 0, 0
    try:
        while stack.live.process is not None and stack.live.process.poll() is None:
            step = stack.steps()[-1][1]
            sample: dict[str, float] = {"step": step, "load": os.getloadavg()[0]}
            with contextlib.suppress(NotRecovered, psutil.Error):  # it ends
                for name, process in processes(stack).items():
                    sample[f"memory {name}"] = process.memory_full_info().uss
            sample |= files(stack.live.root)
            moments = [moment for moment, _ in stack.steps()]
            if moments[timed + 1 :]:
                sample["step_s"] = median(
                    later - earlier for earlier, later in pairwise(moments[timed:])
                )
                timed = len(moments) - 1
            if step * ATTACHES // steps >= attached:
                attached = step * ATTACHES // steps + 1
                sample["attach_s"] = attach(stack, steps)
            yield sample
            time.sleep(every)
    finally:
        screen.process.kill()


def attach(stack: Stack, steps: int) -> float:
    """Seconds until another screen shows the run's numbers."""
    screen = Screen(stack.live.root)
    try:
        return screen.wait(f"/{steps}".encode(), timeout_s=60) - screen.began
    finally:
        screen.process.kill()


def files(root: Path) -> dict[str, float]:
    """Bytes below each entry of the run directory, and of each component's logs."""
    entries = [path for path in root.iterdir() if path.name != "logs"] + list(
        (root / "logs").iterdir()
    )
    return {f"file {path.relative_to(root)}": size(path) for path in entries}


def size(path: Path) -> float:
    total = 0.0
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with contextlib.suppress(OSError):  # gone since
            total += each.stat().st_size
    return total


def lines(taken: list[dict[str, float]]) -> dict[str, Line]:
    """A line for each value of the samples, where there are enough."""
    kept = taken[int(len(taken) * FIRST) :]
    found = {}
    for name in sorted({name for sample in kept for name in sample} - {"step", "load"}):
        have = [sample for sample in kept if name in sample]
        with contextlib.suppress(ValueError):
            found[name] = fit(
                [sample["step"] for sample in have], [sample[name] for sample in have]
            )
    return found


def table(taken: list[dict[str, float]]) -> str:
    """As Markdown; bytes in kB, seconds as they are."""
    rows = ["| | first | last | by step | in 10,000 steps | |", "|---|---|---|---|---|---|"]
    for name, line in lines(taken).items():
        unit, scale = ("s", 1.0) if name.endswith("_s") else ("kB", 1e3)
        by_step = f"{line.slope / scale:.3g} ± {line.error / scale:.1g} {unit}"
        far = f"{line.slope * FAR / scale:,.1f}"
        rows.append(
            f"| {name} | {line.first / scale:,.2f} | {line.last / scale:,.2f} | {by_step} | "
            f"{far} | "
            f"{'grows' if line.grows else ''} |"
        )
    loads = [sample["load"] for sample in taken]
    told = (
        f"{len(taken)} samples to step {taken[-1]['step']:.0f}; load average {min(loads):.0f} to "
        f"{max(loads):.0f}"
    )
    return "\n".join([*rows, "", told])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--mode", choices=MODES, default="shared_vllm")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the profile"
    )
    parser.add_argument("--samples", type=Path, help="append a JSON line for each sample")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="only print the table of these samples"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # its run is ended like that of an interrupted one
    prepare("demo", 0)
    taken = []
    with tempfile.TemporaryDirectory(prefix="long-") as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        given: dict[str, Any] = {
            "trainer.training_steps": options.steps,
            "trainer.keep_checkpoints": 2,
        }
        given |= dict(pair.split("=", 1) for pair in options.set)
        stack = Stack(Path(folder, "run"), options.mode, workers=1, profile="demo", given=given)
        stack.live.up()
        try:
            for sample in samples(stack, options.steps, options.every):
                taken.append(sample)
                if options.samples:
                    with options.samples.open("a") as stream:
                        stream.write(json.dumps(sample) + "\n")
        finally:
            stack.live.close()
    print(
        json.dumps({name: vars(line) for name, line in lines(taken).items()})
        if options.json
        else table(taken)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
