"""Events panel: transitions, diagnoses, commands and checkpoints, newest first."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.binding import BindingType
from textual.message import Message

from atropos_common.protocol.records import DiagnosisRecord
from atropos_tui.monitor.format import clock, counted, one_line
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.monitor.run.state import Event, diagnosed, timeline
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Listing, View, hidden

NAME_CELLS = 12


class Events(Listing[Event]):
    """One line per event; Enter shows its evidence and fix."""

    BINDINGS: ClassVar[list[BindingType]] = [
        hidden(
            "enter", "choose", "Open", "Events: show evidence and fix of the event under the cursor"
        ),
        hidden("o", "go", "Log", "Events: show the component's log at that time"),
        hidden("y", "copy", "Copy", "Events: copy the event, with evidence and fix"),
    ]

    best = ("choose", "go", "app.search", "copy", "app.zoom")

    @dataclass(eq=False)
    class Asked(Message):
        component: str
        moment: float
        """Unix seconds."""

    def __init__(self) -> None:
        super().__init__(id="events")
        # Newest supervisor record and newest checkpoint that the list was built from. The initial
        # value matches no run.
        self._seen: tuple[int, int] = (-2, -1)
        self._all: list[Event] = []
        self._pattern: Pattern | None = None
        self._names = 0  # width of the component names

    def on_mount(self) -> None:
        self._retitle()

    def key_of(self, item: Event) -> Hashable:
        return item

    def show(self, view: View) -> None:
        # The timeline is built from all records, so rebuild it only for a new one.
        last = view.state.checkpoints[-1].step if view.state.checkpoints else -1
        seen = (view.state.supervisor_seq, last)
        if seen != self._seen:
            self._seen, self._all = seen, timeline(view.state)[::-1]
            self._filter()

    def action_go(self) -> None:
        if self.current and self.current.component:
            self.post_message(self.Asked(self.current.component, self.current.time))

    def action_copy(self) -> None:
        if event := self.current:
            head = f"{event.component} {event.mark} {event.text}"
            self.app.copy_to_clipboard(f"{head}\n{event.detail}".strip())
            self.app.notify("copied the event", timeout=2)

    def point(self, diagnosis: DiagnosisRecord) -> None:
        """Put the cursor on a diagnosis, unless the user has moved it."""
        wanted = diagnosed(diagnosis)
        if self.cursor == 0 and wanted in self.items:
            self.cursor = self.items.index(wanted)

    def go_to(self, time: float) -> None:
        """Put the cursor on the newest event at or before `time` (Unix seconds)."""
        earlier = (at for at, item in enumerate(self.items) if item.time <= time)
        self.cursor = next(earlier, len(self.items) - 1)

    def search(self, pattern: Pattern | None) -> str:
        """Show only matching events; return their number in words."""
        self._pattern = pattern
        self._filter()
        return counted(len(self.items), "event")

    def accept(self) -> None:
        """Go to the first match."""
        self.cursor = 0

    def drop(self) -> bool:
        """Remove the search; return False if there was none."""
        if self._pattern is None:
            return False
        self.search(None)
        return True

    def _filter(self) -> None:
        self._names = min(max((len(event.component) for event in self._all), default=0), NAME_CELLS)
        pattern = self._pattern
        self.put([event for event in self._all if pattern is None or pattern.search(_words(event))])
        self._retitle()

    def _retitle(self) -> None:
        note = str(len(self._all)) if self._all else "none yet"
        if self._pattern:
            note = f"{len(self.items)} of {len(self._all)}"
        search = f"/ {one_line(self._pattern.text)}" if self._pattern else ""
        self.set_title(title("Events", (note, "quiet"), (search, "accent")))

    def draw(self, item: Event, width: int) -> Text:
        quiet = self.style("dim")
        line = Text(f"{clock(item.time)} ", quiet, no_wrap=True, end="")
        line.append(f"{item.component:<{self._names}.{NAME_CELLS}} ", "bold")
        line.append(f"{item.mark:<12} ", self.style(item.tone))
        # Only warnings and errors stand out.
        return line.append(item.text, None if item.tone in ("warn", "bad") else quiet)


def _words(event: Event) -> str:
    return f"{event.component} {event.mark} {event.text} {event.detail}"
