"""The lines below the list: the sentence, note and differences of the run under the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from rich.text import Text
from textual.app import RenderResult

from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.overlay import differing_settings, settings_of
from atropos_tui.monitor.run.notes import Notes
from atropos_tui.monitor.run_list import RunRow
from atropos_tui.monitor.verdict import Verdict
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Guarded

LABEL = 12  # cells of a label
SENTENCE_LINES = 3


class RunDetails(Guarded):
    """One run in a few lines."""

    DEFAULT_CLASSES = "panel"
    SCOPED_CSS = False
    DEFAULT_CSS = """
    RunDetails { height: 9; }
    .-short RunDetails { height: 6; }
    """

    def __init__(self) -> None:
        super().__init__(id="run-details")
        self._row: RunRow | None = None
        self._said: Verdict | None = None
        self._differing: Sequence[tuple[str, str, str]] = ()
        self._other = ""
        self._own: Sequence[tuple[str, str, str]] = ()
        self._profile = ""

    def show_run(
        self,
        row: RunRow | None,
        said: Verdict | None,
        other: str = "",
        differing: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        """Show a run; `differing`: setting, value, and value of the run `other`."""
        self._row, self._said, self._other, self._differing = row, said, other, differing
        self.border_title = title(one_line(row.run) if row else "No run")
        self.refresh()

    def show_settings(self, profile: str, own: Sequence[tuple[str, str, str]]) -> None:
        """Show the settings of the run that differ from `profile`, with both values."""
        self._profile, self._own = profile, own
        self.refresh()

    def render(self) -> RenderResult:
        width, height = self.content_size
        lines = list(self._lines(width))[:height]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", end="").join(lines)

    def _lines(self, width: int) -> list[Text]:
        row = self._row
        if row is None:
            return []
        words = self._said.line if self._said else row.reason or "…"
        tone = self.style(self._said.tone if self._said else "dim")
        wrapped = wrap(one_line(words), max(width, 10), max_lines=SENTENCE_LINES, placeholder=" …")
        lines = [Text(line, tone, no_wrap=True) for line in wrapped]
        note = Notes(row.note, row.tags).line or "none; n writes one"
        lines.append(self._labelled("note", one_line(note), "accent" if row.note else "dim"))
        if self._profile and not self._other:
            base = self._profile
            found = [f"{key} {one or '–'} ({base}: {two or '–'})" for key, one, two in self._own]
            says = ", ".join(found) or f"those of {base}"
            first, *more = wrap(
                one_line(says), max(width - LABEL, 10), max_lines=2, placeholder=" …"
            )
            lines.append(self._labelled("settings", first, "plain"))
            lines += [self._labelled("", line, "plain") for line in more]
        if self._other:
            found = [f"{key} {one} (there {two})" for key, one, two in self._differing]
            says = ", ".join(found) or "no setting"
            lines.append(self._labelled("differs in", says, "plain"))
            lines.append(self._labelled("from", self._other, "dim"))
        lines.append(self._labelled("folder", str(row.dir), "dim"))
        return lines

    def _labelled(self, label: str, words: str, style: str) -> Text:
        line = Text(f"{label:<{LABEL}}", self.style("dim"), no_wrap=True, end="")
        return line.append(one_line(words), self.style(style))


def changes(row: RunRow) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the name of a run's profile, and the settings that differ from it."""
    from atropos_common.system.run_dir import RunDir
    from atropos_tui.monitor.settings import settings_table

    table = settings_table(RunDir(row.dir))
    return table.profile, [(one.key, one.value, one.profile) for one in table.rows if one.differs]


def differences(row: RunRow, other: RunRow) -> list[tuple[str, str, str]]:
    """Return the settings in which two runs differ, the seed last."""
    from atropos_common.system.run_dir import RunDir

    found = differing_settings([settings_of(RunDir(each.dir)) for each in (row, other)])
    return [(key, here, there) for key, (here, there) in found.items()]
