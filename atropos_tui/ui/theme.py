"""Themes, and the style of each state. Colour is never the only sign of a state."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from rich.style import Style
from textual.app import App
from textual.color import Color
from textual.content import Content
from textual.markup import parse_style
from textual.theme import Theme

from atropos_common.protocol.control import State
from atropos_tui.monitor.format import TONES, glyph_and_word


def _named(
    theme: Theme,
    *,
    quiet: str,
    line: str,
    cursor: str,
    on_cursor: str,
    cursor_away: str,
    footer: str,
    hover: str,
) -> Theme:
    # The variables that Textual and this screen read. quiet: labels; line: frames, grids, the empty
    # part of a bar; cursor: background of the cursor line (on_cursor: its text, cursor_away:
    # without the focus); footer: descriptions of keys; hover: scrollbar under the mouse.
    lines = ("track", "grid", "frame", "border", "border-blurred", "scrollbar")
    theme.variables |= dict.fromkeys(lines, line) | {
        "quiet": quiet,
        "block-cursor-background": cursor,
        "block-cursor-foreground": on_cursor,
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": cursor_away,
        "block-cursor-blurred-foreground": str(theme.foreground),
        "block-cursor-blurred-text-style": "none",
        "footer-background": str(theme.surface),
        "footer-key-foreground": theme.primary,
        "footer-description-foreground": footer,
        "scrollbar-background": str(theme.surface),
        "scrollbar-hover": hover,
        "scrollbar-active": theme.primary,
    }
    return theme


THEME = _named(
    Theme(
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
        variables={"text-warning": "#e3b96f"},
    ),
    quiet="#7f8b9b",
    line="#2b3541",
    cursor="#26384c",
    on_cursor="#eef3f8",
    cursor_away="#1e2935",
    footer="#8a96a5",
    hover="#3b4857",
)
LIGHT = _named(
    Theme(
        name="atropos-light",
        dark=False,
        primary="#1f66a8",
        secondary="#5b6775",
        accent="#7d4fa3",
        success="#1d7443",
        warning="#855500",
        error="#b3261e",
        foreground="#1f2933",
        background="#f8f9fb",
        surface="#eef1f5",
        panel="#e2e7ee",
    ),
    quiet="#56616e",
    line="#c3ccd6",
    cursor="#cfe0f2",
    on_cursor="#10202f",
    cursor_away="#e2e9f1",
    footer="#56616e",
    hover="#a5b2c0",
)


def theme_colours(theme: Theme) -> dict[str, str]:
    """Return the colours that `theme` does not define, mixed from text and background."""
    if theme.ansi:  # the terminal's 16 colours cannot be mixed
        lines = dict.fromkeys(("track", "grid", "frame"), "ansi_bright_black")
        text = dict.fromkeys(("quiet", "healthy", "log"), "ansi_default")
        return (
            lines | text | {"found": "ansi_yellow", "log-name": "ansi_blue", "limit": "ansi_yellow"}
        )
    system = theme.to_color_system().generate()
    background = Color.parse(system["background"])
    # Share of the named colour over the background. quiet: labels; track: empty part of a bar;
    # healthy: background of a curve's good range; found: background of a match; log and log-name:
    # text and component name of a log line; limit: end of a healthy range.
    mixed = {
        "quiet": ("foreground", 0.75),
        "track": ("foreground", 0.25),
        "grid": ("foreground", 0.2),
        "frame": ("foreground", 0.25),
        "log": ("foreground", 0.85),
        "healthy": ("success", 0.08),
        "found": ("warning", 0.4),
        "limit": ("warning", 0.6),
        "log-name": ("primary", 0.7),
    }
    return {
        name: background.blend(Color.parse(system[colour]), share).hex
        for name, (colour, share) in mixed.items()
    }


def first_theme(
    wished: str, known: Collection[str], ground: Literal["dark", "light"] | None
) -> str:
    """Return the user's theme if it exists, else one for the terminal's background."""
    return wished if wished in known else LIGHT.name if ground == "light" else THEME.name


# Styles that panels draw with, as one table: CSS component classes would be matched against every
# node of each panel.
STYLES = {
    "good": "$success",
    "busy": "$primary",
    "warn": "$warning",
    "bad": "bold $error",
    "dim": "$quiet",
    "text-good": "$text-success",
    "text-busy": "$text-primary",
    "text-warn": "$text-warning",
    "text-bad": "$text-error",
    "text-dim": "$quiet",
    "primary": "$primary",
    "accent": "$accent",
    "success": "$success",
    "warning": "$warning",
    "error": "$error",
    "secondary": "$foreground",
    "title": "bold $foreground",
    "here": "bold $background on $primary",
    "replay": "bold $background on $accent",
    "track": "$track",
    "grid": "$grid",
    "frame": "$frame",
    "limit": "$limit",
    "healthy": "on $healthy",
    "lit": "on $block-cursor-background",
    "found": "bold underline on $found",
    "gone": "strike $error",
    "new": "underline $success",
    # Classes of a token's logprob difference, and ranks of its weight version; each has a sign of
    # its own beside the colour.
    "diff-1": "$primary",
    "diff-2": "underline $warning",
    "diff-3": "bold underline $error",
    "diff-4": "bold $background on $error",
    "version-0": "$success",
    "version-1": "underline $primary",
    "version-2": "bold $warning",
    "version-3": "bold underline $error",
    "plain": "$log",
    "poll": "$log",
    "note": "italic $quiet",
    "name of a log": "$log-name",
}

# Parsed `STYLES` by name of the theme.
_made: dict[str, dict[str, Style]] = {}


def named_style(app: App[Any], name: str) -> Style:
    """Return the style `name` of `STYLES` in the current theme."""
    if (styles := _made.get(app.theme)) is None:
        variables = theme_colours(app.current_theme) | app.get_css_variables()
        # `textual.style.Style.parse` reads the stylesheet, which may still hold the old theme's
        # colours.
        parsed = {name: parse_style(words, variables) for name, words in STYLES.items()}
        styles = _made[app.theme] = {name: style.rich_style for name, style in parsed.items()}
    return styles[name]


def state_text(state: State) -> tuple[str, str]:
    """Return glyph and word of a state, and its tone."""
    return glyph_and_word(state), TONES[state]


def title(name: str, *parts: tuple[str, str], gap: int = 2) -> Content:
    """Return a panel's title: its name, then `(text, theme colour)` parts."""
    pieces: list[tuple[str, str]] = [(name, "bold $foreground")]
    for text, colour in parts:
        if not text:
            continue
        pieces += [(" " * gap, ""), (text, f"${colour}" if colour else "")]
    return Content.assemble(*pieces)
