"""A picture of the screen as SVG, in fonts that systems have: nothing in it is fetched from the network."""

from __future__ import annotations

import re
import time
from pathlib import Path

FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"


def own_fonts(svg: str) -> str:
    """`svg` without fonts from elsewhere."""
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg)
    return re.sub(r"font-family:\s*[^;]+;", f"font-family: {FONTS};", svg)


def save(svg: str, name: str, folder: Path) -> Path:
    """Write a picture under a name of its own in `folder`.

    Raises:
        OSError: it cannot be written there.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "run"
    stem = f"atropos-{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = folder / f"{stem}.svg", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}_{number}.svg"
    path.write_text(own_fonts(svg), encoding="utf-8", errors="replace")
    return path
