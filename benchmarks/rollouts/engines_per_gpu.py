"""Tokens per second of one and several engines on the same device, with what each process uses.

    python -m benchmarks.rollouts.engines_per_gpu --model FOLDER [--engines 1 2 3]
        [--sequences 128 320] [--tokens 250] [--seconds 8] [--gpu 0 | --cpu] [--random] [--json]

All engines start one after the other and stay; a row loads the first of them over HTTP with
groups of eight, each completion of exactly `--tokens`. `--random` takes random weights of the
folder's shape. The CPU figures are cores: of the server, of vLLM's scheduler and of its worker,
whose waiting counts too. A second engine that makes fewer tokens than one alone fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import aiohttp
import psutil

from atropos_common.protocol.bridge import ARRAYS, FORM_HEADER
from atropos_tui.gpu import Nvml, given_here
from benchmarks.support.checks import Checks
from benchmarks.support.children import TOKEN, Server, environment, free_ports

GROUP = 8
PROMPT_TOKENS = 150
WARM_UP_S = 4.0
START_S = 600.0
GENERATED = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Row:
    """One load on the first engines; `cores` by process, summed over them."""

    engines: int
    sequences: int
    tokens_per_s: float
    gpu_busy: float | None
    cores: dict[str, float]


def processes(server: Server) -> dict[str, list[psutil.Process]]:
    """Return a server's processes by part: the scheduler is its child, workers are that one's."""
    top = psutil.Process(server.popen.pid)
    cores = top.children()
    return {
        "server": [top],
        "scheduler": cores,
        "worker": [each for core in cores for each in core.children()],
    }


def cpu_s(servers: list[Server]) -> dict[str, float]:
    """Return CPU seconds so far, by part."""
    used: dict[str, float] = {}
    for server in servers:
        for part, found in processes(server).items():
            times = [each.cpu_times() for each in found]
            used[part] = used.get(part, 0.0) + sum(each.user + each.system for each in times)
    return used


async def generated(session: aiohttp.ClientSession, server: Server) -> float:
    """Return the tokens that a server has generated since its start."""
    async with session.get(f"{server.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(GENERATED))


async def keep_asking(
    session: aiohttp.ClientSession, server: Server, seed: int, tokens: int
) -> None:
    """Request one group after another until cancelled."""
    number = 0
    while True:
        ids = [100 + (7 * seed + 13 * number + at * at) % 300 for at in range(PROMPT_TOKENS)]
        body = {
            "prompt": {"prompt_token_ids": ids},
            "n": GROUP,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
        }
        async with session.post(
            f"{server.url}/generate", json=body, headers={FORM_HEADER: ARRAYS}
        ) as answer:
            if answer.status != 200:
                raise RuntimeError((await answer.text())[:500])
            await answer.read()
        number += 1


async def measure(servers: list[Server], sequences: int, asked: argparse.Namespace) -> Row:
    """Load `servers` with `sequences` in all, and measure for `--seconds`."""
    gpu, cards = None if asked.cpu else asked.gpu, Nvml(given_here())
    groups = max(1, sequences // GROUP // len(servers))
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(300),
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Authorization": f"Bearer {TOKEN}"},
    ) as session:
        tasks = [
            asyncio.create_task(keep_asking(session, server, seed, asked.tokens))
            for server in servers
            for seed in range(groups)
        ]
        await asyncio.sleep(WARM_UP_S)
        began, before = time.perf_counter(), [await generated(session, each) for each in servers]
        used, busy = cpu_s(servers), []
        while time.perf_counter() < began + asked.seconds:
            await asyncio.sleep(0.5)
            busy.append(None if gpu is None else cards.read()[gpu].utilization)
            if failed := next((task for task in tasks if task.done()), None):
                failed.result()
        after, now = [await generated(session, each) for each in servers], cpu_s(servers)
        seconds = time.perf_counter() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    known = [each / 100 for each in busy if each is not None]
    return Row(
        engines=len(servers),
        sequences=groups * GROUP * len(servers),
        tokens_per_s=(sum(after) - sum(before)) / seconds,
        gpu_busy=mean(known) if known else None,
        cores={part: (now[part] - used[part]) / seconds for part in now},
    )


def flags(asked: argparse.Namespace) -> list[str]:
    longest = PROMPT_TOKENS + asked.tokens + 8
    found = ["--model", str(asked.model), "--max-model-len", str(longest)]
    found += ["--distributed-executor-backend", "mp"]
    found += ["--load-format", "dummy"] if asked.random else []
    if asked.cpu:
        return [*found, "--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", "2G"]
    # vLLM starts only where the named share of the card is free, whatever the cache's size.
    found += ["--gpu-memory-utilization", "0.15"]
    return [*found, "--max-num-seqs", "512", "--kv-cache-memory-bytes", "6G"]


def table(rows: list[Row]) -> str:
    lines = [
        "| engines | sequences | tokens/s | GPU busy | server | scheduler | worker |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        busy = "" if row.gpu_busy is None else f"{row.gpu_busy:.0%}"
        parts = " | ".join(f"{row.cores[part]:.2f}" for part in ("server", "scheduler", "worker"))
        lines.append(
            f"| {row.engines} | {row.sequences} | {row.tokens_per_s:,.0f} | {busy} | {parts} |"
        )
    return "\n".join(lines)


def main() -> int:
    asked = _options()
    ports, rows, servers = free_ports(max(asked.engines)), [], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        env = environment(folder, None if asked.cpu else asked.gpu, {})
        if asked.cpu:
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        try:
            for number, port in enumerate(ports):
                server = Server(folder / str(number), port, flags(asked), env)
                servers.append(server)
                server.wait_ready(time.perf_counter() + START_S)
            for count in asked.engines:
                for sequences in asked.sequences:
                    rows.append(asyncio.run(measure(servers[:count], sequences, asked)))
                    print(json.dumps(asdict(rows[-1])), file=sys.stderr, flush=True)
        finally:
            for server in servers:
                server.close()
    print(json.dumps([asdict(row) for row in rows]) if asked.json else table(rows))
    checks = Checks()
    best = {n: max(row.tokens_per_s for row in rows if row.engines == n) for n in asked.engines}
    if not asked.cpu and {1, 2} <= best.keys():
        checks.at_least("tokens/s of two engines over those of one", best[2] / best[1], 1.0)
    return checks.status()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sequences", type=int, nargs="+", default=[128, 320])
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
