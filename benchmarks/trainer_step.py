"""Compare one optimizer step with the peer's on the same batch, and its gradient with float64.

    python -m benchmarks.trainer_step [--shape demo|tiny|qwen3-1.7b]
        [--mix short lognormal long] [--steps 3] [--json]

`--mix` takes one distribution of lengths or several; `arithmetic` is the demo's, for `--shape
demo`. The peer is `example_trainer` of atroposlib 0.4.0, from its own wheel, with its own padding,
gradient checkpointing and optimizer; ours is what `atropos-trainer` runs: read, pack, accumulate,
step. Weights are random, of the named shape. On CUDA both are bfloat16 and MFU is relative to the
card's dense bfloat16 peak; on a CPU both are float32 and have the same cores (`--threads`, all by
default). A gradient outside of `BOUNDS` makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from atropos_common.models.model_math import Dimensions, peak_flops, step_flops
from benchmarks.support.checks import Checks
from benchmarks.support.shapes import SHAPES, build, model_config
from trainer_core.config import TrainingConfig
from trainer_core.objective.registry import Objective
from trainer_core.optimization.optimizers import Stepper, for_device
from trainer_core.optimization.step import accumulate
from trainer_core.policy.attention import register
from trainer_core.policy.kernel_choice import use_attention
from trainer_core.policy.logprobs import use_head
from trainer_core.policy.speed import (
    compile_layers,
    compiles,
    use_checkpointing,
    use_cores,
    use_memory,
)
from trainer_core.rollouts.batch import Rollout, read_batch
from trainer_core.rollouts.packing import pack

BOUNDS = {"cpu": (1 - 1e-9, 1e-5), "cuda": (0.98, 0.2)}
"""Least cosine and largest relative error of the gradient: float32 on a CPU, bfloat16 on a GPU."""
GROUP = 8


@dataclass(frozen=True)
class Mix:
    """Lengths of a batch in tokens: prompts, then completions with a lognormal length."""

    mu: float
    sigma: float
    low: int
    high: int
    prompt: int = 128
    groups: int = 8
    """Groups of 8 completions each."""


MIXES = {
    "short": Mix(5.0, 0.4, 16, 512),
    "lognormal": Mix(6.2, 0.6, 32, 1920),
    "long": Mix(7.6, 0.5, 512, 7800),
    "arithmetic": Mix(0.9, 0.3, 2, 4, prompt=5, groups=16),
}


def make_batch(
    shape: str, mix: str, *, groups: int | None = None, prompt: int | None = None
) -> list[dict[str, Any]]:
    """Groups as run-api returns them: scores of +-1, rollout logprobs of an almost uniform
    policy."""
    dice = np.random.default_rng(1)
    vocabulary = SHAPES[shape]["vocab_size"]
    lengths_of = MIXES[mix]
    prompt = prompt or lengths_of.prompt
    found = []
    for _ in range(groups or lengths_of.groups):
        start = dice.integers(1, vocabulary, prompt).tolist()
        lengths = dice.lognormal(lengths_of.mu, lengths_of.sigma, GROUP).astype(int)
        lengths = np.clip(lengths, lengths_of.low, lengths_of.high)
        ends = [dice.integers(1, vocabulary, n).tolist() for n in lengths]
        found.append(
            {
                "tokens": [start + end for end in ends],
                "masks": [[-100] * prompt + end for end in ends],
                "scores": dice.permutation([1.0] * (GROUP // 2) + [-1.0] * (GROUP // 2)).tolist(),
                "inference_logprobs": [
                    [1.0] * prompt
                    + (-np.log(vocabulary) + 0.1 * dice.standard_normal(len(end))).tolist()
                    for end in ends
                ],
                "overrides": None,
                "generation_params": None,
                "group_overrides": None,
            }
        )
    return found


def sizes(batch: list[dict[str, Any]]) -> list[int]:
    return [len(tokens) for group in batch for tokens in group["tokens"]]


def flops_of(shape: str, batch: list[dict[str, Any]]) -> float:
    """Floating point operations of a step on this batch."""
    generated = sum(label >= 0 for group in batch for mask in group["masks"] for label in mask)
    return float(step_flops(Dimensions.of(model_config(shape).to_dict()), sizes(batch), generated))


def mfu_of(flops: float, seconds: float, cards: int = 1) -> float | None:
    """Share of the cards' dense bfloat16 peak; None on a CPU or an unknown card."""
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return flops / seconds / peak / cards if peak else None


class Ours:
    """The work of `atropos-trainer` for one batch."""

    def __init__(self, shape: str, device: torch.device, **settings: Any) -> None:
        self.device = device
        defaults = {"model_name": shape, "seq_len": 8192, "lr": 1e-6, "optimizer": "adamw"}
        self.config = for_device(TrainingConfig.model_validate(defaults | settings), device)
        use_memory(device)
        self.model = build(shape, device, register()).eval()
        use_attention(self.model, self.config.attention_kernel)
        if compiled := compiles(self.model, self.config.compile, device):
            compile_layers(self.model)
        self.threads = use_cores(self.model, self.config, device)
        self.stepper = Stepper(self.model, self.config)
        use_checkpointing(
            self.model,
            self.config.gradient_checkpointing,
            device=device,
            tokens=self.config.tokens_per_pass,
            optimizer="" if self.config.optimizer_offload else self.config.optimizer,
            offload=self.config.activation_offload,
            gradient_bytes=4 if self.config.gradient_dtype == "float32" else 2,
            compiled=compiled,
        )
        use_head(self.model, self.config.head_dtype)
        self.taken = 0

    def step(self, batch: list[dict[str, Any]]) -> None:
        self.train(self.read(batch))

    def read(self, batch: list[dict[str, Any]]) -> list[Rollout]:
        """Read a batch, as the trainer does in a thread while it trains the batch before."""
        return read_batch(batch, seq_len=self.config.seq_len).rollouts

    def train(self, rollouts: list[Rollout]) -> None:
        self.taken += 1
        rows = pack(rollouts, self.config.tokens_per_pass, self.threads)
        accumulate(
            self.model, self.stepper, rows, Objective(self.config), self.taken, threads=self.threads
        )
        self.stepper.compute()
        self.stepper.write()


def peer_attention() -> str:
    from example_trainer import model as peer_model

    found = peer_model._get_attention_implementation()
    return found if isinstance(found, str) else found[0]


class Peer:
    """`example_trainer` of atroposlib: its padding, its loss, its optimizer step."""

    def __init__(self, shape: str, device: torch.device, micro_batch: int, sequences: int) -> None:
        from example_trainer import model as peer_model
        from example_trainer.trainers import create_optimizer

        self.device, self.micro_batch = device, micro_batch
        self.config = SimpleNamespace(
            device=str(device),
            lr=1e-6,
            clip_eps=0.2,
            warmup_steps=0,
            optimizer="adamw",
            gradient_accumulation_steps=sequences // micro_batch,
        )
        self.model = build(shape, device, peer_attention())
        peer_model._setup_gradient_checkpointing(self.model, self.config)
        self.model.train()
        self.optimizer = create_optimizer(self.model, self.config)
        self.taken = 0

    def step(self, batch: list[dict[str, Any]]) -> None:
        from example_trainer.data import pad_data_to_good_offset
        from example_trainer.training import run_training_step

        parts = pad_data_to_good_offset({"batch": copy.deepcopy(batch)}, self.micro_batch)
        run_training_step(self.model, self.optimizer, *parts[:4], self.config, self.taken, parts[4])
        self.taken += 1


def measure(
    make: Callable[[], Ours | Peer], batch: list[dict[str, Any]], steps: int, flops: float
) -> dict[str, Any]:
    """Median seconds of a step after the first one, tokens a second, MFU, and the peak of GPU
    memory."""
    with contextlib.redirect_stdout(io.StringIO()):
        runner = make()
        cuda = runner.device.type == "cuda"
        runner.step(batch)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        took = []
        for _ in range(steps):
            began = time.perf_counter()
            runner.step(batch)
            if cuda:
                torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    del runner
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    seconds = median(took)
    return {
        "step_s": seconds,
        "tokens_per_s": sum(sizes(batch)) / seconds,
        "mfu": mfu_of(flops, seconds),
        "peak_gb": peak,
    }


def grpo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, config: TrainingConfig
) -> torch.Tensor:
    """The default objective of each token, written down once more: clip range, and the bound of
    `dual_clip`."""
    ratio, dual = (logprobs - old).exp(), config.dual_clip
    high = 1 + (config.clip_eps if config.clip_eps_high is None else config.clip_eps_high)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - config.clip_eps, high) * advantages)
    return torch.where(advantages < 0, loss.clamp(max=-dual * advantages), loss) if dual else loss


def check_gradient(shape: str, device: torch.device, **settings: Any) -> dict[str, float]:
    """Our gradient of a small batch against the formula in float64 on full logits, one sequence at
    a time.

    Args:
        settings: of our side alone, which the formula does not follow: to see the check fail.
    """
    batch = make_batch(shape, "short", groups=1, prompt=16)
    ours = Ours(shape, device, max_grad_norm=0.0, **settings)
    read = read_batch(batch, seq_len=8192)
    rows = pack(read.rollouts, 1024, ours.threads)
    accumulate(ours.model, ours.stepper, rows, Objective(ours.config), 1, threads=ours.threads)
    mine = torch.cat([gradient.double().flatten().cpu() for gradient in ours.stepper.gradients])
    wide = build(shape, device, "eager").double()
    wide.load_state_dict({k: v.double() for k, v in ours.model.state_dict().items()})
    del ours
    config = TrainingConfig(model_name=shape)
    total = sum(int(r.trained.sum()) for r in read.rollouts)
    for rollout in read.rollouts:
        tokens = torch.from_numpy(rollout.tokens).to(device)
        logprobs = (
            wide(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        )
        keep = torch.from_numpy(rollout.trained[1:]).to(device)
        old = torch.from_numpy(rollout.logprobs[1:].astype(np.float64)).to(device)
        advantage = torch.from_numpy(rollout.advantages[1:].astype(np.float64)).to(device)
        (grpo(logprobs, old, advantage, config)[keep].sum() / total).backward()
    true = torch.cat([p.grad.flatten().cpu() for p in wide.parameters()])
    return {
        "gradient_cosine": float(torch.nn.functional.cosine_similarity(mine, true, dim=0)),
        "gradient_relative_error": float((mine - true).norm() / true.norm()),
    }


def compare(options: argparse.Namespace, mix: str, device: torch.device) -> dict[str, Any]:
    """Peer and ours on one batch of this mix."""
    batch = make_batch(options.shape, mix)
    flops = flops_of(options.shape, batch)
    cores = {} if options.threads is None else {"torch_threads": options.threads}
    runs: dict[str, Callable[[], Ours | Peer]] = {
        f"peer, micro-batch {n}": partial(Peer, options.shape, device, n, len(sizes(batch)))
        for n in options.peer
    }
    runs["ours"] = lambda: Ours(options.shape, device, **cores)
    for text in options.also:
        settings = json.loads(text)
        runs["ours " + " ".join(f"{k}={v}" for k, v in settings.items())] = partial(
            Ours, options.shape, device, **(cores | settings)
        )
    threads = options.threads or torch.get_num_threads()
    rows = {}
    for name, make in runs.items():
        torch.set_num_threads(threads)
        try:
            rows[name] = measure(make, batch, options.steps, flops)
        except torch.OutOfMemoryError:
            rows[name] = {"step_s": None, "tokens_per_s": None, "mfu": None, "peak_gb": None}
            gc.collect()
            torch.cuda.empty_cache()
        print(f"{mix}, {name}: {rows[name]}", file=sys.stderr, flush=True)
    torch.set_num_threads(threads)
    peers = [
        rows[name]["step_s"] for name in rows if name.startswith("peer") and rows[name]["step_s"]
    ]
    mine = rows["ours"]["step_s"]
    return {
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"cpu, {threads} threads",
        "torch": torch.__version__,
        "shape": options.shape,
        "mix": mix,
        "sequences": len(sizes(batch)),
        "tokens": sum(sizes(batch)),
        "longest": max(sizes(batch)),
        "runs": rows,
        "times_the_default_peer": peers[0] / mine if peers and mine else None,
        "times_the_best_peer": min(peers) / mine if peers and mine else None,
    }


def show(found: dict[str, Any]) -> str:
    lines = [
        f"{found['shape']}, {found['sequences']} sequences, {found['tokens']} tokens, "
        f"longest {found['longest']} "
        f"({found['mix']}); {found['device']}, torch {found['torch']}",
        f"{'':<40}{'s/step':>9}{'tok/s':>10}{'MFU':>8}{'peak GB':>9}",
    ]
    for name, row in found["runs"].items():
        if row["step_s"] is None:
            lines.append(f"{name:<40}  out of memory")
            continue
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        peak = "-" if row["peak_gb"] is None else f"{row['peak_gb']:.1f}"
        lines.append(
            f"{name:<40}{row['step_s']:>9.3f}{row['tokens_per_s']:>10,.0f}{mfu:>8}{peak:>9}"
        )
    if found["times_the_default_peer"]:
        lines.append(
            f"{found['times_the_default_peer']:.1f}x the peer's first, "
            f"{found['times_the_best_peer']:.1f}x its best"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b" if cuda else "tiny")
    parser.add_argument(
        "--mix", choices=MIXES, nargs="+", default=["lognormal" if cuda else "short"]
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps, after one that is not"
    )
    parser.add_argument(
        "--peer",
        type=int,
        nargs="*",
        default=[2, 8],
        help="micro-batches of the peer; its default is 2",
    )
    parser.add_argument(
        "--also",
        metavar="JSON",
        nargs="*",
        default=[],
        help="further runs of ours with these settings",
    )
    parser.add_argument("--threads", type=int, help="CPU threads for each; default: all cores")
    parser.add_argument(
        "--json", action="store_true", help="one object a line: each mix, then the gradient"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    for mix in options.mix:
        found = compare(options, mix, device)
        print(json.dumps(found) if options.json else show(found), flush=True)
    gradient = check_gradient(options.shape, device)
    print(
        json.dumps(gradient)
        if options.json
        else "gradient against float64: cosine {gradient_cosine:.6f}, relative "
        "error {gradient_relative_error:.1e}".format(**gradient)
    )
    return checked(gradient, device).status()


def checked(gradient: dict[str, float], device: torch.device) -> Checks:
    """The gradient within `BOUNDS`."""
    checks, (cosine, error) = Checks(), BOUNDS[device.type]
    checks.at_least("the gradient's cosine with float64", gradient["gradient_cosine"], cosine)
    checks.at_most(
        "the gradient's relative error against float64", gradient["gradient_relative_error"], error
    )
    return checks


if __name__ == "__main__":
    sys.exit(main())
