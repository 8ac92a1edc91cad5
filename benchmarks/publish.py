"""Measure a publish from several ranks to engines of several GPUs, and check that it is exact.

    python -m benchmarks.publish [--shape tiny|qwen3-1.7b|qwen3-8b] [--trainer-ranks 2]
        [--engines 1] [--tensor-parallel 2] [--steps 11] [--json]

Real `python -m vllm_server` processes and the trainer's own strategy over FSDP2, with random
weights; on GPUs the ranks have the first ones and the engines those after (two ranks and an engine
of two: four GPUs), on a CPU all is gloo. Each publish changes every weight. In the end the ranks'
weights are gathered and written into a folder, each engine loads that with vLLM's own loader, and
has to give the same logprobs as after the last broadcast, to the last digit. What the link itself
gives: `python -m benchmarks.weights.link`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.support.children import (
    Child,
    ChildError,
    Server,
    answer,
    environment,
    free_ports,
    visible,
)
from benchmarks.support.shapes import SHAPES, save_model

START_S = 600.0
STEP_S = 300.0
PROMPTS, PROMPT_TOKENS, TOKENS = 4, 40, 48


def rank(argv: list[str]) -> None:
    """One rank of the trainer: attach, publish, check; rank 0 answers."""
    from safetensors.torch import save_file

    from atropos_common.protocol.bridge import LoadWeightsRequest
    from trainer_core.config import TrainingConfig
    from trainer_core.policy.sharding import compute_dtype, local, weights
    from trainer_core.ranks.group import join
    from trainer_core.weight_sync.base import Start, SyncReport, make_sync

    model, folder, device_type, dtype, steps, *urls = argv
    cuda = device_type == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    world = join(device, STEP_S)
    config = TrainingConfig.model_validate(
        {
            "model_name": model,
            "weight_bridge_mode": "shared_vllm",
            "use_shared_memory": True,
            "dtype": dtype,
            "device": device_type,
            "vllm_urls": urls,
            "optimizer": "adamw",
            "save_path": folder,
        }
    )
    sync = make_sync(config, device, threading.Event(), world)
    began = time.perf_counter()
    policy = sync.attach(Start())
    attached = time.perf_counter() - began

    @torch.no_grad()
    def change() -> None:
        for parameter in policy.parameters():
            local(parameter).mul_(1.0 - 2**-7)
        if cuda:
            torch.cuda.synchronize()

    reports: list[SyncReport] = [
        sync.publish(version, change) for version in range(1, int(steps) + 1)
    ]
    size = (
        sum(parameter.numel() for parameter in policy.parameters()) * compute_dtype(policy).itemsize
    )
    tensors = weights(policy)

    def verdict() -> dict[str, Any]:
        gathered = Path(folder) / "gathered"
        gathered.mkdir()
        save_file(tensors, gathered / "model.safetensors")
        exact = []
        for engine in sync.engines:
            sent = said(engine)
            engine.load_weights(
                LoadWeightsRequest(path=str(gathered), weight_version=int(steps) + 1)
            )
            exact.append(sent == said(engine))
        later = reports[1:]  # the first runs through the model's own loader, and notes its copies
        names = list(later[-1].phases)
        return {
            "attach_s": attached,
            "bytes": size,
            "publish_s": median(sum_of(r) for r in later),
            "first_publish_s": sum_of(reports[0]),
            "left_out": reports[-1].left_out,
            "exact": exact,
            "phases": {name: median(r.phases.get(name, 0.0) for r in later) for name in names},
        }

    found = world.share(verdict)
    if world.rank == 0:
        answer(found)
    sync.close()
    world.close()
    sys.stdout.flush()
    os._exit(0)


def sum_of(report: Any) -> float:
    """Seconds of a publish, without the change of the weights itself."""
    return float(report.seconds - report.phases.get("write", 0.0))


def said(engine: Any) -> list[list[float]]:
    """Logprobs of what an engine decodes at temperature 0, every digit of them."""
    prompts = [[2 + (7 * i + j) % 10 for j in range(PROMPT_TOKENS)] for i in range(PROMPTS)]
    return [
        engine.generate(prompt, TOKENS, temperature=0.0, salt=str(time.time())).logprobs
        for prompt in prompts
    ]


class Bench:
    """Engines, then the ranks."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.cuda = torch.cuda.is_available()
        self.dtype = "bfloat16" if self.cuda else "float32"
        self.children: list[Server | Child] = []

    def run(self) -> dict[str, Any]:
        save_model(
            self.options.shape, self.folder / "model", torch.device("cuda" if self.cuda else "cpu")
        )
        servers = [
            self.server(number, port)
            for number, port in enumerate(free_ports(self.options.engines))
        ]
        for server in servers:
            server.wait_ready(time.perf_counter() + START_S)
        ranks = [
            self.rank(number, [server.url for server in servers])
            for number in range(self.options.trainer_ranks)
        ]
        return dict(ranks[0].wait(STEP_S + 10 * self.options.steps))

    def server(self, number: int, port: int) -> Server:
        width = self.options.tensor_parallel
        first = self.options.trainer_ranks + number * width
        extra = {
            "ATROPOS_WEIGHT_UPDATES": "1",
            "ATROPOS_HOLD_GENERATION": "1",
            "ATROPOS_RUN_DIR": str(self.folder),
        }
        flags = [
            "--model",
            str(self.folder / "model"),
            "--served-model-name",
            "m",
            "--dtype",
            self.dtype,
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            "64",
            "--generation-config",
            "vllm",
            "--logprobs-mode",
            "processed_logprobs",
            "--tensor-parallel-size",
            str(width),
            "--no-enable-prefix-caching",
        ]
        if self.cuda:
            extra |= visible(range(first, first + width))
            flags += ["--kv-cache-memory-bytes", str(4 << 30), "--gpu-memory-utilization", "0.5"]
        else:
            extra["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            flags += [
                "--kv-cache-memory-bytes",
                str(64 << 20),
                "--block-size",
                "32",
                "--enforce-eager",
            ]
        folder = self.folder / f"engine{number}"
        self.children.append(
            server := Server(folder, port, flags, environment(folder, None, extra))
        )
        return server

    def rank(self, number: int, urls: list[str]) -> Child:
        size = str(self.options.trainer_ranks)
        extra = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
        }
        folder = self.folder / f"rank{number}"
        command = [
            "-m",
            "benchmarks.publish",
            "rank",
            str(self.folder / "model"),
            str(self.folder / "rank0"),
            "cuda" if self.cuda else "cpu",
            self.dtype,
            str(self.options.steps),
            *urls,
        ]
        self.children.append(child := Child(folder, command, environment(folder, None, extra)))
        return child


def show(found: dict[str, Any]) -> str:
    receive, size = found["phases"].get("receive", float("nan")), found["bytes"]
    lines = [
        f"{found['shape']}: {size / 1e9:.2f} GB from {found['trainer_ranks']} ranks to "
        f"{found['engines']} engines of "
        f"{found['tensor_parallel']}, {found['device']}",
        f"transfer, median      {receive * 1000:9.1f} ms   {size / receive / 1e9:.1f} GB/s",
        f"publish, median       {found['publish_s'] * 1000:9.1f} ms   the first "
        f"{found['first_publish_s'] * 1000:.1f}",
        "of it                 "
        + ", ".join(f"{k} {v * 1000:.1f} ms" for k, v in found["phases"].items()),
        f"attach                {found['attach_s']:9.2f} s",
        f"as loaded from a folder, to the last digit: {found['exact']}",
    ]
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="qwen3-1.7b" if torch.cuda.is_available() else "tiny"
    )
    parser.add_argument("--trainer-ranks", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, default=11, help="publishes, the first of which is not counted"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atropos-publish-") as temporary:
        bench = Bench(options, Path(temporary))
        try:
            found = bench.run() | {
                "shape": options.shape,
                "trainer_ranks": options.trainer_ranks,
                "engines": options.engines,
                "tensor_parallel": options.tensor_parallel,
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            }
        except ChildError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            for child in reversed(bench.children):
                child.close()
        print(
            json.dumps(found) if options.json else show(found), flush=True
        )  # removing the models takes its time
    return 0 if all(found["exact"]) and not found["left_out"] else 1


if __name__ == "__main__":
    sys.exit(main())
