"""Plant ten of the situations without vLLM, with a real supervisor over small children.

    python -m benchmarks.runs.situations_small [--json]

Real are the supervisor, its rules, the disk (a tmpfs that is filled), the death of an engine, and
the way from there to the sentence. Planted are the lines that engine and environment print, and the
records: one step each half second. `benchmarks/situations.py` plants the same into the demo.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from atropos_common.protocol.control import Role
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.trainer_records import StepRecord, TimingRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.spec import LogCheck, Probe, Probes, RestartPolicy
from atropos_tui.supervisor.client import ControlClient
from benchmarks.situations import (
    ENGINE_DEAD,
    LAG,
    PATIENCE_S,
    WORDS,
    Row,
    Watch,
    fill,
    on_small_disk,
    tell,
)
from benchmarks.supervisor import child, supervised
from tests.support.run_maker import step_records, write_records

STEP_S = 0.5
SPEAK = """
import pathlib, sys, time
print("up", flush=True)
lines = pathlib.Path(sys.argv[1])
while True:
    if lines.exists():
        print(lines.read_text(), flush=True)
        if "Error" in lines.read_text():
            sys.exit(1)
        lines.unlink()
    time.sleep(0.1)
"""
"""A child that prints what it finds in a file; an error ends it."""
BALANCED = {"data_wait_s": 0.1, "train_s": 0.3, "engine_idle_fraction": 0.2}
TIMINGS = {
    "environment slow": {"data_wait_s": 0.45, "engine_idle_fraction": 0.8},
    "engine slow": {"data_wait_s": 0.4, "engine_idle_fraction": 0.03},
    "trainer slow": {"data_wait_s": 0.01, "engine_idle_fraction": 0.7},
}
REFUSED = (
    "[vllm_server] refused {count} requests to /generate (400): top_p=0.9: changes the "
    "logprobs. Send top_p=1 "
    "[of {count} since 10:00:00]"
)
SITUATIONS = (
    *TIMINGS,
    "all groups flat",
    "requests refused",
    "hub unreachable",
    "disk nearly full",
    ENGINE_DEAD,
    LAG,
    "healthy",
)
HUB = (
    "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate "
    "the file on the Hub"
)


class Stack:
    """Children for run-api, three engines, environment and trainer, and the records of a
    trainer."""

    def __init__(self, folder: Path, run: RunDir) -> None:
        self.folder, self.run, self.watch = folder, run, Watch(run.root)
        self.timing: dict[str, float] = dict(BALANCED)
        self.step_fields: dict[str, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        rng, step = random.Random(1), 0
        while not self._over.wait(STEP_S):
            step += 1
            records = [self._changed(each) for each in step_records(step, rng, time=time.time())]
            write_records(self.run.telemetry_jsonl, records)

    def _changed(self, record: Record) -> Record:
        if isinstance(record, TimingRecord):
            return record.model_copy(update={"step_s": STEP_S, "sync_s": 0.0} | self.timing)
        return (
            record.model_copy(update=self.step_fields) if isinstance(record, StepRecord) else record
        )

    def say(self, component: str, text: str) -> None:
        """Let a child print."""
        (self.folder / component).write_text(text)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def stack_of_children() -> Iterator[Stack]:
    ready = Probes(readiness=Probe(checks=[LogCheck(pattern="up")], interval_s=0.1))
    again = RestartPolicy(backoff_s=20.0)
    roles = {
        "api": Role.API,
        "vllm-1": Role.ENGINE,
        "vllm-2": Role.ENGINE,
        "vllm-3": Role.ENGINE,
        "math": Role.ENV,
        "trainer": Role.TRAINER,
    }
    with tempfile.TemporaryDirectory() as name, on_small_disk(Path(name)) as folder:
        parts = [
            child(name, SPEAK, folder / name, role=role, probes=ready, restart=again)
            for name, role in roles.items()
        ]
        with supervised(folder, "run", *parts) as (client, _):
            while any(row.state != "healthy" for row in asyncio.run(client.status()).components):
                time.sleep(0.1)
            stack = Stack(folder, client.run_dir)
            try:
                stack.watch.until(("healthy",), PATIENCE_S)
                yield stack
            finally:
                stack.close()


def plant(name: str, stack: Stack) -> None:
    """Plant a situation."""
    if name in TIMINGS:
        stack.timing |= TIMINGS[name]
    elif name == "requests refused":
        stack.say("vllm-1", REFUSED.format(count=1) + "\n" + REFUSED.format(count=331))
    elif name == "hub unreachable":
        stack.say("math", HUB)
    elif name == "disk nearly full":
        fill(stack.folder)
    elif name == ENGINE_DEAD:
        rows = asyncio.run(ControlClient(stack.run.root).status()).components
        psutil.Process(next(row.pid for row in rows if row.name == "vllm-2")).kill()
    elif name == LAG:
        stack.step_fields = {"left_out": {"older than --max-policy-lag 1": 64}, "sequences": 64}
    elif name == "all groups flat":
        stack.step_fields = {"reward_std": 0.0}


def rows() -> Iterator[Row]:
    """Each in a run of its own."""
    for name in SITUATIONS:
        words = WORDS[name]
        with stack_of_children() as stack:
            plant(name, stack)
            seconds, line = stack.watch.until(words, PATIENCE_S)
            yield Row(name, seconds, line)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    return tell(list(rows()), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
