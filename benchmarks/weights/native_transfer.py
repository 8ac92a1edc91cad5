"""Compare our broadcast with vLLM's own weight transfers, from one GPU to another.

    python -m benchmarks.weights.native_transfer [--shape qwen3-1.7b] [--rounds 11] [--json]

Two GPUs are needed: the trainer's tensors are on the first, a vLLM server is on the second. Each
way moves all weights of the shape in bf16. A publish is pause, transfer and resume. Ours is
measured by `benchmarks.weight_sync` in the same run, with the trainer's own strategy. vLLM's
backends run with vLLM's own API server; after the last publish a logprob must have changed.
Medians; the first round is not counted. Each way is printed when it is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch

from benchmarks.support import gpu_pair
from benchmarks.support.children import Server, environment, free_ports
from benchmarks.support.shapes import SHAPES, save_model

BACKENDS = ("nccl", "nccl_m2n")
START_S = 300.0


def publishes(
    pause: Callable[[], Any],
    send: Callable[[], Any],
    resume: Callable[[], Any],
    rounds: int,
) -> dict[str, float]:
    """Median seconds of a publish and of its transfer."""
    whole, transfer = [], []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        pause()
        paused = time.perf_counter()
        send()
        torch.cuda.synchronize()
        sent = time.perf_counter()
        resume()
        whole.append(time.perf_counter() - began)
        transfer.append(sent - paused)
    return {"publish_s": median(whole[1:]), "transfer_s": median(transfer[1:])}


def first_logprob(server: Server, model: Path) -> float:
    body = {"model": str(model), "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | {"logprobs": 1}, timeout=60)
    return float(answer.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"][0])


def trainer_of(backend: str, source: Any, server: Server, port: int) -> Any:
    """Connect vLLM's trainer side of `backend` with the server."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.m2n_trainer import (
        M2NTrainerInitInfo,
        M2NTrainerWeightTransferEngine,
    )
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine,
    )

    kinds: dict[str, tuple[Any, Any]] = {
        "nccl": (NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine),
        "nccl_m2n": (M2NTrainerInitInfo, M2NTrainerWeightTransferEngine),
    }
    info, engine = kinds[backend]
    init = info(rank=0, master_address="127.0.0.1", master_port=port, world_size=2)
    return engine.trainer_init(init, client=HTTPVLLMWeightSyncClient(server.url), source=source)


def vllms(backend: str, model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure one of vLLM's backends."""
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import ModuleSource

    port, meeting = free_ports(2)
    # CUDA graphs change nothing in a publish, and their capture would lengthen the start.
    flags = ["--model", str(model), "--dtype", "bfloat16", "--max-model-len", "2048"]
    flags += ["--enforce-eager"]
    flags += ["--weight-transfer-config", json.dumps({"backend": backend})]
    env = environment(folder, 1, {"VLLM_SERVER_DEV_MODE": "1"})
    server = Server(folder / backend, port, flags, env, ours=False)
    try:
        server.wait_ready(time.perf_counter() + START_S)
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to("cuda:0")
        before = first_logprob(server, model)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.01)
        trainer = trainer_of(backend, ModuleSource(module), server, meeting)

        def post(path: str) -> None:
            httpx.post(server.url + path, timeout=60).raise_for_status()

        found: dict[str, Any] = publishes(
            lambda: post("/pause?mode=keep"), trainer.send_weights, lambda: post("/resume"), rounds
        )
        return found | {"arrived": first_logprob(server, model) != before}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[-600:], "log": server.tail()}
    finally:
        server.close()


def ours(shape: str, steps: int) -> dict[str, Any]:
    """Measure the product's broadcast."""
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--modes", "broadcast"]
    command += ["--no-decode", "--json", "--shape", shape, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        row = json.loads(done.stdout.splitlines()[-1])["modes"]["broadcast"]
        return {"publish_s": row["publish_s"], "phases": row["phases"]}
    except (IndexError, KeyError, ValueError):
        return {"error": f"exit {done.returncode}: {(done.stdout + done.stderr)[-600:]}"}


def main() -> int:
    parser = gpu_pair.argument_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    options = gpu_pair.parse(parser)
    failed = False

    def show(way: str, row: dict[str, Any]) -> None:
        nonlocal failed
        failed |= "error" in row or not row.get("arrived", True)
        found = {"device": torch.cuda.get_device_name(), "way": way} | row
        text = json.dumps(found if options.json else row)
        print(text if options.json else f"{way:<10}{text}", flush=True)

    show("ours", ours(options.shape, options.rounds))
    with tempfile.TemporaryDirectory(prefix="atropos-native-") as temporary:
        folder = Path(temporary)
        save_model(options.shape, folder / "model", torch.device("cuda"))
        for backend in BACKENDS:
            show(backend, vllms(backend, folder / "model", folder, options.rounds))
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
