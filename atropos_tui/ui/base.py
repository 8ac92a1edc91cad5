"""Base class of the screens: themes, plain text, the user's keys, refusals, errors in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Generic

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App, ReturnType
from textual.color import Color
from textual.filter import LineFilter
from textual.notifications import SeverityLevel

from atropos_tui.monitor.format import one_line
from atropos_tui.streams import harmless
from atropos_tui.ui import user_files
from atropos_tui.ui.dialogs import OwnCommandDialog
from atropos_tui.ui.keymap import KeyFile, kinds_with_keys, read_key_file
from atropos_tui.ui.own_commands import (
    OwnCommand,
    filled,
    line_of,
    run_in_background,
    run_in_terminal,
)
from atropos_tui.ui.theme import LIGHT, THEME, theme_colours

FILE_S = 12.0  # seconds to read the path of a new file


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
    """App with the themes of this program, and the keys and commands of the user."""

    always: ClassVar[tuple[str, ...]] = ()
    """Actions whose keys the footer shows whatever has the focus."""

    def __init__(self) -> None:
        super().__init__()
        self._only_plain_text = OnlyPlainText()
        self.key_file = KeyFile()
        self.read_only = False
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

    def report_file(self, what: str, path: Path) -> None:
        """Show where a file of the user was written."""
        self.notify(str(path), title=f"{what} written", timeout=FILE_S, markup=False)

    # The user's keys and commands.

    def use_key_file(self, path: Path) -> None:
        """Apply the user's keys, bind the own commands, and report wrong entries."""
        self.key_file = read_key_file(path, kinds_with_keys())
        self.set_keymap(dict(self.key_file.keys))
        for command in self.key_file.commands:
            self.bind(command.key, f"own({command.name!r})", description=command.description)
        if self.key_file.problems:
            words = "\n".join(one_line(problem) for problem in self.key_file.problems)
            heading = f"wrong entries in {path}"
            self.notify(words, title=heading, severity="warning", timeout=20, markup=False)

    def selection(self) -> dict[str, str | None]:
        """Return the values of the placeholders of own commands; None without one."""
        raise NotImplementedError

    def action_own(self, name: str) -> None:
        command = next(one for one in self.key_file.commands if one.name == name)
        if self.read_only:
            self.refuse("this screen is read-only", "attach without --read-only to run commands")
            return
        try:
            argv = filled(command, self.selection())
        except ValueError as error:
            self.refuse(str(error), "select a component or step that has one", command.name)
            return
        self.run_worker(self._run_own(command, argv), group=f"own-{name}", exclusive=True)

    async def _run_own(self, command: OwnCommand, argv: list[str]) -> None:
        if command.confirm:
            question = OwnCommandDialog(command.description, line_of(argv))
            if not await self.push_screen_wait(question):
                return
        if not command.background:
            if problem := run_in_terminal(self, command, argv):
                self.refuse(problem, "", command.name)
            return
        try:
            status, output = await run_in_background(argv)
        except OSError as error:
            self.refuse(f"{argv[0]} cannot be started: {error.strerror}", "", command.name)
            return
        heading = f"{command.name}: " + (f"exit status {status}" if status else "done")
        severity: SeverityLevel = "error" if status else "information"
        words = output or "no output"
        self.notify(words, title=heading, severity=severity, timeout=10, markup=False)
