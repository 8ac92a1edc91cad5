"""Components table: state, health, process, memory and latest message of each component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.coordinate import Coordinate
from textual.geometry import Region
from textual.message import Message
from textual.widgets import DataTable

from atropos_common.protocol.control import ComponentStatus, Phase, State
from atropos_tui.monitor.format import bytes_text, duration, one_line, percent, seconds_text
from atropos_tui.monitor.why import doing, open_diagnoses
from atropos_tui.ui.theme import named_style, state_text, title
from atropos_tui.ui.widgets.panel import Panel, View, hidden

_WIDE = 90  # width from which the table has columns for ports and GPU memory

Column = tuple[str, int, bool]
# Title, width in cells without the gap, right-aligned. The last column takes the rest.
_COLUMNS: tuple[Column, ...] = (
    ("component", 9, False),
    ("node", 4, False),
    ("state", 11, False),
    ("health", 7, True),
    ("pid", 7, True),
    ("up", 7, True),
    ("rst", 3, True),
    ("err", 4, True),
    ("cpu", 5, True),
    ("memory", 7, True),
    ("gpu", 7, True),
    ("port", 5, True),
    ("", 0, False),
)
# Columns to drop, in order, while the last one has fewer cells than this and its longest text.
_DROP_ORDER = {"port": 24, "pid": 24, "health": 24, "rst": 24, "err": 12}
_DROP_ORDER |= {"up": 10, "memory": 10, "cpu": 10}


class Components(DataTable[Text], Panel):
    """One row per component, in start order."""

    DEFAULT_CSS = """
    Components {
        width: 1fr;
        height: auto;
        max-height: 100%;
        overflow-x: hidden;
        scrollbar-size: 0 0;
        background-tint: transparent;
        &:focus { background-tint: transparent; }

        & > .datatable--header { background: $background; color: $quiet; text-style: none; }
        & > .datatable--cursor, &:focus > .datatable--cursor {
            background: $block-cursor-background;
            color: $block-cursor-foreground;
            text-style: none;
        }
        & > .datatable--hover { background: $panel; }
    }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("k", "cursor_up", "Up"),
        hidden("j", "cursor_down", "Down"),
        hidden(
            "enter,d",
            "app.view('component')",
            "Open",
            "Components: details of the component under the cursor",
        ),
        hidden(
            "l", "app.view('logs')", "Logs", "Components: the log of the component under the cursor"
        ),
    ]

    best = (
        "app.act('restart')",
        "app.stop_or_start",
        "app.act('kill')",
        "app.view('component')",
        "app.last_words",
    )
    # Folded, it must know the states that its keys act on.
    hides_itself = True

    @dataclass(eq=False)
    class Selected(Message):
        """The cursor moved; `by_user`: by a key or the mouse."""

        component: str
        by_user: bool

    def __init__(self) -> None:
        # Set before the base class, whose constructor calls `refresh`.
        self._writes_cells = False
        super().__init__(id="components", cursor_type="row", zebra_stripes=False, cell_padding=0)
        self.statuses: list[ComponentStatus] = []  # one per row, top to bottom
        self._now = 0.0
        self._news: dict[str | None, str] = {}  # open diagnoses by component
        self._stale = False  # no supervisor confirms these states any more
        self._is_over = False  # no process is left to measure
        # Rows and columns of the table as it was built; another set needs a rebuild.
        self._built: tuple[list[str], list[Column]] = [], []
        self._touched = False  # a key or a click arrived since the cursor last moved
        self.is_users = False  # the user has moved the cursor
        self.border_title = title("Components")

    @property
    def selected(self) -> ComponentStatus | None:
        return self.statuses[self.cursor_row] if 0 <= self.cursor_row < len(self.statuses) else None

    def show(self, view: View) -> None:
        if view.status is None:
            return
        self.statuses, self._now = list(view.status.components), view.now
        if view.status.exit_code == 0:  # earlier diagnoses no longer matter
            self.statuses = [row.model_copy(update={"diagnosis": ""}) for row in self.statuses]
        found = open_diagnoses(view.state, view.status)
        self._news = {item.component: item.title for item in reversed(found)}
        self._stale = bool(view.gone)
        has_process = any(row.pids for row in self.statuses)
        self._is_over = view.status.phase is Phase.ENDED and not has_process
        self._retitle()
        if self._built == ([row.name for row in self.statuses], self._columns()):
            self._fill()
        else:
            self._rebuild()

    def recover(self) -> None:
        if self.failure:
            self._built = [], []  # may be incomplete after the error: rebuild
        super().recover()

    def select(self, component: str) -> None:
        """Move the cursor on behalf of the screen."""
        names = [row.name for row in self.statuses]
        if component in names and names.index(component) != self.cursor_row:
            self.move_cursor(row=names.index(component))

    def step(self, by: int) -> None:
        """Move the cursor on behalf of the user."""
        self._touched = self.is_users = True
        self.move_cursor(row=min(max(self.cursor_row + by, 0), max(len(self.statuses) - 1, 0)))

    def _retitle(self) -> None:
        dead = sum(row.state is State.FAILED for row in self.statuses)
        # The table has no scrollbar, so the title tells of rows below.
        below = len(self.statuses) + self.header_height - self.content_size.height
        more = f"{below} more: ↑ ↓" if self.content_size and below > 0 else ""
        failed = f"{dead} failed" if dead else ""
        self.set_title(title("Components", (failed, "error"), (more, "warning")))

    def on_resize(self, event: events.Resize) -> None:
        if self.statuses:
            self._rebuild()
            self._retitle()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        event.stop()
        if row := self.selected:
            self.post_message(self.Selected(row.name, by_user=self._touched))
        self._touched = False

    def on_key(self, event: events.Key) -> None:
        # Keys that move the cursor. The table also moves it itself, for example after a rebuild.
        self._touched = event.key in ("up", "down", "k", "j", "pageup", "pagedown", "home", "end")
        self.is_users = self.is_users or self._touched

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._touched = self.is_users = True

    def _columns(self) -> list[Column]:
        wide = self.size.width >= _WIDE
        hidden = set() if wide else {"gpu", "port"}
        if not any(row.gpu_bytes for row in self.statuses):
            hidden.add("gpu")
        # Columns without a value in any row give their space to the others.
        if not any(row.errors for row in self.statuses):
            hidden.add("err")
        if len({row.node for row in self.statuses}) < 2:
            hidden.add("node")
        if self._is_over:
            hidden |= {"health", "pid", "up", "cpu", "memory"}
        columns = [column for column in _COLUMNS if column[0] not in hidden]
        names = max((len(row.name) for row in self.statuses), default=0)
        columns[0] = (columns[0][0], min(max(columns[0][1], names), 24 if wide else 12), False)
        nodes = max((len(row.node) for row in self.statuses), default=0)
        columns = [
            (name, min(nodes, 12), right) if name == "node" else (name, width, right)
            for name, width, right in columns
        ]
        words = max((len(self._words(row)[0]) for row in self.statuses), default=0)
        for name, enough in _DROP_ORDER.items():
            if self._left(columns) < min(enough, words):
                columns = [column for column in columns if column[0] != name]
        columns[-1] = ("", max(1, self._left(columns)), False)
        return columns

    def _left(self, columns: Sequence[Column]) -> int:
        taken = sum(width + self._gap for _, width, _ in columns[:-1])
        return self.content_size.width - taken - self._gap

    @property
    def _gap(self) -> int:
        return 3 if self.size.width >= 140 else 2 if self.size.width >= 100 else 1

    def _fit(self, text: str, style: str | Style, width: int, right: bool) -> Text:
        cell = Text(text, style=style, no_wrap=True, end="")
        cell.truncate(width, overflow="ellipsis")
        space = " " * max(0, width - cell.cell_len)
        return Text.assemble(space if right else "", cell, "" if right else space, " " * self._gap)

    def _rebuild(self) -> None:
        row, columns = self.cursor_row, self._columns()
        self._built = [item.name for item in self.statuses], columns
        self.clear(columns=True)
        for name, width, right in columns:
            self.add_column(
                self._fit(name, "", width, right), key=name or "last", width=width + self._gap
            )
        for item in self.statuses:
            self.add_row(*self._cells(item, columns), key=item.name)
        self.move_cursor(row=min(max(row, 0), max(len(self.statuses) - 1, 0)))

    def _fill(self) -> None:
        _, columns = self._built
        changed = []
        for y, item in enumerate(self.statuses):
            cells = zip(columns, self._cells(item, columns), strict=True)
            for x, ((name, _, _), cell) in enumerate(cells):
                if self.get_cell(item.name, name or "last") != cell:
                    self._writes_cells = True
                    self.update_cell(item.name, name or "last", cell)
                    self._writes_cells = False
                    changed.append(Coordinate(y, x))
        for cell_at in changed:
            self.refresh_coordinate(cell_at)

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        # `update_cell` repaints the whole table. `_fill` repaints only the cells that changed.
        if self._writes_cells:
            return self
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def _cells(self, row: ComponentStatus, columns: Sequence[Column]) -> list[Text]:
        words, tone = state_text(row.state)
        if self._stale and row.state is not State.PENDING and not row.state.is_resting:
            words, tone = f"? {row.state.value}", "dim"  # last known state
        coming = row.state is State.STARTING
        # While a component starts, a failing health check is normal.
        health = "–" if row.healthy is None else "ok" if row.healthy else "…" if coming else "fails"
        if row.healthy and row.probe_latency_s is not None:
            health = seconds_text(row.probe_latency_s)
        fails = row.healthy is False and not coming
        texts: dict[str, tuple[str, str | Style]] = {
            "component": (row.name, "bold"),
            "node": (row.node, ""),
            "state": (words, self.style(tone)),
            "health": (health, self.style("error") if fails else ""),
            "pid": (str(row.pid) if row.pid else "–", ""),
            "up": (duration(self._now - row.started_at) if row.pid and row.started_at else "–", ""),
            "rst": (str(row.restarts), self.style("warn") if row.restarts else "dim"),
            "err": (
                str(min(row.errors, 9999)) if row.errors else "",
                self.style("error"),
            ),
            "cpu": (percent(row.cpu_percent), ""),
            "memory": (bytes_text(row.memory_bytes), ""),
            "gpu": (bytes_text(row.gpu_bytes), ""),
            "port": (str(row.port) if row.port else "–", "dim"),
            "": self._words(row),
        }
        return [self._fit(*texts[name], width, right) for name, width, right in columns]

    def _words(self, row: ComponentStatus) -> tuple[str, str | Style]:
        if row.name in self._news and row.state is State.HEALTHY:
            return f"▲ {one_line(self._news[row.name])}", self.style("warn")
        return last_word(row), named_style(
            self.app, "error"
        ) if row.state is State.FAILED else "dim"


def last_word(row: ComponentStatus) -> str:
    """Return what matters now: a diagnosis, a wait, or a reason."""
    if row.state in (State.HEALTHY, State.COMPLETED):
        return ""
    if row.diagnosis:
        return one_line(row.diagnosis)
    if row.state is State.STARTING:
        return doing(row)
    if row.waiting_for and row.state in (State.PENDING, State.BACKOFF):
        return one_line(f"waits for {row.waiting_for}")
    words = one_line(row.reason)
    if not words and row.exit_code and not row.state.has_process:
        words = f"exit code {row.exit_code}"
    return words or one_line(row.probe_detail)
