"""The last line: the best keys of the focused panel, then those that always work."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App, RenderResult
from textual.screen import Screen

from atropos_tui.ui.widgets.panel import Guarded

MOST_KEYS = 6  # of the focused panel


class Offer(NamedTuple):
    """A key of the footer."""

    key: str
    shown: str
    words: str


BACK = ("back", "app.view_before")  # actions of Esc in a chart, and in any other panel


def best_keys(app: App[Any], idle: Collection[str], *, back: bool = False) -> list[Offer]:
    """Return the keys of the focused panel, then those of the app; without the `idle` actions.

    Args:
        back: offer the way back first.
    """
    screen, focused = app.screen, app.focused
    active = {
        (one.binding.action if one.node is not app else f"app.{one.binding.action}"): one.binding
        for one in reversed(list(screen.active_bindings.values()))
        if one.enabled and not one.binding.system
    }
    nodes = focused.ancestors_with_self if focused else ()
    best = next((node.best for node in nodes if hasattr(node, "best")), ())
    if back:
        best = (next((action for action in BACK if action in active), ""), *best)
    always = getattr(app, "always", ())
    offers = [
        Offer(binding.key, app.get_key_display(binding), binding.description)
        for action in best
        if action.removeprefix("app.") not in idle and (binding := active.get(action))
    ][:MOST_KEYS]
    # A field for text takes every other key.
    if focused is None or not focused.check_consume_key("q", "q"):
        offers += [
            Offer(binding.key, app.get_key_display(binding), binding.description)
            for action in always
            if (binding := active.get(f"app.{action}"))
        ]
    return offers


class Footer(Guarded):
    """One line of keys; a click presses one."""

    DEFAULT_CSS = """
    Footer {
        height: 1;
        padding: 0 1;
        background: $footer-background;
        color: $foreground;
    }
    """
    idle: Callable[[], Collection[str]] = staticmethod(tuple)
    """Actions that would be refused now; their keys are hidden."""
    offers_back: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self) -> None:
        super().__init__(id="keys")
        self.offers: list[Offer] = []
        # Cell behind each key, as last drawn.
        self._ends: list[int] = []

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def _changed(self, screen: Screen[object]) -> None:
        # Below a dialog the keys of this screen do not work.
        if screen is self.screen and self.app.screen is screen:
            offers = best_keys(self.app, self.idle(), back=self.offers_back())
            if offers != self.offers:
                self.offers = offers
                self.refresh()

    def render(self) -> RenderResult:
        offers, width = list(self.offers), self.content_size.width
        key, words = Style.combine([self.style("busy"), Style(bold=True)]), self.style("dim")
        while True:
            line, self._ends = Text(no_wrap=True, end=""), []
            for offer in offers:
                line.append(offer.shown, key).append(f" {offer.words}", words).append("   ")
                self._ends.append(line.cell_len)
            line.rstrip()
            if line.cell_len <= width or len(offers) < 3:
                return line
            # The last two always work; the panel's least important key goes first.
            del offers[-3]

    async def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        pairs = zip(self._ends, self.offers, strict=False)
        offer = next((offer for end, offer in pairs if at is not None and at.x < end), None)
        if offer:
            self.app.simulate_key(offer.key)
