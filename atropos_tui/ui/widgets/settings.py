"""The settings of the run, beside its profile and a compared run."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from rich.text import Text
from textual.binding import BindingType

from atropos_tui.monitor.format import counted, cut, one_line
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.monitor.settings import SettingRow, SettingsTable
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Listing, View, hidden

DIFFERS = "≠"
LONGEST_KEY = 44
NONE = "–"


class Settings(Listing[SettingRow]):
    """One line per setting; those that differ come first, with a mark."""

    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("v", "only", "Differing", "Settings: only those that differ, or all"),
        hidden("y", "copy", "Copy", "Settings: copy the setting as KEY=VALUE"),
    ]
    head = 1

    def __init__(self) -> None:
        super().__init__(id="settings")
        self.table = SettingsTable()
        self._pattern: Pattern | None = None
        self._only = False

    def show(self, view: View) -> None:
        """Do nothing: the settings come with `put_table`."""

    def key_of(self, item: SettingRow) -> Hashable:
        return item.key

    def put_table(self, table: SettingsTable) -> None:
        self.table = table
        self._fill()

    def _fill(self) -> None:
        rows = [row for row in self.table.rows if not self._only or self._differs(row)]
        if pattern := self._pattern:
            rows = [row for row in rows if pattern.search(f"{row.key} {row.value}")]
        self.put(rows)
        changed = sum(row.differs for row in self.table.rows)
        parts = [(counted(len(self.table.rows), "setting"), "")]
        if self.table.profile:
            parts.append((f"{DIFFERS} {changed} differ from {self.table.profile}", "warning"))
        if self.table.other:
            other = sum(row.differs_from_other for row in self.table.rows)
            parts.append((f"{other} from {one_line(self.table.other)}", "accent"))
        if self._only:
            parts.append(("only those", "quiet"))
        if self._pattern:
            parts.append((f"/{one_line(self._pattern.text)}", "accent"))
        self.set_title(title("Settings", *parts))

    @staticmethod
    def _differs(row: SettingRow) -> bool:
        return row.differs or row.differs_from_other

    # Keys.

    def search(self, pattern: Pattern | None) -> str:
        """Show only matching settings; return their number in words."""
        self._pattern = pattern
        self._fill()
        return counted(len(self.items), "setting")

    def accept(self) -> None:
        """Go to the first match."""
        self.cursor = 0

    def drop(self) -> bool:
        """Remove the search, else the restriction; False if there is neither."""
        if self._pattern is None and not self._only:
            return False
        self._pattern, self._only = None, self._only and self._pattern is not None
        self._fill()
        return True

    def action_only(self) -> None:
        self._only = not self._only
        self._fill()

    def action_copy(self) -> None:
        if row := self.current:
            self.app.copy_to_clipboard(f"{row.key}={row.value}")
            self.app.notify(f"copied {row.key}", timeout=2, markup=False)

    # Drawing.

    def _columns(self, width: int) -> tuple[int, int]:
        # Widths of the key, and of each value.
        longest = max((len(row.key) for row in self.table.rows), default=0)
        key = min(longest, LONGEST_KEY, width // 3)
        count = 1 + bool(self.table.profile) + bool(self.table.other)
        return key, max(6, (width - key - 6) // count - 2)

    def _line(self, key: str, cells: list[tuple[str, str]], width: int) -> Text:
        first, each = self._columns(width)
        line = Text(no_wrap=True, end="")
        line.append(f"{cut(key, first):<{first}}  ")
        for text, style in cells:
            cell = f"{cut(one_line(text), each):<{each}}  "
            line.append(cell, self.style(style) if style else None)
        return line

    def _cells(self, one: str, two: str, three: str) -> list[str]:
        found = [one, two if self.table.profile else "", three if self.table.other else ""]
        return [found[0], *(cell for cell in found[1:] if cell)]

    def head_line(self) -> Text:
        width = self.scrollable_content_region.width
        other = self.table.other and f"{DIFFERS} {one_line(self.table.other)}"
        cells = self._cells("THIS RUN", self.table.profile.upper(), other)
        line = self._line("SETTING", [(cell, "dim") for cell in cells], width - 2)
        line.stylize(self.style("dim"))
        return Text("  ", end="").append_text(line)

    def draw(self, item: SettingRow, width: int) -> Text:
        mark = DIFFERS if self._differs(item) else " "
        style = "warn" if item.differs else "plain"
        cells = [(item.value or NONE, style)]
        if self.table.profile:
            cells.append((item.profile or NONE, "dim"))
        if self.table.other:
            there = f"{DIFFERS} {item.other or NONE}" if item.differs_from_other else "same"
            cells.append((there, "accent" if item.differs_from_other else "dim"))
        line = self._line(one_line(item.key), cells, width - 2)
        return Text(f"{mark} ", self.style("warn"), end="").append_text(line)
