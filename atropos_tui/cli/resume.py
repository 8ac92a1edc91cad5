"""`up --resume RUN`: which profile it goes on with, and how that differs from the one the run had."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atropos_common.run_dir import RunDir
from atropos_tui.cli import runs
from atropos_tui.errors import Problem, UserError
from atropos_tui.profile.errors import SECTION_LISTS, KeyPath, key_text, printable
from atropos_tui.profile.load import read_toml
from atropos_tui.profile.redact import hide_tree
from atropos_tui.profile.sections import Profile

MAX_SHOWN = 120
"""Characters of a value in the list of changes."""


def profile_name(options: argparse.Namespace) -> str:
    """PROFILE, else with --resume the run's own profile.toml.

    Raises:
        UserError: neither was given, or the run's own is gone.
    """
    if options.profile is not None:
        return str(options.profile)
    if options.resume is None:
        raise UserError("no profile", [Problem("PROFILE is missing", "atropos-tui up PROFILE, such as: up demo")])
    own = runs.pick(options.resume).dir.profile_toml
    if not own.is_file():
        raise UserError(
            "the run's own profile is gone",
            [Problem("no such file", f"name the profile: up PROFILE --resume {options.resume}", file=str(own))],
        )
    return str(own)


def first_profile(options: argparse.Namespace) -> Path | None:
    """The file that the run's own profile was made from, beside which its `.env` lies; None when PROFILE is given."""
    if options.profile is not None:
        return None
    named = runs.pick(options.resume).info.get("profile")
    return Path(named) if isinstance(named, str) else None


def tell_changes(run: RunDir, profile: Profile) -> None:
    """Print what differs from the profile that the run had so far; secrets stay hidden."""
    try:
        before = Profile.model_validate(read_toml(run.profile_toml), strict=True)
    except (UserError, ValidationError):
        print("the profile that this run had cannot be read, so what has changed since is not known", flush=True)
        return
    changes = list(differences(_data(before), _data(profile)))
    if changes:
        print("this run goes on with a changed profile:")
        print("\n".join(f"  {key}: {old} → {new}" for key, old, new in changes), flush=True)


def _data(profile: Profile) -> dict[str, Any]:
    """Everything, defaults included: a key that says its default is no change."""
    data: dict[str, Any] = hide_tree(profile.model_dump(mode="json", exclude_none=True))
    return data


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Key, old value and new value of every leaf that differs, as text."""
    before, after = _leaves(old), _leaves(new)
    return [
        (key_text(path, new if path in after else old), _text(before, path), _text(after, path))
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]


def _leaves(data: Any, path: KeyPath = ()) -> dict[KeyPath, Any]:
    """Values by path; a list of anything but sections is one value."""
    if isinstance(data, dict):
        parts = list(data.items())
    elif len(path) == 1 and path[0] in SECTION_LISTS:
        parts = list(enumerate(data))
    else:
        return {path: data}
    return {inner: value for key, part in parts for inner, value in _leaves(part, (*path, key)).items()}


def _text(leaves: dict[KeyPath, Any], path: KeyPath) -> str:
    return printable(json.dumps(leaves[path], ensure_ascii=False), MAX_SHOWN) if path in leaves else "(not set)"
