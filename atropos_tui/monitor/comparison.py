"""How one of several stacks is doing, in one line, from its files alone: `Progress(RUN).line()`."""

from __future__ import annotations

from atropos_common.control import State
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.feed import RunFeed
from atropos_tui.monitor.pace import pace
from atropos_tui.monitor.plain import duration, number, one_line, seconds_text
from atropos_tui.monitor.run_info import RunInfo, read_info, read_json
from atropos_tui.monitor.state import RunState

SETTLED = (State.COMPLETED, State.STOPPED, State.FAILED)
ILL = (State.UNHEALTHY, State.BACKOFF, State.STOPPING, State.FAILED)


class Progress:
    """Reads the streams of `run` as they grow; bounded work per call, no socket."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._feed, self._state = RunFeed(run), RunState()
        self._info: RunInfo | None = None
        self.components: dict[str, str] = {}
        """The last known state of each component."""

    def refresh(self) -> None:
        """Take in what the files have got since the last call."""
        self._info = self._info or read_info(self._run)
        while True:
            batch = self._feed.read()
            if batch.anew:
                self._state = RunState()
            for record in batch.records:
                self._state.apply(record)
            if not batch.behind:
                break
        self.components = {record.component or "": record.new for record in self._state.transitions}

    def settled(self, component: str) -> bool:
        """Whether `component` has come to its end, good or bad."""
        return self.components.get(component) in SETTLED

    @property
    def phase(self) -> str:
        """What the stack is about: how it ended, which component it waits for, or training."""
        result = read_json(self._run.result_json)
        if result:
            code = result.get("exit_code")
            return "done" if code == 0 else f"ended with code {code}: {one_line(str(result.get('reason', '')))}"
        ill = [f"{name} {state}" for name, state in self.components.items() if state in ILL]
        if self._state.step:
            return ", ".join(ill) or "training"
        if self._state.diagnoses:
            return one_line(self._state.diagnoses[-1].title)
        planned = [part.name for part in self._info.components] if self._info else []
        waiting = [name for name in planned if self.components.get(name) not in (*SETTLED, State.HEALTHY)]
        return f"starting {', '.join(waiting)}" if waiting else "waiting for the first batch"

    def line(self) -> str:
        """Step, reward, seconds a step, time left, phase."""
        steps = self._info.training_steps if self._info else None
        now = pace(self._state, steps)
        reward = self._state.metric("reward_mean").values
        parts = [f"step {self._state.step:>4}{f'/{steps}' if steps else ''}"]
        parts.append(f"reward {number(reward[-1] if reward else None):>6}")
        parts.append(f"{seconds_text(now.step_s):>8}/step")
        if now.eta_s:
            parts.append(f"{duration(now.eta_s)} left")
        return "  ".join([*parts, self.phase])
