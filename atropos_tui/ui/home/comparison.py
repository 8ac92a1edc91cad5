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

from atropos_tui.monitor.format import cut, one_line
from atropos_tui.monitor.overlay import SEED, RunCurves, differing, final_table
from atropos_tui.monitor.run.notes import Notes
from atropos_tui.monitor.run_list import RunRow
from atropos_tui.ui.home.table import state_words
from atropos_tui.ui.theme import named_style
from atropos_tui.ui.widgets.legend import RUN_COLOURS, run_mark
from atropos_tui.ui.widgets.panel import hidden

GAP = 3
LONGEST_LABEL, LONGEST_VALUE = 32, 24
FRAME = 12  # cells of the frame and the gap around the table


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
        settings = settings or [["none", *[""] * len(marks)]]
        _, *figures = zip(*final_table(self._curves), strict=True)
        results = [list(row) for row in figures if row[0] not in ("mode", SEED)]
        tables = {"Settings that differ": settings, "Results": results}
        # Both tables have the same columns.
        lines = [[max(tables, key=len), *marks], *settings, *results]
        values = [max(map(len, column)) for column in zip(*map(_values, lines), strict=True)]
        # The names of the settings get the room that the values leave.
        room = self.app.size.width - FRAME - sum(GAP + width for width in values)
        label = min(max(len(one_line(line[0])) for line in lines), max(room, LONGEST_LABEL))
        widths = [label, *values]
        for heading, rows in tables.items():
            text.append("\n")
            self._add(text, [heading, *marks], widths, is_head=True)
            for line in rows:
                self._add(text, line, widths)
        return text

    def _add(
        self, text: Text, row: Sequence[str], widths: Sequence[int], *, is_head: bool = False
    ) -> None:
        label, cells = cut(one_line(row[0]), widths[0]), _values(row)
        text.append(f"{label:<{widths[0]}}", self._style("title" if is_head else "dim"))
        for at, (cell, width) in enumerate(zip(cells, widths[1:], strict=True)):
            style = RUN_COLOURS[at % len(RUN_COLOURS)] if is_head else "plain"
            text.append(" " * GAP).append(f"{cell:>{width}}", self._style(style))
        if label.startswith("reward") and (best := _best(cells)):
            text.append(" " * GAP).append(f"best: {best}", self._style("good"))
        text.append("\n")


def _values(row: Sequence[str]) -> list[str]:
    return [cut(one_line(value), LONGEST_VALUE) for value in row[1:]]


def _best(cells: Sequence[str]) -> str:
    # The mark of the highest figure, if one stands alone.
    found = []
    for at, cell in enumerate(cells):
        try:
            found.append((float(cell.replace(",", "")), run_mark(at)))
        except ValueError:
            continue
    top = max(found, default=None)
    return top[1] if top and sum(value == top[0] for value, _ in found) == 1 else ""
