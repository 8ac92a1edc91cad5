"""Measure the groups an environment makes and the trainer's wait, with and without refill.

    python -m benchmarks.env_rate [--flat 0 0.5 0.8] [--step-ms 220] [--against FOLDER]
        [--json FILE]
    python -m benchmarks.env_rate --in-flight 1250 --ahead 8 --latency-ms 1500 --spread 0.5
        --sequences 4096 --workers 256 --flat 0.45 0.8 --seconds 10 --against FOLDER

The sums environment (`atropos_envs.sums_server`) and run-api as they are, each in its process. The
engine is a stand-in that answers every request after `--latency-ms`, at most `--sequences`
completions at a time, and makes a group flat with the given probability: so what is measured is the
environment. The trainer is a consumer that fetches a batch ahead, as ours does, takes `--step-ms`
for a step and gives the engine a new weight version at the end of each; every completion carries
the version that was there when its request came as its logprob, which gives the policy lag.

`--against` is a checkout of another commit, whose environment runs beside this one's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from atropos_common.net.http import AFTER_HEADER, BATCH_HEADER
from atropos_common.protocol.records import FLAT
from atropos_common.system.run_dir import ENV_AHEAD, ENV_CONCURRENCY, ENV_ENGINE_URLS
from benchmarks.support.chat_model import SPECIAL, TEMPLATE
from benchmarks.support.checks import Checks
from benchmarks.support.children import Process, free_ports
from benchmarks.support.shapes import byte_level

ROOT = Path(__file__).resolve().parent.parent
WORSE, BETTER = "no number", "77"
"""Two answers whose rewards differ at every question."""
READY_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Rate:
    """One run."""

    name: str
    flat: float
    """Asked for."""
    flat_share: float
    """Found."""
    useful_per_s: float
    made_per_s: float
    """Useful and flat ones, and those that were not needed."""
    surplus_share: float
    step_ms: float
    """From one batch to the next."""
    waited: float
    """Share of the time in which the consumer had no batch."""
    lag_max: int
    lag_mean: float
    cpu_ms: float
    """CPU time of the environment's process for each group."""


def make_tokenizer(folder: Path) -> dict[str, list[int]]:
    """A byte-level chat tokenizer into `folder`; the ids of both answers."""
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = byte_level(models.BPE({token: at for at, token in enumerate([*SPECIAL, *letters])}, []))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        additional_special_tokens=SPECIAL[1:],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return {text: [*tokenizer.encode(text)[:4], tokenizer.eos_token_id] for text in (WORSE, BETTER)}


def serve_engine(asked: argparse.Namespace) -> None:
    """The stand-in for an engine, in a process of its own."""
    from aiohttp import web

    latency_s, spread, flat = asked.latency_ms / 1e3, asked.spread, asked.flat[0]
    dice, version, places = random.Random(0), 0, asyncio.Semaphore(asked.sequences)

    async def generate(request: web.Request) -> web.Response:
        body, seen = await request.json(), version
        n = body.get("n", 1)
        for _ in range(n):
            await places.acquire()
        await asyncio.sleep(latency_s * dice.lognormvariate(0.0, spread))
        for _ in range(n):
            places.release()
        good = 0 if dice.random() < flat else dice.randrange(1, n) if n > 1 else 0
        chosen = [asked.answers[BETTER if at < good else WORSE] for at in range(n)]
        return web.json_response(
            {
                "token_ids": chosen,
                "finish_reasons": ["stop"] * n,
                "weight_versions": [[seen, seen]] * n,
                "logprobs": [[[{str(token): -1.0 - seen}] for token in ids] for ids in chosen],
            }
        )

    async def publish(request: web.Request) -> web.Response:
        nonlocal version
        version = int(request.query["version"])
        return web.json_response({})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": 1024}]})

    app = web.Application()
    app.add_routes(
        [
            web.post("/generate", generate),
            web.post("/publish", publish),
            web.get("/v1/models", models),
        ]
    )
    web.run_app(app, host="127.0.0.1", port=asked.serve, print=None)


class Consumer:
    """A trainer's side of run-api: one batch trains while the next is fetched."""

    def __init__(self, http: aiohttp.ClientSession, api: str, engine: str, step_s: float) -> None:
        self._http, self._api, self._engine, self._step_s = http, api, engine, step_s
        self._after, self.version = "", 0
        self.lags: list[int] = []
        self.waited_s = 0.0

    async def register(self, batch: int) -> None:
        fields = {
            "wandb_group": "",
            "wandb_project": "",
            "checkpoint_dir": "",
            "save_checkpoint_interval": -1,
        }
        numbers = {
            "batch_size": batch,
            "max_token_len": 1024,
            "starting_step": 0,
            "num_steps": 10**6,
        }
        until = time.monotonic() + READY_S
        while True:
            with suppress(aiohttp.ClientConnectionError):
                await self._http.post(f"{self._api}/register", json=fields | numbers)
                return
            if time.monotonic() > until:
                raise RuntimeError("run-api does not answer")
            await asyncio.sleep(0.1)

    async def fetch(self) -> list[dict[str, Any]]:
        """The next batch, however long it takes."""
        while True:
            async with self._http.get(
                f"{self._api}/batch", headers={AFTER_HEADER: self._after}
            ) as response:
                batch = (await response.json()).get("batch")
                if batch:
                    self._after = response.headers[BATCH_HEADER]
                    return list(batch)
            await asyncio.sleep(0.02)

    async def steps(self, seconds: float) -> int:
        """Train for `seconds`; how many steps."""
        ahead = asyncio.create_task(self.fetch())
        self.lags, self.waited_s, count, began = [], 0.0, 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            asked = time.perf_counter()
            batch = await ahead
            self.waited_s += time.perf_counter() - asked
            ahead = asyncio.create_task(self.fetch())
            written = (round(-1 - min(group["inference_logprobs"][0][-1:])) for group in batch)
            self.lags += [self.version - version for version in written]
            await asyncio.sleep(self._step_s)
            self.version += 1
            await self._http.post(f"{self._engine}/publish", params={"version": self.version})
            count += 1
        ahead.cancel()
        return count


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def counts(path: Path) -> dict[str, Any]:
    """The newest record of what became of the groups."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [record for line in lines if (record := json.loads(line))["kind"] == "env_counts"]
    return found[-1] if found else {"sent": 0, "left_out": {}, "time": 0.0}


async def measure(
    asked: argparse.Namespace, name: str, root: Path, refill: bool, flat: float
) -> Rate:
    """One environment, from its registration on."""
    with tempfile.TemporaryDirectory(prefix="env-rate-") as folder:
        place = Path(folder)
        answers = make_tokenizer(place / "model")
        api_port, engine_port = free_ports(2)
        api, engine = f"http://127.0.0.1:{api_port}", f"http://127.0.0.1:{engine_port}"
        env = _variables(asked, root, place / "run", engine, refill)
        (place / "run").mkdir()
        engine_flags = {
            "serve": engine_port,
            "answers": json.dumps(answers),
            "flat": flat,
            "latency-ms": asked.latency_ms,
            "spread": asked.spread,
            "sequences": asked.sequences,
        }
        stand_in = ["-m", "benchmarks.env_rate", *_words(engine_flags)]
        flags = {
            "slurm": "false",
            "env.tokenizer_name": place / "model",
            "env.rollout_server_url": api,
            "openai.base_url": f"{engine}/v1",
            "openai.model_name": place / "model",
            "env.group_size": asked.group,
            "env.steps_per_eval": 0,
            "env.max_batches_offpolicy": asked.ahead,
            "env.max_num_workers": asked.workers or asked.sequences // asked.group,
        }
        # Without -P, Python would import from the present folder, not from `root`.
        serve = ["-P", "-m", "atropos_envs.sums_server", "serve", *_words(flags)]
        ours = env | {"PYTHONPATH": str(ROOT)}
        parts = [
            Process(
                place / "api", ["-m", "atropos_api", "--port", str(api_port)], ours, talks=False
            ),
            Process(place / "engine", stand_in, ours, talks=False),
        ]
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=READY_S)) as http:
                consumer = Consumer(http, api, engine, asked.step_ms / 1000)
                await consumer.register(asked.batch)
                parts.append(Process(place / "env", serve, env, talks=False))
                try:
                    await asyncio.wait_for(consumer.steps(asked.warm_up), READY_S)
                except TimeoutError:
                    raise RuntimeError(f"no batch came:\n{parts[-1].tail()}") from None
                return await _measured(
                    asked, name, flat, consumer, parts[-1], place / "run/eval.sums.jsonl"
                )
        finally:
            for part in parts:
                part.close()


def _words(flags: dict[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _variables(
    asked: argparse.Namespace, root: Path, run: Path, engine: str, refill: bool
) -> dict[str, str]:
    """The environment variables of the environment's process."""
    env = os.environ | {
        "PYTHONPATH": str(root),
        "HF_HUB_OFFLINE": "1",
        "ATROPOS_RUN_DIR": str(run),
        "ATROPOS_COMPONENT": "sums",
        "ATROPOS_REFILL": str(int(refill)),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if asked.in_flight:
        env[ENV_CONCURRENCY], env[ENV_AHEAD] = str(asked.in_flight), str(asked.ahead)
        env[ENV_ENGINE_URLS] = engine
    return env


async def _measured(
    asked: argparse.Namespace,
    name: str,
    flat: float,
    consumer: Consumer,
    program: Process,
    records: Path,
) -> Rate:
    before, cpu = counts(records), cpu_s(program.popen.pid)
    began = time.perf_counter()
    steps = await consumer.steps(asked.seconds)
    lasted, cpu = time.perf_counter() - began, cpu_s(program.popen.pid) - cpu
    while (after := counts(records))["time"] == before["time"]:
        await asyncio.sleep(0.2)
    sent = after["sent"] - before["sent"]
    left_out = {
        reason: count - before["left_out"].get(reason, 0)
        for reason, count in after["left_out"].items()
    }
    equal, made = left_out.get(FLAT, 0), sent + sum(left_out.values())
    per_s = 1 / (after["time"] - before["time"])
    return Rate(
        name,
        flat,
        equal / made,
        sent * per_s,
        made * per_s,
        (made - sent - equal) / made,
        lasted / steps * 1e3,
        consumer.waited_s / lasted,
        max(consumer.lags),
        sum(consumer.lags) / len(consumer.lags),
        cpu / lasted / (made * per_s) * 1e3,
    )


HEAD = (
    f"{'':16} {'flat':>5} {'made/s':>7} {'sent/s':>7} {'surplus':>8} {'step ms':>8} "
    f"{'waited':>7} {'lag':>8} "
    f"{'CPU ms/group':>13}"
)


def row(rate: Rate) -> str:
    """One run, under `HEAD`; the lag as mean/largest."""
    return (
        f"{rate.name:16} {rate.flat_share:5.2f} {rate.made_per_s:7.1f} {rate.useful_per_s:7.1f} "
        f"{rate.surplus_share:8.1%} {rate.step_ms:8.0f} {rate.waited:7.1%} "
        f"{rate.lag_mean:6.2f}/{rate.lag_max} "
        f"{rate.cpu_ms:13.2f}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.env_rate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--flat", type=float, nargs="+", default=[0.0, 0.5, 0.8], help="shares of flat groups"
    )
    parser.add_argument("--batch", type=int, default=128, help="sequences of a step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=220.0, help="what a training step takes")
    parser.add_argument(
        "--latency-ms", type=float, default=40.0, help="what the engine takes for a request"
    )
    parser.add_argument(
        "--spread", type=float, default=0.0, help="standard deviation of the latency's logarithm"
    )
    parser.add_argument(
        "--sequences", type=int, default=512, help="completions that it makes at a time"
    )
    parser.add_argument(
        "--in-flight", type=int, help="completions that the environment keeps in flight"
    )
    parser.add_argument("--ahead", type=int, default=1, help="env.max_batches_offpolicy")
    parser.add_argument(
        "--workers", type=int, default=0, help="max_num_workers; default: what the engine takes"
    )
    parser.add_argument("--warm-up", type=float, default=6.0, help="seconds before the measurement")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--only", nargs="+", help="names of the runs to make")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    asked = _parser().parse_args(argv)
    if asked.serve:
        serve_engine(asked)
        return 0
    runs = [("before", asked.against.resolve(), True)] if asked.against else []
    runs += [("refill = false", ROOT, False), ("refill = true", ROOT, True)]
    rates = []
    print(HEAD)
    for flat in asked.flat:
        for name, root, refill in runs:
            if not asked.only or name in asked.only:
                rates.append(asyncio.run(measure(asked, name, root, refill, flat)))
                print(row(rates[-1]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(rate) for rate in rates], indent=1) + "\n")
    checks = Checks()
    for rate in rates:
        # With several batches ahead the trainer leaves out what is too old.
        if rate.name != "before" and asked.ahead == 1:
            checks.at_most(
                f"the policy lag of {rate.name} at {rate.flat:g} flat", rate.lag_max, asked.ahead
            )
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
