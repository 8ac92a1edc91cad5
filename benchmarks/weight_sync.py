"""Measure each way of moving weights: attach, publish, memory, decode speed, alignment.

    python -m benchmarks.weight_sync [--shape tiny|qwen3-1.7b]
        [--modes shared_vllm lora_only none ...] [--json]

Everything runs as in production: real `python -m vllm_server` processes, the trainer's own
strategies. The weights are random, of the named shape. All servers start together, with small
caches on one GPU, and are then measured one after the other while the rest idle: first each mode's
trainer (attach, optimizer steps with a publish each, probe at the end), then decoding, round by
round in turn, so that every ratio is of one run. Lines come as they are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from atropos_common.models.engine_release import installed
from benchmarks.support.children import (
    MODE_SERVERS,
    Child,
    ChildError,
    Process,
    Server,
    environment,
    free_ports,
)
from benchmarks.support.shapes import SHAPES, save_model
from benchmarks.weights.sync_report import checked, show

MODES = ("shared_vllm", "lora_only", "none", "lora_restart", "broadcast")
FP32_HEAD = ["--hf-overrides", '{"head_dtype": "float32"}']
SERVERS = MODE_SERVERS | {
    "plain": ([], {}),
    "eager": (["--enforce-eager"], {}),
    "fp32_head": (FP32_HEAD, {}),
}
"""Flags and environment beside the common ones, by mode or name."""
VLLMS_OWN = ("plain", "eager")
"""Servers that are vLLM's own, without anything of ours."""
ENGINE = "in_process"


class Bench:
    """One run: servers, trainers, what was found so far."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.gpus = torch.cuda.device_count()
        self.dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        self.model = folder / "model"
        self.modes: list[str] = list(options.modes)
        self.servers: dict[str, Server] = {}
        self.trainers: dict[str, Child] = {}
        self.loads: dict[str, Child] = {}
        self.began = time.perf_counter()
        self.found: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if self.gpus else "cpu",
            "torch": torch.__version__,
            "vllm": release.version if (release := installed()) else None,
            "shape": options.shape,
            "dtype": self.dtype,
            "steps": options.steps,
            "modes": {},
            "starts_s": {},
            "decode": {},
            "decode_one": {},
            "errors": {},
        }
        if "broadcast" in self.modes and self.device.type == "cuda" and self.gpus < 2:
            self.modes.remove("broadcast")
            self.found["errors"]["broadcast"] = "skipped: it needs 2 GPUs"

    def left(self) -> float:
        return float(self.options.limit - (time.perf_counter() - self.began))

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """Carry out one part; what goes wrong is noted, and the others go on."""
        try:
            if self.left() < 5:
                raise ChildError("the time was over before it")
            result = work()
            self.say(f"{name}: {json.dumps(result)}")
        except Exception as error:
            self.found["errors"][name] = f"{type(error).__name__}: {error}"
            self.say(f"{name} FAILED: {error}")
        if self.options.output:
            self.options.output.write_text(json.dumps(self.found, indent=1))

    def run(self) -> dict[str, Any]:
        self.part("model", lambda: save_model(self.options.shape, self.model, self.device))
        self.start()
        for name in [*self.servers, *self.loads]:
            self.part(f"start of {name}", partial(self.await_start, name))
        if "fp32_head" in self.servers and "none" in self.servers:
            self.part("heads", self.heads)
        for mode in self.modes:
            self.part(mode, partial(self.mode, mode))
        if not self.options.no_decode:
            self.part("decode", lambda: self.decode("decode", self.options.requests, self.servers))
            self.part(
                "decode of one",
                lambda: self.decode("decode_one", 1, ("plain", "eager", "shared_vllm")),
            )
            self.part("generate", self.generate)
        return self.found

    def start(self) -> None:
        """Start everything at once."""
        names = [] if self.options.no_decode else ["plain", "eager", "fp32_head"]
        if self.device.type == "cpu" and names:
            names = ["plain"]  # no graphs there
        names += [mode for mode in self.modes if mode in SERVERS]
        ports = dict(zip([*names, "lora_restart"], free_ports(len(names) + 1), strict=True))
        for name in names:
            flags, extra = SERVERS[name]
            env = environment(self.folder / name, self.gpu_of(name), extra)
            self.servers[name] = Server(
                self.folder / name,
                ports[name],
                [*self.flags(), *flags],
                env,
                ours=name not in VLLMS_OWN,
            )
        for mode in [*self.modes, *(["heads"] if "fp32_head" in names else [])]:
            self.trainers[mode] = self.trainer(mode, ports.get(mode, ports["lora_restart"]))
        if (
            "lora_restart" in self.trainers
        ):  # its server is its own child, and a cold start takes as long as the others
            self.trainers["lora_restart"].tell(["attach", *self.cache_flags()])
        if not self.options.no_decode:
            env = environment(self.folder / ENGINE, self.gpu_of(ENGINE), {})
            command = ["-m", "benchmarks.weights.load", "engine", *self.flags()]
            self.loads[ENGINE] = Child(self.folder / ENGINE, command, env)
            env = environment(self.folder / "http", None, {})
            self.loads["http"] = Child(
                self.folder / "http", ["-m", "benchmarks.weights.load", "http"], env
            )

    def trainer(self, mode: str, port: int) -> Child:
        folder = self.folder / f"trainer-{mode}"
        every = self.options.steps // 2 if mode in ("none", "lora_restart") else 1
        command = [
            "-m",
            "benchmarks.weights.sync_trainer",
            str(self.model),
            self.options.shape,
            mode,
            str(port),
            str(folder),
            self.device.type,
            self.dtype,
            str(max(every, 1)),
        ]
        extra = {
            "VLLM_BRIDGE_CONFIG_PATH": str(
                self.folder / mode / "bridge" / "vllm_bridge_config.json"
            )
        }
        gpu = None if self.device.type == "cpu" else 0
        return Child(
            folder, command, environment(folder, gpu, extra if mode == "shared_vllm" else {})
        )

    def gpu_of(self, name: str) -> int | None:
        """Servers and trainers share GPU 0; a broadcast's server has its own."""
        if self.device.type == "cpu":
            return None
        return 1 if name == "broadcast" else 0

    def cache_flags(self) -> list[str]:
        if self.device.type == "cpu":
            return [
                "--kv-cache-memory-bytes",
                str(256 << 20),
                "--block-size",
                "32",
                "--enforce-eager",
            ]
        return ["--kv-cache-memory-bytes", str(4 << 30)]

    def flags(self) -> list[str]:
        """The same for every engine, vLLM's own too."""
        common = [
            "--model",
            str(self.model),
            "--served-model-name",
            "m",
            "--dtype",
            self.dtype,
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            "128",
            "--generation-config",
            "vllm",
            "--logprobs-mode",
            "processed_logprobs",
        ]
        if self.device.type == "cuda":
            common += ["--gpu-memory-utilization", "0.12"]
        return common + self.cache_flags()

    def await_start(self, name: str) -> dict[str, float]:
        if name in self.loads:
            self.loads[name].wait(self.left())
            seconds = time.perf_counter() - self.loads[name].began
        else:
            self.servers[name].wait_ready(time.perf_counter() + self.left())
            seconds = self.servers[name].ready_s or 0.0
        self.found["starts_s"][name] = seconds
        return {"seconds": seconds}

    def mode(self, mode: str) -> dict[str, Any]:
        """The trainer's side of a mode, from attach to probe."""
        trainer = self.trainers[mode]
        trainer.wait(self.left())
        if mode != "lora_restart":
            trainer.tell(["attach"])
        row = self.found["modes"][mode] = trainer.wait(self.left())
        row |= trainer.ask(["train", self.options.steps], self.left())
        trainer.close()
        return dict(row)

    def heads(self) -> dict[str, Any]:
        """Alignment at the base weights, with the head's products in half precision or fp32, on
        either side."""
        trainer = self.trainers["heads"]
        trainer.wait(self.left())
        urls = {
            "server_half": self.servers["none"].url,
            "server_fp32": self.servers["fp32_head"].url,
        }
        self.found["heads"] = trainer.ask(["heads", urls], self.left())
        trainer.close()
        return dict(self.found["heads"])

    def load(self, name: str, seed: int, **fields: Any) -> float:
        """Tokens a second of one round."""
        load = {
            "vocabulary": SHAPES[self.options.shape]["vocab_size"],
            "model": "m",
            "seed": seed,
        } | fields
        if name == ENGINE:
            return float(self.loads[ENGINE].ask(load, self.left())["tokens_per_s"])
        load["url"] = self.servers[name].url
        return float(self.loads["http"].ask(load, self.left())["tokens_per_s"])

    def decode(self, key: str, requests: int, names: Collection[str]) -> dict[str, Any]:
        """`/v1/completions` on those of `names` that are ready, in turn; the medians are kept as
        `key`."""
        ready = [
            name
            for name, server in self.servers.items()
            if server.ready_s is not None and name in names
        ]
        size = {"requests": requests, "max_tokens": self.options.tokens, "route": "/v1/completions"}
        rounds = self.in_turn(ready, self.options.rounds, 1, size)
        self.found[key] = {name: median(values) for name, values in rounds.items()}
        self.found[f"{key}_rounds"] = rounds
        return dict(self.found[key])

    def generate(self) -> dict[str, Any]:
        """`/generate` against vLLM's `AsyncLLM` in process, both with logprobs, in turn."""
        ready = [
            name
            for name in self.servers
            if name not in ("eager", "plain") and name in self.found["starts_s"]
        ]
        names = [ENGINE, next(name for name in ("none", "shared_vllm", *ready) if name in ready)]
        size = {
            "requests": self.options.requests,
            "max_tokens": self.options.tokens,
            "logprobs": True,
        }
        rounds = self.in_turn(names, self.options.rounds + 2, 2, size)
        ours, theirs = median(rounds[names[1]]), median(rounds[ENGINE])
        self.found["generate"] = {
            "server": names[1],
            "http": ours,
            "in_process": theirs,
            "ratio": ours / theirs,
        }
        self.found["generate_rounds"] = rounds
        return dict(self.found["generate"])

    def in_turn(
        self, names: list[str], rounds: int, seed: int, size: dict[str, Any]
    ) -> dict[str, list[float]]:
        """Return tokens a second for each of `rounds` rounds, in turn, after a short one that does
        not count."""
        for name in names:
            self.load(name, seed, **size | {"max_tokens": 16})
        found: dict[str, list[float]] = {name: [] for name in names}
        for count in range(rounds):
            for name in names:
                found[name].append(self.load(name, 100 * seed + count, **size))
        return found

    def close(self) -> None:
        children: list[Process] = [
            *self.trainers.values(),
            *self.loads.values(),
            *self.servers.values(),
        ]
        for child in children:
            child.popen.terminate()
        for child in children:
            child.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b" if cuda else "tiny")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each mode")
    parser.add_argument("--requests", type=int, default=64, help="concurrent requests of the load")
    parser.add_argument(
        "--tokens", type=int, default=256, help="tokens of each completion of the load"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each server")
    parser.add_argument(
        "--limit", type=float, default=540.0, help="seconds after which nothing new is begun"
    )
    parser.add_argument("--no-decode", action="store_true", help="the modes alone, no decode speed")
    parser.add_argument(
        "--output", type=Path, help="write what is known so far to this JSON file, after each part"
    )
    parser.add_argument("--folder", type=Path, help="keep model and logs here")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atropos-sync-") as temporary:
        bench = Bench(options, options.folder or Path(temporary))
        try:
            found = bench.run()
        finally:
            bench.close()
    found["seconds"] = time.perf_counter() - bench.began
    print(json.dumps(found) if options.json else show(found))
    return checked(found).status()


if __name__ == "__main__":
    sys.exit(main())
