"""The line in which a search or a filter is typed: what is typed takes effect at once; Enter keeps it, Esc drops it."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.widgets import Input, Label

from atropos_tui.monitor.patterns import Pattern, PatternError, compiled

Apply = Callable[[Pattern | None], str]
"""Takes what is looked for, or None; says in words how much matches."""


class SearchBar(Horizontal):
    """Hidden while nothing is typed."""

    BINDINGS = [Binding("escape", "drop", "Drop the search", show=False)]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(id="search")
        self._apply: Apply | None = None
        self._done: Callable[[], object] = lambda: None

    def compose(self) -> ComposeResult:
        yield Label("/", id="search-what")
        yield Input(id="search-text", placeholder="a regular expression; capitals make it case-sensitive")
        yield Label("", id="search-found", markup=False)

    def ask(self, what: str, apply: Apply, done: Callable[[], object]) -> None:
        """Open the line.

        Args:
            apply: called at every change.
            done: called when the line closes; gives the focus back.
        """
        self._apply, self._done = apply, done
        self.query_one("#search-what", Label).update(what)
        self.query_one("#search-found", Label).update("")
        field = self.query_one(Input)
        field.value = ""
        self.display = True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._apply is not None and self.display:
            self.query_one("#search-found", Label).update(self._applied(self._apply, event.value))

    @staticmethod
    def _applied(apply: Apply, text: str) -> str:
        """Look for `text`; the words that are shown beside it: what matches, or why it is no pattern."""
        try:
            result = apply(compiled(text) if text else None)
        except PatternError as error:
            apply(None)
            return str(error)
        return result if text else ""

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._close()

    def action_drop(self) -> None:
        if self._apply is not None:
            self._apply(None)
        self._close()

    def _close(self) -> None:
        self._apply, self.display = None, False
        self._done()
