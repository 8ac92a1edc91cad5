"""The list of runs: sort, filter, mark, compare, note, report, open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Static

from atropos_common.protocol.control import RunStatus
from atropos_common.system.run_dir import RunDir
from atropos_tui.monitor.catalogue import Catalogue, Sentences, is_ended, is_quick
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.glossary import MARKS, WORDS
from atropos_tui.monitor.overlay import read_runs
from atropos_tui.monitor.run.notes import Notes, write_notes
from atropos_tui.monitor.run_list import RunRow
from atropos_tui.supervisor.client import ControlClient, NoSupervisor, Refused
from atropos_tui.ui import user_files
from atropos_tui.ui.base import BaseApp
from atropos_tui.ui.commands import explained, palette
from atropos_tui.ui.dialogs import HelpDialog
from atropos_tui.ui.exports import new_file
from atropos_tui.ui.feed import NO_ANSWER
from atropos_tui.ui.home.comparison import CompareScreen
from atropos_tui.ui.home.details import RunDetails, changes, differences
from atropos_tui.ui.home.notes import NotesDialog
from atropos_tui.ui.home.table import Memory, RunTable
from atropos_tui.ui.own_commands import PLACEHOLDERS
from atropos_tui.ui.widgets.bars import SearchBar
from atropos_tui.ui.widgets.footer import Footer
from atropos_tui.ui.widgets.panel import Listing, hidden

# Shortest seconds between two scans, and the share of the time that scans may take.
SCAN_S, SHARE = 1.0, 0.1
LONGEST_PAUSE_S = 4.0
STATUS_TIMEOUT_S = 2.0
MOST_COMPARED = 8
FIRST_RUN = """\
There is no run yet.

  atropos-tui up demo     train a tiny model on this machine's CPU, in a minute or two
  atropos-tui init        ask a few questions and write a profile of your own
  atropos-tui doctor      show what this machine lacks

A run appears here as soon as it starts. q leaves."""


@dataclass(frozen=True)
class Choice:
    """The run to open; None leaves the program."""

    run: Path | None
    view: str = ""
    others: tuple[Path, ...] = ()


class HomeApp(BaseApp[Choice]):
    CSS_PATH = "../app.tcss"
    TITLE = "atropos-tui"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-normal")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        # Names of actions that the screen of a run has too stand for both in the key file.
        hidden("c", "compare", "Compare", "Show how the marked runs differ"),
        replace(hidden("slash", "search", "Filter", "Show only runs that match"), id="search"),
        hidden("n", "note", "Note", "Runs: write the note and the tags of this run"),
        hidden("i,d", "open('settings')", "Settings", "Settings of this run"),
        hidden("l", "open('logs')", "Logs", "Runs: the logs of this run"),
        hidden("o", "report", "Report", "Runs: write a page about the marked runs, or this one"),
        hidden("t", "change_theme", "Theme", "Choose a theme"),
        hidden(
            "colon,ctrl+p", "command_palette", "Commands", "Find a command or a view by its name"
        ),
        hidden("question_mark", "help", "Help", "This list, and the words and marks of the screen"),
        hidden("q", "leave", "Quit", "Leave; all runs go on"),
        Binding("ctrl+q,ctrl+c", "leave", "Quit", show=False, system=True, priority=True),
        hidden("escape", "back", "Back", "Remove the filter, then the marks"),
    ]

    always = ("open('settings')", "leave", "help")

    def __init__(
        self, catalogue: Catalogue, memory: Memory | None = None, here: Path | None = None
    ) -> None:
        """Args: `here`: directory of the run to put the cursor on."""
        super().__init__()
        self._catalogue, self._sentences = catalogue, Sentences()
        self._memory = memory or Memory()
        self._here = here
        self._look_now, self._scan_now = asyncio.Event(), asyncio.Event()
        # Held here: a worker may come back from a thread while the screen closes.
        self.table, self._details = RunTable(self._memory), RunDetails()
        self._is_scanned = False
        # The profile of a run, and the settings that differ from it, by the run's directory.
        self._own_settings: dict[Path, tuple[str, Sequence[tuple[str, str, str]]]] = {}

    def compose(self) -> ComposeResult:
        yield Static(Text(FIRST_RUN), id="no-runs", classes="panel")
        yield self.table
        yield self._details
        yield SearchBar()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#no-runs").display = False
        self.table.focus()
        self.use_key_file(user_files.key_file())
        if rows := self._memory.rows:
            self._memory.rows = ()
            self._put(list(rows))
        self.run_worker(self._follow_runs(), group="runs")
        self.run_worker(self._follow_sentences(), group="sentences")

    # What is shown.

    async def _follow_runs(self) -> None:
        while True:
            began = time.monotonic()
            parts = self._catalogue.scan()
            # A first scan of many runs takes a second, so it arrives in parts.
            while (rows := await asyncio.to_thread(next, parts, None)) is not None:
                self.table.expected = self._catalogue.count
                self._put(rows)
            self._is_scanned = True
            self._show_emptiness()
            pause = min(max(SCAN_S, (time.monotonic() - began) / SHARE), LONGEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._scan_now.wait()
            self._scan_now.clear()

    def _put(self, rows: list[RunRow]) -> None:
        table = self.table
        if rows != table.memory.rows:
            table.put_rows(rows)
            if self._here and (at := _place(table.items, self._here)) is not None:
                table.cursor, self._here = at, None
            self._show_emptiness()
            self._look_now.set()
        else:
            table.refresh()  # ages grow

    def _show_emptiness(self) -> None:
        is_empty = self._is_scanned and not self.table.memory.rows
        for place in self.screen_stack[:1]:
            place.query("#no-runs").set(display=is_empty)
        self.table.display = self._details.display = not is_empty

    def on_listing_moved(self) -> None:
        self._show_details()
        self._look_now.set()

    def _show_details(self) -> None:
        table = self.table
        row = table.current
        other = next((one for one in table.memory.rows if one.dir in table.memory.marked[:1]), None)
        said = table.memory.sentences.get(row.dir) if row else None
        panel = self._details
        if row and other and other.dir != row.dir:
            panel.show_run(row, said, other.run, differences(row, other))
        else:
            panel.show_run(row, said)
        panel.show_settings(*self._own_settings.get(row.dir if row else Path(), ("", ())))

    async def _follow_sentences(self) -> None:
        """Tell the sentence of the run under the cursor, then of the visible ones."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SCAN_S):
                    await self._look_now.wait()
            self._look_now.clear()
            for row in self._visible():
                if self._look_now.is_set():
                    break  # the cursor moved, so another run comes first
                await self._tell(row)

    def _visible(self) -> list[RunRow]:
        table = self.table
        top = table.scroll_offset.y
        seen = table.items[top : top + table.size.height]
        first = [table.current] if table.current else []
        return [*first, *(row for row in seen if row is not table.current and is_quick(row))]

    async def _tell(self, row: RunRow) -> None:
        if row is self.table.current and row.dir not in self._own_settings:
            self._own_settings[row.dir] = await asyncio.to_thread(changes, row)
            self._show_details()
        said = self._sentences.known(row)
        if said is None:
            status = await _status(row) if not is_ended(row) else None
            said = await asyncio.to_thread(self._sentences.tell, row, status)
        if self.table.memory.sentences.get(row.dir) != said:
            self.table.memory.sentences[row.dir] = said
            self.table.refresh()
            if self.table.current is not None and self.table.current.dir == row.dir:
                self._show_details()

    # Keys.

    def on_listing_chosen(self, message: Listing.Chosen) -> None:
        self.action_open()

    def action_open(self, view: str = "") -> None:
        if row := self.table.current:
            others = [path for path in self.table.memory.marked if path != row.dir] if view else []
            self.exit(Choice(row.dir, view, tuple(others)))

    def action_search(self) -> None:
        table = self.table
        self.query_one(SearchBar).ask("/", table.search, table.focus, table.accept)

    async def action_back(self) -> None:
        self.table.drop()
        self._show_details()

    def action_leave(self) -> None:
        self.exit(Choice(None))

    def action_help(self) -> None:
        self.push_screen(
            HelpDialog(explained(self, [self.table]), {"Marks": MARKS, "Words": WORDS})
        )

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        return palette(self, [self.table])

    def selection(self) -> dict[str, str | None]:
        row = self.table.current
        return {**dict.fromkeys(PLACEHOLDERS), "run_dir": str(row.dir) if row else None}

    def _chosen(self) -> list[RunRow]:
        # The marked runs in the order of their marks, else the one under the cursor.
        table = self.table
        by_path = {row.dir: row for row in table.memory.rows}
        marked = [by_path[path] for path in table.memory.marked]
        return marked or ([table.current] if table.current else [])

    def action_compare(self) -> None:
        rows, current = self._chosen(), self.table.current
        if len(rows) == 1 and current and current.dir != rows[0].dir:
            rows.append(current)
        if len(rows) < 2:
            self.refuse("one run cannot be compared", "mark two or more with space", "compare")
        elif len(rows) > MOST_COMPARED:
            self.refuse(f"{len(rows)} runs are marked", f"mark at most {MOST_COMPARED}", "compare")
        else:
            self.run_worker(self._compare(rows), group="compare", exclusive=True)

    async def _compare(self, rows: Sequence[RunRow]) -> None:
        curves = await asyncio.to_thread(read_runs, [row.dir for row in rows])
        choice = await self.push_screen_wait(CompareScreen(rows, curves))
        if choice == "charts":
            first, *others = (row.dir for row in rows)
            self.exit(Choice(first, "training", tuple(others)))
        elif choice == "report":
            await self._report(rows)

    def action_note(self) -> None:
        if row := self.table.current:
            self.run_worker(self._note(row), group="note", exclusive=True)

    async def _note(self, row: RunRow) -> None:
        notes = await self.push_screen_wait(NotesDialog(row.run, Notes(row.note, row.tags)))
        if notes is None:
            return
        try:
            await asyncio.to_thread(write_notes, RunDir(row.dir), notes)
        except OSError as error:
            self.refuse(f"cannot write the note: {error.strerror}", str(row.dir), "note")
        self._scan_now.set()

    def action_report(self) -> None:
        if rows := self._chosen():
            self.run_worker(self._report(rows), group="report", exclusive=True)

    async def _report(self, rows: Sequence[RunRow]) -> None:
        # A process of its own: drawing takes seconds, and its libraries a hundred megabytes.
        first, what = rows[0], "report" if len(rows) == 1 else f"report-of-{len(rows)}-runs"
        try:
            path = await asyncio.to_thread(new_file, first.dir, first.run, what, ".html")
        except OSError as error:
            self.refuse(f"cannot write the report: {error.strerror}", str(first.dir), "report")
            return
        self.notify("writing the report …", timeout=3)
        words = ("-m", "atropos_tui", "report", *(str(row.dir) for row in rows), "-o", str(path))
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await child.communicate()
        if child.returncode:
            path.unlink(missing_ok=True)
            self.refuse(one_line(said.decode(errors="replace")), "", "report")
            return
        if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
            self.open_url(path.as_uri())
        self.report_file("report for a browser", path)


def _place(items: Sequence[RunRow], path: Path) -> int | None:
    return next((at for at, row in enumerate(items) if row.dir == path), None)


async def _status(row: RunRow) -> RunStatus | None:
    # None if no supervisor answers here, or soon enough.
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await ControlClient(row.dir).status()
    except (*NO_ANSWER, NoSupervisor, Refused):
        return None
