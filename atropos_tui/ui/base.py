"""Base class of the screens: themes, plain text, refusals, and errors in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App, ReturnType
from textual.color import Color
from textual.filter import LineFilter

from atropos_tui.monitor.format import one_line
from atropos_tui.streams import harmless
from atropos_tui.ui import user_files
from atropos_tui.ui.keymap import KeyFile
from atropos_tui.ui.theme import LIGHT, THEME, theme_colours


class OnlyPlainText(LineFilter):
    """Removes control characters from every line that a widget draws."""

    # Rollouts and logs are untrusted text: escape sequences must not reach the terminal. A line
    # filter covers every widget.
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(text.isprintable() for text, _, _ in segments):
            return segments
        return [segment if segment.control else _plain_segment(segment) for segment in segments]


def _plain_segment(segment: Segment) -> Segment:
    # Pad to the old width, so that the columns of the line stay aligned.
    text = harmless(segment.text).replace("\n", " ").replace("\t", " ")
    return Segment(text + " " * (cell_len(segment.text) - cell_len(text)), segment.style)


class BaseApp(App[ReturnType], Generic[ReturnType]):
    """App with the themes of this program."""

    def __init__(self) -> None:
        super().__init__()
        self._only_plain_text = OnlyPlainText()
        self.key_file = KeyFile()
        # The themes come last: `watch_theme` calls `keep_theme` with a theme that the user chooses.
        self.keep_theme: Callable[[str], object] = lambda name: None
        for theme in (THEME, LIGHT):
            self.register_theme(theme)
        self.theme = THEME.name

    def watch_theme(self, name: str) -> None:
        if self.is_running:
            self.keep_theme(name)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return theme_colours(self.current_theme)

    def _fatal_error(self) -> None:
        # Textual's method prints a traceback with all local variables. For a long run that takes
        # minutes, in which no key works.
        user_files.record_error(self._exception or RuntimeError("unknown"), "the screen")
        self._close_messages_no_wait()

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._only_plain_text]

    def refuse(self, error: str, fix: str, heading: str = "refused") -> None:
        """Show why nothing is done."""
        words = one_line(error) + (f"\n{one_line(fix)}" if fix else "")
        # A held key would otherwise fill the screen with the same toast.
        if all((note.title, note.message) != (heading, words) for note in self._notifications):
            self.notify(words, title=heading, severity="warning", timeout=8, markup=False)
