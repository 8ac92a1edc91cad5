"""Measure step time and idle shares of trainer and engines on two GPUs.

    python -m benchmarks.weights.idle_shares [--layouts broadcast two-engines]
        [--shape tiny|qwen3-1.7b|qwen3-8b] [--tokens 512] [--ahead 0] [--steps 20]
        [--set trainer.overlap_publish=true] [--json]

The whole product: `atropos-tui up`, with one layout after the other on the same model. `broadcast`
has the engine on GPU 0 and the trainer on GPU 1. `two-engines` has an engine on each GPU; the first
shares weights and GPU with the trainer. On a machine without two GPUs a tiny model runs on the
cores. Weights are random, of the named shape, and never end a completion, so all have `--tokens`
tokens; this module is the environment as well, whose scores are the toss of a coin. Shares are of
the steps after the first two, which compile; the sentence is the one on the screen.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w
import torch

from atropos_common.protocol.trainer_records import AlignmentRecord, StepRecord, TimingRecord
from atropos_common.system.run_dir import ENV_AHEAD, ENV_CONCURRENCY
from atropos_envs.hosting.base import StackEnv, run
from atropos_envs.hosting.evaluation import Graded
from atropos_tui.profile.builders.environment import MOST_AHEAD
from benchmarks.large_models import records
from benchmarks.situations import Watch
from benchmarks.support.children import free_ports, up
from benchmarks.support.shapes import SHAPES, save_model

WARM = 2
"""Steps that are not measured."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
APART = {"distributed-executor-backend": "mp"}
"""An engine on a GPU, as the shipped profiles have it: scheduler and worker in a process each."""
SMALL = {"enforce-eager": True, "kv-cache-memory-bytes": 64 << 20, "block-size": 32}
"""An engine on a CPU."""
NAMES = {"broadcast": ["vllm"], "two-engines": ["vllm-shared", "vllm-own"]}
"""Engines of each layout."""
MOST_SEQUENCES = 512
"""Slots of an engine if the product chooses the completions in flight."""
BESIDE_TRAINER, PACK_TOKENS = 0.35, 16_384
"""Memory of the engine on the trainer's GPU, and tokens of a pass beside it."""
PROMPT = "What do you know about the number {}?"


class Coins(StackEnv):
    """Endless questions; a completion scores 1 or 0 by chance."""

    name = "coins"

    async def setup(self) -> None:
        self._dice = random.Random(0)
        self.items = self._questions()

    def _questions(self) -> Iterator[str]:
        while True:
            yield PROMPT.format(self._dice.randrange(10**6))

    async def rollout(self, item: str) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "max_tokens": self.config.max_token_length}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=item, n=self.config.group_size, **sampling)
            nodes = managed.get_state()["nodes"]
        return self.scored_group(nodes, [float(self._dice.random() < 0.5) for _ in nodes], sampling)

    def eval_questions(self) -> dict[str, Sequence[str]]:
        return {}

    async def grade(self, question: str, *, wait: bool) -> Graded:
        raise NotImplementedError("nothing is held out")


def _engines(options: argparse.Namespace, layout: str, *, cuda: bool) -> list[dict[str, Any]]:
    most = options.ahead * options.sequences or MOST_SEQUENCES
    common = {
        "max_model_len": options.tokens + 64,
        "args": {"max-num-seqs": most} | (APART if cuda else SMALL),
        "env": {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if cuda else ONE_THREAD,
    } | ({} if cuda else {"dtype": "float32"})
    made = [
        common | {"name": name, "port": port} | ({"gpus": [gpu]} if cuda else {})
        for gpu, (name, port) in enumerate(zip(NAMES[layout], free_ports(2), strict=False))
    ]
    if cuda and layout == "two-engines":
        made[0]["gpu_memory_utilization"] = BESIDE_TRAINER
    return made


def profile(options: argparse.Namespace, layout: str, model: Path) -> dict[str, Any]:
    """The run, as a profile has it."""
    cuda = torch.cuda.device_count() > 1
    (api,) = free_ports(1)
    sequences = options.sequences
    workers = {"env.max_num_workers": options.ahead * sequences // 8} if options.ahead else {}
    # As a plan says it to an environment of `atropos_envs`.
    steered = {} if options.ahead else {ENV_CONCURRENCY: "auto", ENV_AHEAD: str(MOST_AHEAD)}
    both = layout == "two-engines"
    return {
        "name": "idle-shares",
        "mode": "shared_vllm" if both else "broadcast",
        "model": str(model),
        "api": {"port": api},
        "env": {
            "module": "benchmarks.weights.idle_shares",
            "cwd": str(Path(__file__).parents[2]),
            "env": steered,
            "args": {
                "env.group_size": 8,
                "env.max_token_length": options.tokens,
                "env.steps_per_eval": 0,
            }
            | workers,
        },
        "vllm": _engines(options, layout, cuda=cuda),
        "trainer": {
            "training_steps": 100_000,
            "batch_size": sequences,
            "gradient_accumulation_steps": 1,
            "lr": 1e-6,
            "checkpoint_interval": 0,
            "seq_len": options.tokens + 64,
            "optimizer": "adamw",
            # As the shipped profiles: completions in flight keep their keys and values.
            "in_flight": "reuse",
        }
        | ({"pack_tokens": PACK_TOKENS} if both else {})
        | (
            {"gpus": [0 if both else 1], "dtype": "bfloat16"}
            if cuda
            else {"device": "cpu", "dtype": "float32", "env": ONE_THREAD}
        ),
    }


def measure(options: argparse.Namespace, layout: str, folder: Path) -> dict[str, Any]:
    """Shares and sentence of one run."""
    path, root = folder / f"{layout}.toml", folder / layout
    path.write_text(tomli_w.dumps(profile(options, layout, folder / "model")))
    command = up(path, root, dict(setting.split("=", 1) for setting in options.set))
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        give_up = time.monotonic() + options.limit
        while (found := shares(root)).get(
            "steps", 0
        ) < options.steps and time.monotonic() < give_up:
            if running.poll() is not None:
                raise SystemExit(f"{found}\n{(folder / 'log').read_text()[-6000:]}")
            time.sleep(2)
        said = Watch(root).said()
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(120)
    return {"layout": layout, "sentence": said.line if said else "", **found}


def shares(root: Path) -> dict[str, Any]:
    """Summarize the trainer's records without the first steps, which compile; empty before there
    are others."""
    found = records(root / "telemetry.jsonl")
    timings = [r for r in found if isinstance(r, TimingRecord) and (r.step or 0) > WARM]
    if not timings:
        return {}
    checks = [r for r in found if isinstance(r, AlignmentRecord) and (r.step or 0) > WARM]
    probes = [r.probe_diff_abs_mean for r in checks if r.probe_diff_abs_mean is not None]
    lags = [
        r.policy_lag_max
        for r in found
        if isinstance(r, StepRecord) and r.policy_lag_max is not None
    ]
    idle = [
        (r.engine_idle_fraction, r.step_s) for r in timings if r.engine_idle_fraction is not None
    ]
    used = [r.engine_capacity_used for r in timings if r.engine_capacity_used is not None]
    return {
        "steps": len(timings),
        "step_s": mean(r.step_s for r in timings),
        "train_s": mean(r.train_s for r in timings),
        "publish_s": mean(r.sync_s for r in timings),
        "waiting_share": sum(r.data_wait_s for r in timings) / sum(r.step_s for r in timings),
        "engine_idle_fraction": sum(share * s for share, s in idle) / sum(s for _, s in idle)
        if idle
        else None,
        "engine_capacity_used": mean(used) if used else None,
        "alignment": dict(Counter(r.verdict for r in checks)),
        "probe_max": max(probes, default=None),
        "policy_lag_max": max(lags, default=None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.device_count() > 1
    parser.add_argument("--layouts", nargs="+", choices=NAMES, default=["broadcast"])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b" if cuda else "tiny")
    parser.add_argument(
        "--tokens", type=int, default=512 if cuda else 16, help="of each completion"
    )
    parser.add_argument("--sequences", type=int, default=64, help="of an optimizer step")
    parser.add_argument(
        "--ahead",
        type=int,
        default=2,
        help="steps' worth of completions in flight; 0: as many as the product finds best",
    )
    parser.add_argument("--steps", type=int, default=20, help="measured, after the first ones")
    parser.add_argument(
        "--limit",
        type=float,
        default=900.0,
        help="seconds for each layout, after which fewer steps have to do",
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the profile, as of `up`",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atropos-idle-") as temporary:
        folder = Path(temporary)
        save_model(options.shape, folder / "model", torch.device("cuda" if cuda else "cpu"))
        for layout in options.layouts:
            found = measure(options, layout, folder)
            text = (
                json.dumps(found)
                if options.json
                else "\n".join(f"{key:<28}{value}" for key, value in found.items())
            )
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    if {"serve", "process", "evaluate"} & set(sys.argv[1:2]):
        run(Coins)
    else:
        sys.exit(main())
