"""The cockpit app: the feed posts messages, handlers update the state, panels draw a `View`."""

from __future__ import annotations

import asyncio
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

from atropos_common.protocol.control import Phase, RunStatus, State
from atropos_common.protocol.records import CommandRecord, GaugesRecord
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.charts import SharedLens
from atropos_tui.monitor.format import clock, counted, one_line
from atropos_tui.monitor.glossary import MARKS, WORDS
from atropos_tui.monitor.log_buffer import LogFeed
from atropos_tui.monitor.overlay import Comparison
from atropos_tui.monitor.rollout_export import json_line
from atropos_tui.monitor.run.run_files import RunInfo, status_from_files
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.run_list import other_runs
from atropos_tui.monitor.settings import settings_table
from atropos_tui.supervisor.client import ControlClient
from atropos_tui.ui import user_files
from atropos_tui.ui.commands import CommandApp, Outcome, explained, palette
from atropos_tui.ui.dialogs import ChooseCurvesDialog, ChooseRunsDialog, HelpDialog, TextDialog
from atropos_tui.ui.exports import write_new
from atropos_tui.ui.feed import (
    Control,
    Feed,
    LogArrived,
    NewestArrived,
    RecordsArrived,
    StatusArrived,
    SupervisorGone,
)
from atropos_tui.ui.terminal import (
    Bell,
    edit,
    keep_history_out_of_collections,
    own_fonts,
    run_app,
    with_theme,
)
from atropos_tui.ui.views import (
    REFRESH_S,
    SETTINGS,
    VIEWS,
    Navigator,
    Painter,
    compose_screen,
    visible,
)
from atropos_tui.ui.widgets.bars import HINT, Apply, SearchBar
from atropos_tui.ui.widgets.chart_grid import ChartGrid
from atropos_tui.ui.widgets.components import Components
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.details import StepPanel
from atropos_tui.ui.widgets.events import Events
from atropos_tui.ui.widgets.footer import Footer
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.panel import Listing, View, hidden
from atropos_tui.ui.widgets.rollout_detail import Pointed, RolloutDetail
from atropos_tui.ui.widgets.rollouts import Rollouts
from atropos_tui.ui.widgets.settings import Settings

# Seconds to wait for the lines of a log that was switched to, and number of checks in that time.
FILL_S, FILL_LOOKS = 0.6, 6
SEARCHED = (LogView, Rollouts, Events, ChartGrid, Settings)
Searched = LogView | Rollouts | Events | ChartGrid | Settings
# Classes of the screen by its size, for the style sheets.
WIDTHS = ("-tiny", "-narrow", "-wide", "-wider", "-widest")
HEIGHTS = ("-flat", "-short", "-normal", "-tall")


class CockpitApp(CommandApp):
    CSS_PATH = "app.tcss"
    TITLE = "atropos-tui"
    HORIZONTAL_BREAKPOINTS = list(zip((0, 40, 110, 150, 180), WIDTHS, strict=True))  # noqa: RUF012
    VERTICAL_BREAKPOINTS = list(zip((0, 12, 30, 48), HEIGHTS, strict=True))  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        hidden(
            "r",
            "act('restart')",
            "Restart",
            "Restart the selected component and what must go with it",
        ),
        hidden("s", "stop_or_start", "Stop/start", "Stop or start the selected component"),
        hidden("K", "act('kill')", "Kill", "Kill every process of the selected component"),
        hidden("R", "restart_all", "Restart all", "Restart the whole stack"),
        hidden("slash", "search", "Search", "Search the log, the rollouts or the events"),
        hidden("f", "follow", "Follow", "Follow the end of the log, or stop following"),
        hidden("a", "all_logs", "All logs", "All logs merged, or the selected component's"),
        hidden("c", "compare", "Compare", "Compare with other runs, on the same axes"),
        *(
            hidden(
                f"f{number}",
                f"toggle_run({number - 1})",
                f"Run {number}",
                "Show or hide a compared run, by its number in the legend",
            )
            for number in range(1, 10)
        ),
        hidden("M", "choose_curves", "Curves", "Choose extra curves for Training"),
        hidden(
            "left_square_bracket", "select(-1)", "Previous component", "Select the component above"
        ),
        hidden("right_square_bracket", "select(1)", "Next component", "Select the component below"),
        hidden(
            "w",
            "last_words",
            "Last words",
            "Jump to the newest error in the selected component's log",
        ),
        hidden("z", "zoom", "Full screen", "Give the focused panel the screen, and back"),
        hidden("F", "fold", "Fold", "Fold the components into one line, or unfold them"),
        hidden("i", "view('settings')", "Settings", "Settings, and how they differ"),
        hidden("0", "home", "Runs", "The list of runs; this run goes on"),
        hidden("p", "picture", "Picture", "Save a picture of the screen as SVG"),
        hidden("t", "change_theme", "Theme", "Choose a theme"),
        hidden(
            "colon,ctrl+p", "command_palette", "Commands", "Find a command or a view by its name"
        ),
        hidden("ctrl+d", "detach", "Detach", "Leave the screen; the run goes on"),
        hidden("q", "ask_quit", "Quit", "Detach or stop"),
        Binding("ctrl+q", "ask_quit", "Quit", show=False, system=True, priority=True),
        Binding("ctrl+c", "interrupt", "Quit", show=False, system=True, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, system=True, priority=True),
        hidden("question_mark", "help", "Help", "This list, and the words and marks of the screen"),
        hidden(
            "escape",
            "view_before",
            "Back",
            "Remove the filter, then the search, then the marked "
            "line or comparison, then the full screen; then return to the view before",
        ),
        *(
            hidden(str(number % 10), f"view('{name}')", view.title, view.about)
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

        # What is known of the run. Until its files were read to their end once, `_newest` has the
        # last records of long streams, and no curve is drawn.
        self.info = RunInfo()
        self.state = RunState()
        self._newest: RunState | None = None
        self.status: RunStatus | None = None
        self.loaded = False
        self._bad_lines = 0

        # What is shown, and how. `_idle`: actions that the footer hides now.
        self.painter = Painter(self, self._view)
        self.views = Navigator(self, self.painter)
        self.chosen = user_files.charts()
        self.shared = SharedLens(self.chosen.lens())
        self.comparison = Comparison()
        self._log_of_all = False
        self._idle: tuple[str, ...] = ()
        # Esc in the overview returns to the list of runs.
        self.from_home = False
        # Opened with the screen: a view, and runs to compare with.
        self.first_view, self.first_others = "", tuple[Path, ...]()

    def compose(self) -> ComposeResult:
        yield from compose_screen()

    def on_mount(self) -> None:
        self.action_view("overview")
        footer = self.query_one(Footer)
        footer.idle, footer.offers_back = self.idle_actions, lambda: self.views.is_full
        self.use_key_file(user_files.key_file())
        feed = self.feed
        for follow in (feed.follow_files, feed.follow_status, feed.follow_events, feed.follow_log):
            self.run_worker(follow(), group="feed")
        self.set_interval(REFRESH_S, self._refresh_panels)
        self.run_worker(self.draw_chosen(), group="curves")
        if self.first_view:
            self.call_after_refresh(self.action_view, self.first_view)
        if self.first_others:
            self.run_worker(self._compare_with(self.first_others), group="compare")

    # Messages of the feed.

    def on_status_arrived(self, message: StatusArrived) -> None:
        before = None if self.status is None or self.gone else stable_fields(self.status)
        news = stable_fields(message.status) != before
        self.status, self.gone = message.status, ""
        self.is_over = message.status.phase is Phase.ENDED
        self._after_status(news)

    def on_supervisor_gone(self, message: SupervisorGone) -> None:
        self.gone, self.is_over = one_line(message.reason) or "no supervisor", message.ended
        self._use_status_from_files()
        self._after_status(True)

    def _use_status_from_files(self) -> None:
        # The files decide when the run has no supervisor any more, or when the supervisor has never
        # answered.
        if self.gone and self.loaded and (self.is_over or self.status is None):
            self.status = status_from_files(self.feed.run, self.info, self.state)

    def on_newest_arrived(self, message: NewestArrived) -> None:
        self.info, self._newest = message.info, RunState()
        for record in message.records:
            self._newest.apply(record)
        self.painter.dirty = True

    def on_records_arrived(self, message: RecordsArrived) -> None:
        if message.reset:
            self.state = RunState()
        for record in message.records:
            self.state.apply(record)
            if isinstance(record, CommandRecord):
                # History must not open toasts.
                self.report_command(record, silently=not self.loaded)
        if self.rings.at_records(message.records, self.clock()):
            self.bell()
        self.info, self._bad_lines = message.info, message.bad_lines
        if not self.loaded and not message.behind:
            self.loaded, self._newest = True, None
            keep_history_out_of_collections(self)
        # Gauges arrive every few seconds and change no curve, so they wait for the next draw of the
        # clocks.
        gauges = [record for record in message.records if isinstance(record, GaugesRecord)]
        if message.reset or not gauges or len(gauges) < len(message.records):
            self.painter.dirty = self.painter.fresh_records = True
        self._use_status_from_files()

    def on_log_arrived(self, message: LogArrived) -> None:
        log = self.find(LogView)
        # Lines of the component that was shown before may still arrive.
        if log and message.components == self._log_names():
            log.extend(message.entries, message.path)

    def _after_status(self, news: bool) -> None:
        # A status without news changes only figures, which are drawn with the clocks.
        self.painter.dirty = self.painter.dirty or news
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
        is_known = self.loaded or self._newest is not None
        # While a component starts or fails, the user watches the seconds.
        is_steady = self.status is not None and all(
            row.state in (State.HEALTHY, State.PENDING) or row.state.is_resting
            for row in self.status.components
        )
        if self.painter.refresh(is_known=is_known, is_loaded=self.loaded, is_steady=is_steady):
            self._choose_component()

    # A panel that appears needs a `View`; after the end of a run no record would trigger one.
    def on_resize(self) -> None:
        self.painter.dirty = True

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
            other=self.comparison.first,
            selected=table.selected.name if table and table.selected else "",
            loaded=self.loaded,
            shared=self.shared,
            runs=self.comparison.runs(self.info, self.state),
        )

    def _choose_component(self) -> None:
        table, rows = self.find(Components), self.status.components if self.status else []
        if table is None or self.user_selects or table.is_users or not rows:
            return
        # Until the user moves the cursor it follows what matters most: a failed component, a
        # starting one, the trainer.
        for wanted in (State.FAILED, State.BACKOFF, State.STARTING):
            if found := [row for row in rows if row.state is wanted]:
                table.select(found[0].name)
                return
        table.select(next((row.name for row in rows if row.role == "trainer"), rows[-1].name))

    def on_components_selected(self, message: Components.Selected) -> None:
        self.user_selects = self.user_selects or message.by_user
        self.painter.dirty = True
        if not self._log_of_all:
            self._follow_logs(message.component)

    def _follow_logs(self, component: str) -> None:
        log = self.find(LogView)
        if log and (component != log.component or not log.is_begun):
            log.switch(component)
            self.feed.follow_log_of(self._log_names())

    def _log_names(self) -> tuple[str, ...]:
        log = self.find(LogView)
        if log and log.component:
            return (log.component,)
        return tuple(row.name for row in self.status.components) if self.status else ()

    def on_rollouts_pointed(self, message: Pointed) -> None:
        detail = self.find(RolloutDetail)
        if detail and detail.display:
            detail.show_rollout(message)

    def on_listing_chosen(self, message: Listing.Chosen) -> None:
        if isinstance(message.listing, Events) and (event := message.listing.current):
            heading = f"{event.component} {event.mark}"
            self.push_screen(TextDialog(heading, Text(f"{event.text}\n\n{event.detail}".strip())))
        elif isinstance(message.listing, Rollouts):
            self.action_view("rollouts")

    def on_events_asked(self, message: Events.Asked) -> None:
        jump = self._go_to_log(message.component, message.moment)
        self.run_worker(jump, group="jump", exclusive=True)

    async def _go_to_log(self, component: str, time: float) -> None:
        table, log = self.find(Components), self.find(LogView)
        if table is None or log is None:
            return
        self._log_of_all = False
        table.select(component)
        self.user_selects = True
        self._follow_logs(component)
        # The lines arrive by message, after the switch.
        for _ in range(FILL_LOOKS):
            await asyncio.sleep(FILL_S / FILL_LOOKS)
            if log.component == component and log.buffer and log.go_to(time):
                self.action_view("logs")
                return
        # The moment lies before the lines kept: read that part of the file and show it in a dialog.
        entries = await asyncio.to_thread(LogFeed(self.feed.run).around, component, time)
        lines = [f"{clock(entry.time)}  {entry.text}" for entry in entries]
        words = "\n".join(lines) or "the log does not go back that far"
        self.push_screen(TextDialog(f"{component} about {clock(time)}", Text(words)))

    def action_last_words(self) -> None:
        self.action_view("logs")
        if log := self.find(LogView):
            log.action_error(-1)

    # Views.

    def action_view(self, name: str) -> None:
        self.views.open(name)
        if name == SETTINGS:
            self.run_worker(self._read_settings(), group="settings", exclusive=True)

    async def _read_settings(self) -> None:
        path = next(iter(self.comparison.others), None)
        other, name = (RunDir(path), path.name) if path else (None, "")
        table = await asyncio.to_thread(settings_table, self.feed.run, other, name)
        if panel := self.find(Settings):
            panel.put_table(table)

    def action_view_before(self) -> None:
        """Undo one filter, search or mark; else return to the view before."""
        if any(panel.drop() for panel in self._searchable()) or self.views.back():
            return
        if self.from_home:
            self.action_home()

    def idle_actions(self) -> tuple[str, ...]:
        full = ("enlarge", "zoom") if self.views.is_full else ()
        return (*super().idle_actions(), *full)

    def action_zoom(self) -> None:
        self.views.zoom()

    def action_fold(self) -> None:
        self.views.fold()

    def action_select(self, by: int) -> None:
        if table := self.find(Components):
            table.step(by)

    def action_follow(self) -> None:
        if log := self.find(LogView):
            log.toggle_follow()

    def action_all_logs(self) -> None:
        self._log_of_all = not self._log_of_all
        table = self.find(Components)
        row = table.selected if table and not self._log_of_all else None
        self._follow_logs(row.name if row else "")

    def action_search(self) -> None:
        if seen := self._searchable():
            self._ask_line("/", seen[0].search, seen[0])

    def _searchable(self) -> list[Searched]:
        # The focused one comes first.
        shown = visible(self.main) if self.main else ()
        seen = [widget for widget in shown if isinstance(widget, SEARCHED)]
        here = [self.focused, *(self.focused.ancestors if self.focused else ())]
        return sorted(seen, key=lambda widget: widget not in here)

    def action_filter_log(self) -> None:
        if log := self.find(LogView):
            self._ask_line("&", log.narrow, log)

    def _ask_line(self, what: str, apply: Apply, panel: Searched) -> None:
        if bar := self.find(SearchBar):
            hint = getattr(panel, "search_hint", HINT)
            bar.ask(what, apply, panel.focus, panel.accept, hint)

    def action_open_log(self) -> None:
        log, table = self.find(LogView), self.find(Components)
        path = log.path if log else None
        if path is None and table and table.selected:
            path = self.feed.log_of(table.selected.name)
        if path is None:
            self.refuse("this component has no log yet", "", "open")
        elif problem := edit(self, path):
            self.refuse(problem, f"open the file elsewhere: {path}", "open")

    def action_picture(self) -> None:
        svg = self.export_screenshot(title=f"atropos-tui · {self.info.name}")
        self.run_worker(self._write("picture", "", ".svg", lambda: own_fonts(svg)), group="files")

    def on_rollouts_exported(self, message: Rollouts.Exported) -> None:
        records = message.records

        def text() -> str:
            return "".join(f"{json_line(record)}\n" for record in records)

        what = counted(len(records), "rollout")
        self.run_worker(self._write(what, "rollouts", ".jsonl", text), group="files")

    async def _write(self, what: str, part: str, suffix: str, text: Callable[[], str]) -> None:
        def write() -> Path:
            name = self.info.run_id or self.info.name
            return write_new(self.feed.run.root, name, part, suffix, text())

        try:
            self.report_file(what, await asyncio.to_thread(write))
        except OSError as error:
            fix = "start the screen in a folder that you may write"
            self.refuse(f"cannot write the {what}: {error.strerror}", fix)

    def action_help(self) -> None:
        keys = explained(self, visible(self.screen))
        self.push_screen(HelpDialog(keys, {"Marks": MARKS, "Words": WORDS}))

    def selection(self) -> dict[str, str | None]:
        table = self.find(Components)
        row = table.selected if table else None
        log = self.feed.log_of(row.name) if row else None
        step = self._view().cursor_step
        rollouts = self.find(Rollouts)
        if rollouts and rollouts.has_focus and rollouts.current:
            step = rollouts.current.group.step
        return {
            "run_dir": str(self.feed.run.root.resolve()),
            "component": row.name if row else None,
            "pid": str(row.pid) if row and row.pid else None,
            "log": str(log.resolve()) if log else None,
            "step": str(step) if step else None,
        }

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        panels_with_keys = [widget for kind in SEARCHED if (widget := self.find(kind))]
        rows = self.status.components if self.status and self.can_act else ()
        return palette(self, panels_with_keys, rows, self.act)

    # Charts.

    def on_chart_turned(self) -> None:
        kept = self.chosen.through(self.shared.lens)
        if kept != self.chosen:
            self.chosen = kept
            user_files.keep(charts=kept)
        self.painter.draw_now(Chart, StepPanel)

    def on_chart_grid_changed(self, message: ChartGrid.Changed) -> None:
        if message.hidden is not None:
            self.chosen = replace(self.chosen, hidden=tuple(sorted(message.hidden)))
            user_files.keep(charts=self.chosen)
            for grid in self.main.query(ChartGrid) if self.main else ():
                grid.hidden = message.hidden
                grid.fit()
        self.painter.draw_now(Chart)

    def action_toggle_run(self, at: int) -> None:
        """Show or hide a compared run."""
        count = len(self._view().settings)
        if at >= count:
            return
        lens = self.shared.lens
        hidden = lens.hidden_runs ^ {at}
        # Hiding the last one shows all.
        hidden = frozenset() if len(hidden) == count else hidden
        self.shared.lens = replace(lens, hidden_runs=hidden)
        self.painter.draw_now()

    def on_chart_asked(self, message: Chart.Asked) -> None:
        if message.what == "rollouts":
            self.action_view("rollouts")
            if rollouts := self.find(Rollouts):
                rollouts.go_to(message.step)
        elif message.what in ("log", "events"):
            self._go_to_step(message.what, message.step)
        elif message.what == "enlarge":
            self.views.enlarge(message.chart)
        elif message.what == "back":
            self.action_view_before()
            self.views.refocus(message.chart)

    def _go_to_step(self, what: str, step: int) -> None:
        # A step's record is written at its end, so its time is the end of the step.
        ends = self.state.metric("step_s")
        at = bisect_left(ends.steps, step)
        if at == len(ends):
            self.notify(f"no record has the time of step {step}", timeout=3)
        elif what == "log":
            trainers = (part.name for part in self.info.components if part.role == "trainer")
            self.post_message(Events.Asked(next(trainers, ""), ends.times[at]))
        else:
            self.action_view("events")
            if events := self.find(Events):
                events.go_to(ends.times[at])

    async def draw_chosen(self) -> None:
        """Add charts of the chosen curves to the training view."""
        if self.main:
            for grid in self.main.query(ChartGrid):
                grid.hidden = frozenset(self.chosen.hidden)
                grid.fit()
            grid = self.main.query_one("#view-training").query_one(ChartGrid)
            await grid.set_extra(self.chosen.metrics)
            self.painter.draw_now()

    def action_choose_curves(self) -> None:
        self.run_worker(self._choose_curves(), group="curves", exclusive=True)

    async def _choose_curves(self) -> None:
        names = list(dict.fromkeys([*self.chosen.metrics, *self.state.names()]))
        wanted = await self.push_screen_wait(ChooseCurvesDialog(names, self.chosen.metrics))
        if isinstance(wanted, list):
            self.chosen = replace(self.chosen, metrics=tuple(wanted))
            user_files.keep(charts=self.chosen)
            self.action_view("training")
            await self.draw_chosen()

    # Other runs.

    def action_compare(self) -> None:
        self.run_worker(self._compare(), group="compare", exclusive=True)

    async def _compare(self) -> None:
        run, others = self.feed.run, self.comparison.others
        # Listing and reading runs is file work: it must not block the screen.
        found = await asyncio.to_thread(other_runs, run.root)
        wanted = await self.push_screen_wait(ChooseRunsDialog(found, others, self.size.width))
        if isinstance(wanted, list):
            await self._compare_with(wanted)

    async def _compare_with(self, others: Sequence[Path]) -> None:
        run = self.feed.run
        self.comparison = await asyncio.to_thread(self.comparison.with_runs, others, run)
        # A window or cursor of this run alone may lie outside the new axes.
        self.shared.lens = self.chosen.lens()
        self.painter.draw_now()
        if self.views.name == SETTINGS:
            await self._read_settings()


def stable_fields(status: RunStatus) -> object:
    """Return the parts of a status that do not change all the time."""
    rows = [
        (row.name, row.state, row.pid, row.attempt, row.healthy, row.waiting_for)
        for row in status.components
    ]
    return status.phase, status.exit_code, rows


def run_cockpit(
    run_dir: Path,
    *,
    read_only: bool = False,
    from_home: bool = False,
    view: str = "",
    others: Sequence[Path] = (),
) -> Outcome:
    """Show the screen of `run_dir` until the user leaves it.

    Args:
        from_home: opened from the list of runs.
        view: the first view, if not the overview.
        others: runs to compare with.
    """
    app = CockpitApp(run_dir)
    app.read_only, app.from_home = read_only, from_home
    app.first_view, app.first_others = view, tuple(others)
    return run_app(with_theme(app), "detach")
