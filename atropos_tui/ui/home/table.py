"""The table of runs: columns by width, order, marks."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual import events
from textual.binding import BindingType

from atropos_tui.monitor.format import cut, number, one_line, real
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.monitor.run.notes import Notes
from atropos_tui.monitor.run_list import LIVE, RunRow, age
from atropos_tui.monitor.verdict import Verdict
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Listing, after, hidden

MARK = "✓"
GAP = "  "
LONGEST_NAME = 34
FEWEST = 16  # cells of the sentence; with less room the panel below tells it alone


class Column(NamedTuple):
    """One column of figures."""

    heading: str
    text: Callable[[RunRow, float], str]
    key: Callable[[RunRow], float | str | None]
    """Sort key; None comes last."""
    is_descending: bool = True
    is_right: bool = True
    is_spared: bool = False
    """Left out of a narrow table."""


def state_words(row: RunRow) -> tuple[str, str]:
    """Return glyph and word of a run's state, and its tone."""
    if row.state == LIVE:
        return "● live", "good"
    if row.state == "ended 0":
        return "✔ done", "text-good"
    if row.state == "ended 130":
        return "■ stopped", "dim"
    if row.state.startswith("ended"):
        return "✖ failed", "bad"
    return ("○ waits", "busy") if row.state == "waits" else ("▲ crashed", "warn")


COLUMNS = {
    "name": Column("RUN", lambda run, _: one_line(run.run), lambda run: run.run, False, False),
    "state": Column(
        "STATE", lambda run, _: state_words(run)[0], lambda run: state_words(run)[0], False, False
    ),
    "age": Column(
        "AGE",
        lambda run, now: age(run.started_at, now).removesuffix(" ago"),
        lambda run: run.started_at,
    ),
    "step": Column(
        "STEP",
        lambda run, _: "–" if run.step is None else f"{run.step}/{run.training_steps or '–'}",
        lambda run: run.step,
    ),
    "pace": Column(
        "S/STEP",
        lambda run, _: "–" if run.step_s is None else number(run.step_s, 2),
        lambda run: None if run.step_s is None else real(run.step_s),
        is_spared=True,
    ),
    "reward": Column(
        "REWARD",
        lambda run, _: number(run.reward),
        lambda run: None if run.reward is None else real(run.reward),
    ),
    "held out": Column(
        "HELD OUT",
        lambda run, _: "–" if run.held_out is None else f"{100 * run.held_out:.1f} %",
        lambda run: None if run.held_out is None else real(run.held_out),
        is_spared=True,
    ),
}


@dataclass
class Memory:
    """State of the list, kept while a run is open."""

    rows: Sequence[RunRow] = ()
    marked: list[Path] = field(default_factory=list)
    sentences: dict[Path, Verdict] = field(default_factory=dict)
    order: str = "age"
    is_reversed: bool = False
    pattern: Pattern | None = None


class RunTable(Listing[RunRow]):
    """Runs in an order of the user's choice; space marks."""

    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("enter", "choose", "Open", "Runs: open the run under the cursor"),
        hidden("space", "mark", "Mark", "Runs: mark this run, or remove the mark"),
        hidden("S", "sort", "Sort", "Runs: sort by the next column, as a click does"),
        hidden("N", "sort_by('name')", "By name", "Runs: sort by name; again: reversed"),
        hidden("A", "sort_by('age')", "By age", "Runs: sort by age; again: reversed"),
        hidden("R", "sort_by('reward')", "By reward", "Runs: sort by reward; again: reversed"),
    ]
    best = ("choose", "mark", "app.compare", "app.search", "sort_by('reward')", "sort")
    head = 1

    def __init__(self, memory: Memory) -> None:
        super().__init__(id="runs")
        self.memory = memory
        # Number of runs, known before all of them are read.
        self.expected = 0
        self._filter_text = ""
        # Column behind each heading, as last drawn.
        self._ends: dict[str, int] = {}
        # Widths of the columns, and the width of the table that they were made for.
        self._widths_made: dict[str, int] = {}
        self._made_for = -1

    def key_of(self, item: RunRow) -> Hashable:
        return item.dir

    def put_rows(self, rows: Sequence[RunRow]) -> None:
        """Replace all rows; marks of removed runs go."""
        self.memory.rows = rows
        there = {row.dir for row in rows}
        self.memory.marked = [path for path in self.memory.marked if path in there]
        self.sort_rows()

    def sort_rows(self) -> None:
        """Filter and sort the rows."""
        fits = [row for row in self.memory.rows if self._fits(row)]
        column = COLUMNS[self.memory.order]
        known = [row for row in fits if column.key(row) is not None]
        unknown = [row for row in fits if column.key(row) is None]
        known.sort(
            key=lambda row: column.key(row),  # type: ignore[arg-type,return-value]
            reverse=column.is_descending != self.memory.is_reversed,
        )
        self.put([*known, *unknown])
        self._show_title()

    def _fits(self, row: RunRow) -> bool:
        if self.memory.pattern is None:
            return True
        words = (row.run, row.name, row.mode, state_words(row)[0], Notes(row.note, row.tags).line)
        return any(self.memory.pattern.search(word) for word in words)

    def _show_title(self) -> None:
        live = sum(row.state == LIVE for row in self.memory.rows)
        count = (
            f"{len(self.items)} of {len(self.memory.rows)}"
            if self.memory.pattern
            else str(len(self.memory.rows))
        )
        parts = [(count, ""), (f"{live} live" if live else "", "success")]
        if self.memory.pattern:
            parts.insert(0, (f"/{one_line(self._filter_text)}", "accent"))
        if self.memory.marked:
            parts.append((f"{MARK} {len(self.memory.marked)} marked", "accent"))
        if len(self.memory.rows) < self.expected:
            parts.append((f"reading {self.expected} …", "quiet"))
        self.set_title(title("Runs", *parts))

    # Filter.

    def search(self, pattern: Pattern | None) -> str:
        self.memory.pattern = pattern
        self._filter_text = pattern.text if pattern else ""
        self.sort_rows()
        return f"{len(self.items)} of {len(self.memory.rows)}"

    def accept(self) -> None:
        """Keep the filter."""

    def drop(self) -> bool:
        """Remove the filter, else the marks; False if there is neither."""
        if self.memory.pattern is not None:
            self.search(None)
            return True
        had, self.memory.marked = bool(self.memory.marked), []
        self._show_title()
        self.refresh()
        return had

    # Keys.

    def action_mark(self) -> None:
        if (row := self.current) is None:
            return
        if row.dir in self.memory.marked:
            self.memory.marked.remove(row.dir)
        else:
            self.memory.marked.append(row.dir)
        self._show_title()
        self.action_move(1)
        self.refresh()
        self.post_message(self.Moved())

    def action_sort(self) -> None:
        self.memory.order, self.memory.is_reversed = after(self.memory.order, list(COLUMNS)), False
        self._sorted()

    def action_sort_by(self, name: str) -> None:
        self.memory.is_reversed = (
            not self.memory.is_reversed if name == self.memory.order else False
        )
        self.memory.order = name
        self._sorted()

    def _sorted(self) -> None:
        # To the top: who sorts looks for the first rows.
        self.cursor = 0
        self.sort_rows()
        self.scroll_to(y=0, animate=False)

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at is not None and at.y == 0:
            name = next((name for name, end in self._ends.items() if at.x < end), "")
            if name:
                self.action_sort_by(name)
            return
        super().on_click(event)

    # Drawing.

    def _widths(self, width: int) -> dict[str, int]:
        now = time.time()
        found = {}
        for name, column in COLUMNS.items():
            texts = [column.text(row, now) for row in self.items]
            found[name] = max([len(column.heading) + 1, *map(len, texts)])
        found["name"] = min(found["name"], LONGEST_NAME)
        for name, column in COLUMNS.items():
            if column.is_spared and sum(found.values()) + len(GAP) * len(found) + 2 > width:
                del found[name]
        return found

    def put(self, items: Sequence[RunRow]) -> None:
        super().put(items)
        self._made_for = -1

    def _layout(self, width: int) -> dict[str, int]:
        if self._made_for != width:
            self._widths_made, self._made_for = self._widths(width), width
        return self._widths_made

    def head_line(self) -> Text:
        width = self.scrollable_content_region.width
        line, self._ends = Text("  ", no_wrap=True, end=""), {}
        for name, cells in self._layout(width).items():
            column = COLUMNS[name]
            here = name == self.memory.order
            arrow = (
                ("▼" if column.is_descending != self.memory.is_reversed else "▲") if here else ""
            )
            words = f"{column.heading}{arrow}"
            words = words.rjust(cells) if column.is_right else words.ljust(cells)
            line.append(words, self.style("busy" if here else "dim")).append(GAP)
            self._ends[name] = line.cell_len
        if width - line.cell_len >= FEWEST:
            line.append("WHAT", self.style("dim"))
        return line

    def draw(self, item: RunRow, width: int) -> Text:
        is_marked, now = item.dir in self.memory.marked, time.time()
        line = Text(no_wrap=True, end="")
        line.append(f"{MARK} " if is_marked else "  ", self.style("accent"))
        for name, cells in self._layout(width).items():
            column, style = COLUMNS[name], ""
            text = cut(column.text(item, now), cells)
            text = text.rjust(cells) if column.is_right else text.ljust(cells)
            if name == "state":
                style = state_words(item)[1]
            elif name == "age":
                style = "dim"
            elif is_marked and name == "name":
                style = "accent"
            line.append(text, self.style(style) if style else None).append(GAP)
        if width - line.cell_len >= FEWEST:
            line.append_text(self._words(item))
        return line

    def _words(self, item: RunRow) -> Text:
        # Tags and note first: their writer looks for them.
        line, notes = Text(), Notes(item.note, item.tags).line
        if notes:
            line.append(one_line(notes), self.style("accent")).append("  ")
        said = self.memory.sentences.get(item.dir)
        words = said.text if said else item.reason
        return line.append(one_line(words), self.style(said.tone if said else "dim"))
