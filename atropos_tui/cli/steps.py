"""A calm line about training for a run without a screen: one per optimizer step, at most every two seconds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atropos_common.records import StepRecord, TimingRecord
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.format import number, seconds_text
from atropos_tui.supervisor.record_tail import RecordTail

T = TypeVar("T")
LOOK_S = 0.5
EVERY_S = 2.0


class StepLines:
    """Follows telemetry.jsonl from now on; steps of an earlier start of the run are not told again."""

    def __init__(self, run: RunDir, training_steps: int | None, say: Callable[[str], None]) -> None:
        self._tail = RecordTail(run.telemetry_jsonl, from_end=True)
        self._total = training_steps
        self._say = say
        self._began = time.time()
        self._step: StepRecord | None = None
        self._timing: TimingRecord | None = None
        self._untold = ""
        self._told_at = 0.0
        self._looking = threading.Lock()
        """A look that was cancelled goes on in its thread for a moment."""

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Tell of steps while `work` goes on; what it gives."""
        following = asyncio.create_task(self._follow())
        try:
            return await work
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            self.finish()

    async def _follow(self) -> None:
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Take in what was written since the last look; the newest step is told when it is time."""
        with self._looking:
            self._read()
            if self._untold and time.monotonic() - self._told_at >= EVERY_S:
                self._tell()

    def finish(self) -> None:
        """The last step is told in any case."""
        with self._looking:
            self._read()
            if self._untold:
                self._tell()

    def _read(self) -> None:
        while True:
            for record in self._tail.read():
                if record.time >= self._began and isinstance(record, StepRecord | TimingRecord) and record.rank == 0:
                    self._take(record)
            if not self._tail.behind:
                return

    def _take(self, record: StepRecord | TimingRecord) -> None:
        if isinstance(record, StepRecord):
            self._step = record
        else:
            self._timing = record
        step, timing = self._step, self._timing
        if step and timing and (step.attempt, step.step) == (timing.attempt, timing.step):
            self._untold = step_line(step, timing, self._total)

    def _tell(self) -> None:
        self._say(self._untold)
        self._untold, self._told_at = "", time.monotonic()


def step_line(step: StepRecord, timing: TimingRecord, total: int | None) -> str:
    """One optimizer step, in the columns of the events."""
    clock = time.strftime("%H:%M:%S", time.localtime(step.time))
    count = f"{step.step:>{len(str(total))}}/{total}" if total else str(step.step)
    return (
        f"{clock}  {'trainer':<14} step {count}  reward {number(step.reward_mean):>6}  loss {number(step.loss):>8}  "
        f"{seconds_text(timing.step_s):>8}/step  {number(timing.tokens_per_s):>7} tok/s"
    )
