"""Marked runs side by side: settings that differ, then results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.overlay import SEED, RunCurves, differing, final_table
from atropos_tui.monitor.run.notes import Notes
from atropos_tui.monitor.run_list import RunRow
from atropos_tui.ui.home.table import state_words
from atropos_tui.ui.theme import named_style
from atropos_tui.ui.widgets.legend import RUN_COLOURS, run_mark
from atropos_tui.ui.widgets.panel import hidden

GAP = 3
LONGEST_VALUE = 24
BEST = "◀ best"


class CompareScreen(ModalScreen[str | None]):
    """Returns `charts`, `report`, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "leave('charts')", "Charts"),
        Binding("o", "leave('report')", "Report"),
        Binding("escape,q", "leave('')", "Back"),
        hidden("down,j", "scroll(1)", "Down"),
        hidden("up,k", "scroll(-1)", "Up"),
    ]

    def __init__(self, rows: Sequence[RunRow], curves: Sequence[RunCurves]) -> None:
        super().__init__()
        self._rows, self._curves = rows, curves

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="comparison") as box:
            box.border_title = f"How {len(self._rows)} runs differ"
            box.border_subtitle = "enter charts · o report · esc back"
            yield Static(self._text(), classes="dialog-text")

    def action_leave(self, choice: str) -> None:
        self.dismiss(choice or None)

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)

    def _style(self, name: str) -> Style:
        return named_style(self.app, name)

    def _text(self) -> Text:
        text, marks = Text(no_wrap=True), [run_mark(at) for at in range(len(self._rows))]
        for at, (mark, row) in enumerate(zip(marks, self._rows, strict=True)):
            words, tone = state_words(row)
            colour = self._style(RUN_COLOURS[at % len(RUN_COLOURS)])
            text.append(f"{mark} {one_line(row.run)}", colour).append("  ")
            text.append(words, self._style(tone))
            text.append(f"  {one_line(Notes(row.note, row.tags).line)}\n", self._style("dim"))
        settings = [[key, *values] for key, values in differing(self._curves).items()]
        self._add(text, "Settings that differ", marks, settings or [["none", *[""] * len(marks)]])
        _, *figures = zip(*final_table(self._curves), strict=True)
        skipped = ("mode", SEED)
        results = [[title, *values] for title, *values in figures if title not in skipped]
        self._add(text, "Results", marks, results, best="reward")
        return text

    def _add(
        self,
        text: Text,
        heading: str,
        marks: Sequence[str],
        rows: Sequence[Sequence[str]],
        best: str = "",
    ) -> None:
        shown = [[one_line(cell)[:LONGEST_VALUE] for cell in row[1:]] for row in rows]
        widths = [max(map(len, cells)) for cells in zip(marks, *shown, strict=True)]
        label = max(len(heading), *(len(row[0]) for row in rows)) + GAP
        text.append(f"\n{heading:<{label}}", self._style("title"))
        for at, (mark, width) in enumerate(zip(marks, widths, strict=True)):
            colour = self._style(RUN_COLOURS[at % len(RUN_COLOURS)])
            text.append(f"{mark:>{width}}", colour).append(" " * GAP)
        text.append("\n")
        for row, cells in zip(rows, shown, strict=True):
            text.append(f"{one_line(row[0]):<{label}}", self._style("dim"))
            for cell, width in zip(cells, widths, strict=True):
                text.append(f"{cell:>{width}}").append(" " * GAP)
            if best and row[0].startswith(best) and (mark := _best(marks, cells)):
                text.append(f"best: {mark}", self._style("good"))
            text.append("\n")


def _best(marks: Sequence[str], cells: Sequence[str]) -> str:
    # The mark of the highest figure, if one stands alone.
    found = []
    for mark, cell in zip(marks, cells, strict=True):
        try:
            found.append((float(cell.replace(",", "")), mark))
        except ValueError:
            continue
    top = max(found, default=None)
    return top[1] if top and sum(value == top[0] for value, _ in found) == 1 else ""
