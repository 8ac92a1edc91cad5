"""What a user has chosen for every screen: one small file, `screen.json` in the user's folder of settings.

A file that cannot be read, or holds what no version of ours wrote, is as if there were none, and one that cannot be
written costs the choice, never the screen.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs

from atropos_common.files import write_private
from atropos_tui.monitor.reading import Along, Lens
from atropos_tui.monitor.run_files import read_json
from atropos_tui.monitor.state import MOST_CURVES


@dataclass(frozen=True)
class Charts:
    """Curves drawn besides those of the catalogue, and how charts are looked at."""

    metrics: tuple[str, ...] = ()
    smoothing: int = Lens.smoothing
    along: Along = Lens.along
    cuts_outliers: bool = Lens.cuts_outliers

    def lens(self) -> Lens:
        """The lens of a screen that opens."""
        return Lens(along=self.along, smoothing=self.smoothing, cuts_outliers=self.cuts_outliers)

    def through(self, lens: Lens) -> Charts:
        """The same curves, looked at as now."""
        return replace(self, smoothing=lens.smoothing, along=lens.along, cuts_outliers=lens.cuts_outliers)


def path() -> Path:
    """Where it lies; the folder may not be there."""
    return Path(platformdirs.user_config_dir("atropos-tui")) / "screen.json"


def theme() -> str:
    """The theme that was chosen; empty where none was."""
    return str(read_json(path()).get("theme") or "")


def charts() -> Charts:
    """What was chosen for the charts; the defaults for what is not told, or not understood."""
    known = read_json(path()).get("charts")
    data = known if isinstance(known, dict) else {}
    metrics, smoothing, along = data.get("metrics"), data.get("smoothing"), data.get("along")
    names = [name for name in metrics if isinstance(name, str)] if isinstance(metrics, list) else []
    return Charts(
        tuple(names[:MOST_CURVES]),
        smoothing if type(smoothing) is int and 0 <= smoothing <= 10_000 else Lens.smoothing,
        Along(along) if along in list(Along) else Lens.along,
        data.get("cuts_outliers") is not False,
    )


def keep(*, theme: str | None = None, charts: Charts | None = None) -> None:
    """Keep a choice for the screens to come."""
    chosen = read_json(path())
    if theme is not None:
        chosen["theme"] = theme
    if charts is not None:
        chosen["charts"] = asdict(charts)
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path(), json.dumps(chosen, indent=2) + "\n")
