"""The log of one component: a window over a ring buffer of plain lines, repainted at most ten times a second."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollTo
from textual.strip import Strip

from atropos_tui.monitor.plain import bytes_text
from atropos_tui.ui.look import title

LINES_KEPT = 20_000
REPAINT_S = 0.1

_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL|Traceback|[A-Z]\w*(?:Error|Exception))\b")
_WARNING = re.compile(r"\b(WARN|WARNING)\b")


class LogView(ScrollView, can_focus=True):
    """Lines of the selected component. Follows the end until scrolled away from it; `f` or End follows again."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"log--plain", "log--error", "log--warning", "log--note"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("end,G", "follow_end", "End", show=False, tooltip="Jump to the newest line and follow"),
        Binding("home,g", "top", "Top", show=False, tooltip="Jump to the oldest line kept"),
    ]

    following: reactive[bool] = reactive(True)
    """Whether new lines scroll into view by themselves."""

    def __init__(self, capacity: int = LINES_KEPT) -> None:
        super().__init__(id="log")
        self.lines: deque[tuple[str, str]] = deque(maxlen=capacity)
        """Style name and text of each line kept."""
        self.component = ""
        self.path: Path | None = None
        self.dropped = 0
        """Lines that left the ring buffer since it was switched to this component."""
        self._width = 0
        self._stale = False

    @property
    def text_lines(self) -> list[str]:
        """The lines kept, oldest first."""
        return [text for _, text in self.lines]

    def on_mount(self) -> None:
        self._retitle()
        self.set_interval(REPAINT_S, self._repaint)

    def switch(self, component: str) -> None:
        """Show another component from its latest lines on."""
        if component == self.component:
            return
        self.component, self.path = component, None
        self.lines.clear()
        self.dropped = self._width = 0
        self.following = True
        self._stale = True
        self._retitle()

    def extend(self, path: Path, lines: list[str], skipped: int) -> None:
        """Append plain `lines` of the log at `path`; `skipped` bytes before them were not read."""
        if self.path is not None and path != self.path:
            self._append("note", f"── attempt {path.stem} ──")
        self.path = path
        if skipped:
            self._append("note", f"··· {bytes_text(skipped)} earlier, in {path.parent.name}/{path.name} ···")
        for line in lines:
            self._append("error" if _ERROR.search(line) else "warning" if _WARNING.search(line) else "plain", line)
        self._stale = True

    def _append(self, kind: str, line: str) -> None:
        if len(self.lines) == self.lines.maxlen:
            self.dropped += 1
            if not self.following:
                self.scroll_target_y = max(0, self.scroll_target_y - 1)
                self.scroll_y = max(0, self.scroll_y - 1)
        self.lines.append((kind, line))
        self._width = max(self._width, len(line) if line.isascii() else cell_len(line))

    def _repaint(self) -> None:
        if not self._stale:
            return
        self._stale = False
        self.virtual_size = Size(self._width, len(self.lines))
        if self.following:
            self.scroll_end(animate=False, immediate=True, x_axis=False, force=True)
            # A scrollbar that appears only now takes its place after the layout.
            self.call_after_refresh(self._place_scrollbar)
        self._retitle()
        self.refresh()

    def _place_scrollbar(self) -> None:
        if self.show_vertical_scrollbar:
            self.vertical_scrollbar.position = self.scroll_y

    def on_resize(self) -> None:
        self._stale = True

    def _retitle(self) -> None:
        mode = ("following", "success") if self.following else ("scrolled back · f follows", "warning")
        attempt = (f"attempt {self.path.stem}", "secondary") if self.path else ("", "")
        self.border_title = title("Log", (self.component, "primary"), attempt, mode)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if old_value < new_value >= self.max_scroll_y:
            self.following = True

    def watch_following(self) -> None:
        self._retitle()

    def _hold(self) -> None:
        """Stop following before the scroll begins, so that the next repaint does not pull it back."""
        if self.max_scroll_y > 0:
            self.following = False

    def action_scroll_up(self) -> None:
        self._hold()
        super().action_scroll_up()

    def action_page_up(self) -> None:
        self._hold()
        super().action_page_up()

    def on_mouse_scroll_up(self, _: events.MouseScrollUp) -> None:
        self._hold()

    def on_scroll_to(self, message: ScrollTo) -> None:
        """The scrollbar is dragged."""
        if message.y is not None and message.y < self.max_scroll_y:
            self._hold()

    def action_follow_end(self) -> None:
        self.following = True
        self.scroll_end(animate=False, x_axis=False, force=True)

    def action_top(self) -> None:
        self._hold()
        self.scroll_home(animate=False)

    def toggle_follow(self) -> None:
        """Stop following where it stands, or jump to the end and follow."""
        if self.following:
            self.following = False
        else:
            self.action_follow_end()

    def render_line(self, y: int) -> Strip:
        offset_x, offset_y = self.scroll_offset
        width, at = self.scrollable_content_region.width, y + offset_y
        background = self.rich_style
        if at >= len(self.lines):
            return Strip.blank(width, background)
        kind, text = self.lines[at]
        style: Style = self.get_component_rich_style(f"log--{kind}")
        strip = Strip([Segment(text, style)]).crop_extend(offset_x, offset_x + width, background)
        return strip.apply_style(background + style)
