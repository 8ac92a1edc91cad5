"""What a user chose for the charts, kept from one screen to the next: `charts.toml` in the user's folder of settings.

Nothing depends on it: a file that cannot be read or written, or holds what no version of ours wrote, costs the memory.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from atropos_common.files import read_regular, write_private
from atropos_tui.monitor.reading import Along, Lens
from atropos_tui.monitor.state import MOST_CURVES


@dataclass(frozen=True)
class Chosen:
    """Curves drawn besides those of the catalogue, and how charts are looked at."""

    metrics: tuple[str, ...] = ()
    smoothing: int = Lens.smoothing
    along: Along = Lens.along
    cuts_outliers: bool = Lens.cuts_outliers

    def lens(self) -> Lens:
        """The lens of a screen that opens."""
        return Lens(along=self.along, smoothing=self.smoothing, cuts_outliers=self.cuts_outliers)

    def through(self, lens: Lens) -> Chosen:
        """The same curves, looked at as now."""
        return replace(self, smoothing=lens.smoothing, along=lens.along, cuts_outliers=lens.cuts_outliers)


def path() -> Path:
    """Where it is kept."""
    return Path(platformdirs.user_config_dir("atropos-tui")) / "charts.toml"


def read() -> Chosen:
    """What was chosen last; the defaults for what is not told, or not understood."""
    try:
        data = tomllib.loads(read_regular(path()))
    except (OSError, ValueError):
        return Chosen()
    metrics, smoothing, along = data.get("metrics"), data.get("smoothing"), data.get("along")
    names = [name for name in metrics if isinstance(name, str)] if isinstance(metrics, list) else []
    return Chosen(
        tuple(names[:MOST_CURVES]),
        smoothing if type(smoothing) is int and 0 <= smoothing <= 10_000 else Lens.smoothing,
        Along(along) if along in set(Along) else Lens.along,
        data.get("cuts_outliers") is not False,
    )


def write(chosen: Chosen) -> None:
    """Keep it."""
    lines = [
        "# What the charts of atropos-tui draw and how; written by the screen.",
        f"metrics = {json.dumps(chosen.metrics)}",
        f"smoothing = {chosen.smoothing}",
        f'along = "{chosen.along}"',
        f"cuts_outliers = {str(chosen.cuts_outliers).lower()}",
    ]
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path(), "\n".join(lines) + "\n")
