"""What the keys of charts ask for beyond one chart: another lens for all, one chart alone, other curves, other runs on
the same axes, the rollouts of a step."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from atropos_common.run_dir import RunDir
from atropos_tui.monitor.bench import RunBenchmark, benchmark_state
from atropos_tui.monitor.overlay import RunCurves, read_runs, settings_of
from atropos_tui.monitor.reading import Looking
from atropos_tui.monitor.run_files import RunInfo, exit_code
from atropos_tui.monitor.run_list import other_runs
from atropos_tui.monitor.state import RunState
from atropos_tui.ui import preferences
from atropos_tui.ui.commands import CommandApp
from atropos_tui.ui.dialogs import ChooseCurvesDialog, ChooseRunsDialog
from atropos_tui.ui.views import ENLARGED
from atropos_tui.ui.widgets.curves import Chart, ChartGrid
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.rollouts import Rollouts


class ChartApp(CommandApp):
    """An app with charts."""

    info: RunInfo
    state: RunState
    loaded: bool

    def __init__(self) -> None:
        super().__init__()
        self.chosen = preferences.charts()
        self.looking = Looking(self.chosen.lens())
        self.others: dict[Path, RunCurves] = {}
        """Runs on the same axes as this one, by their directories, in the order they were chosen."""
        self.other: RunBenchmark | None = None
        """The first of them in figures."""
        self._settings: dict[str, str] = {}
        self._enlarged: Chart | None = None
        """The chart that has the whole screen, where it stands among others."""

    def draw_now(self, kind: type[Chart] | None = None) -> None:
        """Draw what is visible, or of it those of one kind, without waiting for news."""
        raise NotImplementedError

    def action_view(self, name: str) -> None:
        raise NotImplementedError

    def action_view_before(self) -> None:
        raise NotImplementedError

    @property
    def runs(self) -> Sequence[RunCurves]:
        """This run and those on the same axes; empty where it is alone."""
        if not self.others:
            return ()
        return [RunCurves("this run", self.info, self.state, self._settings), *self.others.values()]

    def on_chart_turned(self) -> None:
        kept = self.chosen.through(self.looking.lens)
        if kept != self.chosen:
            self.chosen = kept
            preferences.keep(charts=kept)
        self.draw_now(Chart)

    def on_chart_asked(self, message: Chart.Asked) -> None:
        if message.what == "rollouts":
            self.action_view("rollouts")
            if rollouts := self.find(Rollouts):
                rollouts.go_to(message.step)
        elif message.what in ("log", "events"):
            self._go_to_step(message.what, message.step)
        elif message.what == "enlarge" and self.main:
            self._enlarge(message.chart)
        elif message.what == "back":
            self._shrink(message.chart)

    def _go_to_step(self, what: str, step: int) -> None:
        """What the trainer said, or what happened, when that step was done."""
        ends = self.state.metric("step_s")
        at = bisect_left(ends.steps, step)
        if at == len(ends):
            self.notify(f"no record tells when step {step} was", timeout=3)
        elif what == "log":
            trainer = next((part.name for part in self.info.components if part.role == "trainer"), "")
            self.post_message(Events.Asked(trainer, ends.times[at]))
        else:
            self.action_view("events")
            if events := self.find(Events):
                events.go_to(ends.times[at])

    def _enlarge(self, chart: Chart) -> None:
        assert self.main
        large = self.main.query_one(f"#view-{ENLARGED}").query_one(Chart)
        if chart is large:
            self._shrink(chart)
            return
        self._enlarged = chart
        large.become(chart.spec)
        self.action_view(ENLARGED)

    def _shrink(self, chart: Chart) -> None:
        """Back to where the chart was enlarged; from a view of its own, to the view before."""
        self.action_view_before()
        if self._enlarged is not None and any(node.id == f"view-{ENLARGED}" for node in chart.ancestors):
            self._enlarged.focus()

    # Other curves.

    async def draw_chosen(self) -> None:
        """Charts of the chosen curves in their view."""
        if self.main:
            await self.main.query_one("#view-training").query_one(ChartGrid).also(self.chosen.metrics)
            self.draw_now()

    def action_choose_curves(self) -> None:
        self.run_worker(self._choose_curves(), group="curves", exclusive=True)

    async def _choose_curves(self) -> None:
        names = list(dict.fromkeys([*self.chosen.metrics, *self.state.names()]))
        wanted = await self.push_screen_wait(ChooseCurvesDialog(names, self.chosen.metrics))
        if isinstance(wanted, list):
            self.chosen = replace(self.chosen, metrics=tuple(wanted))
            preferences.keep(charts=self.chosen)
            self.action_view("training")
            await self.draw_chosen()

    # Other runs.

    def action_compare(self) -> None:
        self.run_worker(self._compare(), group="compare", exclusive=True)

    async def _compare(self) -> None:
        root = self.run_dir.root
        found = await asyncio.to_thread(other_runs, root)
        wanted = await self.push_screen_wait(ChooseRunsDialog(found, self.others, self.size.width))
        if not isinstance(wanted, list):
            return
        new = [path for path in wanted if path not in self.others]
        read = dict(zip(new, await asyncio.to_thread(read_runs, new), strict=True))
        self.others = {path: self.others.get(path) or read[path] for path in wanted}
        self._settings = await asyncio.to_thread(settings_of, RunDir(root))
        first = next(iter(self.others), None)
        self.other = self._figures(first) if first else None
        self.looking.lens = self.chosen.lens()
        self.draw_now()

    def _figures(self, root: Path) -> RunBenchmark:
        run = self.others[root]
        figures = benchmark_state(run.state, run=run.name, mode=run.info.mode)
        return replace(figures, exit_code=exit_code(RunDir(root)))

    @property
    def run_dir(self) -> RunDir:
        """Of the run on the screen."""
        return self.feed.run
