"""Train on environments of other authors in one real stack on one GPU; print each one's reward.

    python -m benchmarks.environment_curves --model FOLDER [--minutes 4] [--only PART ...]
        [--run-dir DIR] [--set KEY=VALUE ...] [--json]

The default environments: verifiers with two reward functions, two of reasoning-gym through
verifiers, OpenEnv, and an agent, which only knows an OpenAI-compatible address. All of them feed
one trainer. They also send flat groups, so a reward is the mean over all completions.
`make environments` installs their packages. With `--cpu` a step has one group of eight
completions, which SmolLM2-135M generates in a few seconds.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w

from atropos_common.protocol.record_tail import RecordTail
from atropos_common.system.run_dir import RunDir
from benchmarks.environments import keys_of, listed, slug
from benchmarks.support.checks import Checks
from benchmarks.support.children import free_ports, up
from trainer_core.rollouts.fields import environment

RECORDING = "rollouts.jsonl"
GROUP = 8
GROUPS_A_STEP = 16
ENDS = 0.2
"""Share of an environment's groups over which the first and the last mean reward are taken."""
FEWEST_GROUPS = 40
START_S = 300.0
DOWN_S = 120.0
NAMES = (
    "sums_vf",
    "reasoning-gym coin_flip",
    "reasoning-gym gcd",
    "openenv pick_digit",
    "agent plain_agent.py",
)
"""Entries of `environments.toml` that run by default."""


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stops a running stack
    names = chosen(options.only)
    with tempfile.TemporaryDirectory() as made:
        root = options.run_dir or Path(made) / "run"
        profile = root.with_suffix(".toml")
        profile.write_text(tomli_w.dumps(profile_of(names, options.model, cpu=options.cpu)))
        play(profile, root, options)
        rows = rewards(root / RECORDING, names)
    if options.json:
        print(json.dumps(rows))
    else:
        print(table(rows))
    checks = Checks()
    for name, row in rows.items():
        checks.at_least(f"groups of {name}", row["groups"], FEWEST_GROUPS)
        if row["groups"]:
            rise = row["last"] - row["first"]
            checks.that(rise > 0, f"the reward of {name} does not rise: {rise:+.2f}")
    return checks.status()


def chosen(parts: list[str]) -> list[str]:
    """Return the names in `environments.toml` that equal or contain one of `parts`; by default
    `NAMES`."""
    known = [each["name"] for each in listed()]
    wanted = {
        name
        for part in parts
        for name in known
        if name == part or (part in name and part not in known)
    }
    return [name for name in known if name in wanted] if parts else [*NAMES]


def profile_of(names: list[str], model: Path, *, cpu: bool) -> dict[str, Any]:
    """Return the profile of one stack with these environments."""
    api, engine, *ports = free_ports(2 + len(names))
    args = {
        "env.group_size": GROUP,
        "env.max_tokens": 128,
        "env.steps_per_eval": 0,
        "env.ensure_scores_are_not_same": False,
    }
    environments = []
    entries = {each["name"]: each for each in listed()}
    for name, port in zip(names, ports, strict=True):
        each = entries[name]
        keys = keys_of(each)
        if "openenv" in keys:
            keys["openenv_port"] = port
        environments.append({"name": slug(name), **keys, "args": args | each.get("args", {})})
    on_gpu = {"gpus": [0], "gpu_memory_utilization": 0.3}
    on_cpu = {"env": {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    small = {"enforce-eager": True, "kv-cache-memory-bytes": 2**27, "block-size": 32}
    trainer_gpu = {"gpus": [0], "in_flight": "reuse", "pack_tokens": 8192}
    trainer_cpu = {"device": "cpu", "dtype": "float32", "env": {"OMP_NUM_THREADS": "1"}}
    return {
        "name": "environment-curves",
        "mode": "none" if cpu else "shared_vllm",
        "model": str(model),
        "seed": 0,
        "api": {"port": api},
        "env": environments,
        "vllm": {
            "port": engine,
            "max_model_len": 1024,
            **(on_cpu if cpu else on_gpu),
            "args": {
                "max-num-seqs": 128 if cpu else 512,
                "enable-auto-tool-choice": True,
                "tool-call-parser": "hermes",
                **(small if cpu else {"distributed-executor-backend": "mp"}),
            },
        },
        "trainer": {
            "training_steps": 1_000_000,
            "batch_size": GROUP,
            "gradient_accumulation_steps": 1 if cpu else GROUPS_A_STEP,
            "lr": 3e-6,
            "warmup_steps": 5,
            "checkpoint_interval": 0,
            "record_rollouts": RECORDING,
            **(trainer_cpu if cpu else trainer_gpu),
        },
    }


def play(profile: Path, root: Path, options: argparse.Namespace) -> None:
    """Run the stack until `options.minutes` after its first step."""
    command = up(profile, root, dict(each.split("=", 1) for each in options.set))
    run, began, first = RunDir(root), time.monotonic(), None
    tail, output = RecordTail(run.telemetry_jsonl), root.with_suffix(".log")
    with output.open("wb") as file:
        stack = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        end = began + START_S
        while stack.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
            if first is None and any(each.kind == "step" for each in tail.rest()):
                first = time.monotonic()
                end = first + 60 * options.minutes
                print(f"first step after {first - began:.0f} s", flush=True)
    finally:
        stack.send_signal(signal.SIGTERM)
        stack.wait(DOWN_S)
    if first is None:
        raise SystemExit(f"no step within {START_S:.0f} s: see {output}")


def rewards(recording: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return each environment's number of groups, and the mean score of the first and the last."""
    scores: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with recording.open("rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            for group in json.loads(line)["batch"]:
                scores[environment(group) or ""].append((number, mean(group["scores"])))
    found = {}
    for name in names:
        own = scores.get(slug(name), [])
        part = max(1, int(ENDS * len(own)))
        means = [score for _, score in own]
        found[name] = {
            "groups": len(own),
            "steps": len({number for number, _ in own}),
            "first": mean(means[:part]) if own else None,
            "last": mean(means[-part:]) if own else None,
            "curve": [round(mean(means[at : at + part]), 4) for at in range(0, len(means), part)],
        }
    return found


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each environment."""
    lines = [
        "| environment | groups of 8 | steps with it | reward, first fifth | last fifth |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        ends = [f"{row[at]:.2f}" if row[at] is not None else "" for at in ("first", "last")]
        lines.append(f"| {name} | {row['groups']} | {row['steps']} | {' | '.join(ends)} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--only", nargs="*", metavar="PART", default=[])
    parser.add_argument(
        "--run-dir", type=Path, help="run directory, which is kept; default: a temporary folder"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
