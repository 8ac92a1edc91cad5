"""The dialog for the note and the tags of a run."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.run.notes import Notes, notes_of


class NotesDialog(ModalScreen[Notes | None]):
    """Returns the new notes; None changes nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel"),
        Binding("down", "app.focus_next", "Next", show=False),
        Binding("up", "app.focus_previous", "Previous", show=False),
    ]

    def __init__(self, run: str, notes: Notes) -> None:
        super().__init__()
        self._run, self._notes = run, notes

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="notes") as box:
            box.border_title = Content(f"Note of {one_line(self._run)}")
            box.border_subtitle = "enter save · tab next · esc cancel"
            yield Label("Note")
            yield Input(self._notes.text, id="note-text", compact=True)
            yield Label("Tags, with spaces between them")
            yield Input(" ".join(self._notes.tags), id="note-tags", compact=True)
            yield Label("", id="note-problem", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        text, tags = self.query_one("#note-text", Input), self.query_one("#note-tags", Input)
        try:
            self.dismiss(notes_of(text.value, tags.value.split()))
        except ValueError as error:
            self.query_one("#note-problem", Label).update(str(error))
