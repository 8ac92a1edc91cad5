"""Make recorded runs that differ, to try the list of runs and the comparison by hand.

    python -m benchmarks.cockpit.several FOLDER
    cd FOLDER && atropos-tui

They are below FOLDER/runs: five learning rates and seeds with different rewards, one whose trainer
waits for rollouts, and one that failed. Their figures come from a seeded generator.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from atropos_common.protocol.control import Role, State
from atropos_common.protocol.records import StateRecord
from atropos_common.system.run_dir import RunDir
from tests.support.run_maker import PARTS, T0, make_run, write_records

GROUPS, GROUP_SIZE = 2, 8
"""Recorded groups of a step, and completions of each."""


class Recipe(NamedTuple):
    """Figures of one run."""

    name: str
    age_h: float
    lr: str = "2e-4"
    group_size: int = 8
    seed: int = 0
    gain: float = 1.0
    """Part of the possible rise of the reward that it reaches."""
    waits: float = 1.0
    """Factor of the time for which the trainer waits for a batch."""
    steps: int = 60
    code: int = 0
    reason: str = "the trainer is done"


RECIPES = (
    Recipe("lr-2e-4", 0.4),
    Recipe("lr-2e-4-again", 1.2, seed=1, gain=0.97),
    Recipe("lr-5e-4", 3, lr="5e-4", gain=1.12),
    Recipe("lr-1e-3", 5, lr="1e-3", gain=0.3),
    Recipe("lr-5e-5", 26, lr="5e-5", gain=0.55),
    Recipe("few-workers", 30, waits=9.0, gain=0.98),
    Recipe("broken", 50, steps=11, code=3, reason="trainer exited with 1: CUDA out of memory"),
)


def make(folder: Path, recipe: Recipe) -> RunDir:
    """Write one run below `folder`."""
    run = make_run(folder / recipe.name, recipe.steps, 60, recipe.seed)
    began = time.time() - 3600 * recipe.age_h
    run.run_json.write_text(json.dumps({"run_id": recipe.name, "started_at": began}))
    plan = json.loads(run.plan_json.read_text()) | {"run_id": recipe.name, "name": "arithmetic"}
    run.plan_json.write_text(json.dumps(plan))
    stops = [
        StateRecord(
            time=T0 + 31 + 0.33 * recipe.steps + 1,
            component=name,
            role=role,
            old=State.STOPPING if role is not Role.TRAINER else State.HEALTHY,
            new=_end(role, recipe.code),
            attempt=1,
            reason="the run is over",
        )
        for name, role in PARTS
        if role is not Role.PREPARE
    ]
    write_records(run.supervisor_jsonl, list(stops), start=100)
    run.profile_toml.write_text(
        'name = "arithmetic"\nmode = "shared_vllm"\nmodel = "arithmetic-0.8M"\n'
        f"seed = {recipe.seed}\n[trainer]\nlr = {recipe.lr}\n[[env]]\nname = "
        f'"arithmetic"\ngroup_size = {recipe.group_size}\n'
    )
    rng = random.Random(recipe.seed)
    for path in (run.supervisor_jsonl, run.eval_jsonl("arithmetic"), run.telemetry_jsonl):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        told = (line for record in records for line in _told(record, recipe, rng, began - T0))
        # Without spaces, as the programs write them: the list of runs looks for `"kind":"step"`.
        lines = [json.dumps(line, separators=(",", ":")) for line in told]
        path.write_text("".join(f"{line}\n" for line in lines))
        ended = json.loads(lines[-1])["time"]
    result = {"exit_code": recipe.code, "reason": recipe.reason, "ended_at": ended + 2}
    run.result_json.write_text(json.dumps(result))
    return run


def _end(role: Role, code: int) -> State:
    if role is Role.TRAINER:
        return State.FAILED if code else State.COMPLETED
    return State.STOPPED


def _told(
    record: dict[str, Any], recipe: Recipe, rng: random.Random, later: float
) -> Iterator[dict[str, Any]]:
    # The record with the recipe's figures; groups of rollouts instead of single ones.
    # The first 31 s are the start; nearly half of a step is the wait.
    more = max(0.0, record["time"] - T0 - 31) * 0.45 * (recipe.waits - 1)
    record["time"] += later + more
    if record["kind"] == "rollout":
        return
    if record["kind"] == "step":
        record["reward_mean"] = 0.5 + recipe.gain * (record["reward_mean"] - 0.5)
    if record["kind"] == "eval":
        record["accuracy"] = 0.2 + recipe.gain * (record["accuracy"] - 0.2)
    if record["kind"] == "timing":
        more = record["data_wait_s"] * (recipe.waits - 1)
        record["tokens_per_s"] *= record["step_s"] / (record["step_s"] + more)
        record["data_wait_s"] += more
        record["engine_idle_fraction"] = 0.08 + 0.8 * more / (record["step_s"] + more)
        record["step_s"] += more
    yield record
    if record["kind"] == "sync":
        for _ in range(GROUPS):
            yield from _group(record, recipe, rng)


def _group(record: dict[str, Any], recipe: Recipe, rng: random.Random) -> Iterator[dict[str, Any]]:
    a, b = rng.randrange(20, 90), rng.randrange(20, 90)
    errors = [
        0
        if rng.random() < 0.4 + 0.5 * recipe.gain * record["step"] / 60
        else rng.choice((-10, -1, 1, 10))
        for _ in range(GROUP_SIZE)
    ]
    rewards = [1.0 if error == 0 else 0.2 if abs(error) == 1 else 0.0 for error in errors]
    mean = sum(rewards) / GROUP_SIZE
    common = {key: record[key] for key in ("v", "run_id", "time", "step", "attempt", "rank", "seq")}
    for error, reward in zip(errors, rewards, strict=True):
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        yield common | {
            "kind": "rollout",
            "env": "arithmetic",
            "prompt": f"What is {a} + {b}? Think first.",
            "completion": f"The tens give {tens}, the ones give {ones + error}. Together they are "
            f"{a + b + error}.\nAnswer: {a + b + error}",
            "reward": reward,
            "advantage": round(reward - mean, 3),
            "policy_lag": 1.0,
            "group_size": GROUP_SIZE,
            "tokens": rng.randrange(24, 60),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder / "runs"
    for recipe in RECIPES:
        make(folder, recipe)
    print(f"{len(RECIPES)} runs in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
