"""A stopped component has freed its GPU memory: real allocations, a fork that keeps the device
open, a second process.

python -m pytest -m gpu tests/gpu/test_gpu_memory.py -s
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pynvml
import pytest
import torch

from atropos_common.protocol.control import CommandRequest, ComponentStatus, State
from atropos_common.protocol.record_base import Record
from atropos_common.protocol.records import DiagnosisRecord, StateRecord
from atropos_tui.gpu import Card, Nvml
from atropos_tui.profile.spec import (
    ComponentSpec,
    LogCheck,
    Probe,
    Probes,
    RestartPolicy,
    StackSpec,
)
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.supervisor.runner import run_stack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]

GIB = 1024**3
FIRST, SECOND = 4 * GIB, 2 * GIB
SLACK = GIB // 2
ALLOCATE = (
    "import torch; held = torch.full(({size},), 1, dtype=torch.uint8, device='cuda'); "
    "torch.cuda.synchronize()"
)
CHILD = f"""
import os, subprocess, sys, time
{ALLOCATE.format(size=FIRST)}
if os.fork() == 0:
    time.sleep(600)  # holds the files of the device, as a forked worker does
other = {ALLOCATE.format(size=SECOND)!r}
other += "; print('both hold', flush=True); import time; time.sleep(600)"
subprocess.Popen([sys.executable, '-c', other], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _no_inherited_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ATROPOS_")]:
        monkeypatch.delenv(name)


def used() -> int:
    """Bytes in use on GPU 0, read beside the supervisor's own reading."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


class Watched:
    """A stack of one component that holds 6 GiB, and the memory in use at each of its
    transitions."""

    def __init__(self, folder: Path) -> None:
        holder = ComponentSpec(
            name="holder",
            command=[sys.executable, "-c", CHILD],
            env={"CUDA_VISIBLE_DEVICES": "0"},
            gpus=[0],
            probes=Probes(readiness=Probe(checks=[LogCheck(pattern="both hold")], interval_s=0.05)),
            restart=RestartPolicy(backoff_s=0.05),
        )
        self.folder = folder
        self.stack = StackSpec(
            run_id=f"gpu-{os.getpid()}",
            name="gpu",
            mode="none",
            run_dir=str(folder),
            components=[holder],
        )
        self.seen: list[tuple[StateRecord, int]] = []
        self.diagnoses: list[DiagnosisRecord] = []
        self.task = asyncio.create_task(run_stack(self.stack, on_event=self._note))

    def _note(self, record: Record) -> None:
        if isinstance(record, StateRecord):
            self.seen.append((record, used()))
        elif isinstance(record, DiagnosisRecord):
            self.diagnoses.append(record)

    async def until(self, state: State, attempt: int) -> tuple[StateRecord, int]:
        async with asyncio.timeout(50):
            while True:
                for record, memory in self.seen:
                    if (record.new, record.attempt) == (state, attempt):
                        return record, memory
                assert not self.task.done(), self.seen
                await asyncio.sleep(0.01)


def check_row(row: ComponentStatus) -> str:
    """Assert that `ps` shows the right memory or none; return its words."""
    assert row.gpu_bytes is None or FIRST + SECOND <= row.gpu_bytes < FIRST + SECOND + 4 * GIB
    return "not told apart here" if row.gpu_bytes is None else f"{row.gpu_bytes / GIB:.2f} GiB"


async def test_killed_and_stopped_give_their_memory_back_first(tmp_path: Path) -> None:
    pynvml.nvmlInit()
    before = used()
    run = Watched(tmp_path / "run")
    try:
        _, held = await run.until(State.HEALTHY, 1)
        assert held - before >= FIRST + SECOND
        client = ControlClient(run.folder)
        status = await client.status()
        async with asyncio.timeout(10):  # the card is looked at every second or two
            while status.gpus[0].used_bytes < before + FIRST + SECOND:
                await asyncio.sleep(0.1)
                status = await client.status()
        assert status.gpus[0].total_bytes > status.gpus[0].used_bytes
        pid, shown = status.components[0].pid, check_row(status.components[0])
        assert pid is not None
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        crashed, left = await run.until(State.BACKOFF, 1)
        assert left - before < SLACK, "a crash is answered once the memory is back"
        await run.until(State.HEALTHY, 2)
        asked = time.time()
        await client.command(CommandRequest(action="stop", component="holder"))
        stopped, left_after = await run.until(State.STOPPED, 2)
        assert left_after - before < SLACK
        print(
            f"\n{status.gpus[0].name}: gpu_bytes {shown}; kill to memory back "
            f"{crashed.time - killed:.2f} s, "
            f"stop to memory back {stopped.time - asked:.2f} s; "
            f"left {(left - before) / GIB:.2f} and {(left_after - before) / GIB:.2f} GiB"
        )
        assert not [found for found in run.diagnoses if "GPU memory of" in found.title]
        await client.command(CommandRequest(action="down"))
        assert await run.task == 130
    finally:
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)


def test_busy_multiprocessors_and_memory_bandwidth_are_measured() -> None:
    """Hopper and later; elsewhere, and where the driver refuses it, both are None."""
    driver, wide = Nvml(), torch.ones(1 << 28, device="cuda")
    index = torch.cuda.current_device()

    def after(seconds: float, *, copying: bool) -> Card:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if copying:
                wide.add_(1.0)
                torch.cuda.synchronize()
        return driver.read()[index]

    driver.read()
    idle, busy = after(2.0, copying=False), after(2.0, copying=True)
    driver.close()
    print(f"idle {idle.sm_percent} {idle.bandwidth_percent}; busy {busy}")
    if torch.cuda.get_device_capability()[0] < 9 or busy.bandwidth_percent is None:
        assert busy.memory_busy_percent is None or busy.memory_busy_percent > 0
        return
    assert idle.bandwidth_percent is not None and idle.bandwidth_percent < 20
    assert busy.bandwidth_percent > 40 and (busy.sm_percent or 0) > 40
