"""Dialogs: confirm a command, quit, choose runs or curves, read a text, help."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, SelectionList, Static
from textual.widgets.button import ButtonVariant
from textual.widgets.selection_list import Selection

from atropos_common.protocol.control import Recipe
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.run_list import RunRow, table
from atropos_tui.ui.widgets.panel import hidden

HELP_WIDTH = 68  # cells of text in a dialog


class _Dialog(ModalScreen[object]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Cancel"),
        hidden("left,up", "app.focus_previous", "Previous"),
        hidden("right,down", "app.focus_next", "Next"),
    ]


class ConfirmDialog(_Dialog):
    """Confirmation of a command. Returns True or None."""

    BINDINGS: ClassVar[list[BindingType]] = [hidden("y", "dismiss(True)", "Yes")]

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def compose(self) -> ComposeResult:
        recipe = self.recipe
        verb = recipe.action.capitalize()
        what = recipe.component or "the whole stack"
        with Vertical(classes="dialog", id="confirm") as box:
            box.border_title = f"{verb} {what}?"
            yield Static(radius_text(recipe), classes="dialog-text")
            with Horizontal(classes="dialog-buttons"):
                variant: ButtonVariant = "error" if recipe.action == "kill" else "primary"
                yield Button(f"{verb}  y", variant=variant, id="yes")
                yield Button("Cancel  esc", id="no")

    def on_mount(self) -> None:
        # The focus decides what Enter does, so anything but a mild command starts on Cancel.
        is_mild = self.recipe.action == "restart" and self.recipe.component is not None
        self.query_one("#yes" if is_mild else "#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        # None, as for Esc.
        self.dismiss(True if event.button.id == "yes" else None)


class OwnCommandDialog(_Dialog):
    """Confirmation of the user's own command. Returns True or None."""

    BINDINGS: ClassVar[list[BindingType]] = [hidden("y,enter", "dismiss(True)", "Yes")]

    def __init__(self, description: str, line: str) -> None:
        super().__init__()
        self._description, self._line = description, line

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="own-command") as box:
            box.border_title = Content(self._description)
            box.border_subtitle = "y run · esc cancel"
            yield Static(Text(self._line), classes="dialog-text")


class QuitDialog(_Dialog):
    """Returns `detach`, `stop`, or None to stay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "dismiss('detach')", "Detach"),
        Binding("s", "dismiss('stop')", "Stop"),
    ]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="quit") as box:
            box.border_title = "Quit?"
            words = (
                "Detach: the run keeps going; `atropos-tui attach` opens it again.\n"
                "Stop: the trainer saves, then every process is stopped in order."
            )
            yield Static(Text(words), classes="dialog-text")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Detach  d", variant="primary", id="detach")
                yield Button("Stop the run  s", variant="error", id="stop")
                yield Button("Stay  esc", id="stay")

    def on_mount(self) -> None:
        # The choice that never ends the run.
        self.query_one("#detach").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(event.button.id if event.button.id in ("detach", "stop") else None)


class TextDialog(_Dialog):
    """Text to read and copy."""

    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("enter,q", "dismiss", "Close"),
        hidden("y", "copy", "Copy"),
    ]

    def __init__(self, heading: str, text: Text) -> None:
        super().__init__()
        self._heading = heading
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="text") as box:
            box.border_title = Content(self._heading)
            box.border_subtitle = "y copies, esc closes"
            yield Static(self._text, classes="dialog-text")

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._text.plain)
        self.app.notify("copied", timeout=2)


class HelpDialog(TextDialog):
    """Every key that works now, from the bindings; on a second page, marks and words."""

    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("question_mark", "dismiss", "Close"),
        hidden("w,tab", "turn", "Words"),
    ]

    def __init__(
        self,
        keys: Mapping[str, Mapping[str, str]],
        words: Mapping[str, Mapping[str, str]],
    ) -> None:
        super().__init__("Keys", explanation(keys))
        self._first, self._words = self._text, words
        self._shows_words = False

    def on_mount(self) -> None:
        self._name_pages()

    def action_turn(self) -> None:
        self._shows_words = not self._shows_words
        self._text = explanation(self._words) if self._shows_words else self._first
        self.query_one(".dialog-text", Static).update(self._text)
        self.query_one("#text", VerticalScroll).scroll_home(animate=False)
        self._name_pages()

    def _name_pages(self) -> None:
        heading, other = ("Keys", "words and marks")
        if self._shows_words:
            heading, other = ("Words and marks", "keys")
        box = self.query_one("#text", VerticalScroll)
        box.border_title = Content(heading)
        box.border_subtitle = f"w {other} · y copies, esc closes"


def explanation(sections: Mapping[str, Mapping[str, str]]) -> Text:
    """Return lines of terms with their meaning, by section, in two columns."""
    width = max((cell_len(term) for terms in sections.values() for term in terms), default=0)
    text = Text()
    for heading, terms in sections.items():
        text.append("\n\n" if text else "").append(heading, "bold underline")
        for term, words in terms.items():
            lines = wrap(words, HELP_WIDTH - width - 3) or [""]
            space = " " * (width - cell_len(term))
            text.append(f"\n{space}{term}", "bold").append(f"   {lines[0]}")
            for line in lines[1:]:
                text.append(f"\n{' ' * (width + 3)}{line}")
    return text


BOX = 4  # cells of the check box before a line
AROUND = 10  # cells of frame and padding beside the lines


class _ChooseDialog(_Dialog):
    """Space marks; Enter returns the marked values, or the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "take", "Take", priority=True)]
    HEADING: ClassVar[str]
    NOTHING: ClassVar[str]  # text of an empty list

    def __init__(
        self, lines: Sequence[str], values: Sequence[object], chosen: Container[object], heads: str
    ) -> None:
        super().__init__()
        self._lines, self._values, self._heads = lines, values, heads
        self._marked = {at for at, value in enumerate(values) if value in chosen}

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="choose") as box:
            box.border_title = self.HEADING
            box.border_subtitle = "space select · enter apply · esc cancel"
            if not self._lines:
                yield Static(self.NOTHING, classes="dialog-text")
            elif self._heads:
                yield Static(Text(" " * BOX + self._heads, no_wrap=True), classes="dialog-heads")
            # `Text`, because names of runs and curves must not be parsed as markup.
            lines = (Text(line, no_wrap=True) for line in self._lines)
            options = [Selection(line, at, at in self._marked) for at, line in enumerate(lines)]
            yield SelectionList[int](*options)

    def on_mount(self) -> None:
        self.query_one(SelectionList).focus()

    def action_take(self) -> None:
        options = self.query_one(SelectionList)
        taken = options.selected
        # Unmarking everything is an answer too: only a list that started empty falls back to the
        # cursor.
        if not taken and not self._marked and options.highlighted is not None:
            taken = [options.highlighted]
        self.dismiss([self._values[at] for at in taken])


class ChooseRunsDialog(_ChooseDialog):
    """Returns the directories of runs to compare with; None changes nothing."""

    HEADING = "Compare with"
    NOTHING = "No other run with training records was found, beside this one or among your own."

    def __init__(self, runs: Sequence[RunRow], chosen: Container[Path], columns: int) -> None:
        heads, *lines = table(runs, time.time(), columns - AROUND - BOX)
        super().__init__(lines, [run.dir for run in runs], chosen, heads)


class ChooseCurvesDialog(_ChooseDialog):
    """Returns the names of extra curves; None changes nothing."""

    HEADING = "Curves in Training"
    NOTHING = "The run has recorded no metrics yet."

    def __init__(self, names: Sequence[str], chosen: Container[str]) -> None:
        super().__init__([*map(one_line, names)], names, chosen, "")


def radius_text(recipe: Recipe) -> Text:
    """Return what stops and what starts, in order, with the reason."""
    text = Text()
    for label, names in (("stops   ", recipe.stop), ("starts  ", recipe.start)):
        if names:
            text.append(label, "dim").append(" → ".join(names), "bold").append("\n")
    if recipe.action == "kill":
        text.append("\nKill leaves no time to save or clean up. ")
        text.append("The restart policy decides what happens next.\n")
    if recipe.note:
        text.append("\n" + recipe.note + "\n")
    text.rstrip()
    return text
