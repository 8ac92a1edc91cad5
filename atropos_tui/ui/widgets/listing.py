"""List with a cursor over any number of items; only visible items become text."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from atropos_tui.ui.widgets.panel import Panel

Item = TypeVar("Item")


class Listing(ScrollView, Panel, Generic[Item], can_focus=True):
    """Items from top to bottom. The cursor stays on its item when new ones arrive."""

    DEFAULT_CSS = """
    Listing {
        width: 1fr;
        height: 1fr;
        scrollbar-size: 0 1;
    }
    """
    follows_records = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "jump(0)", "First", show=False),
        Binding("end,G", "jump(-1)", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

    cursor: reactive[int] = reactive(0)

    class Moved(Message):
        """The cursor moved, or its item changed."""

    @dataclass(eq=False)
    class Chosen(Message):
        """The user pressed Enter."""

        listing: Listing[Any]

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.items: Sequence[Item] = ()

    def key_of(self, item: Item) -> Hashable:
        """Return a key that identifies the item in later lists."""
        raise NotImplementedError

    def draw(self, item: Item, width: int) -> Text:
        """Return one line of text."""
        raise NotImplementedError

    @property
    def current(self) -> Item | None:
        return self.items[self.cursor] if 0 <= self.cursor < len(self.items) else None

    def put(self, items: Sequence[Item]) -> None:
        before = self.current
        self.items = items
        self.virtual_size = Size(self.size.width, self.head + len(items))
        # On the first row the cursor stays there, so it follows the newest item.
        if self.cursor and before is not None:
            wanted = self.key_of(before)
            self.cursor = next(
                (at for at, item in enumerate(items) if self.key_of(item) == wanted), 0
            )
        self.refresh()
        self.post_message(self.Moved())

    def watch_cursor(self) -> None:
        # Scroll only as far as the cursor needs.
        top, height = (
            round(self.scroll_y),
            max(self.scrollable_content_region.height - self.head, 1),
        )
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)
        self.refresh()
        self.post_message(self.Moved())

    head = 0  # lines above the items that do not scroll

    def head_line(self) -> Text:
        return Text()

    def action_move(self, by: int) -> None:
        self.cursor = min(max(self.cursor + by, 0), max(len(self.items) - 1, 0))

    def action_page(self, by: int) -> None:
        self.action_move(by * max(self.scrollable_content_region.height - self.head - 1, 1))

    def action_jump(self, to: int) -> None:
        self.cursor = to if to >= 0 else max(len(self.items) - 1, 0)

    def action_choose(self) -> None:
        if self.current is not None:
            self.post_message(self.Chosen(self))

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if (
            at is not None
            and self.head <= at.y < len(self.items) - self.scroll_offset.y + self.head
        ):
            self.cursor = at.y - self.head + self.scroll_offset.y
            # A double click opens the item.
            if event.chain == 2:
                self.action_choose()

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        # Textual calls this for each visible line only, which keeps a list of thousands of items
        # fast.
        background = self.rich_style
        if y < self.head:
            line = self.head_line()
        else:
            at = y - self.head + self.scroll_offset.y
            if at >= len(self.items):
                return Strip.blank(width, background)
            line = self.draw(self.items[at], width)
            # Without the focus there is no cursor, because keys go to another panel.
            if at == self.cursor and self.has_focus:
                background = background + self.ink("lit")
        line.truncate(width, overflow="ellipsis")
        strip = Strip(line.render(self.app.console, end=""))
        return strip.adjust_cell_length(width, background).apply_style(background)
