"""Measure the link between two GPUs by NCCL and by a plain copy, without our code.

    python -m benchmarks.weights.link [--bytes 3441689600] [--rounds 11] [--json]

The bytes are those of Qwen3-1.7B's shape in bf16; medians after one round that is not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from atropos_common.broadcast.transfer import CHUNK_BYTES
from benchmarks.support import gpu_pair


def timed(work: Callable[[], Any], rounds: int, ready: Callable[[], Any] = lambda: None) -> float:
    """Median seconds of `work` on the present GPU."""
    seconds = []
    for _ in range(rounds + 1):
        ready()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def _broadcast_all(parts: Sequence[torch.Tensor]) -> None:
    for part in parts:
        dist.broadcast(part, 0)


def broadcasts(rank: int, store: str, total: int, rounds: int, results: Any) -> None:
    """One of two processes: broadcast `total` bytes from GPU 0 to GPU 1, whole and in the product's
    chunks."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", rank=rank, world_size=2, init_method=f"file://{store}", device_id=device
    )
    data = torch.zeros(total, dtype=torch.uint8, device=device)
    for name, size in (
        ("NCCL, chunks as in the product", CHUNK_BYTES),
        ("NCCL, all at once", total),
    ):
        parts = data.split(size)
        seconds = timed(partial(_broadcast_all, parts), rounds, dist.barrier)
        if rank == 1:
            results.put((name, seconds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = gpu_pair.argument_parser(__doc__)
    parser.add_argument("--bytes", type=int, default=3_441_689_600)
    options = gpu_pair.parse(parser)
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(broadcasts, (f"{folder}/store", options.bytes, options.rounds, results), nprocs=2)
    found = dict(results.get() for _ in range(2))
    here = torch.zeros(options.bytes, dtype=torch.uint8, device="cuda:0")
    there = torch.empty_like(here, device="cuda:1")
    found["copy from GPU to GPU"] = timed(
        lambda: there.copy_(here, non_blocking=True), options.rounds
    )
    if options.json:
        print(
            json.dumps(
                {"device": torch.cuda.get_device_name(), "bytes": options.bytes, "seconds": found}
            )
        )
        return 0
    print(
        f"{options.bytes / 1e9:.2f} GB, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    for name, seconds in found.items():
        print(f"{name:<34}{seconds * 1000:8.2f} ms{options.bytes / seconds / 1e9:8.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
