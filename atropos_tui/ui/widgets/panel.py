"""The base of every panel: a widget that draws a `View`, in styles of its own by name. Its errors stay in it.

A panel is two places: its file here, with its CSS, and one row of `ui.views.VIEWS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import wrap
from typing import ClassVar, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.content import Content
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from atropos_common.control import ComponentStatus, Phase, RunStatus
from atropos_tui.monitor.bench import RunBenchmark
from atropos_tui.monitor.format import one_line
from atropos_tui.monitor.gauges import GaugeHistory
from atropos_tui.monitor.overlay import RunCurves, Setting, by_setting
from atropos_tui.monitor.reading import MARKS, Lens, Looking, Mark, Ruler, marks
from atropos_tui.monitor.run_files import RunInfo
from atropos_tui.monitor.series import Series
from atropos_tui.monitor.state import RunState
from atropos_tui.monitor.verdict import Verdict, verdict
from atropos_tui.ui import faults
from atropos_tui.ui.theme import ink

Choice = TypeVar("Choice")


def after(now: Choice, choices: Sequence[Choice]) -> Choice:
    """What a key that goes round `choices` leads to."""
    return choices[(choices.index(now) + 1) % len(choices)]


@dataclass(frozen=True, eq=False)
class View:
    """The run as the screen knows it now.

    `state` is shared and grows on: a panel may draw a view again after later records. Whatever is derived from the
    state and kept (`ruler`, `marks`) copies what it needs, so that no index into a copy meets a newer series.
    """

    info: RunInfo
    state: RunState
    status: RunStatus | None
    """None until the supervisor or the files have told."""
    gone: str
    """Why no supervisor answers; empty while one does."""
    now: float
    """Unix seconds."""
    bad_lines: int = 0
    """Lines in the run's streams that were no records."""
    other: RunBenchmark | None = None
    """The run that this one is compared with."""
    selected: str = ""
    """The component under the cursor."""
    loaded: bool = True
    """Whether the files were read to their end once; before, `state` may hold no more than the newest records."""
    read_to: int = 0
    """The step up to which they were read."""
    looking: Looking = field(default_factory=lambda: Looking(Lens()))
    """How charts are looked at."""
    runs: Sequence[RunCurves] = ()
    """On the same axes: this one first, then the others; empty where it is alone."""

    @cached_property
    def verdict(self) -> Verdict | None:
        """The one sentence about the run; None until something has told of it."""
        if self.status is None or not (self.loaded or self.is_live):
            return None
        return verdict(self.status, self.info, self.state, self.now)

    @property
    def is_live(self) -> bool:
        """Whether the run goes on, and its newest step is known: where it stands is told from its newest records."""
        ended = self.status is None or self.status.phase is Phase.ENDED
        return not ended and not self.gone and self.state.step > self.read_to

    @property
    def gauges(self) -> GaugeHistory:
        """What the supervisor recorded of machine and engines."""
        return self.state.gauges

    @property
    def rows(self) -> list[ComponentStatus]:
        """Components in start order; empty until something has told."""
        return self.status.components if self.status else []

    @property
    def lens(self) -> Lens:
        """How charts are looked at now."""
        return self.looking.lens

    @cached_property
    def ruler(self) -> Ruler:
        """Where this run's steps lie on the axis of the charts."""
        return Ruler(self.state, self.lens.along)

    @cached_property
    def marks(self) -> list[tuple[float, Mark]]:
        """What happened, with its place on the axis, the most important kind first."""
        found = sorted(marks(self.state), key=lambda mark: list(MARKS).index(mark.kind))
        at = Series([mark.step for mark in found], [0.0] * len(found), [mark.time for mark in found])
        return list(zip(self.ruler.place(at), found, strict=True))

    @cached_property
    def settings(self) -> list[Setting]:
        """The runs on the same axes, seeds of one setting together."""
        return by_setting(self.runs)

    @property
    def cursor_steps(self) -> tuple[int, int]:
        """First and last of the steps that the point under the cursor stands for."""
        return self.state.metric("step_s").reach(self.cursor_step)

    @property
    def cursor_step(self) -> int:
        """The step under the charts' cursor, else the newest."""
        if self.lens.cursor is None:
            return self.state.step
        return self.ruler.step_at(self.lens.cursor, self.state.metric("step_s"))


class Guarded(Widget):
    """A widget that keeps its errors to itself: it shows the reason in one line, and the rest of the screen goes on."""

    failure: str = ""
    """Why it cannot be drawn; empty while it can be."""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an error of the block into this widget's `failure`; the traceback goes to a file."""
        try:
            yield
        except Exception as error:
            faults.record(error, type(self).__name__)
            self._fail(one_line(f"cannot be drawn: {type(error).__name__}: {error}"))

    def _fail(self, reason: str) -> None:
        if self.failure:
            return
        self.failure = reason
        self.render_line = self._failure_line  # type: ignore[method-assign]
        self._hide_children(True)

    def recover(self) -> None:
        """Try to draw again."""
        if self.failure:
            self.failure = ""
            del self.render_line
            self._hide_children(False)

    def _hide_children(self, hidden: bool) -> None:
        for child in self.children:
            child.display = not hidden
        self.refresh(layout=True)

    def _failure_line(self, y: int) -> Strip:
        width, style = self.scrollable_content_region.width, self.rich_style
        lines = wrap(self.failure, max(width, 1))
        words = [Segment(lines[y], ink(self.app, "bad"))] if y < len(lines) else []
        return Strip(words).crop_extend(0, width, style).apply_style(style)

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
        return super().render_lines(crop)  # by `_failure_line`


class Panel(Guarded):
    """A widget that draws a `View`. Framed panels have the class `panel`, whose look is in `app.tcss`."""

    DEFAULT_CLASSES = "panel"
    hides_itself: ClassVar[bool] = False
    """Shown only while it has something to say, which it has to be asked."""
    follows_records: bool = False
    """Only the run's records change it: it is drawn less often than what moves with the clock."""
    _title_words: Content | None = None

    def show(self, view: View) -> None:
        """Take the newest."""
        raise NotImplementedError

    def present(self, view: View) -> None:
        """Show `view`, or why that failed."""
        self.recover()
        with self.guard():
            self.show(view)

    def entitle(self, words: Content) -> None:
        """Set the title in the frame, which paints the whole panel anew, where it is another one."""
        if words != self._title_words:
            self._title_words = self.border_title = words

    def ink(self, name: str) -> Style:
        """A style of `theme.INKS`."""
        return ink(self.app, name)

    def labelled(self, label: str, width: int) -> Text:
        """The beginning of a line: `label` in `width` cells."""
        return Text(f"{label:<{width}}", self.ink("dim"), no_wrap=True, end="")


class TextPanel(Panel):
    """A panel of lines that are cut where there is no room. Those that are not what it shows are painted."""

    view: View | None = None

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._painted: list[Text] = []

    def show(self, view: View) -> None:
        self.view = view
        before, self._painted = self._painted, self._cut()
        if len(self._painted) != len(before):
            self.refresh(layout=self.styles.is_auto_height)
        elif changed := [y for y, line in enumerate(self._painted) if line != before[y]]:
            self.refresh(*(Region(0, y, self.content_size.width, 1) for y in changed))

    def lines(self, view: View, width: int, height: int) -> list[Text]:
        """What there is to say, the most important first."""
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
