"""Base classes of panels: they draw a `View` and keep their errors to themselves."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import wrap
from typing import Any, ClassVar, Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from atropos_common.protocol.control import ComponentStatus, Phase, RunStatus
from atropos_tui.monitor.bench import RunBenchmark
from atropos_tui.monitor.charts import MARKS, Lens, Mark, Ruler, SharedLens, marks
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.overlay import RunCurves, Setting, by_run, by_setting
from atropos_tui.monitor.run.gauges import GaugeHistory
from atropos_tui.monitor.run.run_files import RunInfo
from atropos_tui.monitor.run.series import Series
from atropos_tui.monitor.run.state import RunState
from atropos_tui.monitor.verdict import Verdict, verdict
from atropos_tui.ui import user_files
from atropos_tui.ui.keymap import action_id
from atropos_tui.ui.theme import named_style

Choice = TypeVar("Choice")


def after(now: Choice, choices: Sequence[Choice]) -> Choice:
    """Return the choice that follows `now`, in a circle."""
    return choices[(choices.index(now) + 1) % len(choices)]


def hidden(keys: str, action: str, name: str, tip: str = "") -> Binding:
    """Return a binding with a name in the key file; help and palette show `tip`."""
    return Binding(keys, action, name, show=False, tooltip=tip, id=action_id(name, tip))


@dataclass(frozen=True, eq=False)
class View:
    """The run as the screen knows it. `state` grows; cached values copy what they need."""

    info: RunInfo
    state: RunState
    status: RunStatus | None
    """None until the first answer of the supervisor or the files."""
    gone: str
    """Reason why no supervisor answers; empty while one does."""
    now: float
    """Unix seconds."""
    bad_lines: int = 0
    """Invalid lines of the run's streams."""
    other: RunBenchmark | None = None
    selected: str = ""
    loaded: bool = True
    """False while `state` may hold only the newest records."""
    read_to: int = 0
    """Step up to which the files were read."""
    shared: SharedLens = field(default_factory=lambda: SharedLens(Lens()))
    runs: Sequence[RunCurves] = ()
    """Runs on the same axes, this one first."""

    @cached_property
    def verdict(self) -> Verdict | None:
        """None until enough is known."""
        # A verdict from part of the history could be wrong.
        if self.status is None or not (self.loaded or self.is_live):
            return None
        return verdict(self.status, self.info, self.state, self.now)

    @property
    def is_live(self) -> bool:
        """True while only the history is still being read."""
        ended = self.status is None or self.status.phase is Phase.ENDED
        return not ended and not self.gone and self.state.step > self.read_to

    @property
    def gauges(self) -> GaugeHistory:
        return self.state.gauges

    @property
    def rows(self) -> list[ComponentStatus]:
        return self.status.components if self.status else []

    @property
    def lens(self) -> Lens:
        return self.shared.lens

    @cached_property
    def ruler(self) -> Ruler:
        return Ruler(self.state, self.lens.along)

    @cached_property
    def marks(self) -> list[tuple[float, Mark]]:
        """Events with their place on the axis, the most important kind first."""
        found = sorted(marks(self.state), key=lambda mark: list(MARKS).index(mark.kind))
        # `Ruler.place` takes a series.
        steps, times = [mark.step for mark in found], [mark.time for mark in found]
        at = Series(steps, [0.0] * len(found), times)
        return list(zip(self.ruler.place(at), found, strict=True))

    @cached_property
    def settings(self) -> list[Setting]:
        """Runs on the same axes, with the seeds of one setting together."""
        return by_run(self.runs) if self.lens.each_run else by_setting(self.runs)

    @property
    def cursor_steps(self) -> tuple[int, int]:
        """First and last step of the point under the cursor."""
        return self.state.metric("step_s").reach(self.cursor_step)

    @property
    def cursor_step(self) -> int:
        """Step under the charts' cursor, otherwise the newest."""
        if self.lens.cursor is None:
            return self.state.step
        return self.ruler.step_at(self.lens.cursor, self.state.metric("step_s"))


class Guarded(Widget):
    """Widget that shows its own error in one line."""

    best: ClassVar[tuple[str, ...]] = ("app.zoom",)
    """Actions whose keys the footer shows while the panel has the focus, the best first."""
    failure: str = ""
    """Reason why it cannot be drawn."""

    def style(self, name: str) -> Style:
        return named_style(self.app, name)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an error of the block into `failure`."""
        try:
            yield
        except Exception as error:
            user_files.record_error(error, type(self).__name__)
            self._fail(one_line(f"cannot be drawn: {type(error).__name__}: {error}"))

    def _fail(self, reason: str) -> None:
        if self.failure:
            return
        self.failure = reason
        # On the instance, so that it wins over the method of any subclass.
        self.render_line = self._failure_line  # type: ignore[method-assign]
        self._hide_children(True)

    def recover(self) -> None:
        if self.failure:
            self.failure = ""
            # Uncovers the method of the class.
            del self.render_line
            self._hide_children(False)

    def _hide_children(self, hidden: bool) -> None:
        for child in self.children:
            child.display = not hidden
        self.refresh(layout=True)

    def _failure_line(self, y: int) -> Strip:
        width, style = self.scrollable_content_region.width, self.rich_style
        lines = wrap(self.failure, max(width, 1))
        words = [Segment(lines[y], self.style("bad"))] if y < len(lines) else []
        return Strip(words).crop_extend(0, width, style).apply_style(style)

    # Textual calls these three methods; an exception in any of them would end the app.
    async def on_event(self, event: events.Event) -> None:
        with self.guard():
            await super().on_event(event)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if not self.failure:
            with self.guard():
                return super().get_content_height(container, viewport, width)
        return 1

    def render_lines(self, crop: Region) -> list[Strip]:
        with self.guard():
            return super().render_lines(crop)
        return super().render_lines(crop)  # after an error: draws `_failure_line`


class Panel(Guarded):
    """Widget that draws a `View`. The class `panel`, styled in `app.tcss`, frames it."""

    DEFAULT_CLASSES = "panel"
    hides_itself: ClassVar[bool] = False
    """It sets its own `display`, so it gets every view."""
    follows_records: bool = False
    """Only records change the panel, so it is drawn less often."""
    _title_words: Content | None = None

    def show(self, view: View) -> None:
        raise NotImplementedError

    def present(self, view: View) -> None:
        # An error may have come from one odd record; each new view gets a new attempt.
        self.recover()
        with self.guard():
            self.show(view)

    def set_title(self, words: Content) -> None:
        # Textual repaints the whole panel for every assignment to `border_title`.
        if words != self._title_words:
            self._title_words = self.border_title = words

    def labelled(self, label: str, width: int) -> Text:
        return Text(f"{label:<{width}}", self.style("dim"), no_wrap=True, end="")


class TextPanel(Panel):
    """Panel of lines, cut at the panel's width."""

    view: View | None = None

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._painted: list[Text] = []

    def show(self, view: View) -> None:
        self.view = view
        before, self._painted = self._painted, self._cut()
        # Another number of lines may change the height of the panel.
        if len(self._painted) != len(before):
            self.refresh(layout=self.styles.is_auto_height)
        elif changed := [y for y, line in enumerate(self._painted) if line != before[y]]:
            self.refresh(*(Region(0, y, self.content_size.width, 1) for y in changed))

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        """Return the lines to show, the most important first."""
        raise NotImplementedError

    def render(self) -> RenderResult:
        self._painted = self._cut()
        return Text("\n", end="").join(self._painted)

    def _cut(self) -> list[Text]:
        if self.view is None:
            return []
        width, height = self.content_size
        lines = self.lines(self.view, width, height)
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines if self.styles.is_auto_height else lines[:height]


Item = TypeVar("Item")


class Listing(ScrollView, Panel, Generic[Item], can_focus=True):
    """Items from top to bottom. The cursor stays on its item."""

    DEFAULT_CSS = """
    Listing {
        width: 1fr;
        height: 1fr;
        scrollbar-size: 0 1;
    }
    """
    follows_records = True
    BINDINGS: ClassVar[list[BindingType]] = [
        hidden("up,k", "move(-1)", "Up"),
        hidden("down,j", "move(1)", "Down"),
        hidden("pageup", "page(-1)", "Page up"),
        hidden("pagedown", "page(1)", "Page down"),
        hidden("home,g", "jump(0)", "First"),
        hidden("end,G", "jump(-1)", "Last"),
        hidden("enter", "choose", "Open"),
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
            keys = [self.key_of(item) for item in items]
            wanted = self.key_of(before)
            self.cursor = keys.index(wanted) if wanted in keys else 0
        self.refresh()
        self.post_message(self.Moved())

    def watch_cursor(self) -> None:
        # Scroll only as far as the cursor needs.
        top = round(self.scroll_y)
        height = max(self.scrollable_content_region.height - self.head, 1)
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
        end = self.head + len(self.items) - self.scroll_offset.y
        if at is not None and self.head <= at.y < end:
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
                background = background + self.style("lit")
        line.truncate(width, overflow="ellipsis")
        strip = Strip(line.render(self.app.console, end=""))
        return strip.adjust_cell_length(width, background).apply_style(background)
