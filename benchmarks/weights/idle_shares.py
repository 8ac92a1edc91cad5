"""Measure idle shares of trainer and engine in broadcast on two GPUs.

    python -m benchmarks.weights.idle_shares [--shape tiny|qwen3-1.7b|qwen3-8b]
        [--tokens 512] [--steps 20] [--set trainer.overlap_publish=true] [--json]

The whole product: `atropos-tui up` with the engine on GPU 0 and the trainer on GPU 1 (on a machine
without GPUs a tiny model on its cores). Weights are random, of the named shape, and never end a
completion, so all have `--tokens` tokens; this module is the environment as well, whose scores are
the toss of a coin. Shares are of the steps after the first two, which compile; the sentence is the
one on the screen.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w
import torch

from atropos_common.protocol.trainer_records import TimingRecord
from atropos_envs.hosting.base import StackEnv, run
from atropos_envs.hosting.evaluation import Graded
from benchmarks.large_models import records
from benchmarks.situations import Watch
from benchmarks.support.children import free_ports, up
from benchmarks.support.shapes import SHAPES, save_model

WARM = 2
"""Steps that are not measured."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SMALL = {"enforce-eager": True, "kv-cache-memory-bytes": 64 << 20, "block-size": 32}
"""An engine on a CPU."""
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


def profile(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The run, as a profile has it."""
    cuda = torch.cuda.is_available()
    api, engine = free_ports(2)
    longest = options.tokens + 64
    sequences = options.sequences
    return {
        "name": "idle-shares",
        "mode": "broadcast",
        "model": str(model),
        "api": {"port": api},
        "env": {
            "module": "benchmarks.weights.idle_shares",
            "cwd": str(Path(__file__).parents[2]),
            "args": {
                "env.group_size": 8,
                "env.max_token_length": options.tokens,
                "env.max_num_workers": options.ahead * sequences // 8,
                "env.steps_per_eval": 0,
            },
        },
        "vllm": {
            "port": engine,
            "max_model_len": longest,
            "args": {"max-num-seqs": options.ahead * sequences} | ({} if cuda else SMALL),
            "env": {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if cuda else ONE_THREAD,
        }
        | ({"gpus": [0]} if cuda else {"dtype": "float32"}),
        "trainer": {
            "training_steps": 100_000,
            "batch_size": sequences,
            "gradient_accumulation_steps": 1,
            "lr": 1e-6,
            "checkpoint_interval": 0,
            "seq_len": longest,
            "optimizer": "adamw",
        }
        | (
            {"gpus": [1], "dtype": "bfloat16"}
            if cuda
            else {"device": "cpu", "dtype": "float32", "env": ONE_THREAD}
        ),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Shares and sentence of one run."""
    save_model(
        options.shape,
        folder / "model",
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    (folder / "idle.toml").write_text(tomli_w.dumps(profile(options, folder / "model")))
    root = folder / "run"
    command = up(folder / "idle.toml", root, dict(setting.split("=", 1) for setting in options.set))
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
    return {"sentence": said.line if said else "", **found}


def shares(root: Path) -> dict[str, Any]:
    """Summarize the trainer's records without the first steps, which compile; empty before there
    are others."""
    timings = [
        r
        for r in records(root / "telemetry.jsonl")
        if isinstance(r, TimingRecord) and (r.step or 0) > WARM
    ]
    if not timings:
        return {}
    idle = [
        (r.engine_idle_fraction, r.step_s) for r in timings if r.engine_idle_fraction is not None
    ]
    return {
        "steps": len(timings),
        "step_s": mean(r.step_s for r in timings),
        "train_s": mean(r.train_s for r in timings),
        "publish_s": mean(r.sync_s for r in timings),
        "waiting_share": sum(r.data_wait_s for r in timings) / sum(r.step_s for r in timings),
        "engine_idle_fraction": sum(share * s for share, s in idle) / sum(s for _, s in idle)
        if idle
        else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.device_count() > 1
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b" if cuda else "tiny")
    parser.add_argument(
        "--tokens", type=int, default=512 if cuda else 16, help="of each completion"
    )
    parser.add_argument("--sequences", type=int, default=64, help="of an optimizer step")
    parser.add_argument(
        "--ahead",
        type=int,
        default=2,
        help="steps' worth of completions that the engine has at a time",
    )
    parser.add_argument("--steps", type=int, default=20, help="measured, after the first ones")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds, after which fewer steps have to do"
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
        found = measure(options, Path(temporary))
        text = (
            json.dumps(found)
            if options.json
            else "\n".join(f"{key:<28}{value}" for key, value in found.items())
        )
        print(text, flush=True)  # removing the model takes its time
    return 0


if __name__ == "__main__":
    if {"serve", "process", "evaluate"} & set(sys.argv[1:2]):
        run(Coins)
    else:
        sys.exit(main())
