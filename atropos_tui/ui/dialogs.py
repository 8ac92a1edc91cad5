"""Dialogs: a command with its blast radius, leaving, and the help that is made from the bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, OptionList, Static
from textual.widgets.option_list import Option

from atropos_common.control import Recipe
from atropos_tui.monitor.format import one_line, plain_text
from atropos_tui.monitor.run_files import OtherRun

Leave = Literal["detach", "stop"]


class _Dialog(ModalScreen[object]):
    """Shared behaviour: arrows move between buttons, Esc closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel"),
        Binding("left,up", "app.focus_previous", "Previous", show=False),
        Binding("right,down", "app.focus_next", "Next", show=False),
    ]

    def action_cancel(self) -> None:
        self.dismiss(None)


class ConfirmDialog(_Dialog):
    """Asks before a command that stops something. Dismissed with True, or None.

    Enter does a restart of one component; what ends more, or for longer, needs `y` or a step to its button.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "confirm", "Yes", show=False)]

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

    def action_confirm(self) -> None:
        self.dismiss(True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(True if event.button.id == "yes" else None)


class QuitDialog(_Dialog):
    """Detach or stop. Dismissed with the choice, or None to stay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "leave('detach')", "Detach"),
        Binding("s", "leave('stop')", "Stop"),
    ]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="quit") as box:
            box.border_title = "Leave the cockpit?"
            yield Static(
                Text(
                    "Detach leaves the run going: `atropos-tui attach` brings it back.\n"
                    "Stop ends it: the trainer saves, every process is stopped in order."
                ),
                classes="dialog-text",
            )
            with Horizontal(classes="dialog-buttons"):
                yield Button("Detach  d", variant="primary", id="detach")
                yield Button("Stop the run  s", variant="error", id="stop")
                yield Button("Stay  esc", id="stay")

    def on_mount(self) -> None:
        self.query_one("#detach").focus()

    def action_leave(self, choice: str) -> None:
        self.dismiss(choice)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(event.button.id if event.button.id in ("detach", "stop") else None)


class HelpDialog(_Dialog):
    """Every key that works now, from the bindings themselves."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark,q,enter", "cancel", "Close", show=False)]

    def __init__(self, keys: list[tuple[str, str]]) -> None:
        super().__init__()
        self.keys = keys

    def compose(self) -> ComposeResult:
        width = max((len(key) for key, _ in self.keys), default=0)
        text = Text("\n").join(Text.assemble((f"{key:>{width}}", "bold"), "   ", what) for key, what in self.keys)
        with VerticalScroll(classes="dialog", id="help") as box:
            box.border_title = "Keys"
            box.border_subtitle = "esc closes"
            yield Static(text, classes="dialog-text")


class TextDialog(_Dialog):
    """Something to read."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,q", "cancel", "Close", show=False)]

    def __init__(self, heading: str, text: Text) -> None:
        super().__init__()
        self._heading = heading
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="text") as box:
            box.border_title = Content(self._heading)
            box.border_subtitle = "esc closes"
            yield Static(self._text, classes="dialog-text")


class ChooseRunDialog(_Dialog):
    """Which run to compare with. Dismissed with its directory, with "" for none any more, or None to leave it."""

    def __init__(self, runs: Sequence[OtherRun]) -> None:
        super().__init__()
        self._runs = runs

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="choose") as box:
            box.border_title = "Compare with"
            box.border_subtitle = "enter chooses, esc leaves"
            if not self._runs:
                yield Static("There is no other run in this folder.", classes="dialog-text")
            options = [Option(run_line(run), id=str(at)) for at, run in enumerate(self._runs)]
            yield OptionList(*options, Option("no comparison", id="none"))

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        wanted = event.option.id
        self.dismiss("" if wanted in (None, "none") else self._runs[int(wanted)].root)


def run_line(run: OtherRun) -> Text:
    """A run in one line."""
    end = (
        "running or cut off"
        if run.exit_code is None
        else "done"
        if run.exit_code == 0
        else f"ended with {run.exit_code}"
    )
    about = "  ".join(one_line(word) for word in (run.mode, end) if word)
    return Text.assemble((one_line(run.name), "bold"), f"  {about}", no_wrap=True)


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
        text.append("\n" + plain_text(recipe.note) + "\n")
    text.rstrip()
    return text
