"""Compare `[env] curriculum = "pass_rate"` with "none": useful groups per generated token.

    python -m benchmarks.rollouts.curriculum [--simulated] [--demo] [--steps 60]
        [--set KEY=VALUE]... [--seeds 0 1 2] [--json]

A group is useful if its scores differ. Without a flag both parts run:

- simulated: a learner solves problem i with probability sigmoid(skill - d_i), where d_i is normally
  distributed, and every useful group raises its skill. The curriculum is the real one. Both runs
  of a pair generate the same number of tokens.
- demo: the demo stack (tiny model, vLLM on the CPU, trainer), once with each setting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from atropos_common.system.run_dir import RunDir
from atropos_envs.hosting.curriculum import Curriculum, key_of
from benchmarks.demo import prepare
from benchmarks.support.checks import Checks
from benchmarks.support.children import free_ports, up

GROUP = 8
TOKENS_RIGHT, TOKENS_WRONG = 300, 450
"""Tokens of a simulated completion."""
MIDDLE = 0.1
"""Pass rates from here to 1 minus this are called middle."""
SETTINGS = "none", "pass_rate"
LEAST_GAIN = 1.15
"""Promised ratio of useful groups per token, from the second pass over the problems on."""
LEAST_RATIO = 0.95
"""Promised ratio elsewhere: it costs nothing."""
NO_GAIN = "1 pass", "5 passes, few flat"
"""Simulated worlds in which there is nothing to gain."""


@dataclass(frozen=True)
class World:
    """A simulated data set and learner."""

    name: str
    problems: int
    passes: float
    """Budget of generated tokens, in passes over the problems."""
    spread: float = 4.0
    """Standard deviation of the difficulty; 4 makes half of the first groups flat."""
    gain: float = 1 / 1000
    """Gain in skill by a useful group at pass rate 0.5."""

    @property
    def tokens(self) -> float:
        return self.problems * self.passes * GROUP * (TOKENS_RIGHT + TOKENS_WRONG) / 2


WORLDS = (
    World("1 pass", 2000, 1),
    World("2 passes", 2000, 2),
    World("5 passes", 2000, 5),
    World("20 passes", 500, 20),
    World("5 passes, no learning", 2000, 5, gain=0.0),
    World("5 passes, two thirds flat", 2000, 5, spread=7.0),
    World("5 passes, few flat", 2000, 5, spread=1.0),
)


@dataclass(frozen=True)
class Outcome:
    world: str
    setting: str
    useful_per_million: float
    """Useful groups per million generated tokens."""
    flat_share: float
    unused_tokens: float
    """Share of the generated tokens that are in flat groups."""
    accuracy_first: float
    accuracy_last: float
    low: float
    """Share of the useful groups from problems with a pass rate below `MIDDLE`."""
    high: float
    """Share of the useful groups from problems with a pass rate above 1 - `MIDDLE`."""


def simulate(world: World, setting: str, seed: int) -> Outcome:
    dice, order = random.Random(seed), random.Random(seed + 1)
    # A mean above the learner's skill: a little less than half of the problems are solved.
    difficulty = [dice.gauss(1.0, world.spread) for _ in range(world.problems)]
    skill, tokens, unused, queue = 0.0, 0, 0, list[int]()
    groups, bands = Counter[bool](), Counter[str]()

    def rate(problem: int) -> float:
        return 1 / (1 + math.exp(difficulty[problem] - skill))

    def accuracy() -> float:
        return mean(map(rate, range(world.problems)))

    async def draw() -> int:
        if not queue:
            queue.extend(order.sample(range(world.problems), world.problems))
        return queue.pop()

    curriculum = Curriculum(dice=random.Random(seed + 2), group_size=GROUP)
    first = accuracy()

    async def work() -> None:
        nonlocal skill, tokens, unused
        while tokens < world.tokens:
            problem = await (curriculum.choose(draw) if setting == "pass_rate" else draw())
            p = rate(problem)
            scores = [float(dice.random() < p) for _ in range(GROUP)]
            right = sum(scores)
            made = round(right * TOKENS_RIGHT + (GROUP - right) * TOKENS_WRONG)
            flat = len(set(scores)) == 1
            tokens, unused = tokens + made, unused + made * flat
            groups[flat] += 1
            if not flat:
                bands["low" if p < MIDDLE else "high" if p > 1 - MIDDLE else "middle"] += 1
                share = right / GROUP
                skill += world.gain * 4 * share * (1 - share)
            if setting == "pass_rate":
                curriculum.learn(key_of(problem), [scores])

    asyncio.run(work())
    return Outcome(
        world.name,
        setting,
        groups[False] / tokens * 1e6,
        groups[True] / groups.total(),
        unused / tokens,
        first,
        accuracy(),
        bands["low"] / groups[False],
        bands["high"] / groups[False],
    )


def averaged(outcomes: list[Outcome]) -> Outcome:
    """Return the means over the seeds."""
    first, *_ = outcomes
    numbers = {
        name: mean(getattr(each, name) for each in outcomes)
        for name, value in asdict(first).items()
        if isinstance(value, float)
    }
    return Outcome(first.world, first.setting, **numbers)


def measure(setting: str, seed: int, asked: argparse.Namespace, folder: Path) -> Outcome:
    """Run the demo with this setting and read its environment's counts."""
    prepare("demo", seed)
    root = folder / f"{setting}-{seed}"
    api, engine = free_ports(2)
    sets = {
        "seed": seed,
        "api.port": api,
        "vllm.port": engine,
        "env.curriculum": setting,
        "trainer.training_steps": asked.steps,
    } | dict(each.split("=", 1) for each in asked.set)
    done = subprocess.run(
        up("demo", root, sets),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the demo ended with {done.returncode}: {done.stdout.decode()[-2000:]}")
    lines = RunDir(root).eval_jsonl("arithmetic").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    counts = [each for each in records if each["kind"] == "env_counts"][-1]
    held_out = [each["accuracy"] for each in records if each.get("split") == "held_out"]
    flat = counts["sent_flat"] + counts["left_out"].get("flat", 0)
    unused = counts["sent_flat_tokens"] + counts["left_out_tokens"].get("flat", 0)
    made = counts["sent"] + sum(counts["left_out"].values())
    tokens = counts["sent_tokens"] + sum(counts["left_out_tokens"].values())
    useful = counts["sent"] - counts["sent_flat"]
    nan = float("nan")
    return Outcome(
        f"demo, {asked.steps} steps",
        setting,
        useful / tokens * 1e6,
        flat / made,
        unused / tokens,
        held_out[0],
        held_out[-1],
        nan,
        nan,
    )


HEAD = (
    f"{'':26} {'curriculum':10} {'useful/M tokens':>15} {'ratio':>6} {'flat':>6} "
    f"{'tokens unused':>13} {'accuracy':>14} {'useful from p<.1':>17} {'p>.9':>6}"
)


def show(before: Outcome, after: Outcome) -> float:
    """Print both rows; return the ratio of useful groups per token."""
    ratio = after.useful_per_million / before.useful_per_million
    for each, text in ((before, ""), (after, f"{ratio:.2f}")):
        print(
            f"{each.world:26} {each.setting:10} {each.useful_per_million:15.0f} {text:>6} "
            f"{each.flat_share:6.1%} {each.unused_tokens:13.1%} "
            f"{each.accuracy_first:5.1%} -> {each.accuracy_last:5.1%} {each.low:17.1%} "
            f"{each.high:6.1%}",
            flush=True,
        )
    return ratio


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.rollouts.curriculum",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--simulated", action="store_true", help="only this part")
    parser.add_argument("--demo", action="store_true", help="only this part")
    parser.add_argument("--steps", type=int, default=60, help="training steps of the demo")
    parser.add_argument(
        "--set", action="append", default=[], help="KEY=VALUE of the demo's profile"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    both = asked.simulated == asked.demo
    os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp(prefix="atropos-bench-"))
    pairs: list[list[Outcome]] = []
    if both or asked.simulated:
        for world in WORLDS:
            pairs.append(
                [
                    averaged([simulate(world, each, seed) for seed in asked.seeds])
                    for each in SETTINGS
                ]
            )
    if both or asked.demo:
        with tempfile.TemporaryDirectory(prefix="atropos-curriculum-") as folder:
            # Alternately, so that both settings meet the same load of the machine.
            runs = [
                [measure(each, seed, asked, Path(folder)) for each in SETTINGS]
                for seed in asked.seeds
            ]
        pairs.append([averaged(list(each)) for each in zip(*runs, strict=True)])
    checks = Checks()
    if asked.json:
        rows = [asdict(each) for pair in pairs for each in pair]
        # JSON has no NaN.
        known = [{name: value for name, value in row.items() if value == value} for row in rows]
        print(json.dumps({"runs": known}))
    else:
        print(HEAD)
    for before, after in pairs:
        ratio = after.useful_per_million / before.useful_per_million
        if not asked.json:
            show(before, after)
        if before.world in {world.name for world in WORLDS}.difference(NO_GAIN):
            checks.at_least(f"the gain of {before.world}", ratio, LEAST_GAIN)
        checks.at_least(f"the ratio of {before.world}", ratio, LEAST_RATIO)
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
