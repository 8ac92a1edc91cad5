"""Compare a real engine's logprobs with the trainer's, with and without routing replay.

    python -m benchmarks.routing --shape tiny-moe                # on a CPU
    python -m benchmarks.routing --shape qwen3-moe-8 --json      # on a GPU, in bfloat16

Weights are random, of the named shape (`--spread` times larger than usual, which makes routers more
decided). The engine is `python -m vllm_server --enable-return-routed-experts`; it samples
`--completions` answers to each of `--prompts` random prompts at temperature 1, a prompt's answers
side by side, so that prefixes come from the cache too. Then it ends, the trainer loads the same
weights, packs what was sampled into rows, and computes its logprobs of the sampled tokens twice:
with its routers' own choice, and with the engine's. `--trainer-dtype` lets it compute in another
type, which stands for engines that round otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.checks import Checks
from benchmarks.support.children import TAIL, TOKEN, ChildError, Server, environment, free_ports
from benchmarks.support.shapes import SHAPES
from trainer_core.policy.load import load_model
from trainer_core.policy.logprobs import row_scores
from trainer_core.policy.routing import own_experts, replay_in
from trainer_core.rollouts.asking import RouterShape, RoutingAsker
from trainer_core.rollouts.batch import Batch, Rollout
from trainer_core.rollouts.packing import PackedRow, pack
from trainer_core.server.client import ServerClient


@dataclass
class Difference:
    """Difference between the trainer's logprobs and the engine's over the sampled tokens, in
    nats."""

    gaps: torch.Tensor

    def told(self) -> dict[str, float]:
        size = self.gaps.abs()
        ratio = self.gaps.double().exp()
        return {
            "abs_mean": size.mean().item(),
            "abs_p99": size.quantile(0.99).item(),
            "abs_max": size.max().item(),
            "ratio_outside_0.8_1.2": ((ratio < 0.8) | (ratio > 1.2)).double().mean().item(),
        }


def build(shape: str, folder: Path, gpu: bool) -> None:
    """The model of this shape, unless it is there; in a process of its own, which gives its memory
    back."""
    if (folder / "config.json").is_file():
        return
    command = [
        sys.executable,
        "-m",
        "benchmarks.support.shapes",
        shape,
        str(folder),
        "cuda" if gpu else "cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ChildError(f"the model was not built:\n{(done.stdout + done.stderr)[-TAIL:]}")


def spread(folder: Path, factor: float) -> None:
    """Make the matrices of a model `factor` times larger, in place."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as source:
            tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118
        wide = {
            name: value * factor if value.ndim > 1 else value for name, value in tensors.items()
        }
        save_file(wide, path, metadata={"format": "pt"})


def sample(
    server: Server, options: argparse.Namespace, vocabulary: int, shape: RouterShape
) -> tuple[list[Rollout], dict[str, float]]:
    """Return the engine's completions with their experts, and the seconds they took."""
    client = ServerClient(server.url, TOKEN, timeout_s=300.0)
    if not client.info().records_routing:
        raise ChildError(f"the engine does not record its experts:\n{server.tail()}")
    dice = random.Random(0)
    prompts = [
        [dice.randrange(3, vocabulary) for _ in range(options.prompt)]
        for _ in range(options.prompts)
    ]
    with ThreadPoolExecutor(options.side_by_side) as pool:
        asked = [
            (p, pool.submit(client.generate, p, options.completion))
            for p in prompts * options.completions
        ]
        answers = [(prompt, answer.result()) for prompt, answer in asked]
    rollouts = []
    for prompt, answer in answers:
        tokens = np.array([*prompt, *answer.token_ids])
        trained = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.concatenate([np.zeros(len(prompt)), answer.logprobs]).astype(np.float32)
        advantages = np.ones(len(tokens), np.float32)
        rollouts.append(Rollout(tokens, trained, logprobs, advantages, 1.0, 0.0, "", ()))
    batch = Batch(rollouts)
    began = time.perf_counter()
    RoutingAsker([client.routing], shape).fill(batch)
    return batch.rollouts, {
        "replayed": batch.routing_replayed or 0.0,
        "fetch_s": time.perf_counter() - began,
        "tokens": batch.tokens,
        "answers_on_a_cached_prefix": sum((answer.cached_tokens or 0) > 0 for _, answer in answers),
    }


def shape_of(config: dict[str, Any]) -> RouterShape:
    """Return the router's shape for a model in which every layer is sparse."""
    layers = config["num_hidden_layers"]
    return RouterShape(
        layers, tuple(range(layers)), config["num_experts_per_tok"], config["num_experts"]
    )


@torch.no_grad()
def differences(model: torch.nn.Module, rows: Sequence[PackedRow]) -> dict[str, Any]:
    """Both ways over all rows."""
    gaps: dict[str, list[torch.Tensor]] = {"own": [], "replayed": []}
    seconds = dict.fromkeys(gaps, 0.0)
    other = tokens_with = choices = tokens = 0
    for row in rows:
        ways = {"own": replace(row, experts=None), "replayed": row}
        for way, each in ways.items():
            _settle(row)
            began = time.perf_counter()
            found = row_scores(model, each).logprobs
            _settle(row)
            seconds[way] += time.perf_counter() - began
            gaps[way].append((found - row.logprobs).cpu())
        assert row.experts is not None
        known = row.experts[:, 0, 0] >= 0
        taken, own = row.experts[known].long(), own_experts(model, ways["own"])[known].long()
        missed = ~(taken[..., None] == own[..., None, :]).any(-1)
        other, choices = other + int(missed.sum()), choices + missed.numel()
        tokens_with, tokens = tokens_with + int(missed.any(-1).any(-1).sum()), tokens + len(missed)
    told = {
        way: Difference(torch.cat(parts)).told() | {"forward_s": seconds[way]}
        for way, parts in gaps.items()
    }
    return told | {
        "experts_that_differ": other / choices,
        "tokens_with_another_expert": tokens_with / tokens,
    }


def _settle(row: PackedRow) -> None:
    if row.tokens.is_cuda:
        torch.cuda.synchronize()


def gradients(model: torch.nn.Module, row: PackedRow) -> dict[str, float]:
    """Compare one row's gradient without replay with that of replay, and time each."""
    flat, seconds = [], []
    for each in (row, replace(row, experts=None)):
        model.zero_grad(set_to_none=True)
        _settle(row)
        began = time.perf_counter()
        row_scores(model, each).logprobs.mean().backward()
        _settle(row)
        seconds.append(time.perf_counter() - began)
        routers = [
            p.grad
            for name, p in model.named_parameters()
            if ".gate." in name and p.grad is not None
        ]
        flat.append(torch.cat([gradient.flatten().float() for gradient in routers]))
    model.zero_grad(set_to_none=True)
    return {
        "routers_relative_gap": ((flat[0] - flat[1]).norm() / flat[0].norm()).item(),
        "replayed_s": seconds[0],
        "own_s": seconds[1],
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it."""
    gpu, shape = options.device == "cuda", SHAPES[options.shape]
    model_folder: Path = options.model or folder / "model"
    fresh = not (model_folder / "config.json").is_file()
    build(options.shape, model_folder, gpu)
    if fresh and options.spread != 1:
        spread(model_folder, options.spread)
    say("model written")
    length = options.prompt + options.completion
    flags = [
        "--model",
        str(model_folder),
        "--dtype",
        options.dtype,
        "--max-model-len",
        str(length),
        "--enable-return-routed-experts",
        "--skip-tokenizer-init",
        *options.server,
    ]
    flags += ["--kv-cache-memory-bytes", str(1 << 31), "--max-num-seqs", str(options.side_by_side)]
    flags += ["--gpu-memory-utilization", "0.3"] if gpu else ["--block-size", "32"]
    server = Server(
        folder / "server", free_ports(1)[0], flags, environment(folder, 0 if gpu else None, {})
    )
    try:
        server.wait_ready(time.perf_counter() + options.limit)
        say(f"server ready after {server.ready_s:.0f} s")
        rollouts, engine = sample(server, options, shape["vocab_size"], shape_of(shape))
    except Exception as error:
        raise ChildError(
            f"{type(error).__name__}: {error}\n--- server's log:\n{server.log_end()}"
        ) from None
    finally:
        server.close()
    say(f"sampled {len(rollouts)} answers; experts of {engine['replayed']:.1%} of their tokens")
    if not engine["replayed"]:
        raise ChildError(f"the engine told no experts:\n{server.log_end()}")
    if engine["replayed"] < 1:
        say(
            "\n".join(
                line for line in server.log_end(1 << 20).splitlines() if "vLLM recorded" in line
            )
        )
    dtype = getattr(torch, options.trainer_dtype or options.dtype)
    model = load_model(model_folder, dtype, torch.device(options.device))
    found = replay_in(model)
    rows = [row.to(torch.device(options.device)) for row in pack(rollouts, options.pack)]
    row_scores(model, rows[0])  # kernels are loaded
    return {
        "shape": options.shape,
        "spread": options.spread,
        "engine_dtype": options.dtype,
        "trainer_dtype": str(dtype),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "routers": vars(found),
        "engine": engine,
        **differences(model, rows),
        "gradient": gradients(model, rows[0]),
    }


LEAST_REPLAYED = 0.9


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


BEGAN = time.perf_counter()


def show(found: dict[str, Any]) -> str:
    lines = [
        f"{found['shape']} ({found['device']}), engine {found['engine_dtype']}, trainer "
        f"{found['trainer_dtype']}, "
        f"weights x{found['spread']:g}: {found['engine']['tokens']} tokens",
        f"experts that differ {found['experts_that_differ']:.2%}, tokens with one "
        f"{found['tokens_with_another_expert']:.1%}; replayed {found['engine']['replayed']:.1%}",
    ]
    for way, name in (("own", "own choice"), ("replayed", "engine's")):
        one = found[way]
        lines.append(
            f"{name:12s}|diff| mean {one['abs_mean']:.5f}, 99 % {one['abs_p99']:.4f}, max "
            f"{one['abs_max']:.3f}; ratio "
            f"outside 0.8-1.2: {one['ratio_outside_0.8_1.2']:.2%}; forward {one['forward_s']:.2f} s"
        )
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    moe = [name for name, shape in SHAPES.items() if "num_experts" in shape]
    parser.add_argument("--shape", choices=moe, default="tiny-moe")
    parser.add_argument("--spread", type=float, default=1.0, help="factor of all matrices")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="the engine's"
    )
    parser.add_argument(
        "--trainer-dtype", choices=["bfloat16", "float32"], help="default: the engine's"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=4, help="of each prompt")
    parser.add_argument("--prompt", type=int, default=96, help="tokens")
    parser.add_argument("--completion", type=int, default=96, help="tokens")
    parser.add_argument("--side-by-side", type=int, default=16, help="requests at a time")
    parser.add_argument("--pack", type=int, default=2048, help="tokens of a row")
    parser.add_argument(
        "--server", action="append", default=[], metavar="=FLAG", help="a further flag of vLLM"
    )
    parser.add_argument(
        "--model", type=Path, help="a folder from an earlier run, or where to put the model"
    )
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the engine's start")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main() -> int:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="atropos-routing-") as temporary:
        try:
            found = measure(options, Path(temporary))
        except ChildError as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps(found) if options.json else show(found))
    checks = Checks()
    checks.at_least("the share of replayed tokens", found["engine"]["replayed"], LEAST_REPLAYED)
    own, replayed = (found[way]["abs_mean"] for way in ("own", "replayed"))
    checks.at_most(
        "|diff| with the engine's experts, of that with the trainer's own,",
        replayed,
        own * 1.001 + 1e-9,
    )
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
