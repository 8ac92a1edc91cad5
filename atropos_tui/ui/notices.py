"""One line, when something about the files has to be said: bad lines, a newer writer, history that is still read."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from atropos_tui.ui.view import View
from trainer_core.contracts.records import SCHEMA_VERSION


class Notices(Static):
    """Hidden while there is nothing to say."""

    def __init__(self) -> None:
        super().__init__(id="notices")
        self._words: list[str] = []

    def show(self, view: View) -> None:
        words = notices(view)
        if words != self._words:
            self._words, self.display = words, bool(words)
            self.update(Text("▲ " + " · ".join(words), no_wrap=True, overflow="ellipsis"))


def notices(view: View) -> list[str]:
    """What a reader of this screen has to know of what it was drawn from."""
    state = view.state
    words = [] if view.loaded else [f"reading the run's history: step {state.step}"]
    if view.bad_lines:
        words.append(f"bad lines: {view.bad_lines} in the run's streams are no records and were skipped")
    if state.newest_version > SCHEMA_VERSION:
        words.append(
            f"a newer version wrote this run (schema {state.newest_version}, known here {SCHEMA_VERSION}): "
            "what this one does not know is not shown"
        )
    elif state.unknown:
        words.append(f"{state.unknown} records are of a kind this version does not know")
    return words
