"""What a user has chosen for every screen: one small file, `$XDG_CONFIG_HOME/atropos-tui/screen.json`.

A file that cannot be read is as if there were none, and one that cannot be written costs the choice, never the screen.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from atropos_common.files import read_regular, write_private


def path() -> Path:
    """Where it lies; the folder may not be there."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "atropos-tui" / "screen.json"


def wished(name: str) -> str:
    """What was chosen under `name`; empty where nothing was."""
    return str(_read().get(name) or "")


def remember(name: str, value: str) -> None:
    """Keep a choice for the screens to come."""
    chosen = _read() | {name: value}
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path(), json.dumps(chosen, indent=2) + "\n")


def _read() -> dict[str, object]:
    try:
        found = json.loads(read_regular(path()))
    except (OSError, ValueError, RuntimeError, RecursionError):  # RuntimeError: a user without a home
        return {}
    return found if isinstance(found, dict) else {}
