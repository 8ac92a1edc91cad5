"""Train a large shape through the real stack: memory, seconds a step, MFU, alignment.

    python -m benchmarks.large_models --shape llama-3.1-8b --memory-limit 79 --steps 10 --json
        --set master_weights=stochastic gradient_dtype=bfloat16 optimizer=adamw_8bit
              gradient_checkpointing=on
    python -m benchmarks.large_models --shape qwen3-14b --parallel 2 --steps 20 --json
        --set master_weights=stochastic gradient_dtype=bfloat16 optimizer=adamw_8bit
              gradient_checkpointing=on
    python -m benchmarks.large_models --shape tiny --steps 3    # a trial on a CPU

Weights are random, of the named shape, made by a process of its own. Then everything is the
product's: run-api behind its auth middleware, `python -m vllm_server` in the wanted mode with a KV
cache of `--kv-cache` GiB, `python -m trainer_core` with the settings after `--set`. A feeder takes
the environment's place: it registers, lets the engine complete random prompts, gives scores of +-1
at random, and posts groups. The trainer is killed after `--steps` steps, so that nobody waits for a
checkpoint.

With `--mode lora_only --set single_copy=true` adapters are trained over the engine's own weights.
`--parallel` N is single copy over a tensor-parallel engine: N workers of vLLM, N ranks of the
trainer, each pair on a GPU of its own with its part of the one copy.

`--memory-limit` GiB emulates a smaller card: a process of the script's allocates everything of the
device but that much and holds it to the end, so the rest really cannot be had. A card of 80 GB has
79.6 GiB. NVML gives free memory and the stack's peak ten times a second; other programs on the
device would be counted. `mfu` is relative to the card's dense bfloat16 peak.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from atropos_common.protocol.bridge import ROUTING_FLAG, TOKEN_HEADER
from atropos_common.protocol.record_base import Record, RecordError
from atropos_common.protocol.records import parse_line
from atropos_tui.gpu import Nvml, given_here
from benchmarks.support.checks import Checks
from benchmarks.support.children import (
    MODE_SERVERS,
    TOKEN,
    ChildError,
    Process,
    Server,
    environment,
    free_ports,
    visible,
)
from benchmarks.support.shapes import SHAPES
from trainer_core.errors import EngineError, EngineGone
from trainer_core.server.client import ServerClient

GIB = 1 << 30
GROUP = 8
MODES = ("shared_vllm", "lora_only", "none")
ADAPTERS = {"lora_target_modules": "all-linear", "lr": 2e-4}
"""Settings of the trainer in lora_only."""


def hold(limit_gib: float) -> None:
    """Take all of the GPU but `limit_gib` GiB until stdin ends."""
    import torch

    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    taken = max(0, free - int(limit_gib * GIB))
    kept = torch.empty(taken, dtype=torch.uint8, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    print(
        f"holds {kept.numel() / GIB:.1f} GiB of {total / GIB:.1f}, {free / GIB:.2f} GiB are free",
        flush=True,
    )
    sys.stdin.read()


def feed(
    api: str, engine: str, vocabulary: int, prompt: int, completion: int, sequences: int
) -> None:
    """Be the environment: a batch of groups whenever run-api holds less than two."""
    http = httpx.Client(base_url=api, timeout=60, trust_env=False, headers={TOKEN_HEADER: TOKEN})
    # Without the token, as environments are: a request with it passes the hold, while the trainer
    # still tries the weights.
    server = ServerClient(engine, "", timeout_s=600.0)
    dice = random.Random(0)
    about = {
        "max_token_length": prompt + completion,
        "desired_name": "feeder",
        "weight": 1.0,
        "group_size": GROUP,
    }
    known = None
    while known is None:
        time.sleep(0.2)
        with suppress(httpx.HTTPError):
            known = http.post("/register-env", json=about).json().get("env_id")
    with ThreadPoolExecutor(sequences) as pool:
        while True:
            with suppress(httpx.HTTPError, EngineGone, EngineError):
                waiting = int(http.get("/status").json()["queue_size"])
                if waiting * GROUP < 2 * sequences:
                    for group in _groups(
                        server, pool, dice, vocabulary, prompt, completion, sequences // GROUP
                    ):
                        http.post("/scored_data", json=group | {"env_id": known}).raise_for_status()
                    continue
            time.sleep(0.1)


def _groups(
    server: ServerClient,
    pool: ThreadPoolExecutor,
    dice: random.Random,
    vocabulary: int,
    prompt: int,
    completion: int,
    count: int,
) -> list[dict[str, Any]]:
    """Groups of completions of random prompts, of half to all of `completion` tokens, scored at
    random."""
    asked = []
    for _ in range(count):
        start = [dice.randrange(1, vocabulary) for _ in range(prompt)]
        lengths = [dice.randint(completion // 2, completion) for _ in range(GROUP)]
        asked.append((start, [pool.submit(server.generate, start, n) for n in lengths]))
    found = []
    for start, futures in asked:
        answers = [future.result() for future in futures]
        found.append(
            {
                "tokens": [start + a.token_ids for a in answers],
                "masks": [[-100] * len(start) + a.token_ids for a in answers],
                "inference_logprobs": [[1.0] * len(start) + a.logprobs for a in answers],
                "scores": dice.sample([1.0, -1.0] * (GROUP // 2), GROUP),
            }
        )
    return found


class Devices:
    """Memory in use on each of some GPUs, by NVML; without a GPU, nothing."""

    def __init__(self, indices: list[int]) -> None:
        self.peak, self.base = [0] * len(indices), [0] * len(indices)
        self._stop = threading.Event()
        self._indices, self._nvml = indices, Nvml(given_here())
        if not indices:
            return
        threading.Thread(target=self._watch, daemon=True).start()

    def used(self) -> list[int]:
        """Bytes beyond `base`."""
        cards = self._nvml.read() if self._indices else []
        found = [cards[index].used for index in self._indices]
        return [used - base for used, base in zip(found, self.base, strict=True)]

    def from_here(self) -> None:
        """Leave out what is in use now."""
        self.base = [base + used for base, used in zip(self.base, self.used(), strict=True)]
        self.peak = [0] * len(self.peak)

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peak = [max(pair) for pair in zip(self.peak, self.used(), strict=True)]


class Run:
    """One shape, one mode."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.cpu = options.gpu is None
        self.model: Path = options.model or folder / "model"
        self.began = time.monotonic()
        self.devices = Devices(
            [] if self.cpu else list(range(options.gpu, options.gpu + options.parallel))
        )
        self.processes: list[Process] = []
        self.found: dict[str, Any] = {
            "shape": options.shape,
            "mode": options.mode,
            "settings": options.set,
            "kv_cache_gib": options.kv_cache,
            "parallel": options.parallel,
            "memory_limit_gib": options.memory_limit,
            "steps": 0,
            "error": None,
        }

    def left(self) -> float:
        return float(self.options.limit - (time.monotonic() - self.began))

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def start(
        self,
        name: str,
        command: list[str],
        extra: dict[str, str] | None = None,
        *,
        talks: bool = False,
    ) -> Process:
        env = environment(self.folder / name, self.options.gpu, self._places() | (extra or {}))
        process = Process(self.folder / name, ["-m", *command], env, talks=talks)
        self.processes.append(process)
        return process

    def _places(self) -> dict[str, str]:
        """The GPUs of all ranks; on a CPU workers and ranks that leave the cores to each other."""
        if self.cpu:
            return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if self.options.parallel > 1 else {}
        first = self.options.gpu
        return visible(range(first, first + self.options.parallel))

    def run(self) -> None:
        """All of it; `found` grows as it goes."""
        shape = SHAPES[self.options.shape]
        if not (self.model / "config.json").is_file():
            place = "cpu" if self.cpu else "cuda"
            builder = self.start(
                "build", ["benchmarks.support.shapes", self.options.shape, str(self.model), place]
            )
            if builder.popen.wait(max(self.left(), 1)):
                raise ChildError(builder.tail())
            self.say(f"model written: {builder.tail().strip().splitlines()[-1]}")
        if self.options.memory_limit and not self.cpu:
            self._hold_the_rest()
        self.devices.from_here()
        api_port, port = free_ports(2)
        self.start("api", ["atropos_api", "--port", str(api_port)])
        server = self._server(port)
        self.start(
            "feeder",
            [
                "benchmarks.large_models",
                "feed",
                f"http://127.0.0.1:{api_port}",
                server.url,
                str(shape["vocab_size"]),
                str(self.options.prompt),
                str(self.options.completion),
                str(self.options.sequences),
            ],
        )
        server.wait_ready(time.perf_counter() + self.left())
        self.found["server_ready_s"], self.found["server_bytes"] = (
            server.ready_s,
            self.devices.used(),
        )
        self.found["eager_because"] = ServerClient(server.url, TOKEN).info().eager_because
        self.say(f"server ready, {_gib(self.devices.used())} GiB in use")
        trainer = self._trainer(port, api_port)
        self._await_steps(trainer)

    def _hold_the_rest(self) -> None:
        holder = self.start(
            "hold", ["benchmarks.large_models", "hold", str(self.options.memory_limit)], talks=True
        )
        assert holder.popen.stdout is not None
        self.found["held"] = holder.popen.stdout.readline().strip() or holder.tail()
        self.say(self.found["held"])

    def _server(self, port: int) -> Server:
        flags, extra = MODE_SERVERS[self.options.mode]
        if "single_copy=true" in self.options.set:
            extra = MODE_SERVERS["shared_vllm"][1]
        common = [
            "--model",
            str(self.model),
            "--served-model-name",
            "m",
            "--dtype",
            "float32" if self.cpu else "bfloat16",
            "--max-model-len",
            str(self.options.prompt + self.options.completion),
            "--max-num-seqs",
            str(self.options.sequences),
            "--generation-config",
            "vllm",
            "--logprobs-mode",
            "processed_logprobs",
            "--kv-cache-memory-bytes",
            str(int(self.options.kv_cache * GIB)),
            "--gpu-memory-utilization",
            "0.12",
        ]
        if self.cpu:
            common = [*common[:-2], "--block-size", "32", "--enforce-eager"]
        if "routing_replay=true" in self.options.set:
            common += [f"--{ROUTING_FLAG}"]
        if self.options.parallel > 1:
            common += ["--tensor-parallel-size", str(self.options.parallel)]
        folder = self.folder / "server"
        env = environment(folder, self.options.gpu, self._places() | extra)
        server = Server(folder, port, [*common, *flags, *self.options.server], env)
        self.processes.append(server)
        return server

    def _trainer(self, port: int, api_port: int) -> Process:
        settings: dict[str, Any] = {
            "model_name": self.model,
            "weight_bridge_mode": self.options.mode,
            "vllm_port": port,
            "atropos_url": f"http://127.0.0.1:{api_port}",
            "training_steps": self.options.steps + 20,
            "batch_size": self.options.sequences // GROUP,
            "gradient_accumulation_steps": GROUP,
            "lr": 1e-6,
            "seq_len": self.options.prompt + self.options.completion,
            "checkpoint_interval": 0,
            "dtype": "float32" if self.cpu else "bfloat16",
            "save_path": self.folder / "out",
            "benchmark": "true",
            "max_model_len": self.options.prompt + self.options.completion,
            "rollout_samples": 0,
            "pack_tokens": 16_384,
        }
        settings |= ADAPTERS if self.options.mode == "lora_only" else {}
        settings |= dict(item.split("=", 1) for item in self.options.set)
        flags = [
            part
            for key, value in settings.items()
            for part in ("--" + key.replace("_", "-"), str(value))
        ]
        manifest = str(self.folder / "server" / "bridge" / "vllm_bridge_config.json")
        ranks = self.options.parallel
        program = ["trainer_core"] if ranks == 1 else ["trainer_core.ranks.launch", str(ranks)]
        return self.start("trainer", [*program, *flags], {"VLLM_BRIDGE_CONFIG_PATH": manifest})

    def _await_steps(self, trainer: Process) -> None:
        told = 0
        while self.found["steps"] < self.options.steps:
            ended = trainer.popen.poll() is not None
            self._read()
            if self.found["steps"] > told:
                told = self.found["steps"]
                self.say(f"step {told}: {self.found['last']}")
            if ended or self.left() < 5:
                why = "the trainer ended" if ended else "the time is over"
                raise ChildError(f"{why} after {told} steps:\n{trainer.tail()}")
            time.sleep(0.2)

    def _read(self) -> None:
        """Summarize the trainer's records so far, without the first two steps, which compile and
        create state."""
        by_kind: dict[str, list[Any]] = {}
        for record in records(self.folder / "out" / "telemetry.jsonl"):
            by_kind.setdefault(record.kind, []).append(record)
        timings, syncs = by_kind.get("timing", []), by_kind.get("sync", [])
        probes = [
            a.probe_diff_abs_mean
            for a in by_kind.get("alignment", [])
            if a.probe_diff_abs_mean is not None
        ]
        memory = by_kind.get("memory", [])
        if not (timings and memory and syncs):
            return
        warm = timings[2:] or timings[-1:]
        mfu = [t.mfu_peak for t in warm if t.mfu_peak is not None]
        self.found |= {
            "steps": len(memory),
            "step_s": median(t.step_s for t in warm),
            "train_s": median(t.train_s for t in warm),
            "wait_s": median(t.data_wait_s for t in warm),
            "publish_s": median(s.seconds for s in syncs[2:] or syncs),
            "publish_phases": syncs[-1].phases,
            "mfu": median(mfu) if mfu else None,
            "tokens_per_s": median(t.tokens_per_s for t in warm),
            "routing_replayed": [a.routing_replayed for a in by_kind.get("alignment", [])],
            "probe_abs_mean": probes,
            "verdicts": [
                f"{a.verdict}: {a.cause}" if a.cause else a.verdict
                for a in by_kind.get("alignment", [])
            ],
            "trainer_peak_bytes": max(m.peak_bytes or 0 for m in memory),
            "trainer_reserved_bytes": max(m.reserved_bytes or 0 for m in memory),
            "trainer_rss_bytes": max(m.rss_bytes or 0 for m in memory),
            "device_peak_bytes": self.devices.peak,
            "last": f"{timings[-1].step_s:.2f} s, training {timings[-1].train_s:.2f} s",
        }

    def close(self) -> None:
        """End everything; the trainer at once."""
        for process in reversed(self.processes):
            if process.popen.poll() is None:
                process.popen.kill() if not isinstance(
                    process, Server
                ) else process.popen.terminate()
        for process in self.processes:
            process.close()
        self.devices.close()


def records(path: Path) -> list[Record]:
    """The whole lines of a stream so far."""
    found = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        with suppress(RecordError):
            found.append(parse_line(line))
    return found


def show(found: dict[str, Any]) -> str:
    if not found["steps"]:
        return f"{found['shape']}, {found['mode']}: nothing measured: {found['error']}"
    trainer = _gib([found["trainer_peak_bytes"]]), _gib([found["trainer_reserved_bytes"]])
    parts = f" in {found['parallel']} parts" if found["parallel"] > 1 else ""
    graphs = f"; without CUDA graphs: {found['eager_because']}" if found["eager_because"] else ""
    replayed = [share for share in found["routing_replayed"] if share is not None]
    mfu = "-" if found["mfu"] is None else f"{found['mfu']:.1%}"
    return "\n".join(
        [
            f"{found['shape']}{parts}, {found['mode']}, {' '.join(found['settings'])}{graphs}; "
            f"KV cache {found['kv_cache_gib']} GiB",
            f"{found['steps']} steps of {found['step_s']:.2f} s (training "
            f"{found['train_s']:.2f} s, waiting "
            f"{found['wait_s']:.2f} s, publish {found['publish_s']:.3f} s), MFU {mfu}",
            f"GiB: server {_gib(found['server_bytes'])}, tensors of a rank of the trainer at "
            f"their peak {trainer[0]} "
            f"(reserved {trainer[1]}), device at its peak {_gib(found['device_peak_bytes'])}"
            + (f" of {found['memory_limit_gib']}" if found["memory_limit_gib"] else ""),
            *([f"replayed {', '.join(f'{r:.1%}' for r in replayed)}"] if replayed else []),
            f"probe |diff| {', '.join(f'{p:.4f}' for p in found['probe_abs_mean'])}; "
            f"{', '.join(found['verdicts'])}",
            *([f"ended early: {found['error']}"] if found["error"] else []),
        ]
    )


def _gib(sizes: list[int]) -> str:
    """Format the size on each GPU in GiB."""
    return " + ".join(f"{size / GIB:.1f}" for size in sizes) or "-"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--mode", choices=MODES, default="shared_vllm")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the trainer"
    )
    parser.add_argument(
        "--server", nargs="*", default=[], metavar="FLAG", help="further flags of vLLM"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--sequences", type=int, default=64, help="of one optimizer step, in groups of 8"
    )
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument(
        "--completion", type=int, default=512, help="tokens of the longest completion"
    )
    parser.add_argument("--kv-cache", type=float, default=6.0, metavar="GIB")
    parser.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="of the device; the rest is held"
    )
    parser.add_argument(
        "--gpu", type=int, help="which one; default: 0, or none where there is none"
    )
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="GPUs from --gpu on, each with a part"
    )
    parser.add_argument(
        "--model", type=Path, help="a folder from an earlier run, or where to put the model"
    )
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--folder", type=Path, help="keep model and logs here")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.parallel > 1 and (options.mode != "shared_vllm" or options.memory_limit):
        parser.error("--parallel is for --mode shared_vllm, without --memory-limit")
    if options.gpu is None and Path("/dev/nvidiactl").exists():
        options.gpu = 0
    return options


def main() -> int:
    if sys.argv[1:2] == ["hold"]:
        hold(float(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["feed"]:
        feed(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
        return 0
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the others end, too
    with tempfile.TemporaryDirectory(prefix="atropos-large-") as temporary:
        run = Run(options, options.folder or Path(temporary))
        try:
            run.run()
        except ChildError as error:
            run.found["error"] = str(error)
        finally:
            run.found["seconds"] = time.monotonic() - run.began
            run.close()
    if options.output:
        options.output.write_text(json.dumps(run.found, indent=1))
    print(json.dumps(run.found) if options.json else show(run.found))
    checks = Checks()
    checks.that(not run.found["error"], str(run.found["error"]))
    wrong = [verdict for verdict in run.found.get("verdicts", []) if verdict.startswith("mismatch")]
    checks.that(not wrong, f"the verdict of {len(wrong)} steps: {', '.join(wrong[:1])}")
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
