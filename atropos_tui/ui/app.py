"""The cockpit: wiring only. Workers of the feed post messages, handlers here change state, panels draw a `View`.

    atropos-tui attach [RUN]

It owns nothing: killing it changes nothing, attaching late shows the whole history, and when the supervisor is gone
the files of the run have the last word.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget

from atropos_common.control import Phase, RunStatus, State
from atropos_common.records import CommandRecord, GaugesRecord
from atropos_common.run_dir import RunDir
from atropos_tui.monitor.bench import RunBenchmark, benchmark_state
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.log_buffer import LogFeed
from atropos_tui.monitor.overlay import RunCurves, read_runs, settings_of
from atropos_tui.monitor.reading import Looking
from atropos_tui.monitor.run_files import RunInfo, exit_code, status_from_files
from atropos_tui.monitor.run_list import other_runs
from atropos_tui.monitor.state import RunState
from atropos_tui.monitor.timeline import clock
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.ui import preferences
from atropos_tui.ui.commands import CommandApp, Outcome, explained, palette
from atropos_tui.ui.dialogs import ChooseCurvesDialog, ChooseRunsDialog, HelpDialog, TextDialog
from atropos_tui.ui.feed import Control, Feed, LogArrived, NewestArrived, RecordsArrived, StatusArrived, SupervisorGone
from atropos_tui.ui.terminal import Bell, edit, ground, run_app, save_screenshot
from atropos_tui.ui.theme import LIGHT, THEME, own_colours, own_theme
from atropos_tui.ui.views import ENLARGED, VIEWS, arrange, compose_screen, view_spec, visible
from atropos_tui.ui.widgets.bars import Apply, Keys, SearchBar, ViewsLine
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.curves import Chart, ChartGrid
from atropos_tui.ui.widgets.details import StepPanel
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.header import Notices
from atropos_tui.ui.widgets.listing import Listing
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.panel import Panel, View
from atropos_tui.ui.widgets.rollouts import RolloutDetail, Rollouts

REFRESH_S = 0.25
CURVES_S = 1.0
CLOCKS_S, QUIET_CLOCKS_S = 1.0, 2.0
"""How often figures that always change are drawn: uptimes, ages, use of the machine; and so where nothing else has
happened for `QUIET_S`."""
QUIET_S = 5.0
FILL_S, FILL_LOOKS = 0.6, 6
"""How long the log that was switched to is waited for."""
COLLECT_S = 60.0
"""Between two full collections of garbage: each stops the screen for a quarter of a second."""
SEARCHED = (LogView, Rollouts, Events)
"""Panels that can be searched, and have keys of their own."""


class CockpitApp(CommandApp):
    """The screen of one run."""

    CSS_PATH = "app.tcss"
    TITLE = "atropos-tui"
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (40, "-narrow"), (110, "-wide"), (150, "-wider"), (180, "-widest")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (12, "-short"), (30, "-normal"), (48, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "act('restart')", "Restart", tooltip="Restart the selected component and what must go with it"),
        Binding("s", "stop_or_start", "Stop/start", tooltip="Stop or start the selected component"),
        Binding("K", "act('kill')", "Kill", tooltip="Kill every process of the selected component"),
        Binding("R", "restart_all", "Restart all", show=False, tooltip="Restart the whole stack"),
        Binding("slash", "search", "Search", tooltip="Search the log, the rollouts or the events"),
        Binding("f", "follow", "Follow", show=False, tooltip="Follow the log's end, or stay where it is"),
        Binding("a", "all_logs", "All logs", show=False, tooltip="All logs merged, or the selected component's"),
        Binding("c", "compare", "Compare", show=False, tooltip="Compare with other runs, on the same axes"),
        Binding("M", "choose_curves", "Curves", show=False, tooltip="Choose extra curves for Training"),
        Binding(
            "left_square_bracket", "select(-1)", "Previous component", show=False, tooltip="Select the component above"
        ),
        Binding(
            "right_square_bracket", "select(1)", "Next component", show=False, tooltip="Select the component below"
        ),
        Binding(
            "w", "last_words", "Last words", show=False, tooltip="The newest error in the selected component's log"
        ),
        Binding("p", "picture", "Picture", show=False, tooltip="Save a picture of the screen as SVG"),
        Binding("t", "change_theme", "Theme", show=False, tooltip="Choose other colours"),
        Binding("d", "detach", "Detach", tooltip="Leave the screen; the run goes on"),
        Binding("q", "ask_quit", "Quit", tooltip="Detach or stop"),
        Binding("ctrl+q", "ask_quit", "Quit", show=False, system=True, priority=True),
        Binding("ctrl+c", "interrupt", "Quit", show=False, system=True, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, system=True, priority=True),
        Binding("question_mark", "help", "Help", tooltip="This list"),
        Binding(
            "escape",
            "view_before",
            "Back",
            show=False,
            tooltip="Drop the filter, then the search, then the marked "
            "line or comparison; then back to the view before",
        ),
        *(
            Binding(str(number % 10), f"view('{name}')", view.title, show=False, tooltip=view.about)
            for number, (name, view) in enumerate(VIEWS.items(), 1)
        ),
    ]

    def __init__(
        self,
        run_dir: Path,
        *,
        control: Control | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self.feed = Feed(run_dir, control or ControlClient(run_dir), self.post_message)
        self.clock = clock
        self.rings = Bell(self.feed.run)
        self.info = RunInfo()
        self.state = RunState()
        self._newest: RunState | None = None
        """What the ends of long streams tell, until all is read."""
        self.status: RunStatus | None = None
        self.loaded = False
        """Whether the files were read to their end once; until then the curves wait."""
        self._bad_lines = 0
        self._dirty = self._fresh_records = True
        """What is not drawn yet: anything; records of the streams, which alone move the curves."""
        self._current: set[Widget] = set()
        """Panels that show the newest records of those that were drawn; one that appears later has to be told."""
        self._drawn_at = self._curves_at = self._news_at = float("-inf")
        self._log_of_all = False
        self._idle: tuple[str, ...] = ()
        """What the footer does not offer."""
        self._view_name = "overview"
        self._way_back: list[str] = []
        """Views that led to the present one."""
        self.chosen = preferences.charts()
        self.looking = Looking(self.chosen.lens())
        self.others: dict[Path, RunCurves] = {}
        """Runs on the same axes as this one, by their directories, in the order they were chosen."""
        self.other: RunBenchmark | None = None
        """The first of them in figures."""
        self._settings: dict[str, str] = {}
        self._enlarged: Chart | None = None
        """The chart that has the whole screen, where it stands among others."""
        for theme in (THEME, LIGHT):
            self.register_theme(theme)
        self.theme = THEME.name
        self.keep_theme: Callable[[str], object] = lambda name: None
        """Called with a theme that the user has chosen."""

    def watch_theme(self, name: str) -> None:
        if self.is_running:
            self.keep_theme(name)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return own_colours(self.current_theme)

    def compose(self) -> ComposeResult:
        yield from compose_screen()

    def on_mount(self) -> None:
        self.query_one(Components).focus()
        self.query_one(Keys).idle = self.idle_actions
        feed = self.feed
        for follow in (feed.follow_files, feed.follow_status, feed.follow_events, feed.follow_log):
            self.run_worker(follow(), group="feed")
        self.set_interval(REFRESH_S, self._refresh_panels)
        self.run_worker(self.draw_chosen(), group="curves")

    # What the feed tells.

    def on_status_arrived(self, message: StatusArrived) -> None:
        news = self.status is None or bool(self.gone) or standing(message.status) != standing(self.status)
        self.status, self.gone, self.is_over = message.status, "", message.status.phase is Phase.ENDED
        self._after_status(news)

    def on_supervisor_gone(self, message: SupervisorGone) -> None:
        self.gone, self.is_over = one_line(message.reason) or "no supervisor", message.ended
        self._ask_the_files()
        self._after_status(True)

    def _ask_the_files(self) -> None:
        """They have the last word on a run that nobody owns any more, and the first where the supervisor is silent."""
        if self.gone and self.loaded and (self.is_over or self.status is None):
            self.status = status_from_files(self.feed.run, self.info, self.state)

    def on_newest_arrived(self, message: NewestArrived) -> None:
        self.info, self._newest = message.info, RunState()
        for record in message.records:
            self._newest.apply(record)
        self._dirty = True

    def on_records_arrived(self, message: RecordsArrived) -> None:
        if message.reset:
            self.state = RunState()
        for record in message.records:
            self.state.apply(record)
            if isinstance(record, CommandRecord):
                self.tell_command(record, silently=not self.loaded)
        if self.rings.at_records(message.records, self.clock()):
            self.bell()
        self.info, self._bad_lines = message.info, message.bad_lines
        if not self.loaded and not message.behind:
            self.loaded, self._newest = True, None
            self._settle()
        only_clocks = bool(message.records) and all(isinstance(record, GaugesRecord) for record in message.records)
        news = message.reset or not only_clocks
        self._dirty, self._fresh_records = self._dirty or news, self._fresh_records or news
        self._ask_the_files()

    def _settle(self) -> None:
        """Collect garbage in small bites from now on, and never look at what is there already: a key would wait."""
        gc.freeze()
        gc.set_threshold(2_000, 5, 1_000_000)
        gc.enable()
        self.set_interval(COLLECT_S, self._collect)

    def _collect(self) -> None:  # a timer cannot call a builtin
        gc.collect()

    def on_log_arrived(self, message: LogArrived) -> None:
        log = self.find(LogView)
        if log and message.components == self._log_names():
            log.extend(message.entries, message.path)

    def _after_status(self, news: bool) -> None:
        """What is no news is drawn with the clocks."""
        self._dirty = self._dirty or news
        if self.rings.at_status(self.status):
            self.bell()
        if (idle := self.idle_actions()) != self._idle:
            self._idle = idle
            self.refresh_bindings()
        if self._log_of_all:
            self.feed.follow_log_of(self._log_names())
        if self.is_leaving and self.is_over:
            self.exit("stop")

    # Drawing.

    def _refresh_panels(self) -> None:
        """Draw what changed, and the clocks from time to time; beneath a dialog nothing more often."""
        now = time.monotonic()
        known = self.loaded or self._newest is not None
        at_once = self._dirty and known and self.screen_stack[-1:] == [self.main]  # none while it ends
        if self._dirty or not self._stands():
            self._news_at = now
        clocks = CLOCKS_S if now - self._news_at < QUIET_S else QUIET_CLOCKS_S
        if self.main and (now - self._drawn_at >= clocks or at_once):
            curves = self._fresh_records and self.loaded and now - self._curves_at >= CURVES_S
            self._draw(curves)

    def _stands(self) -> bool:
        """Whether every component is up or at rest: nobody counts the seconds until it is."""
        return self.status is not None and all(
            row.state in (State.HEALTHY, State.PENDING) or row.state.is_resting for row in self.status.components
        )

    @property
    def has_news(self) -> bool:
        """Whether something is known that is not drawn yet."""
        return self._dirty or (self._fresh_records and self.loaded)

    def _draw(self, curves: bool) -> None:
        """Give the visible panels what is known now; those that only records change when `curves`."""
        self._drawn_at = time.monotonic()
        self._dirty = False
        if curves:
            self._curves_at, self._fresh_records = self._drawn_at, False
            self._current.clear()
        self._show(visible(self.main) if self.main else (), curves)
        self._choose_component()

    def _show(self, widgets: Iterable[Widget], curves: bool) -> None:
        view = self._view()
        for widget in widgets:
            lacks = curves or (self.loaded and widget not in self._current)
            if isinstance(widget, Panel) and (lacks or not widget.follows_records):
                widget.present(view)
                self._current.add(widget)

    def on_resize(self) -> None:
        """Panels may have appeared, which no record will come for if the run is over."""
        self._dirty = True

    def _view(self) -> View:
        table = self.find(Components)
        return View(
            info=self.info,
            state=self._newest or self.state,
            read_to=self.state.step,
            status=self.status,
            gone=self.gone,
            now=self.clock(),
            bad_lines=self._bad_lines,
            other=self.other,
            selected=table.selected.name if table and table.selected else "",
            loaded=self.loaded,
            looking=self.looking,
            runs=self.runs,
        )

    def draw_now(self, kind: type[Chart] | None = None) -> None:
        """Charts are asked at once, for a key waits; what reads the step under their cursor, too."""
        if self.main:
            wanted = (Chart, StepPanel) if kind else Widget
            self._show([widget for widget in visible(self.main) if isinstance(widget, wanted)], self.loaded)

    def _choose_component(self) -> None:
        """Until the user chooses, the cursor is on what matters: failed, starting, else the trainer."""
        table = self.find(Components)
        if table and not (self.user_selects or table.is_users) and self.status and self.status.components:
            rows = self.status.components
            for wanted in (State.FAILED, State.BACKOFF, State.STARTING):
                if found := [row for row in rows if row.state is wanted]:
                    table.select(found[0].name)
                    return
            table.select(next((row.name for row in rows if row.role == "trainer"), rows[-1].name))

    def on_components_selected(self, message: Components.Selected) -> None:
        self.user_selects = self.user_selects or message.by_user
        self._dirty = True
        if not self._log_of_all:
            self._follow_logs(message.component)

    def _follow_logs(self, component: str) -> None:
        """Show the log of one component, or with "" of all."""
        log = self.find(LogView)
        if log and (component != log.component or not log.is_begun):
            log.switch(component)
            self.feed.follow_log_of(self._log_names())

    def _log_names(self) -> tuple[str, ...]:
        log = self.find(LogView)
        if log and log.component:
            return (log.component,)
        return tuple(row.name for row in self.status.components) if self.status else ()

    def on_rollouts_pointed(self, message: Rollouts.Pointed) -> None:
        detail = self.find(RolloutDetail)
        if detail and detail.display:
            detail.tell(message)

    def on_listing_chosen(self, message: Listing.Chosen) -> None:
        if isinstance(message.listing, Events) and (event := message.listing.current):
            heading = f"{event.component} {event.mark}"
            self.push_screen(TextDialog(heading, Text(f"{event.text}\n\n{event.detail}".strip())))
        elif isinstance(message.listing, Rollouts):
            self.action_view("rollouts")

    def on_events_asked(self, message: Events.Asked) -> None:
        self.run_worker(self._go_to_log(message.component, message.moment), group="jump", exclusive=True)

    async def _go_to_log(self, component: str, time: float) -> None:
        """The log at that second; what lies further back than the lines kept is read from the file, in a dialog."""
        table, log = self.find(Components), self.find(LogView)
        if table is None or log is None:
            return
        self._log_of_all = False
        table.select(component)
        self.user_selects = True
        self._follow_logs(component)
        for _ in range(FILL_LOOKS):
            await asyncio.sleep(FILL_S / FILL_LOOKS)
            if log.component == component and log.buffer and log.go_to(time):
                self.action_view("logs")
                return
        entries = await asyncio.to_thread(LogFeed(self.feed.run).around, component, time)
        lines = [f"{clock(entry.time)}  {entry.text}" for entry in entries]
        words = "\n".join(lines) or "its log does not reach that far back"
        self.push_screen(TextDialog(f"{component} about {clock(time)}", Text(words)))

    def action_last_words(self) -> None:
        """The newest error of the selected component's log."""
        self.action_view("logs")
        if log := self.find(LogView):
            log.action_error(-1)

    # Looking.

    def action_view(self, name: str) -> None:
        if main := self.main:
            if name != self._view_name:
                self._way_back = [*self._way_back, self._view_name] if name != "overview" else []
            self._view_name = name
            main.query_one(ViewsLine).light(name)
            before = set(visible(main))
            arrange(main, name)
            if name == "rollouts":
                main.query_one(Rollouts).point()
            self._focus(main, name)
            main.refresh(layout=True)  # at once, else what was there is painted a last time before the layout
            self._show([widget for widget in visible(main) if widget not in before], self.loaded)
            if name == "events" and (diagnosis := main.query_one(Notices).diagnosis):
                main.query_one(Events).point(diagnosis)

    def _focus(self, main: Screen[object], name: str) -> None:
        """The panel that gets the keys: the first of its kind on the screen."""
        kind = view_spec(name).focus
        next((widget for widget in visible(main) if isinstance(widget, kind)), main.query_one(kind)).focus()

    def action_view_before(self) -> None:
        """Take back one thing that narrows a panel on the screen; if there is none, go to the view before."""
        if any(panel.drop() for panel in self._searchable()):
            return
        if self._way_back:
            *way, name = self._way_back
            self.action_view(name)
            self._way_back = way

    def action_select(self, by: int) -> None:
        if table := self.find(Components):
            table.step(by)

    def action_follow(self) -> None:
        if log := self.find(LogView):
            log.toggle_follow()

    def action_all_logs(self) -> None:
        self._log_of_all = not self._log_of_all
        table = self.find(Components)
        self._follow_logs("" if self._log_of_all or not (table and table.selected) else table.selected.name)

    def action_search(self) -> None:
        """In the panel with the focus, if it can be searched, else in the first that is on the screen."""
        if seen := self._searchable():
            self._ask_line("/", seen[0].search, seen[0])

    def _searchable(self) -> list[LogView | Rollouts | Events]:
        """The panels on the screen that can be searched, the one with the focus first."""
        seen = [widget for widget in visible(self.main) if isinstance(widget, SEARCHED)] if self.main else []
        return sorted(seen, key=lambda widget: widget is not self.focused)

    def action_filter_log(self) -> None:
        if log := self.find(LogView):
            self._ask_line("&", log.narrow, log)

    def _ask_line(self, what: str, apply: Apply, panel: LogView | Rollouts | Events) -> None:
        if bar := self.find(SearchBar):
            bar.ask(what, apply, panel.focus, panel.accept)

    def action_open_log(self) -> None:
        log, table = self.find(LogView), self.find(Components)
        path = log.path if log else None
        if path is None and table and table.selected:
            path = self.feed.log_of(table.selected.name)
        if path is None:
            self.refuse("there is no log yet", "", "open")
        elif problem := edit(self, path):
            self.refuse(problem, f"the file is {path}", "open")

    def action_picture(self) -> None:
        try:
            svg = self.export_screenshot(title=f"atropos-tui · {self.info.name}")
            path = save_screenshot(svg, self.info.name, Path())
        except OSError as error:
            self.refuse(f"no picture: {error.strerror}", "", "picture")
        else:
            self.notify(f"saved {path.resolve()}", markup=False)

    def action_help(self) -> None:
        self.push_screen(HelpDialog(explained(self, visible(self.screen))))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        panels_with_keys = [widget for kind in SEARCHED if (widget := self.find(kind))]
        return palette(self, panels_with_keys, self.status.components if self.status and self.can_act else (), self.act)

    # Charts: another lens for all, one alone, other curves, the rollouts of a step.

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
        root = self.feed.run.root
        found = await asyncio.to_thread(other_runs, root)
        wanted = await self.push_screen_wait(ChooseRunsDialog(found, self.others, self.size.width))
        if not isinstance(wanted, list):
            return
        new = [path for path in wanted if path not in self.others]
        read = dict(zip(new, await asyncio.to_thread(read_runs, new), strict=True))
        self.others = {path: self.others.get(path) or read[path] for path in wanted}
        self._settings = await asyncio.to_thread(settings_of, self.feed.run)
        first = next(iter(self.others), None)
        self.other = self._figures(first) if first else None
        self.looking.lens = self.chosen.lens()
        self.draw_now()

    def _figures(self, root: Path) -> RunBenchmark:
        run = self.others[root]
        figures = benchmark_state(run.state, run=run.name, mode=run.info.mode)
        return replace(figures, exit_code=exit_code(RunDir(root)))


def standing(status: RunStatus) -> object:
    """How a run stands, without the figures that are never twice the same."""
    rows = [(row.name, row.state, row.pid, row.attempt, row.healthy, row.waiting_for) for row in status.components]
    return status.phase, status.exit_code, rows


def run_cockpit(run_dir: Path, *, read_only: bool = False) -> Outcome:
    """Show the screen of `run_dir` until it is left; `read_only`: no command is sent from it."""
    app = CockpitApp(run_dir)
    app.read_only = read_only
    return run_app(dressed(app))


def dressed(app: CockpitApp) -> CockpitApp:
    """In the colours that the user chose the last time or by ATROPOS_THEME, else in ours for this terminal."""
    wish = os.environ.get("ATROPOS_THEME") or preferences.theme()
    known = app.available_themes
    app.theme = own_theme(wish, known, None if wish in known else ground())
    app.keep_theme = lambda name: preferences.keep(theme=name)
    return app
