"""Real stacks of small, stubborn children, checked without the supervisor's own bookkeeping."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atropos_common.protocol.control import State
from atropos_common.protocol.record_base import Record, RecordError
from atropos_common.protocol.records import StateRecord, parse_line
from atropos_common.system.run_dir import RunDir
from atropos_tui.profile.spec import (
    Check,
    ComponentSpec,
    LogCheck,
    Probe,
    Probes,
    RestartPolicy,
    StackSpec,
    StopPolicy,
)
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.supervisor.journal.store import RunResult
from atropos_tui.supervisor.runner import run_stack
from atropos_tui.supervisor.transitions import check_step

CHILDREN = Path(__file__).parent / "children"
QUICK = RestartPolicy(backoff_s=0.02, max_backoff_s=0.1, max_restarts=2)
NEVER = RestartPolicy(policy="never")
SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def python(code: str, *arguments: object) -> list[str]:
    """A child that starts in 10 ms."""
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


def script(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", str(CHILDREN / f"{name}.py"), *map(str, arguments)]


def part(name: str, command: list[str] | None = None, **fields: Any) -> ComponentSpec:
    """A component with a short grace; sleeps unless told otherwise."""
    fields.setdefault("restart", NEVER)
    fields.setdefault("stop", StopPolicy(grace_s=0.3))
    return ComponentSpec(name=name, command=command or python(SLEEP), **fields)


def ready(*checks: Check, **fields: Any) -> Probes:
    """A quick readiness probe; by default the line that `SLEEP` prints."""
    return Probes(
        readiness=Probe(checks=list(checks) or [LogCheck(pattern="up")], interval_s=0.02, **fields)
    )


def alive(pid: int) -> bool:
    """Return True if `pid` runs; a zombie does not. Independent of the supervisor's own process
    table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def pids_in(path: Path, timeout_s: float = 10.0) -> list[int]:
    """Pids that a child wrote to `path`, once they are there."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        if path.exists() and path.read_text().endswith("\n"):
            return [int(word) for word in path.read_text().split()]
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} was not written")


async def wait_until(
    condition: Callable[[], bool], timeout_s: float = 10.0, every_s: float = 0.005
) -> float:
    """Wait until `condition` holds, and return the seconds; it is called every `every_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not happen in time"
        await asyncio.sleep(every_s)
    return time.monotonic() - began


def check_records(run: RunDir, overwritten: int = 0, resumed: bool = False) -> None:
    """Assert that every step of the journal is allowed and that sequences have no gap, up to a torn
    last line and as many `overwritten` lines. A `resumed` run has a new sequence under each
    supervisor."""
    lines = run.supervisor_jsonl.read_bytes().splitlines(keepends=True)
    bad, seq = 0, -1
    last: dict[str | None, str] = {}
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        try:
            row = parse_line(line)
        except RecordError:
            bad += 1
            last.clear()
            continue
        assert seq < row.seq <= seq + 1 + bad, f"{row.seq} follows {seq}"
        seq = row.seq
        if isinstance(row, StateRecord):
            before = last.get(row.component, row.old if bad else "pending")
            assert row.old == before or (resumed and row.old == "pending"), line
            check_step(State(row.old), State(row.new))
            last[row.component] = row.new
    assert bad <= overwritten, f"{bad} lines are no records"


NOTE = re.compile(
    rb"\[atropos\] (\d+) bytes of output are missing here: the disk did not take them\n"
)
"""Line of a log about lost output."""


def check_log(data: bytes, line: bytes, head: bytes = b"") -> int:
    """Assert that the rest of a log of numbered lines such as `line`, after `head`, and the bytes
    that its notes call missing make the whole; return those bytes."""
    lost = sum(int(found) for found in NOTE.findall(data))
    text = NOTE.sub(b"", data)
    last = int(text.splitlines()[-1].split()[-1])
    whole = len(head) + (last + 1) * len(line)
    assert whole <= len(text) + lost <= whole + len(NOTE.findall(data)), (
        "but for a line break before a note"
    )
    return lost


class Running:
    """A stack under a supervisor in this event loop."""

    def __init__(self, stack: StackSpec) -> None:
        self.stack = stack
        self.run = RunDir(Path(stack.run_dir))
        self.records: list[Record] = []
        self.client = ControlClient(self.run.root)
        self.task = asyncio.create_task(run_stack(stack, on_event=self.records.append))

    async def until(
        self, component: str, state: State | str, attempt: int | None = None
    ) -> StateRecord:
        """The first record of `component` entering `state`."""
        async with asyncio.timeout(20):
            while True:
                for record in self.states(component):
                    if record.new == state and attempt in (None, record.attempt):
                        return record
                assert not self.task.done() or self.task.result() is None, (
                    f"the run ended: {self.result()}"
                )
                await asyncio.sleep(0.005)

    async def answers(self) -> ControlClient:
        """The client, once the socket is there."""
        while not self.run.control_sock.exists():
            assert not self.task.done()
            await asyncio.sleep(0.005)
        return self.client

    async def end(self, timeout_s: float = 20.0) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.task

    def states(self, component: str | None = None) -> list[StateRecord]:
        rows = [record for record in self.records if isinstance(record, StateRecord)]
        return [row for row in rows if component in (None, row.component)]

    def logs(self, component: str) -> list[str]:
        """Lines of the newest attempt."""
        attempt = self.states(component)[-1].attempt
        return self.run.log(component, attempt).read_text().splitlines()

    def path(self, component: str) -> list[str]:
        """The states that `component` went through."""
        return [row.new for row in self.states(component)]

    def result(self) -> RunResult:
        found = RunResult.load(self.run.result_json)
        assert found is not None
        return found


def check_history(running: Running) -> None:
    """Whatever happened: the file holds what was published, sequences have no gap, each step
    follows from the last."""
    on_disk = [parse_line(line) for line in running.run.supervisor_jsonl.read_text().splitlines()]
    assert [record.to_line() for record in on_disk] == [
        record.to_line() for record in running.records
    ]
    assert [record.seq for record in on_disk] == list(range(len(on_disk)))
    last: dict[str | None, str] = {}
    for row in running.states():
        assert row.old == last.get(row.component, "pending")
        check_step(State(row.old), State(row.new))
        last[row.component] = row.new
