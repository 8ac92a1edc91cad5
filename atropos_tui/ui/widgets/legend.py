"""Marks of curves, legend lines, and the panel that names the compared runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from rich.style import Style
from rich.text import Text
from textual import events

from atropos_tui.monitor.format import counted, cut, one_line
from atropos_tui.monitor.overlay import Setting, last_steps
from atropos_tui.ui.widgets.panel import TextPanel, View

# Runs on the same axes, this run first.
RUN_COLOURS = ("primary", "accent", "warning", "success", "secondary")
LINE, POINTS = "━", "◆●■✚"
GAP = "   "


def line_marks(count: int, colours: int) -> list[str]:
    """Return the marks of lines: letters where colours do not tell them apart."""
    if count <= colours:
        return [LINE] * count
    return [ascii_lowercase[at % len(ascii_lowercase)] for at in range(count)]


def run_mark(at: int) -> str:
    """Return the mark of a compared run's curves: the number of its key, then letters."""
    marks = "123456789" + ascii_lowercase
    return marks[at % len(marks)]


@dataclass(frozen=True)
class Entry:
    """One curve in a legend, with names from long to short."""

    mark: str
    style: Style
    texts: tuple[str, ...]


def legend_line(entries: Sequence[Entry], width: int) -> Text:
    """Return one line with the longest names that fit."""
    # Shorten all names together, so that the entries stay comparable.
    for level in range(max((len(entry.texts) for entry in entries), default=0)):
        words = [entry.texts[min(level, len(entry.texts) - 1)] for entry in entries]
        line = _joined(entries, words, GAP)
        if line.cell_len <= width:
            return line
    room = width // max(1, len(entries)) - 3  # the mark, and two spaces
    return _joined(entries, [cut(entry.texts[-1], room) for entry in entries], " ")


def _joined(entries: Sequence[Entry], words: Sequence[str], gap: str) -> Text:
    line = Text(no_wrap=True, end="")
    for entry, text in zip(entries, words, strict=True):
        line.append(gap if line else "").append(f"{entry.mark} {text}".rstrip(), entry.style)
    return line


class RunsLegend(TextPanel):
    """One line for all charts: the compared runs and how they differ."""

    DEFAULT_CLASSES = ""
    DEFAULT_CSS = """
    RunsLegend {
        display: none;
        height: 1;
        padding: 0 1;
    }
    """
    hides_itself = True

    def __init__(self) -> None:
        super().__init__(id="runs-legend")
        # Cell behind each entry, as last drawn.
        self._ends: list[int] = []

    def show(self, view: View) -> None:
        self.display = bool(view.runs)
        super().show(view)

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        return [self._line(view, width)] if view.runs else []

    def _line(self, view: View, width: int) -> Text:
        line = legend_line([self._entry(view, at) for at in range(len(view.settings))], width)
        self._ends = [span.end for span in line.spans]
        steps = counted(last_steps(view.runs), "step")
        # The notes are the first part to go.
        for note in (f"f1 … show or hide   values: mean of the last {steps}", "f1 … show or hide"):
            if line.cell_len + len(GAP + note) <= width:
                return line.append(GAP + note, self.style("dim"))
        return line

    def _entry(self, view: View, at: int) -> Entry:
        texts, colour = run_texts(view.settings[at]), RUN_COLOURS[at % len(RUN_COLOURS)]
        if at not in view.lens.hidden_runs:
            return Entry(run_mark(at), self.style(colour), texts)
        # In brackets, because colours may be missing.
        return Entry(run_mark(at), self.style("dim"), tuple(f"({text})" for text in texts))

    async def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        at = bisect_right(self._ends, place.x) if place else len(self._ends)
        if at < len(self._ends):
            await self.app.run_action(f"toggle_run({at})")


def run_texts(setting: Setting) -> tuple[str, ...]:
    """Return names and difference of a setting's runs, then the difference alone."""
    label, names = one_line(setting.label), ", ".join(one_line(run.name) for run in setting.runs)
    return (label,) if not label or label == names else (f"{names}: {label}", label)
