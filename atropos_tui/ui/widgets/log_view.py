"""Log of one component, or of all merged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollTo
from textual.strip import Strip

from atropos_tui.monitor.format import clock, counted
from atropos_tui.monitor.log_buffer import LEVELS, Kind, Level, LogBuffer, LogEntry
from atropos_tui.monitor.patterns import Pattern
from atropos_tui.ui.theme import title
from atropos_tui.ui.widgets.panel import Guarded, after, hidden

LINES_KEPT = 20_000
REPAINT_S = 0.1
BENEATH_S = 1.0  # between two repaints under a dialog, where every change repaints the whole screen
ALL = "all components"
TIME_CELLS = 9
_LEVEL_WORDS = {"all": "", "warning": "warnings and errors", "error": "errors only"}
_LEVEL_WORDS["most"] = "health polls hidden"


class LogView(ScrollView, Guarded, can_focus=True):
    """Lines of the followed log, up to its end unless the user scrolls away."""

    DEFAULT_CLASSES = "panel"
    DEFAULT_CSS = """
    LogView {
        width: 2fr;
        height: 1fr;
        scrollbar-size: 0 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("k", "scroll_up", "Up"),
        hidden("j", "scroll_down", "Down"),
        hidden("end,G", "follow_end", "End", "Log: jump to the newest line and follow"),
        hidden("home,g", "top", "Top", "Log: jump to the oldest line kept"),
        hidden("n", "find(1)", "Next match", "Log: next match of the search"),
        hidden("N", "find(-1)", "Previous match", "Log: previous match of the search"),
        hidden("e", "error(1)", "Next error", "Log: jump to the next error"),
        hidden("E", "error(-1)", "Previous error", "Log: jump to the previous error"),
        hidden(
            "l",
            "level",
            "Level",
            "Log: all, warnings and errors, errors only, all but health polls",
        ),
        hidden("ampersand", "app.filter_log", "Filter", "Log: show only lines that match"),
        hidden("T", "times", "Times", "Log: show or hide the time of each line"),
        hidden("w", "wrap", "Wrap", "Log: wrap long lines"),
        hidden("y", "copy", "Copy", "Log: copy the marked line, or all visible lines"),
        hidden("x", "clear", "Clear", "Log: clear the view; the file keeps all lines"),
        hidden("o", "app.open_log", "Open", "Log: open the file in $EDITOR"),
    ]

    best = ("app.search", "app.filter_log", "level", "error(1)", "app.follow")

    following: reactive[bool] = reactive(True)

    def __init__(self, capacity: int = LINES_KEPT) -> None:
        super().__init__(id="log")
        self.buffer = LogBuffer(capacity)
        self.component = ""  # followed; empty: all
        self.path: Path | None = None
        self.pattern: Pattern | None = None  # search, highlighted
        self._filter: Pattern | None = None
        self._level: Level = "all"
        self._wraps = self._timed = False
        self._marked: int | None = None  # number of the entry that was jumped to
        self._names = 0  # width of the component names, if several components are shown
        # A component was chosen; something is not drawn yet.
        self.is_begun = self._stale = False
        self._painted = 0.0

    def on_mount(self) -> None:
        self._retitle()
        self.set_interval(REPAINT_S, self._repaint)

    def switch(self, component: str) -> None:
        self.component, self.path, self._names = component, None, 0
        # Health polls of all components would hide the other lines.
        if self._level in ("all", "most"):
            self._level = "all" if component else "most"
        self.buffer.clear()
        self._marked = None
        self.following = self.is_begun = self._stale = True
        self._retitle()
        self.refresh()

    def extend(self, entries: Sequence[LogEntry], path: Path | None) -> None:
        """Append lines; `path` is their log file, if there is only one."""
        self.path = path
        if not self.component:
            self._names = max([self._names, *(len(entry.component) for entry in entries)])
        gone = self.buffer.extend(entries)
        # Lines that left the buffer move all others up: scroll along, so that the text stands
        # still.
        if gone and not self.following:
            self.scroll_target_y = max(0, self.scroll_target_y - gone)
            self.scroll_y = max(0, self.scroll_y - gone)
        self._stale = True

    # Drawing.

    def _repaint(self) -> None:
        # At most one repaint per `REPAINT_S`, however fast lines arrive.
        if not self._stale or not self.is_on_screen:
            return
        now = time.monotonic()
        if not self.screen.is_active and now - self._painted < BENEATH_S:
            return
        self._stale, self._painted = False, now
        self.recover()
        with self.guard():
            self._arrange()
            if self.following:
                self.scroll_end(animate=False, immediate=True, x_axis=False, force=True)
            self._retitle()
            self.refresh()

    def _arrange(self) -> None:
        room = self.scrollable_content_region.width - self._margin
        wrap = room if self._wraps and room > 8 else None
        self.buffer.show(level=self._level, pattern=self._filter, wrap=wrap)
        width = 0 if self._wraps else self.buffer.width + self._margin
        self.virtual_size = Size(width, self.buffer.height)

    @property
    def _margin(self) -> int:
        return (self._names + 1 if self._names else 0) + (TIME_CELLS if self._timed else 0)

    def watch_show_vertical_scrollbar(self) -> None:
        # A new scrollbar has no position until after the layout.
        self.call_after_refresh(self._place_scrollbar)

    def _place_scrollbar(self) -> None:
        if self.show_vertical_scrollbar:
            self.vertical_scrollbar.position = self.scroll_y

    def on_resize(self) -> None:
        self._stale = True

    def _retitle(self) -> None:
        dropped = self.buffer.dropped
        parts = (
            (self.component or ALL, "primary"),
            (f"attempt {self.path.stem}" if self.path else "", "quiet"),
            (_LEVEL_WORDS[self._level], "warning"),
            (f"& {self._filter.text}" if self._filter else "", "accent"),
            (f"/ {self.pattern.text}" if self.pattern else "", "accent"),
            (f"{dropped:,} older lines in the file" if dropped else "", "quiet"),
            ("following", "success") if self.following else ("paused · f: follow", "warning"),
        )
        self.border_title = title("Log", *parts)

    def render_line(self, y: int) -> Strip:
        offset_x, offset_y = self.scroll_offset
        width = self.scrollable_content_region.width
        background = self.rich_style
        row = self.buffer.row(y + offset_y)
        if row is None:
            if y == 0 and self.is_begun and not self.buffer:
                line = Strip([Segment("no output yet", self.style("dim"))])
                return line.crop_extend(0, width, background)
            return Strip.blank(width, background)
        number, part, entry, text = row
        style = self.style(entry.kind)
        if number == self._marked:
            style += self.style("lit")
        segments = self._segments(text, style)
        if self._names:
            name = entry.component if part == 0 else ""
            segments.insert(0, Segment(f"{name:<{self._names}} ", self.style("name of a log")))
        if self._timed:
            came = clock(entry.time) if part == 0 and entry.time else ""
            segments.insert(0, Segment(f"{came:<{TIME_CELLS}}", self.style("dim")))
        strip = Strip(segments).crop_extend(offset_x, offset_x + width, background)
        return strip.apply_style(background)

    def _segments(self, text: str, style: Style) -> list[Segment]:
        if self.pattern is None:
            return [Segment(text, style)]
        marked = style + self.style("found")
        segments, at = [], 0
        for start, end in self.pattern.spans(text):
            if start > at:
                segments.append(Segment(text[at:start], style))
            segments.append(Segment(text[start:end], marked))
            at = end
        return [*segments, Segment(text[at:], style)]

    # Following.

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        # The user has scrolled down to the end.
        if old_value < new_value >= self.max_scroll_y:
            self.following = True

    def watch_following(self) -> None:
        self._retitle()

    def _stop_following(self) -> None:
        # Call it before the scroll begins: otherwise the next repaint returns to the end.
        if self.max_scroll_y > 0:
            self.following = False

    def action_scroll_up(self) -> None:
        self._stop_following()
        super().action_scroll_up()

    def action_page_up(self) -> None:
        self._stop_following()
        super().action_page_up()

    def on_mouse_scroll_up(self, _: events.MouseScrollUp) -> None:
        self._stop_following()

    def on_scroll_to(self, message: ScrollTo) -> None:  # drag of the scrollbar
        if message.y is not None and message.y < self.max_scroll_y:
            self._stop_following()

    def action_follow_end(self) -> None:
        self.following = True
        self._marked = None
        self.scroll_end(animate=False, x_axis=False, force=True)

    def action_top(self) -> None:
        self._stop_following()
        self.scroll_home(animate=False)

    def toggle_follow(self) -> None:
        if self.following:
            self.following = False
        else:
            self.action_follow_end()

    # Search, filter and other actions on lines.

    def search(self, pattern: Pattern | None) -> str:
        """Highlight matches; return the number of matching lines in words."""
        self.pattern, self._stale = pattern, True
        self.refresh()
        self._retitle()
        return self._counted(pattern)

    def narrow(self, pattern: Pattern | None) -> str:
        """Show only matching lines; return their number in words."""
        self._filter, self._marked, self._stale = pattern, None, True
        self._arrange()
        return self._counted(pattern)

    def _counted(self, pattern: Pattern | None) -> str:
        return counted(self.buffer.count(pattern) if pattern else 0, "line")

    def accept(self) -> None:
        """Jump to the newest match while following, otherwise to the next one below."""
        if self.pattern is not None:
            self._marked = None
            self._find(self.pattern, -1 if self.following else 1, "no match")

    def drop(self) -> bool:
        """Remove filter, search or mark; return False if there was none."""
        if self._filter is not None:
            # `narrow` removes the mark; keep the marked line in view among all lines.
            marked = self._marked
            self.narrow(None)
            if marked is not None:
                self._jump(marked, "")
            self._retitle()
        elif self.pattern is not None:
            self.search(None)
        elif self._marked is not None:
            self._marked = None
            self.refresh()
        else:
            return False
        return True

    def action_find(self, step: int) -> None:
        if self.pattern is not None:
            self._find(self.pattern, step, "no match")

    def action_error(self, step: int) -> None:
        self._find("error", step, "no error in these lines")

    def _find(self, wanted: Pattern | Kind, step: int, otherwise: str) -> None:
        self._jump(self.buffer.find(wanted, self._start(step), step), otherwise)

    def _start(self, step: int) -> int:
        self._arrange()
        # Search on from the marked entry, otherwise from the edge of the screen.
        row = self.buffer.next_row(self._marked, step) if self._marked is not None else None
        if row is not None:
            return row
        last = self.scrollable_content_region.height - 1
        return round(self.scroll_y) + (0 if step > 0 else last)

    def _jump(self, number: int | None, otherwise: str) -> None:
        row = self.buffer.row_of(number) if number is not None else None
        if row is None:
            self.app.notify(otherwise, timeout=2)
            return
        self._stop_following()
        self._marked = number
        middle = self.scrollable_content_region.height // 2
        self.scroll_to(y=max(0, row - middle), animate=False, force=True)
        self.refresh()

    def go_to(self, time: float) -> bool:
        """Jump to the last line at or before `time` (Unix seconds), if it is kept."""
        # 1 ms of tolerance for rounded times; entries without a time have 0.
        numbers = [number for number, at in self.buffer.times() if 0 < at <= time + 1e-3]
        if not numbers:
            return False
        self._level = "all"
        self.narrow(None)
        self._jump(numbers[-1], "")
        return True

    def action_level(self) -> None:
        self._level = after(self._level, LEVELS)
        self._marked, self._stale = None, True
        self._arrange()
        self._retitle()

    def action_wrap(self) -> None:
        self._wraps, self._stale = not self._wraps, True
        self._arrange()

    def action_times(self) -> None:
        self._timed, self._stale = not self._timed, True
        self._arrange()

    def action_clear(self) -> None:
        self.buffer.clear()
        self._marked, self.following, self._stale = None, True, True

    def action_copy(self) -> None:
        marked = self.buffer.row_of(self._marked) if self._marked is not None else None
        top, height = round(self.scroll_y), self.scrollable_content_region.height
        rows = range(top, top + height) if marked is None else range(marked, marked + 1)
        # By entry number: a wrapped line takes several rows and is copied once.
        lines = {row[0]: row[2].text for y in rows if (row := self.buffer.row(y))}
        self.app.copy_to_clipboard("\n".join(lines.values()))
        self.app.notify(f"copied {counted(len(lines), 'line')}", timeout=2)
