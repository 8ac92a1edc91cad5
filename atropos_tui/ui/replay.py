"""The screen of a recorded run."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult, RenderResult
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from atropos_tui.monitor.format import clock as time_of_day
from atropos_tui.monitor.format import duration
from atropos_tui.monitor.replay import Replay, ReplayClock
from atropos_tui.ui.app import CockpitApp
from atropos_tui.ui.commands import Outcome
from atropos_tui.ui.feed import Feed
from atropos_tui.ui.plot import progress_bar
from atropos_tui.ui.terminal import Bell, run_app, with_theme
from atropos_tui.ui.theme import named_style
from atropos_tui.ui.widgets.curves import Chart
from atropos_tui.ui.widgets.log_view import LogView
from atropos_tui.ui.widgets.panel import hidden

# Seconds between two draws of the bar and two reads of the recording.
TICK_S = 0.25
FASTER = 2.0
TIME_KEYS = (
    ("space", "pause", "Pause", "pause, or go on; at the end, begin again"),
    ("plus", "faster(1)", "Faster", "twice as fast"),
    ("minus", "faster(-1)", "Slower", "half as fast"),
    ("left", "seek(-1)", "Back", "back by a fiftieth"),
    ("right", "seek(1)", "Ahead", "ahead by a fiftieth"),
    ("shift+left", "event(-1)", "Previous event", "back to an event"),
    ("shift+right", "event(1)", "Next event", "ahead to an event"),
)
TIME_ACTIONS = ("pause", "faster", "seek", "event")
# Refused with a reason, and hidden from the footer.
REFUSED_KEYS = (
    ("r", "act('restart')", "Restart"),
    ("s", "stop_or_start", "Stop/start"),
    ("K", "act('kill')", "Kill"),
    ("R", "restart_all", "Restart all"),
)


class ReplayBar(Widget):
    """One line: speed, moment, position and keys."""

    DEFAULT_CSS = """
    ReplayBar {
        dock: top; height: 1; padding: 0 1; background: $panel; color: $foreground;
    }
    """

    def __init__(self, clock: ReplayClock) -> None:
        super().__init__(id="replay")
        self._clock = clock
        self._shown = 0.0

    def on_mount(self) -> None:
        self.set_interval(TICK_S, self._tick)

    def _tick(self) -> None:
        if self._clock.now() != self._shown:  # while paused and at the end nothing changes
            self.refresh()

    def render(self) -> RenderResult:
        clock, width = self._clock, self.content_size.width
        now = self._shown = clock.now()
        whole, quiet = clock.last - clock.first, named_style(self.app, "dim")
        word = "■ at its end" if clock.at_end else f"▶ {clock.speed:g}×"
        word = "▮▮ paused" if clock.paused else word
        left = Text.assemble(
            (" REPLAY ", named_style(self.app, "replay")), f" {word}  ", no_wrap=True
        )
        left.append(time_of_day(now))
        left.append(f"  {duration(now - clock.first)} of {duration(whole)} ", quiet)
        # The key help is the first part to go on a narrow screen.
        keys = Text(" space pause · + − speed · ← → seek, shift: events", quiet, no_wrap=True)
        room = width - left.cell_len - keys.cell_len
        if room < 0:
            left.truncate(width)
            return left
        share = (now - clock.first) / whole if whole > 0 else 1.0
        bar = progress_bar(
            share, room, named_style(self.app, "accent"), named_style(self.app, "track")
        )
        return left.append_text(bar).append_text(keys)


class ReplayApp(CockpitApp):
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            replace(hidden(keys, action, name, f"Replay: {tip}"), priority=True)
            for keys, action, name, tip in TIME_KEYS
        ),
        # Without a tooltip, so that neither the help nor the palette has it.
        Binding("0", "home", "Runs", show=False),
        Binding("q,ctrl+d", "ask_quit", "Leave", tooltip="Leave the replay"),
        *(
            Binding(*keys, show=False, tooltip="Refused: this run has ended")
            for keys in REFUSED_KEYS
        ),
    ]

    always = ("pause", "ask_quit", "help")

    def __init__(self, replay: Replay) -> None:
        run = replay.recording.run
        super().__init__(run.root, control=replay.control, clock=replay.clock.now)
        self.replay = replay
        self._events = replay.recording.events()
        # Replaces the feed of the base class, which reads the files as they are now.
        self.feed = Feed(
            run.root, replay.control, self.post_message, feed=replay.feed, logs=replay.logs
        )
        self.rings = Bell(run, muted=True)  # events of a recording are old
        self._shown = 0.0

    def compose(self) -> ComposeResult:
        yield ReplayBar(self.replay.clock)
        yield from super().compose()

    def on_mount(self) -> None:
        self.set_interval(TICK_S, self._tick)

    def _tick(self) -> None:
        # Without a new moment there is nothing new to read.
        if (now := self.replay.clock.now()) != self._shown:
            self._shown = now
            self.feed.refresh()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "home":  # the list of runs opens screens of runs, but no replay
            return False
        # These bindings have priority: they would take keys from inputs, dialogs and charts.
        is_typing = isinstance(self.focused, Input) or len(self.screen_stack) > 1
        if action in TIME_ACTIONS and is_typing:
            return False
        if action in ("faster", "seek", "event") and isinstance(self.focused, Chart):
            return False  # the chart uses these keys for its cursor and zoom
        return super().check_action(action, parameters)

    def action_pause(self) -> None:
        # At the end `toggle` starts the replay from the beginning, so the log has to be reloaded.
        at_end = self.replay.clock.at_end
        self.replay.clock.toggle()
        self._moved(jumped=at_end)

    def action_faster(self, direction: int) -> None:
        self.replay.clock.faster(FASTER**direction)
        self._moved()

    def action_seek(self, direction: int) -> None:
        self.replay.clock.skip(direction)
        self._moved(jumped=True)

    def action_event(self, direction: int) -> None:
        self.replay.clock.seek_event(self._events, direction)
        self._moved(jumped=True)

    def _moved(self, *, jumped: bool = False) -> None:
        log = self.find(LogView)
        # The log view only appends. After a jump its lines no longer belong to the moment shown.
        if jumped and log:
            log.switch(log.component)
        self.feed.refresh()
        self.query_one(ReplayBar).refresh()

    def action_detach(self) -> None:
        self.exit("detach")

    def action_ask_quit(self) -> None:
        self.exit("detach")


def run_replay(replay: Replay) -> Outcome:
    """Show the screen until the user leaves it."""
    return run_app(with_theme(ReplayApp(replay)), "detach")
