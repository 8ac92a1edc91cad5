"""The demo's numbers over several seeds: start-up, step time, learning, alignment, policy lag, memory.

    python benchmarks/demo.py [--seeds 0 1 2] [--json]

Each seed is one real `atropos-tui up demo --headless` with its own warm-started model, prepared beforehand so that
start-up is measured without it. Memory is the proportional set size of every process that carries the run's marker.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from atropos_tui.stack.variables import cache_dir
from trainer_core.contracts.records import parse_line
from trainer_core.contracts.run_dir import ENV_RUN_ID, RunDir

SAMPLE_S = 2.0
LIMITS = {
    "exit_code": ("<=", 0),
    "steps": (">=", 60),
    "first_step_s": ("<", 40.0),
    "run_s": ("<", 90.0),
    "step_s": ("<", 0.5),
    "reward_last5": (">=", 0.88),
    "reward_gain": (">=", 0.3),
    "held_out_gain": (">=", 0.3),
    "lag_max": ("<=", 1.0),
    "probe_abs_mean_max": ("<", 1e-5),
    "pss_gib": ("<", 3.0),
}
"""What the demo promises."""


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def pss_of(run_id: str, supervisor: psutil.Process) -> int:
    """Bytes of all processes of a run, the supervisor and its guard too, shared pages split among their users."""
    total = 0
    own = {supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.pid in own or process.environ().get(ENV_RUN_ID) == run_id:
                total += process.memory_full_info().pss
        except (psutil.Error, OSError):
            continue
    return total


def measure(seed: int, folder: Path) -> dict[str, Any]:
    """Prepare the seed's model, run the demo, and read its files."""
    model = cache_dir() / f"arithmetic-seed{seed}"
    began = time.time()
    if not model.exists():
        command = [sys.executable, "-m", "atropos_envs.warm_start", "--output", str(model), "--seed", str(seed)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    prepared = time.time()
    root = folder / f"seed{seed}"
    api, engine = free_ports()
    sets = {"seed": seed, "api.port": api, "vllm.port": engine}
    command = [sys.executable, "-m", "atropos_tui", "up", "demo", "--headless", "--run-dir", str(root)]
    command += [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    began_run = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        time.sleep(SAMPLE_S)
        if (root / "run.json").exists():
            peak = max(peak, pss_of(json.loads((root / "run.json").read_text())["run_id"], psutil.Process(process.pid)))
    ended = time.time()
    if process.returncode:
        raise SystemExit(f"seed {seed}: `{' '.join(command)}` ended with {process.returncode}")
    return {"seed": seed, "exit_code": process.returncode, "warm_start_s": prepared - began} | figures(
        RunDir(root), began_run, ended, peak
    )


def figures(run: RunDir, began: float, ended: float, peak: int) -> dict[str, Any]:
    """The promised numbers of one finished run."""
    records = [parse_line(line) for line in run.telemetry_jsonl.read_bytes().splitlines()]
    evals = [parse_line(line) for path in run.root.glob("eval.*.jsonl") for line in path.read_bytes().splitlines()]
    steps: list[Any] = [r for r in records if r.kind == "step"]
    timing: list[Any] = [r for r in records if r.kind == "timing"]
    alignment: list[Any] = [r for r in records if r.kind == "alignment"]
    held_out: list[Any] = [r for r in evals if r.kind == "eval" and getattr(r, "split", "") == "held_out"]
    rewards = [r.reward_mean for r in steps]
    lags = [r.policy_lag_max for r in steps]
    return {
        "steps": len(steps),
        "first_step_s": steps[0].time - began,
        "run_s": ended - began,
        "step_s": mean(r.step_s for r in timing),
        "data_wait_s": mean(r.data_wait_s for r in timing),
        "train_s": mean(r.train_s for r in timing),
        "sync_s": mean(r.sync_s for r in timing),
        "reward_first5": mean(rewards[:5]),
        "reward_last5": mean(rewards[-5:]),
        "reward_gain": mean(rewards[-5:]) - mean(rewards[:5]),
        "held_out_first": held_out[0].accuracy,
        "held_out_last": held_out[-1].accuracy,
        "held_out_gain": held_out[-1].accuracy - held_out[0].accuracy,
        "lag_mean": mean(r.policy_lag_mean for r in steps),
        "lag_max": max(lags) if None not in lags else float("nan"),
        "probe_abs_mean_max": max(r.probe_diff_abs_mean for r in alignment if r.probe_diff_abs_mean is not None),
        "probe_missing": sum(r.probe_diff_abs_mean is None for r in alignment),
        "pss_gib": peak / 2**30,
    }


def within(name: str, value: float) -> bool:
    sign, limit = LIMITS[name]
    return {"<": value < limit, "<=": value <= limit, ">=": value >= limit}[sign]


def print_table(rows: list[dict[str, Any]]) -> None:
    width = max(len(name) for name in rows[0])
    for name in rows[0]:
        cells = "".join(f"{row[name]:>12.3g}" for row in rows)
        promise = f"   {' '.join(map(str, LIMITS[name]))}" if name in LIMITS else ""
        kept = "" if name not in LIMITS or all(within(name, row[name]) for row in rows) else "   MISSED"
        print(f"{name:<{width}}{cells}{promise}{kept}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp(prefix="atropos-bench-"))
    with tempfile.TemporaryDirectory(prefix="atropos-demo-") as folder:
        rows = [measure(seed, Path(folder)) for seed in options.seeds]
    if options.json:
        print(json.dumps({"runs": rows, "limits": LIMITS}))
    else:
        print_table(rows)
    return 0 if all(within(name, row[name]) for name in LIMITS for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
