"""What a component on another node costs: its start, its log over the line, commands, beside one that is started here.

    python -m benchmarks.cluster_line ["srun --overlap -N1 -n1 -w n2" "ssh n2" ...] [--lines 1000000] [--json]

Each PREFIX is a command that runs what follows it elsewhere, with its stdin, stdout and stderr connected. `here` is
measured besides, and `plain`: the line through a shell of this machine. Every figure is of a real supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from atropos_common.control import CommandRequest, State
from atropos_tui.profile.spec import ComponentSpec, Place
from atropos_tui.supervisor.client import ControlClient
from benchmarks.supervisor import FLOOD, SLEEP, child, supervised

STARTS = 5
COMMANDS = 50


def placed(spec: ComponentSpec, prefix: list[str]) -> ComponentSpec:
    """`spec` behind `prefix`; here, if there is none."""
    return spec.model_copy(update={"place": Place(node="far", host="far", address="127.0.0.1", prefix=prefix)})


async def measure(folder: Path, prefix: list[str], lines: int) -> dict[str, float]:
    """Seconds and lines a second of one prefix."""
    starts, asked = [], []
    parts = [placed(child(name, code, lines), prefix) for name, code in (("flood", FLOOD), ("stay", SLEEP))]
    with supervised(folder, "line", *parts) as (client, _):
        rate = await flooded(client, folder / "line" / "logs" / "flood" / "1.log", lines)
        for _ in range(COMMANDS):
            began = time.perf_counter()
            await client.status()
            asked.append(time.perf_counter() - began)
        for _ in range(STARTS):
            starts.append(await restarted(client))
        kept = (folder / "line" / "logs" / "flood" / "1.log").read_bytes().count(b" a line of a log\n")
    return {
        "stop_and_start_s": median(starts),
        "lines_per_s": rate,
        "lines_lost": lines - kept,
        "status_s": median(asked),
    }


async def flooded(client: ControlClient, log: Path, lines: int) -> float:
    """Lines a second, from the first that has come to the last."""
    while not log.exists() or not log.stat().st_size:
        await asyncio.sleep(0.005)
    began = time.perf_counter()
    while (await client.status()).components[0].state is not State.COMPLETED:
        await asyncio.sleep(0.02)
    return lines / (time.perf_counter() - began)


async def restarted(client: ControlClient) -> float:
    """Seconds from the command to a process of the next attempt."""
    before = (await client.status()).components[1].attempt
    began = time.perf_counter()
    await client.command(CommandRequest(action="restart", component="stay"))
    while True:
        row = (await client.status()).components[1]
        if row.attempt > before and row.pid:
            return time.perf_counter() - began
        await asyncio.sleep(0.005)


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster_line", description=__doc__)
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prefixes = {"here": [], "plain": ["/bin/sh", "-c", 'exec "$@"', "--"]}
    prefixes |= {words: shlex.split(words) for words in options.prefixes}
    if not options.json:
        print(f"{'prefix':<28} {'stop and start':>15} {'log lines/s':>12} {'lost':>6} {'status':>9}", flush=True)
    found = {}
    for name, prefix in prefixes.items():
        with tempfile.TemporaryDirectory(prefix="atropos-line-") as folder:
            row = found[name] = asyncio.run(measure(Path(folder), prefix, options.lines))
        if not options.json:
            figures = f"{row['stop_and_start_s']:13.3f} s {row['lines_per_s']:12,.0f} {row['lines_lost']:6,.0f}"
            print(f"{name[:28]:<28} {figures} {row['status_s'] * 1000:6.1f} ms", flush=True)
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
