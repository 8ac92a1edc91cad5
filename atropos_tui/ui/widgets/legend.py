"""Marks of curves, legend lines, and the panel that names the compared runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from rich.style import Style
from rich.text import Text

from atropos_tui.monitor.format import counted, one_line
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
    return _joined(entries, [_cut(entry.texts[-1], room) for entry in entries], " ")


def _joined(entries: Sequence[Entry], words: Sequence[str], gap: str) -> Text:
    line = Text(no_wrap=True, end="")
    for entry, text in zip(entries, words, strict=True):
        line.append(gap if line else "").append(f"{entry.mark} {text}".rstrip(), entry.style)
    return line


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(0, room - 1)]}…"


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

    def show(self, view: View) -> None:
        self.display = bool(view.runs)
        super().show(view)

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        return [self._line(view, width)] if view.runs else []

    def _line(self, view: View, width: int) -> Text:
        # Without colours every curve needs a letter.
        marks = line_marks(len(view.settings), 1 if self.app.no_color else len(RUN_COLOURS))
        entries = [
            Entry(mark, self.style(RUN_COLOURS[at % len(RUN_COLOURS)]), run_texts(setting))
            for at, (setting, mark) in enumerate(zip(view.settings, marks, strict=True))
        ]
        line = legend_line(entries, width)
        # The note is the first part to go.
        note = f"{GAP}values: mean of the last {counted(last_steps(view.runs), 'step')}"
        return line.append(note, self.style("dim")) if line.cell_len + len(note) <= width else line


def run_texts(setting: Setting) -> tuple[str, ...]:
    """Return names and difference of a setting's runs, then the difference alone."""
    label, names = one_line(setting.label), ", ".join(one_line(run.name) for run in setting.runs)
    return (label,) if not label or label == names else (f"{names}: {label}", label)
