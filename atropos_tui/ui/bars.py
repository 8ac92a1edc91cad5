"""Bars and sparklines in block characters: pure functions from shares to styled text.

A legend names the parts in the order of the bar; where there are no colours, they differ in texture, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich.style import Style
from rich.text import Text

from atropos_tui.monitor.shares import Split, cells

TEXTURES = "█▓▒▚▞▤▥"
OTHER_TEXTURE, FREE = "░", "·"
_LEVELS = "▁▂▃▄▅▆▇█"

_DONE, _LEFT = "━", "┄"
"""They differ without colours, too."""

StyleOf = Callable[[str], Style]
"""The style of a part, by its label; `free` for what nobody holds."""


TextureOf = Callable[[str], str]


def textures(order: Sequence[str], *, colours: bool) -> TextureOf:
    """How components are drawn: by their place among all, the same in every bar."""

    def texture(label: str) -> str:
        if label not in order:
            return OTHER_TEXTURE
        return TEXTURES[0 if colours else order.index(label) % len(TEXTURES)]

    return texture


def progress_bar(share: float, width: int, done: Style, left: Style) -> Text:
    """A line of exactly `width` cells, of which `share` (0 to 1) is done."""
    count = round(share * width)
    return Text.assemble((_DONE * count, done), (_LEFT * (width - count), left), no_wrap=True, end="")


def split_bar(split: Split, texture: TextureOf, style: StyleOf, width: int) -> Text:
    """A bar of exactly `width` cells."""
    bar = Text(no_wrap=True, end="")
    taken = 0
    for part, count in zip(split.parts, cells(split, width), strict=True):
        bar.append(texture(part.label) * count, style(part.label))
        taken += count
    return bar.append(FREE * (width - taken), style("free"))


def legend(split: Split, texture: TextureOf, style: StyleOf, write: Callable[[float], str], width: int) -> list[Text]:
    """`█ vllm 60 GB  ▓ trainer 12 GB`, in as many lines as it takes."""
    lines = [Text(no_wrap=True, end="")]
    for part in split.parts:
        entry = Text.assemble((texture(part.label), style(part.label)), f" {part.label} {write(part.amount)}")
        if lines[-1].cell_len and lines[-1].cell_len + 2 + entry.cell_len > width:
            lines.append(Text(no_wrap=True, end=""))
        if lines[-1].cell_len:
            lines[-1].append("  ")
        lines[-1].append_text(entry)
    return lines


def sparkline(values: Iterable[float | None], width: int) -> str:
    """The newest `width` values, 0 to 1, right-aligned; a gap where a value is unknown."""
    newest = list(values)[-width:] if width > 0 else []
    drawn = "".join(_level(value) for value in newest)
    return f"{drawn:>{max(width, 0)}}"


def _level(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return " "
    return _LEVELS[min(int(min(max(value, 0.0), 1.0) * len(_LEVELS)), len(_LEVELS) - 1)]
