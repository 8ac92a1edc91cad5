"""Open a file in the user's own editor, in this terminal; the screen waits and comes back."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from textual.app import App, SuspendNotSupported


def edit(app: App[Any], path: Path) -> str:
    """Show `path` in `$VISUAL`, `$EDITOR` or `less`; what went wrong, or nothing."""
    words = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "less")
    try:
        with app.suspend():
            subprocess.run([*words, str(path)], check=False)
    except SuspendNotSupported:
        return "this terminal cannot be handed to an editor"
    except OSError as error:
        return f"{words[0] if words else 'the editor'} does not start: {error.strerror}"
    return ""
