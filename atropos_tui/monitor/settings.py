"""The settings of a run beside those of its profile, and of another run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_common.system.run_dir import RunDir
from atropos_tui.errors import UserError
from atropos_tui.monitor.overlay import flat_settings
from atropos_tui.monitor.run.run_files import read_json, read_toml
from atropos_tui.profile.load import read_merged, shipped_profiles
from atropos_tui.profile.redact import hide_tree
from atropos_tui.profile.schema import SECTION_LISTS
from trainer_core.config import TrainingConfig


@dataclass(frozen=True)
class SettingRow:
    """One setting; an empty value is not set."""

    key: str
    value: str
    """Value in this run."""
    profile: str = ""
    """Value in the profile, or the trainer's default."""
    other: str = ""
    """Value in the run beside it."""
    differs: bool = False
    """This run and the profile have different values."""
    differs_from_other: bool = False


@dataclass(frozen=True)
class SettingsTable:
    rows: tuple[SettingRow, ...] = ()
    profile: str = ""
    """Name of the profile; empty if it cannot be found."""
    other: str = ""
    """Name of the run beside it, if any."""


def settings_table(run: RunDir, other: RunDir | None = None, name: str = "") -> SettingsTable:
    """Return every setting of `run`, those that differ first.

    Args:
        other: a run beside it.
        name: name of `other`.
    """
    mine = _flat(read_toml(run.profile_toml))
    theirs = _flat(read_toml(other.profile_toml)) if other else {}
    title, profile = _profile_of(run)
    rows = []
    for key in dict.fromkeys([*mine, *profile, *theirs]):
        base, value = profile.get(key) or _default(key), mine.get(key, "")
        there = theirs.get(key, "")
        known = value or _default(key)
        rows.append(
            SettingRow(
                key,
                value,
                base,
                there,
                bool(title) and known != base,
                other is not None and known != (there or _default(key)),
            )
        )
    rows.sort(key=lambda row: (not row.differs_from_other, not row.differs))
    return SettingsTable(tuple(rows), title, name if other else "")


def _default(key: str) -> str:
    section, _, name = key.partition(".")
    field = TrainingConfig.model_fields.get(name) if section == "trainer" else None
    default = None if field is None else field.default
    return "" if default is None or field is None or field.is_required() else str(default)


def _profile_of(run: RunDir) -> tuple[str, dict[str, str]]:
    # A shipped profile of the run's name, else the file that the run was started with.
    meta = read_json(run.run_json)
    shipped, name = shipped_profiles(), str(meta.get("name") or "")
    started = meta.get("profile")
    path = shipped.get(name) or (Path(started) if isinstance(started, str) else None)
    if path is None:
        return "", {}
    try:
        data, _ = read_merged(path)
    except (UserError, OSError):
        return "", {}
    title = f"shipped {name}" if name in shipped else path.name
    return title, _flat(hide_tree(data))


def _flat(profile: dict[str, Any]) -> dict[str, str]:
    # A run's profile has `[[env]]` where the written one may have `[env]`.
    single = {
        key: value[0]
        for key, value in profile.items()
        if key in SECTION_LISTS and isinstance(value, list) and len(value) == 1
    }
    return flat_settings(profile | single)
