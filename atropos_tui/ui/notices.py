"""Lines under the header, when something has to be said: a diagnosis that holds, and what the files themselves lack."""

from __future__ import annotations

from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from atropos_common.records import SCHEMA_VERSION, DiagnosisRecord
from atropos_tui.monitor.plain import one_line
from atropos_tui.monitor.trouble import open_diagnoses
from atropos_tui.ui.view import View


class Notices(Widget):
    """Hidden while there is nothing to say."""

    DEFAULT_CSS = "Notices { height: auto; padding: 0 1; color: $text-warning; display: none; }"

    lines: reactive[tuple[tuple[str, str], ...]] = reactive((), layout=True)
    """Words, and an end that is never cut; top to bottom."""

    def __init__(self) -> None:
        super().__init__(id="notices")
        self.diagnosis: DiagnosisRecord | None = None
        """The newest that holds."""

    def show(self, view: View) -> None:
        found = standing(view)
        self.diagnosis = found[0] if found else None
        lines = [diagnosed(found)] if found else []
        if words := notices(view):
            lines.append((" · ".join(words), ""))
        self.lines, self.display = tuple(lines), bool(lines)

    def render(self) -> RenderResult:
        return Text("\n").join(self._line(words, end) for words, end in self.lines)

    def _line(self, words: str, end: str) -> Text:
        line = Text(f"▲ {words}", no_wrap=True)
        line.truncate(max(0, self.content_size.width - len(end)), overflow="ellipsis")
        return line.append(end)


def standing(view: View) -> list[DiagnosisRecord]:
    """Diagnoses that hold, newest first; none of a run that came to a good end."""
    if view.status is None or view.status.exit_code == 0 or not view.loaded:
        return []
    return open_diagnoses(view.state, view.status)


def diagnosed(found: list[DiagnosisRecord]) -> tuple[str, str]:
    """The newest of `found` in one line, and where the others and the way out are."""
    more = f", {len(found) - 1} more" if len(found) > 1 else ""
    return f"{one_line(found[0].component or '')}: {one_line(found[0].title)}", f"  (8 ⏎ fix{more})"


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
