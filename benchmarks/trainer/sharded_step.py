"""Measure optimizer steps on several GPUs: speedup, memory, checkpoints, and a change of ranks.

    python -m benchmarks.trainer.sharded_step [--shape tiny|qwen3-1.7b|qwen3-8b]
        [--ranks 1 2 4] [--save DIR --resume] [--json]

Starts its own ranks, a GPU each where there are any. Each has `--rows` rows of `--row` tokens
whatever their number, so perfect scaling is N times the tokens in the same seconds. Weights are
random, of the named shape. With fp32 masters and AdamW 8B is too large for one H200: compare with
`--settings '{"master_weights": "kahan", "optimizer": "adamw_8bit"}'`, or begin with `--ranks 2`;
scaling is against the first number. MFU is relative to the cards' dense bfloat16 peak. `--resume`
writes a checkpoint with each number of ranks, lets each other number take the next step from it,
and compares gradient norm, loss and every weight with the step of the ranks that wrote it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from atropos_common.models.model_math import Dimensions, step_flops
from benchmarks.support.checks import Checks
from benchmarks.support.shapes import SHAPES, build, model_config
from benchmarks.trainer_step import mfu_of
from trainer_core.checkpoints import checkpoint, state
from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper, for_device
from trainer_core.optimization.step import StepOutcome, accumulate
from trainer_core.policy.attention import register
from trainer_core.policy.kernel_choice import use_attention
from trainer_core.policy.load import empty_model
from trainer_core.policy.sharding import load_for, shard, weights
from trainer_core.policy.speed import compile_layers, compiles, use_checkpointing, use_memory
from trainer_core.ranks.group import join
from trainer_core.ranks.world import World
from trainer_core.rollouts.batch import Rollout
from trainer_core.rollouts.packing import PackedRow, assign_rows, pack, rows_at

LIMIT_S = 600.0
SEQUENCE = 2048
"""Tokens of a sequence in a row, where the row is as long."""
PROMPT = 128


@dataclass(frozen=True)
class Job:
    """Settings of each rank."""

    shape: str
    row: int
    rows: int
    steps: int
    settings: dict[str, Any]
    save: str = ""
    """Where to write a checkpoint, after which one more step is taken."""
    resume: str = ""
    """A checkpoint to take the next step from, instead of being measured."""
    written_by: int = 0
    """Ranks that wrote it, whose rows that step has."""


class Trainer:
    """One rank."""

    def __init__(self, job: Job, world: World, device: torch.device) -> None:
        self.job, self.world, self.device = job, world, device
        values = {
            "model_name": job.shape,
            "optimizer": "adamw",
            "lr": 1e-6,
            "seq_len": job.row,
            "pack_tokens": job.row,
            "dtype": "bfloat16" if device.type == "cuda" else "float32",
        }
        self.config = for_device(TrainingConfig.model_validate(values | job.settings), device)
        use_memory(device)
        began = time.perf_counter()
        self.model = shard(self._weights(), world, device, self.config)
        self.load_s = time.perf_counter() - began
        self.stepper = Stepper(self.model, self.config, world)
        if job.resume:
            state.restore(Path(job.resume), self.stepper)
        use_attention(self.model, self.config.attention_kernel)
        compiled = compiles(self.model, self.config.compile, device)
        use_checkpointing(
            self.model,
            self.config.gradient_checkpointing,
            device=device,
            tokens=job.row,
            optimizer="" if self.config.optimizer_offload else self.config.optimizer,
            compiled=compiled,
            world=world,
            gradient_bytes=4 if self.config.gradient_dtype == "float32" else 2,
            offload=self.config.activation_offload,
        )
        if compiled:
            compile_layers(self.model)

    def _weights(self) -> nn.Module:
        dtype = getattr(torch, self.config.dtype)
        if self.job.resume:
            return load_for(self.world, self.job.resume, dtype, self.device)
        if self.world.rank:
            return empty_model(model_config(self.job.shape), dtype)
        model: nn.Module = build(self.job.shape, self.device, register(), dtype)
        return model.eval() if self.world.size == 1 else model.cpu().eval()

    def rollouts(self, ranks: int, step: int) -> list[Rollout]:
        """As many as fill the rows of `ranks` ranks."""
        dice = np.random.default_rng(step)
        vocabulary = SHAPES[self.job.shape]["vocab_size"]
        length = min(SEQUENCE, self.job.row)
        count = ranks * self.job.rows * (self.job.row // length)
        trained = np.arange(length + 1) >= min(PROMPT, length // 4)
        return [
            Rollout(
                dice.integers(1, vocabulary, length + 1),
                trained,
                np.full(length + 1, -np.log(vocabulary), dtype=np.float32),
                np.full(length + 1, dice.choice([-1.0, 1.0]), dtype=np.float32),
                1.0,
                0.0,
                "",
                (),
            )
            for _ in range(count)
        ]

    def rows(self, ranks: int, step: int) -> list[PackedRow]:
        rows = pack(self.rollouts(ranks, step), self.job.row, self.world.size)
        return rows_at(rows, assign_rows(rows, self.world.size, lambda _: True)[self.world.rank])

    def step(self, rows: list[PackedRow], step: int) -> StepOutcome:
        outcome = accumulate(
            self.model, self.stepper, rows, Objective(self.config), step, world=self.world
        )
        self.stepper.compute()
        self.stepper.write()
        self._wait()
        return outcome

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.world.gather(0)

    def measured(self) -> dict[str, Any]:
        """Seconds of a step after the first one, tokens a second, MFU of all ranks, the largest
        peak of memory."""
        size, cuda, took = self.world.size, self.device.type == "cuda", []
        for step in range(1, self.job.steps + 2):
            rows = self.rows(size, step)
            if cuda and step == 2:
                torch.cuda.reset_peak_memory_stats()
            self._wait()
            began = time.perf_counter()
            self.step(rows, step)
            took.append(time.perf_counter() - began)
        rollouts = self.rollouts(size, 1)
        lengths = [len(r.tokens) - 1 for r in rollouts]
        dimensions = Dimensions.of(model_config(self.job.shape).to_dict())
        flops = step_flops(dimensions, lengths, sum(int(r.trained.sum()) for r in rollouts))
        seconds = median(took[1:])
        peak = self.world.largest(torch.tensor([torch.cuda.max_memory_allocated() if cuda else 0]))
        return {
            "ranks": size,
            "load_s": self.load_s,
            "first_step_s": took[0],
            "step_s": seconds,
            "tokens_per_s": sum(lengths) / seconds,
            "mfu": mfu_of(flops, seconds, size),
            "peak_gb": float(peak) / 1e9 if cuda else None,
        }

    def saved(self) -> dict[str, Any]:
        """Seconds and bytes of a checkpoint."""
        config = self.config.model_copy(update={"save_path": self.job.save})
        done = checkpoint.save_step(
            self.model, config, self.stepper, step=self.job.steps + 1, version=0, world=self.world
        )
        return {
            "checkpoint": str(done.path),
            "checkpoint_s": done.seconds,
            "checkpoint_gb": done.bytes / 1e9,
        }

    def next_step(self) -> dict[str, Any]:
        """The step behind the checkpoint: what came out, and of each tensor two sums."""
        outcome = self.step(
            self.rows(self.job.written_by or self.world.size, 99), self.job.steps + 2
        )
        tensors = weights(self.model)
        sums = {
            n: [float(t.double().sum()), float(t.double().square().sum())]
            for n, t in tensors.items()
        }
        return {
            "loss": outcome.metrics["loss"],
            "grad_norm": outcome.metrics["grad_norm"],
            "sums": sums,
        }


def work(text: str, out: str) -> int:
    """One rank of one job."""
    job = Job(**json.loads(text))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = join(device, LIMIT_S)
    if device.type == "cpu":
        torch.set_num_threads(1)
    trainer = Trainer(job, world, device)
    found = {} if job.resume else trainer.measured()
    if job.save:
        found |= trainer.saved()
    if job.save or job.resume:
        found |= trainer.next_step()
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))
    world.close()
    return 0


def launch(job: Job, ranks: int) -> dict[str, Any]:
    """Run `ranks` ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.trainer.sharded_step",
            "--work",
            json.dumps(vars(job)),
            str(out),
        ]
        processes = [
            subprocess.Popen(
                command,
                env=os.environ
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "TMPDIR": folder,
                    "HF_HUB_OFFLINE": "1",
                },
                stdout=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{ranks} ranks ended with {codes}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def apart(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest relative difference between two next steps."""
    pairs = [(mine[name], theirs[name]) for name in ("loss", "grad_norm")]
    pairs += [(mine["sums"][name][1], theirs["sums"][name][1]) for name in theirs["sums"]]
    assert mine["sums"].keys() == theirs["sums"].keys()
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def show(row: dict[str, Any]) -> str:
    text = (
        f"{row['ranks']} ranks: {row['step_s']:.3f} s a step, {row['tokens_per_s']:,.0f} tokens/s"
    )
    text += f", scaling {row['scaling']:.3f}, load {row['load_s']:.1f} s"
    if row["mfu"] is not None:
        text += f", MFU {row['mfu']:.1%}"
    if row["peak_gb"] is not None:
        text += f", peak {row['peak_gb']:.1f} GB"
    if "checkpoint_s" in row:
        text += f", checkpoint {row['checkpoint_gb']:.2f} GB in {row['checkpoint_s']:.1f} s"
    return text + "".join(
        f"\n  {n} ranks go on {far:.1e} apart" for n, far in row.get("resumed", {}).items()
    )


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b" if cuda else "tiny")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--row", type=int, default=16_384 if cuda else 256, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=2, help="rows of each rank in a step")
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps, after one that is not"
    )
    parser.add_argument(
        "--settings",
        type=json.loads,
        default={},
        metavar="JSON",
        help="of the trainer, as its config",
    )
    parser.add_argument(
        "--save", type=Path, help="write a checkpoint below this folder, and time it"
    )
    parser.add_argument(
        "--resume", action="store_true", help="with --save: each number of ranks goes on from each"
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(*options.work)
    base, checks = None, Checks()
    for ranks in options.ranks:
        save = str(options.save / f"by-{ranks}") if options.save else ""
        shared = (options.shape, options.row, options.rows, options.steps, options.settings)
        found = launch(Job(*shared, save=save), ranks)
        each = found["tokens_per_s"] / ranks
        base = base or each
        row = found | {
            "shape": options.shape,
            "row": options.row,
            "rows": options.rows,
            "scaling": each / base,
        }
        if options.resume and save:
            jobs = {
                other: Job(*shared, resume=found["checkpoint"], written_by=ranks)
                for other in options.ranks
            }
            row["resumed"] = {
                other: apart(launch(job, other), found) for other, job in jobs.items()
            }
        row.pop("sums", None)
        print(json.dumps(row) if options.json else show(row), flush=True)
        for other, far in row.get("resumed", {}).items():
            checks.at_most(
                f"the next step of {other} ranks from the checkpoint of {ranks}",
                far,
                1e-2 if cuda else 1e-4,
            )
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
