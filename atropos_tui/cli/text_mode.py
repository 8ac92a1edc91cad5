"""`ps -f`: a run as lines of plain text, one for each change, for screen readers, slow lines and log files.

The table of `ps` comes first; then what becomes of components, the sentence about the run where it says something else,
and the newest step from time to time. Nothing is ever drawn over.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator

from atropos_common.control import Phase, RunStatus
from atropos_tui.cli import runs, show
from atropos_tui.monitor.format import number, one_line
from atropos_tui.monitor.run_files import RunInfo, load_run, status_from_files
from atropos_tui.monitor.state import RunState
from atropos_tui.monitor.timeline import clock
from atropos_tui.monitor.verdict import Verdict, verdict
from atropos_tui.supervisor.client import ControlClient, NoSupervisor

LOOK_S = 1.0
STEP_S = 10.0
"""A step is told no more often."""


class NewLines:
    """What is new since the last look, as lines."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._said = ""
        self._step = 0
        self._step_at = float("-inf")

    def lines(self, status: RunStatus, info: RunInfo, state: RunState, said: Verdict, now: float) -> Iterator[str]:
        """Components that moved, the sentence if more than its numbers is another one, the newest step."""
        for row in status.components:
            if self._states.get(row.name, row.state) != row.state:
                yield f"{row.name} is {row.state.value}" + (f": {one_line(row.reason)}" if row.reason else "")
            self._states[row.name] = row.state
        words = re.sub(r"[\d.,:]+", "", said.what)
        if self._said and words != self._said:
            yield f"{said.severity}: {said.text}"
        self._said = words
        if state.step != self._step and now - self._step_at >= STEP_S:
            self._step, self._step_at = state.step, now
            of = f" of {info.training_steps}" if info.training_steps else ""
            yield f"step {state.step}{of}, reward {number(state.metric('reward_mean').last)}"


async def follow(entry: runs.RunEntry) -> None:
    """Print until the run is over."""
    info, state, feed = load_run(entry.dir.root)
    changes, begun = NewLines(), False
    while True:
        state = feed.catch_up(state)
        try:
            status = await ControlClient(entry.dir.root).status()
        except NoSupervisor:
            status = status_from_files(entry.dir, info, state)
        now = time.time()
        said = verdict(status, info, state, now)
        news = list(changes.lines(status, info, state, said, now))
        if not begun:
            print(show.ps_table(status, said.line), flush=True)
            begun = True
        else:
            for line in news:
                print(f"{clock(now)}  {line}", flush=True)
        if status.phase is Phase.ENDED:
            return
        await asyncio.sleep(LOOK_S)
