"""Dialogs: a command with its blast radius, leaving, and the help that is made from the bindings."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, SelectionList, Static
from textual.widgets.selection_list import Selection

from atropos_common.control import Recipe
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.run_list import RunRow, table


class _Dialog(ModalScreen[object]):
    """Shared behaviour: arrows move between buttons, Esc closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Cancel"),
        Binding("left,up", "app.focus_previous", "Previous", show=False),
        Binding("right,down", "app.focus_next", "Next", show=False),
    ]


class ConfirmDialog(_Dialog):
    """Asks before a command that stops something. Dismissed with True, or None.

    Enter does a restart of one component; what ends more, or for longer, needs `y` or a step to its button.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "dismiss(True)", "Yes", show=False)]

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
                yield Button(f"{verb}  y", variant="error" if recipe.action == "kill" else "primary", id="yes")
                yield Button("Cancel  esc", id="no")

    def on_mount(self) -> None:
        is_mild = self.recipe.action == "restart" and self.recipe.component is not None
        self.query_one("#yes" if is_mild else "#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(True if event.button.id == "yes" else None)


class QuitDialog(_Dialog):
    """Detach or stop. Dismissed with the choice, or None to stay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "dismiss('detach')", "Detach"),
        Binding("s", "dismiss('stop')", "Stop"),
    ]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="quit") as box:
            box.border_title = "Quit?"
            yield Static(
                Text(
                    "Detach: the run keeps going; `atropos-tui attach` opens it again.\n"
                    "Stop: the trainer saves, then every process is stopped in order."
                ),
                classes="dialog-text",
            )
            with Horizontal(classes="dialog-buttons"):
                yield Button("Detach  d", variant="primary", id="detach")
                yield Button("Stop the run  s", variant="error", id="stop")
                yield Button("Stay  esc", id="stay")

    def on_mount(self) -> None:
        self.query_one("#detach").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(event.button.id if event.button.id in ("detach", "stop") else None)


class TextDialog(_Dialog):
    """Something to read, and to copy."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,q", "dismiss", "Close", show=False),
        Binding("y", "copy", "Copy", show=False),
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
    """Every key that works now, from the bindings themselves."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "dismiss", "Close", show=False)]

    def __init__(self, sections: Mapping[str, Mapping[str, str]]) -> None:
        """Args: `sections`: by heading, what each key does."""
        width = max((len(key) for keys in sections.values() for key in keys), default=0)
        text = Text()
        for heading, keys in sections.items():
            text.append("\n\n" if text else "").append(heading, "bold underline")
            for key, words in keys.items():
                text.append(f"\n{key:>{width}}", "bold").append(f"   {words}")
        super().__init__("Keys", text)


BOX = 4
"""Columns of what says whether a line is marked."""
AROUND = 10
"""Columns beside the lines of a dialog that is as wide as the terminal allows."""


class _ChooseDialog(_Dialog):
    """Some of many. Space marks; Enter takes what is marked, or, of nothing marked, the line under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "take", "Take", priority=True)]
    HEADING: ClassVar[str]
    NOTHING: ClassVar[str]
    """What stands there where there is nothing to choose from."""

    def __init__(self, lines: Sequence[str], values: Sequence[object], chosen: Container[object], heads: str) -> None:
        """Args: `values`: what each line stands for, to be dismissed with; `heads`: above the lines."""
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
            options = [
                Selection(Text(line, no_wrap=True), at, at in self._marked) for at, line in enumerate(self._lines)
            ]
            yield SelectionList[int](*options)

    def on_mount(self) -> None:
        self.query_one(SelectionList).focus()

    def action_take(self) -> None:
        """In the order they were marked."""
        options = self.query_one(SelectionList)
        taken = options.selected
        if not taken and not self._marked and options.highlighted is not None:
            taken = [options.highlighted]
        self.dismiss([self._values[at] for at in taken])


class ChooseRunsDialog(_ChooseDialog):
    """Which runs to compare with, on the same axes. Dismissed with their directories; None leaves it as it is."""

    HEADING = "Compare with"
    NOTHING = "No other run with a trainer's records, beside this one or among those that this user has started."

    def __init__(self, runs: Sequence[RunRow], chosen: Container[Path], columns: int) -> None:
        """Args: `columns`: of the terminal."""
        heads, *lines = table(runs, time.time(), columns - AROUND - BOX)
        super().__init__(lines, [run.dir for run in runs], chosen, heads)


class ChooseCurvesDialog(_ChooseDialog):
    """Which curves to draw besides those that always are. Dismissed with their names; None leaves it as it is."""

    HEADING = "Curves in Training"
    NOTHING = "The run has no numbers yet."

    def __init__(self, names: Sequence[str], chosen: Container[str]) -> None:
        super().__init__([*map(one_line, names)], names, chosen, "")


def radius_text(recipe: Recipe) -> Text:
    """Who stops and who starts, in order, and why."""
    text = Text()
    if recipe.stop:
        text.append("stops   ", "dim").append(" → ".join(recipe.stop), "bold").append("\n")
    if recipe.start:
        text.append("starts  ", "dim").append(" → ".join(recipe.start), "bold").append("\n")
    if recipe.action == "kill":
        text.append("\nKILL gives it no time to save or clean up. The restart policy decides what follows.\n")
    if recipe.note:
        text.append("\n" + recipe.note + "\n")
    text.rstrip()
    return text
