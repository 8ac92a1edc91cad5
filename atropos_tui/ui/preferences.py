"""The user's choices for all screens: `screen.json` in the user's configuration directory."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs

from atropos_common.system.files import write_private
from atropos_tui.monitor.reading import Along, Lens
from atropos_tui.monitor.run.run_files import read_json
from atropos_tui.monitor.run.state import MOST_CURVES


@dataclass(frozen=True)
class Charts:
    """Extra curves, and the settings of all charts."""

    metrics: tuple[str, ...] = ()
    smoothing: int = Lens.smoothing
    along: Along = Lens.along
    cuts_outliers: bool = Lens.cuts_outliers

    def lens(self) -> Lens:
        return Lens(along=self.along, smoothing=self.smoothing, cuts_outliers=self.cuts_outliers)

    def through(self, lens: Lens) -> Charts:
        return replace(
            self, smoothing=lens.smoothing, along=lens.along, cuts_outliers=lens.cuts_outliers
        )


def path() -> Path:
    return Path(platformdirs.user_config_dir("atropos-tui")) / "screen.json"


def theme() -> str:
    """Return the chosen theme, if any."""
    return str(read_json(path()).get("theme") or "")


def charts() -> Charts:
    """Return the chosen chart settings; defaults replace invalid values."""
    known = read_json(path()).get("charts")
    data = known if isinstance(known, dict) else {}
    metrics, smoothing, along = data.get("metrics"), data.get("smoothing"), data.get("along")
    names = [name for name in metrics if isinstance(name, str)] if isinstance(metrics, list) else []
    return Charts(
        tuple(names[:MOST_CURVES]),
        # `type`, because JSON's `true` is an `int` for isinstance.
        smoothing if type(smoothing) is int and 0 <= smoothing <= 10_000 else Lens.smoothing,
        # An axis that a newer version added falls back to the default.
        Along(along) if along in list(Along) else Lens.along,
        data.get("cuts_outliers") is not False,
    )


def keep(*, theme: str | None = None, charts: Charts | None = None) -> None:
    """Store a choice for later screens."""
    # Read first: another screen may have written the other keys.
    chosen = read_json(path())
    if theme is not None:
        chosen["theme"] = theme
    if charts is not None:
        chosen["charts"] = asdict(charts)
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path(), json.dumps(chosen, indent=2) + "\n")
