"""Measure the supervisor: log floods, commands meanwhile, memory, idle CPU, crashes, the CLI.

    python benchmarks/supervisor.py [--lines 1000000] [--json]

Every figure is of a real supervisor process with real children, beside all other load of this
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from atropos_common.protocol.control import CommandRequest
from atropos_common.protocol.records import StateRecord, parse_line
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.spec import ComponentSpec, LogPolicy, RestartPolicy, StackSpec
from atropos_tui.supervisor.client import ControlClient, NoSupervisor
from benchmarks.support.checks import Checks

CHILDREN = 4
CRASHES = 20
IDLE_S = 20.0
FLOOD = (
    "import sys\nfor i in range(int(sys.argv[1])):\n    sys.stdout.write(f'{i:012d} a line of a "
    "log\\n')"
)
CRASH = "import os, sys, time\ntime.sleep(0.3)\nprint(repr(time.time()), flush=True)\nos._exit(1)"
SLEEP = "import time\ntime.sleep(3600)"


def child(name: str, code: str, *arguments: object, **fields: Any) -> ComponentSpec:
    command = [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]
    fields.setdefault("restart", RestartPolicy(policy="never"))
    return ComponentSpec(name=name, command=command, **fields)


@contextmanager
def supervised(
    folder: Path, name: str, *components: ComponentSpec, max_log_bytes: int = 1 << 40
) -> Iterator[tuple[ControlClient, psutil.Process]]:
    """A supervisor in the background that runs `components`; ended and checked at exit."""
    root = folder / name
    stack = StackSpec(
        run_id=f"bench-{name}-{os.getpid()}",
        name=name,
        mode="none",
        run_dir=str(root),
        components=list(components),
        logs=LogPolicy(max_bytes=max_log_bytes),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "atropos_tui.supervisor"], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(stack.model_dump_json().encode())
    process.stdin.close()
    while not RunDir(root).control_sock.exists():
        time.sleep(0.01)
    try:
        yield ControlClient(root), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


async def flood(folder: Path, lines: int) -> dict[str, float]:
    """Lines a second that are drained to files from four children, and commands meanwhile."""
    parts = [child(f"flood{i}", FLOOD, lines) for i in range(CHILDREN)]
    waits: list[float] = []
    rss: list[int] = []
    began = time.perf_counter()
    with supervised(folder, "flood", *parts, child("stay", SLEEP)) as (client, supervisor):
        while True:
            asked = time.perf_counter()
            status = await client.status()
            await client.recipe("restart", "stay")
            waits.append((time.perf_counter() - asked) / 2)
            rss.append(supervisor.memory_info().rss)
            if all(part.state == "completed" for part in status.components if part.name != "stay"):
                break
            await asyncio.sleep(0.02)
        seconds = time.perf_counter() - began
    logs = (folder / "flood" / "logs").glob("flood*/1.log*")
    kept = sum(path.read_bytes().count(b"\n") for path in logs)
    waits.sort()
    return {
        "flood_lines_per_s": lines * CHILDREN / seconds,
        "flood_lines_lost": lines * CHILDREN - kept,
        "flood_command_p50_ms": 1e3 * median(waits),
        "flood_command_p99_ms": 1e3 * waits[int(len(waits) * 0.99)],
        "flood_commands": len(waits),
        "rss_max_mb": max(rss) / 1e6,
        "rss_growth_mb": (rss[-1] - rss[len(rss) // 4]) / 1e6,
    }


async def idle(folder: Path) -> dict[str, float]:
    """Share of a core with four sleeping children and nobody asking."""
    with supervised(folder, "idle", *(child(f"sleep{i}", SLEEP) for i in range(CHILDREN))) as (
        _,
        supervisor,
    ):
        await asyncio.sleep(3)
        before = supervisor.cpu_times()
        await asyncio.sleep(IDLE_S)
        after = supervisor.cpu_times()
    return {
        "idle_core_percent": 100
        * (after.user + after.system - before.user - before.system)
        / IDLE_S
    }


async def crashes(folder: Path) -> dict[str, float]:
    """Milliseconds from a child's last act to the journaled transition."""
    policy = RestartPolicy(policy="always", backoff_s=0.0, max_restarts=CRASHES - 1)
    parts = child("crash", CRASH, restart=policy), child("stay", SLEEP)
    with supervised(folder, "crash", *parts) as (client, _), suppress(NoSupervisor):
        await client.wait("done", 120)
    run = RunDir(folder / "crash")
    records = [parse_line(line) for line in run.supervisor_jsonl.read_bytes().splitlines()]
    seen = {
        r.attempt: r.time
        for r in reversed(records)
        if isinstance(r, StateRecord)
        and r.component == "crash"
        and r.new in ("stopping", "backoff", "failed")
    }
    delays = sorted(
        1e3 * (seen[n] - float(run.log("crash", n).read_text().split()[0])) for n in seen
    )
    return {
        "crash_seen_p50_ms": median(delays),
        "crash_seen_max_ms": delays[-1],
        "crashes": len(delays),
    }


async def command_line(folder: Path) -> dict[str, float]:
    """Wall time of two commands, best of five."""
    with supervised(folder, "cli", child("sleep", SLEEP)) as (client, _):
        (folder / "cli" / "run.json").write_text(
            json.dumps({"run_id": "bench-cli", "started_at": time.time()})
        )
        times = {}
        for name, arguments in {
            "help": ["--help"],
            "ps": ["ps", "--run-dir", str(folder / "cli")],
        }.items():
            took = []
            for _ in range(5):
                began = time.perf_counter()
                command = [sys.executable, "-m", "atropos_tui", *arguments]
                await asyncio.to_thread(
                    subprocess.run, command, check=True, stdout=subprocess.DEVNULL
                )
                took.append(time.perf_counter() - began)
            times[f"cli_{name}_s"] = min(took)
        await client.command(CommandRequest(action="down"))
    return times


async def measure(lines: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="atropos-bench-") as name:
        folder = Path(name)
        return {
            **await flood(folder, lines),
            **await idle(folder),
            **await crashes(folder),
            **await command_line(folder),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lines", type=int, default=1_000_000, help="lines of each of the four children"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options.lines))
    if options.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key:<22}{value:>14,.2f}")
    checks = Checks()
    checks.at_most("lines lost in the flood", found["flood_lines_lost"], 0)
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
