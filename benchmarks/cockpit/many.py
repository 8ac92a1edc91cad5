"""Measure a supervisor of five hundred stand-ins: idle cost, answer times, and a flood of logs.

    python -m benchmarks.cockpit.many [--components 500] [--far 0] [--lines 20000] [--json]

A tenth of the components print `lines` at the same time; the rest sleeps. `far` of them run below a
prefix that leads nowhere, each with a node agent of its own, as on another node.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from atropos_common.protocol.control import State
from atropos_tui.profile.spec import ComponentSpec, Place
from benchmarks.supervisor import FLOOD, SLEEP, child, supervised
from benchmarks.support.checks import Checks

IDLE_S = 20.0
ASKED = 20
TALKERS = 10
"""One component of this many prints."""
PREFIX = ["/bin/sh", "-c", 'exec "$@"', "--"]


def far(spec: ComponentSpec) -> ComponentSpec:
    """The component, on a node that is this machine."""
    place = Place(node="far", host="far", address="127.0.0.1", prefix=PREFIX)
    return spec.model_copy(update={"place": place})


async def measure(folder: Path, count: int, distant: int, lines: int) -> dict[str, float]:
    """Every figure, in seconds, percent of one core, lines a second and bytes."""
    waiting = (
        "import os, sys, time\nwhile not os.path.exists(sys.argv[2]):\n    time.sleep(0.2)\n"
        + FLOOD
    )
    flag = folder / "go"
    parts = [child(f"c{i}", SLEEP if i % TALKERS else waiting, lines, flag) for i in range(count)]
    parts[:distant] = map(far, parts[:distant])
    began = time.perf_counter()
    with supervised(folder, "many", *parts) as (client, process):
        while sum(row.state is State.HEALTHY for row in (await client.status()).components) < count:
            await asyncio.sleep(0.2)
        started = time.perf_counter() - began
        await asyncio.sleep(5)
        cpu, at = sum(process.cpu_times()[:2]), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        idle = (sum(process.cpu_times()[:2]) - cpu) / (time.perf_counter() - at)
        waits = []
        for _ in range(ASKED):
            asked = time.perf_counter()
            await client.status()
            waits.append(time.perf_counter() - asked)
            await asyncio.sleep(0.5)
        flag.touch()
        began, during = time.perf_counter(), []
        while sum(row.state is State.COMPLETED for row in (await client.status()).components) < len(
            parts[::TALKERS]
        ):
            asked = time.perf_counter()
            await client.status()
            during.append(time.perf_counter() - asked)
            await asyncio.sleep(0.1)
        seconds, rss = time.perf_counter() - began, process.memory_info().rss
        began = time.perf_counter()
    ended = time.perf_counter() - began
    logs = [folder / "many" / "logs" / part.name / "1.log" for part in parts[::TALKERS]]
    kept = sum(log.read_bytes().count(b"\n") for log in logs)
    return {
        "start_s": started,
        "idle_cpu_percent": 100 * idle,
        "status_s": median(waits),
        "status_worst_s": max(waits),
        "flood_lines_per_s": lines * len(logs) / seconds,
        "flood_lines_lost": lines * len(logs) - kept,
        "flood_status_s": median(during) if during else 0.0,
        "rss_bytes": rss,
        "end_s": ended,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="many", description=__doc__)
    parser.add_argument("--components", type=int, default=500)
    parser.add_argument("--far", type=int, default=0)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atropos-many-") as folder:
        found = asyncio.run(measure(Path(folder), options.components, options.far, options.lines))
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<20} {value:,.3f}")
    checks = Checks()
    checks.at_most("lines lost in the flood", found["flood_lines_lost"], 0)
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
