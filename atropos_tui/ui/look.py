"""The look: the theme, and one glyph, word and style per state. State is never colour alone."""

from __future__ import annotations

from textual.content import Content
from textual.theme import Theme

from atropos_tui.monitor.plain import glyph_and_word
from trainer_core.contracts.control import RunStatus, State

THEME = Theme(
    name="atropos",
    dark=True,
    primary="#7aa7d9",
    secondary="#7f8b9b",
    accent="#c9a3e0",
    success="#84c9a0",
    warning="#e3b96f",
    error="#e98089",
    foreground="#ccd4de",
    background="#10141a",
    surface="#141920",
    panel="#1c232c",
    variables={
        "border": "#2b3541",
        "border-blurred": "#2b3541",
        "block-cursor-background": "#26384c",
        "block-cursor-foreground": "#eef3f8",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#1e2935",
        "block-cursor-blurred-foreground": "#ccd4de",
        "block-cursor-blurred-text-style": "none",
        "footer-background": "#141920",
        "footer-key-foreground": "#7aa7d9",
        "footer-description-foreground": "#8a96a5",
        "scrollbar": "#2b3541",
        "scrollbar-background": "#141920",
        "scrollbar-hover": "#3b4857",
        "scrollbar-active": "#7aa7d9",
    },
)

_TONE_OF = {
    State.PENDING: "dim",
    State.STARTING: "busy",
    State.HEALTHY: "good",
    State.UNHEALTHY: "warn",
    State.STOPPING: "busy",
    State.STOPPED: "dim",
    State.BACKOFF: "warn",
    State.FAILED: "bad",
    State.COMPLETED: "good",
}

TONES = {"good": "success", "busy": "primary", "warn": "warning", "bad": "error", "dim": "secondary"}
"""Theme colour of each tone."""

RESTING = {State.PENDING, State.STOPPED, State.FAILED, State.COMPLETED}
"""States without a process: `s` starts what is in one of them."""


def state_text(state: State) -> tuple[str, str]:
    """Glyph and word of a state, and its tone."""
    return glyph_and_word(state), _TONE_OF[state]


def title(name: str, *parts: tuple[str, str], gap: int = 2) -> Content:
    """A panel's title: its name, then `(text, theme colour)` parts. Nothing in it is read as markup."""
    pieces: list[tuple[str, str]] = [(name, "bold $foreground")]
    for text, colour in parts:
        if not text:
            continue
        pieces += [(" " * gap, ""), (text, f"${colour}" if colour else "")]
    return Content.assemble(*pieces)


def live_components(status: RunStatus) -> int:
    """How many components are healthy or have done their part."""
    return sum(row.state in (State.HEALTHY, State.COMPLETED) for row in status.components)
