"""Open a file in the user's own editor, in this terminal; the screen waits and comes back."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from textual.app import App, SuspendNotSupported


def edit(app: App[Any], path: Path) -> str:
    """Show `path` in `$VISUAL`, `$EDITOR` or `less`; what went wrong, or nothing."""
    line = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "less"
    try:
        words = shlex.split(line)
    except ValueError as error:
        return f"the editor {line!r} cannot be read: {error}"
    try:
        with _deaf_to_ctrl_c(), app.suspend():
            subprocess.run([*words, str(path)], check=False)
    except SuspendNotSupported:
        return "this terminal cannot be handed to an editor"
    except OSError as error:
        return f"{words[0] if words else 'the editor'} does not start: {error.strerror}"
    return ""


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """The terminal tells us, too, what is meant for the editor. A handler of ours is not inherited by it, unlike
    SIG_IGN."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
